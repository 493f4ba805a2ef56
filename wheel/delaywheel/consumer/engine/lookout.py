"""Looks every few seconds for what keeps records from being handled."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Final

from delaywheel.consumer.engine.state import EngineState
from delaywheel.consumer.message import State
from delaywheel.consumer.port import ConsumedTopic, KafkaUnavailable, TopicTooSmall
from delaywheel.consumer.records import Partition
from delaywheel.consumer.watching.health import ConsumerTrouble

_ASK_LIMITS_S: Final = 0.5


def note_missing(state: EngineState, existing: Collection[str]) -> None:
    """Notes topics that are to be read, and are not among the existing ones."""
    topics = state.settings.topics
    missing = topics.named - set(existing) - state.unseen
    texts = [f"topic {name} does not exist" for name in sorted(missing)]
    texts += [f"no topic matches {pattern!r}" for pattern in topics.matching_nothing]
    state.note_trouble(ConsumerTrouble.NO_TOPIC, "; ".join(texts) or None)


class Lookout:
    """Finds troubles, and how much is unread."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._broker = state.broker
        self.lags: dict[Partition, int] = {}
        """How many offsets are unread in each partition."""
        self._ask_limits_at_s = 0.0

    def look_at_hand(self) -> None:
        """Finds a record that is never settled, which later ones wait for, and a bug in delays."""
        long_s = self._state.clock_s() - self._state.settings.stuck_after_ms / 1000
        with self._state.changed:
            stuck = [
                one
                for one in self._state.book.firsts()
                if one.state is State.IN_HAND and one.handed_s < long_s
            ]
        text = None
        if stuck:
            oldest = min(stuck, key=lambda one: one.handed_s)
            text = f"{oldest!r} is not settled, and holds up the commits of its partition"
        self._state.note_trouble(ConsumerTrouble.UNSETTLED, text)
        failure = self._state.policy.backoff_failure
        self._state.note_trouble(ConsumerTrouble.BACKOFF_FAILED, failure)

    def look_behind(self, paused: AbstractSet[Partition]) -> None:
        """Finds out how much is unread, and what stands still behind an open transaction."""
        unread = self._broker.unread(self._state.book.positions)
        self.lags = {at: one.offsets for at, one in unread.items()}
        standing = {at for at, one in unread.items() if one.offsets} - paused
        found = sorted(self._broker.held_up({at: unread[at].offset for at in standing}))
        text = None
        if found:
            text = f"{found[0]} waits for a transaction that its producer leaves open"
            text += f", and {len(found) - 1} more" if found[1:] else ""
        self._state.note_trouble(ConsumerTrouble.TRANSACTION_OPEN, text)

    def order_is_unread(self, records: int) -> None:
        """Notes that nothing is handled while order topics are read, which takes long."""
        text = f"{records:,} records of order topics are to be read before anything is handled"
        self._state.note_trouble(ConsumerTrouble.ORDER_UNREAD, text)

    def look_at_topics(self) -> dict[str, ConsumedTopic] | None:
        """Takes in what the topics are now, and what ingress takes; None: Kafka does not answer."""
        try:
            topics = self._state.ask(lambda: self._broker.topics(self._state.seen_topics))
            limits = self._state.ask(self._broker.limits)
            self._ask_for_sizes()
        except KafkaUnavailable as away:
            self._state.note_away("no answer about the topics", away)
            return None
        self._state.note_away("", None)
        self._state.policy.learn_limits(limits)
        self.learn_partitions(topics)
        note_missing(self._state, topics)
        return topics

    def look_before_letters(self) -> None:
        """Takes in what ingress takes, if letters about halves have come and that is not known.

        A checker may have begun before its cluster. By the time there are letters a leader has said
        it: nothing is answered then of which the service is not told.
        """
        now_s = time.monotonic()
        asks = self._state.settings.asks_about_halves and self._state.policy.limits is None
        if not asks or now_s < self._ask_limits_at_s:
            return
        self._ask_limits_at_s = now_s + _ASK_LIMITS_S
        with suppress(KafkaUnavailable):
            self._state.policy.learn_limits(self._state.ask(self._broker.limits))

    def _ask_for_sizes(self) -> None:
        """Takes in what topics take now for which something was too large."""
        too_small = self._state.policy.found_too_small().intersection(self._state.settings.topics)
        if not too_small:
            return
        with suppress(TopicTooSmall):  # what comes next for it is held up, and says so
            sizes = self._state.ask(lambda: self._broker.sizes(list(too_small)))
            self._state.policy.learn_sizes(sizes)

    def learn_partitions(self, topics: Mapping[str, ConsumedTopic]) -> None:
        """Takes in how many partitions there are now."""
        settings = self._state.settings
        counts = {name: one.partitions for name, one in topics.items()}
        self._state.policy.learn_partitions(counts)
        needs = settings.ordered or settings.keep_partition
        few = [
            f"{names.source} has {counts[names.source]} partitions, {names.retry} only"
            f" {counts[names.retry]}: add some to {names.retry}"
            for names in settings.topics
            if needs and counts.get(names.source, 0) > counts.get(names.retry, 1 << 31)
        ]
        self._state.note_trouble(ConsumerTrouble.PARTITIONS_DIFFER, "; ".join(few) or None)
