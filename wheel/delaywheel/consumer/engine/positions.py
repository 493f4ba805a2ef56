"""Where a consumer reads on in its partitions, and what it says beside its offsets."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import NamedTuple

from delaywheel.consumer.engine.deliveries import Deliveries
from delaywheel.consumer.engine.lookout import Lookout
from delaywheel.consumer.engine.state import EngineState
from delaywheel.consumer.message import ConsumerError, ConsumerReason
from delaywheel.consumer.port import ConsumedTopic, KafkaUnavailable
from delaywheel.consumer.records import Partition, Passed

_LOG = logging.getLogger("delaywheel.consumer")


class FoundPositions(NamedTuple):
    """Where partitions are read on, with what that was found from.

    Attributes:
        positions: The next offset of each; None: from the beginning.
        known: What the group has committed for each.
        ends: Where each ends.
    """

    positions: dict[Partition, int | None]
    known: Mapping[Partition, Passed | None]
    ends: Mapping[Partition, int]


class Positions:
    """Finds positions, by what the group has committed and what the topics are now."""

    def __init__(self, state: EngineState, lookout: Lookout, deliveries: Deliveries) -> None:
        self._state = state
        self._deliveries = deliveries
        self._broker = state.broker
        self._lookout = lookout
        self._topics: dict[str, ConsumedTopic] = {}
        self._begun_with: dict[str, int] = {}

    def are_of_other_topics(self, topics: Mapping[str, ConsumedTopic]) -> bool:
        """Whether one of our topics was created, or recreated, since its positions were found."""
        return any(
            one.topic not in self._topics or _is_another(self._topics[one.topic], topics[one.topic])
            for one in self._state.ours
            if one.topic in topics
        )

    def are_current(self, topics: Collection[str]) -> bool | None:
        """Whether topics are still those that positions were found for; None: nobody says.

        Then all that was fetched before is of them, since no id comes back.
        """
        if not any(one.id for one in self._topics.values()):
            return True  # Kafka does not say ids
        try:
            now = self._state.ask(partial(self._broker.topics, topics))
            return not self.are_of_other_topics(now)
        except KafkaUnavailable as away:
            self._state.note_away("no answer about topics", away)
            return None

    def find(
        self, partitions: Sequence[Partition], went_back: AbstractSet[Partition]
    ) -> FoundPositions:
        """Returns where to read on.

        That is where the group was, unless the topic is another one, or ends before that.

        A topic that does not exist is read where the group was in it, should it come back, until
        it is seen that it did. With `ordered` it is not read meanwhile: what is away is not known.
        Nor is what these credentials may not describe, until they may. Nobody knows the end of a
        partition without leader: it is read where the group was in it, once it has one.

        If a group begins at the end, that position is committed before it is used: later records
        are not skipped, even if this consumer dies at once.

        Raises:
            KafkaUnavailable: Try again.
        """
        topics = self._broker.topics(self._state.seen_topics)
        partitions = self._to_be_read(partitions, topics)
        known = self._broker.committed(partitions)
        there = [one for one in partitions if one.topic in topics]
        leaderless = [one for one in there if one.number in topics[one.topic].leaderless]
        ends = self._broker.ends([one for one in there if one not in leaderless])
        ends |= dict.fromkeys(leaderless, sys.maxsize)
        positions: dict[Partition, int | None] = {}
        for partition, passed in known.items():
            positions[partition] = None if passed is None else passed.offset
            if passed is None or partition not in ends:
                continue
            why = None
            if _is_another(ConsumedTopic(passed.topic_id, 0), topics.get(partition.topic)):
                why = "the topic was recreated"
            elif passed.offset > ends[partition]:
                why = f"it ends at {ends[partition]}"
            elif partition in went_back:
                why = "its offsets went back"
            if why is not None:
                _LOG.error("%s is read from its beginning: %s", partition, why)
                positions[partition] = None
                self._state.book.counts.restarts += 1
        kept = set()
        if self._broker.is_incremental:  # others of our partitions are not found again
            kept = {one.topic for one in set(self._state.ours) - set(partitions)}
        self._topics = {
            **{name: one for name, one in topics.items() if name not in kept},
            **{name: one for name, one in self._topics.items() if name in kept},
        }
        self._lookout.learn_partitions(topics)
        if self._state.settings.start == "latest":
            positions |= self._begin_at_the_end([one for one in partitions if known[one] is None])
        return FoundPositions(positions, known, ends)

    def _to_be_read(
        self, partitions: Sequence[Partition], topics: Mapping[str, ConsumedTopic]
    ) -> Sequence[Partition]:
        partitions = [one for one in partitions if one.topic not in self._state.unseen]
        if self._state.order is None:
            return partitions
        names_of = self._state.settings.topics.names_of
        names = {one: names_of(one.topic) for one in partitions}
        return [
            one
            for one, its in names.items()
            if its.source in topics and its.retry in topics and its.order not in self._state.unseen
        ]

    def _begin_at_the_end(self, partitions: Sequence[Partition]) -> dict[Partition, int]:
        """Returns the ends of partitions that the group has not begun with, once committed.

        A partition that was added after the group had begun is read from its beginning: all of its
        records came later. How many partitions there were is said in each commit.
        """
        state, retry_topics = self._state, self._state.retry_topics
        new = [one for one in partitions if one.topic not in retry_topics]
        if not state.ours or state.membership is None:
            return {}
        for topic in {one.topic for one in state.ours} - retry_topics:
            if topic in self._topics and topic not in self._begun_with:
                count = self._topics[topic].partitions
                known = self._broker.committed([Partition(topic, n) for n in range(count)])
                said = [one.begun_with for one in known.values() if one is not None]
                self._begun_with[topic] = max(said) if said else count
        first = [one for one in new if one.number < self._begun_with.get(one.topic, 0)]
        if not first:
            return {}
        ends = self._broker.ends(first)
        failure = self._broker.commit((), self.passed(ends), state.membership)
        if failure is not None:
            self._broker.renew_producer(self._state.unseen)
            if failure.is_forbidden:
                raise ConsumerError(ConsumerReason.NOT_AUTHORIZED, failure.text)
            raise KafkaUnavailable(failure.text)
        places = ", ".join(f"{at} at {offset}" for at, offset in ends.items())
        _LOG.warning(
            "the group has no offsets, never had any or they expired: it begins at the end of %s",
            places,
        )
        return ends

    def passed(
        self, offsets: Mapping[Partition, int], transaction: str = ""
    ) -> dict[Partition, Passed]:
        """Returns offsets as they are committed, with what is said beside them."""
        nowhere = ConsumedTopic("", 0)
        return {
            one: Passed(
                offset,
                self._topics.get(one.topic, nowhere).id,
                self._begun_with.get(one.topic, 0),
                transaction,
                *self._deliveries.beside(one, offset),
            )
            for one, offset in offsets.items()
        }


def _is_another(before: ConsumedTopic | None, now: ConsumedTopic | None) -> bool:
    """Whether a topic was deleted and recreated; not if Kafka does not say its id."""
    return before is not None and now is not None and "" != before.id != now.id != ""
