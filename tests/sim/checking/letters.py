"""Invariants of dead letters.

A message may become a dead letter only if its topic was in the trouble that the letter names,
recently enough; or if it has expired, and then it must.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from delaywheel.record_headers import FIRST_DEFERRED
from delaywheel_replica.cleaner.candidacy import LOOK_AT_REST_S
from delaywheel_replica.cleaner.delivery.deferring import partition_of
from delaywheel_replica.cleaner.delivery.outcomes import DeadReason
from delaywheel_replica.cleaner.delivery.troubles import LAST_PROBE_S
from sim.kafka.topic_troubles import LASTING, TopicTrouble
from sim.machine.clocks import EPOCH_MS, true_wall_ms
from sim.machine.scheduler import US_PER_MS, US_PER_S
from sim.plans.plan import Action

if TYPE_CHECKING:
    from sim.kafka.log import Entry as LogEntry
    from sim.nodes.world import World

REPORTED_LATE_US = 15 * US_PER_S
"""Kafka's answer may be two seconds old, and a commit may take nine."""
PROBED_LATE_US = round((LAST_PROBE_S + 15) * US_PER_S)
"""Troubles that only probes find are reported later."""
_BY_KAFKA = (TopicTrouble.LEADERLESS, TopicTrouble.SHRUNK, TopicTrouble.DENIED)
_REFUSING = ("refused_batch", "lost_request", "lost_reply")
"""Faults that make trials err: no topic is to blame, and only one of its requests is lost."""


class Expiring(Protocol):
    """A message."""

    @property
    def expires_us(self) -> int | None:
        """The time from which it must not be forwarded; None: never."""


def has_expired_long_ago(entry: Expiring, at_us: int) -> bool:
    """Whether a message had expired at the time of this commit."""
    return entry.expires_us is not None and at_us > entry.expires_us + REPORTED_LATE_US


def wrong_letter(world: World, entry: Expiring, letter: LogEntry) -> str | None:
    """Returns why a message must not have become this dead letter."""
    ours = {name: (value or b"").decode(errors="replace") for name, value in letter.headers}
    topic, reason = ours["dw-dead-topic"], DeadReason(ours["dw-dead-reason"])
    if reason is DeadReason.EXPIRED:
        if entry.expires_us is not None and latest_clock_us(world) >= entry.expires_us:
            return None
        return f"a dead letter that has not expired: {ours.get('dw-dead-detail', '')}"
    if reason is DeadReason.TOPIC_UNAVAILABLE and _is_impatient(world, ours):
        return f"a dead letter of {topic} before its patience has ended: {ours}"
    if _is_justified(world, topic, reason, letter.key):
        return None
    return f"a dead letter of {topic}, which is well: {reason} {ours.get('dw-dead-detail', '')}"


def was_unavailable(world: World, topic: str, key: bytes | None) -> bool:
    """Whether a message that is deferred was to go where nothing was taken lately.

    One without a key goes anywhere. Which partition takes nothing, Kafka says of some troubles.
    """
    since_us = world.scheduler.now_us - PROBED_LATE_US
    if any(fault in _faults(world) for fault in _REFUSING):
        return True
    partitions = len(world.kafka.partitions(topic))
    partition = None if key is None else partition_of(key, partitions)
    return any(
        spell.topic == topic
        and spell.lasts_until(since_us)
        and (spell.partition in (None, partition) or spell.trouble not in _BY_KAFKA)
        for spell in world.kafka.troubles.spells
    )


def _is_impatient(world: World, ours: Mapping[str, str]) -> bool:
    """Whether a message could still be deferred: the ingress topic was well all the time."""
    now_ms = latest_clock_us(world) // US_PER_MS + EPOCH_MS
    waited_ms = now_ms - int(ours.get(FIRST_DEFERRED) or now_ms)
    is_well = all(spell.topic != world.names.ingress for spell in world.kafka.troubles.spells)
    return is_well and waited_ms < world.plan.settings.patience_s * 1000


def were_halves_unavailable(world: World) -> bool:
    """Whether the halves topic was in trouble when a leader may have looked the last time."""
    looked_us = world.scheduler.now_us - round(LOOK_AT_REST_S * 1_000_000) - PROBED_LATE_US
    return world.kafka.troubles.lately(world.names.halves, [*TopicTrouble], looked_us)


def latest_clock_us(world: World) -> int:
    """The time of a leader whose clock is ahead, by which messages fall due and expire."""
    true_ms = true_wall_ms(world.scheduler)
    ahead_ms = max(node.clock.wall_ms() - true_ms for node in world.nodes.values())
    return world.scheduler.now_us + max(0, ahead_ms) * US_PER_MS


def _is_justified(world: World, topic: str, reason: DeadReason, key: bytes | None) -> bool:
    troubles, now_us = world.kafka.troubles, world.scheduler.now_us
    if any(fault in _faults(world) for fault in _REFUSING):
        return True
    if reason is DeadReason.TOPIC_MISSING:
        return troubles.lately(topic, [TopicTrouble.MISSING], now_us - REPORTED_LATE_US)
    if reason in {DeadReason.KEY_MISSING, DeadReason.REFUSED}:
        compacted = [TopicTrouble.COMPACTED]
        return key is None and troubles.lately(topic, compacted, now_us - REPORTED_LATE_US)
    if reason is DeadReason.HALVES_UNAVAILABLE:
        return topic == world.names.halves and were_halves_unavailable(world)
    if reason is not DeadReason.TOPIC_UNAVAILABLE:
        return False
    reported = troubles.lately(topic, _BY_KAFKA, now_us - REPORTED_LATE_US)
    return reported or troubles.lately(topic, LASTING, now_us - PROBED_LATE_US)


def _faults(world: World) -> Iterator[str]:
    for step in world.plan.steps:
        if isinstance(step, Action) and step.kind == "kafka_faults":
            yield from step.arguments["changes"]
