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
from delaywheel.consumer.watching.health import ConsumerTrouble

_LOG = logging.getLogger("delaywheel.consumer")


class FoundPositions(NamedTuple):
    """Where partitions are read on (None: from the beginning), their commits, and their ends."""

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
        self._leaderless: dict[Partition, int] = {}

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
        partition without leader: it is read where the group was in it, once it has one. Where that
        is not known without it, it is left out until then (`with_leaders`): no other waits.

        If a group begins at the end, that position is committed before it is used: later records
        are not skipped, even if this consumer dies at once. Of a partition that was left out, none
        is skipped that came since, by the time that the records say.
        """
        others = set(self._state.ours) - set(partitions)
        topics = self._broker.topics(self._named_topics)
        partitions = self._to_be_read(partitions, topics)
        known = self._broker.committed(partitions)
        known = self._without_leaderless(known, topics)
        partitions = list(known)
        since_ms = {one: self._leaderless[one] for one in known if one in self._leaderless}
        there = [one for one in partitions if one.topic in topics]
        leaderless = [one for one in there if _has_no_leader(one, topics)]
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
        # Their partitions are not found again.
        kept = {one.topic for one in others} & self._topics.keys()
        self._topics = {
            **{name: one for name, one in topics.items() if name not in kept},
            **{name: one for name, one in self._topics.items() if name in kept},
        }
        self._lookout.learn_partitions(topics)
        if self._state.settings.start == "latest":
            new = [one for one in partitions if known[one] is None]
            positions |= self._begin_at_the_end(new, since_ms)
        for one in since_ms:
            del self._leaderless[one]
        self._note_leaderless()
        return FoundPositions(positions, known, ends)

    def with_leaders(self) -> list[Partition]:
        """Returns those of our partitions that were left out, and have their leaders now."""
        waiting = self._note_leaderless()
        if not waiting:
            return []
        topics = self._broker.topics(self._named_topics)
        return [
            one
            for one in waiting
            if not (_has_no_leader(one, topics) or self._lacks_order(one, topics))
        ]

    @property
    def _named_topics(self) -> Sequence[str]:
        """The topics that are read, and those of orders."""
        state = self._state
        if state.order is None:
            return state.seen_topics
        orders = {names.order for names in state.settings.topics} - state.unseen
        return [*state.seen_topics, *sorted(orders)]

    def _lacks_order(self, at: Partition, topics: Mapping[str, ConsumedTopic]) -> bool:
        """Whether it is not known what is away of its lane, as nobody leads that partition."""
        if self._state.order is None:
            return False
        order = self._state.settings.topics.names_of(at.topic).order
        return _has_no_leader(Partition(order, at.number), topics)

    def _without_leaderless(
        self,
        known: Mapping[Partition, Passed | None],
        topics: Mapping[str, ConsumedTopic],
    ) -> dict[Partition, Passed | None]:
        """Leaves out partitions of which the position, or what is away, is not known now."""
        state, found = self._state, dict(known)
        for at, passed in known.items():
            begins = state.settings.start == "latest" and at.topic not in state.retry_topics
            is_unknown = begins and passed is None and _has_no_leader(at, topics)
            if is_unknown or self._lacks_order(at, topics):
                self._leaderless.setdefault(at, state.clock_ms())
                del found[at]
        return found

    def _note_leaderless(self) -> list[Partition]:
        """Tells which of our partitions are left out."""
        waiting = [one for one in self._state.ours if one in self._leaderless]
        text = None
        if waiting:
            text = f"{min(waiting)} is read once it, and its part of an order topic, has a leader"
            text += f", and {len(waiting) - 1} more" if waiting[1:] else ""
        self._state.note_trouble(ConsumerTrouble.NO_LEADER, text)
        return waiting

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

    def _begin_at_the_end(
        self, partitions: Sequence[Partition], since_ms: Mapping[Partition, int]
    ) -> dict[Partition, int]:
        """Returns the ends of partitions that the group has not begun with, once committed.

        Of those that were left out, what was the end then, by time.

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
        for at in since_ms.keys() & ends.keys():
            ends[at] = self._broker.first_since(at, since_ms[at])
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


def _has_no_leader(at: Partition, topics: Mapping[str, ConsumedTopic]) -> bool:
    """Whether nobody leads a partition now: no question about it is answered."""
    return at.topic in topics and at.number in topics[at.topic].leaderless


def _is_another(before: ConsumedTopic | None, now: ConsumedTopic | None) -> bool:
    """Whether a topic was deleted and recreated; not if Kafka does not say its id."""
    return before is not None and now is not None and "" != before.id != now.id != ""
