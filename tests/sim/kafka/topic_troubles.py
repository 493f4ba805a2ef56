"""Topics of the simulated Kafka that are in trouble.

| trouble | the brokers say | a produce request |
|---|---|---|
| MOVING | all is well | is sent again by the client: another broker leads soon |
| LEADERLESS | a partition has no leader | is sent again by the client |
| SHRUNK | fewer replicas in sync than `min.insync.replicas` | the same |
| SILENT | all is well | is not answered |
| LATE | the same, after an outage | is not answered for some seconds more |
| DENIED | not authorized | is refused, and its transaction can only be aborted |
| MISSING | there is no such topic | the same |
| COMPACTED | it is compacted | is refused as well if a record has no key |

One partition of a topic may be in trouble alone.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum


class TopicTrouble(StrEnum):
    """Why a topic takes nothing."""

    MOVING = "moving"
    LEADERLESS = "leaderless"
    SHRUNK = "shrunk"
    SILENT = "silent"
    LATE = "late"
    DENIED = "denied"
    MISSING = "missing"
    COMPACTED = "compacted"

    @property
    def refusal(self) -> str | None:
        """What a produce request is answered; None: nothing."""
        return {
            TopicTrouble.DENIED: "TOPIC_AUTHORIZATION_FAILED",
            TopicTrouble.MISSING: "UNKNOWN_TOPIC_OR_PART",
            TopicTrouble.COMPACTED: "INVALID_RECORD",
        }.get(self)

    @property
    def is_repeated(self) -> bool:
        """Whether the client sends a produce request again until it is taken."""
        return self in {TopicTrouble.MOVING, TopicTrouble.LEADERLESS, TopicTrouble.SHRUNK}

    def takes(self, key: bytes | None) -> bool:
        """Whether the topic takes a record with this key nevertheless."""
        return self is TopicTrouble.COMPACTED and key is not None


PASSING = (TopicTrouble.LATE, TopicTrouble.MOVING)
LASTING = tuple(trouble for trouble in TopicTrouble if trouble not in PASSING)
"""A topic in one of these may be given up; one in another is well again before that."""


@dataclass(slots=True)
class Spell:
    """One trouble of a topic, or of one of its partitions, from its beginning to its end."""

    topic: str
    partition: int | None
    trouble: TopicTrouble
    began_us: int
    ended_us: int | None = None

    def lasts_until(self, at_us: int) -> bool:
        """Whether it had not ended by then."""
        return self.ended_us is None or self.ended_us >= at_us


class TopicTroubles:
    """The topics that are or were in trouble."""

    def __init__(self) -> None:
        self.spells: list[Spell] = []

    def begin(
        self, topic: str, trouble: TopicTrouble, now_us: int, partition: int | None = None
    ) -> None:
        """Puts a topic, or one of its partitions, into one trouble from now on."""
        self.end(topic, now_us, partition)
        self.spells.append(Spell(topic, partition, trouble, now_us))

    def end(self, topic: str, now_us: int, partition: int | None = None) -> None:
        """Ends the trouble of a topic or partition."""
        for spell in self.spells:
            if (spell.topic, spell.partition) == (topic, partition) and spell.ended_us is None:
                spell.ended_us = now_us

    def end_all(self, now_us: int) -> None:
        """Ends all troubles."""
        for spell in self.spells:
            spell.ended_us = now_us if spell.ended_us is None else spell.ended_us

    def of(self, topic: str, partition: int | None = None) -> TopicTrouble | None:
        """The present trouble of a topic as a whole, or one that this partition has a part in."""
        for spell in self.spells:
            has_part = spell.partition is None or spell.partition == partition
            if spell.ended_us is None and spell.topic == topic and has_part:
                return spell.trouble
        return None

    def lately(self, topic: str, kinds: Collection[TopicTrouble], since_us: int) -> bool:
        """Whether a topic, or a part of it, had such a trouble since then."""
        return any(
            spell.topic == topic and spell.trouble in kinds and spell.lasts_until(since_us)
            for spell in self.spells
        )
