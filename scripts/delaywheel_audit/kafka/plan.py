"""Fixes what is read before the first record: a range of offsets for each partition.

A range ends at the last stable offset at most: below it every transaction is decided forever. So a
task that Spark runs again reads the same records, and several reads of one plan agree.

What Spark's connector does not notice while it reads, it is asked of Kafka afterwards.

| what happened since planning | noticed by |
|---|---|
| records of the range were deleted | the connector, at the offset (`failOnDataLoss`) |
| the topic was deleted | the connector, which waits for it; `check_topics` |
| it was made anew, with as many records | `check_topics`: its id is another one |
| the partition's end went back | the connector, which waits for what is not there |
| partitions or topics were added | nobody: they are not read |

The connector's own words name none of that: after a failure `check` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from delaywheel_audit.kafka.errors import KafkaSourceError, Reason
from delaywheel_audit.kafka.questions import KafkaQuestions, Place, TopicNow


@dataclass(frozen=True, slots=True)
class Range:
    """What is read of one partition: offsets from `start` to before `end`."""

    partition: int
    start: int
    end: int
    open_until: int | None = None
    """The partition's end, if a transaction was open at `end`: nothing of that is read."""
    cut: bool = False
    """Records before `start` were deleted: some of the requested time may be among them."""


@dataclass(frozen=True, slots=True)
class TopicPlan:
    """The ranges to read of one topic."""

    name: str
    topic_id: str | None
    """At planning."""
    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """All ranges to read.

    Attributes:
        topics: Topics with their ranges, including empty ones.
        missing: Requested topics that do not exist.
    """

    topics: tuple[TopicPlan, ...]
    missing: tuple[str, ...] = ()

    def ends(self) -> dict[str, dict[int, int]]:
        """Where reading ends, by topic and partition."""
        return {t.name: {r.partition: r.end for r in t.ranges} for t in self.topics}

    def remarks(self) -> list[str]:
        """Returns remarks about the plan for people, a line each."""
        lines = [f"topic {name} is not there: counted as empty" for name in self.missing]
        for topic in self.topics:
            lines += [
                f"{topic.name} [{r.partition}]: a transaction is open at offset {r.end}; "
                f"what is from there to {r.open_until} is not read"
                for r in topic.ranges
                if r.open_until is not None
            ]
            lines += [
                f"{topic.name} [{r.partition}]: what is left begins at offset {r.start}, within "
                "the time asked for: earlier records of that time may be deleted (retention)"
                for r in topic.ranges
                if r.cut
            ]
        return lines

    def beginning(self, offsets: Mapping[Place, int]) -> Plan:
        """Returns the same plan from these offsets on, where they are later."""

        def from_there(topic: str, one: Range) -> Range:
            start = max(one.start, offsets.get((topic, one.partition), 0))
            return replace(one, start=min(start, one.end))

        topics = (
            replace(t, ranges=tuple(from_there(t.name, r) for r in t.ranges)) for t in self.topics
        )
        return replace(self, topics=tuple(topics))

    def offsets(self) -> dict[str, dict[int, Range]]:
        """What is to be read, by topic and partition, without ranges that are empty."""
        return {
            topic.name: wanted
            for topic in self.topics
            if (wanted := {r.partition: r for r in topic.ranges if r.start < r.end})
        }

    def size(self) -> int:
        """How many offsets are to be read."""
        return sum(r.end - r.start for _, r in self._ranges())

    def _ranges(self) -> Iterator[tuple[TopicPlan, Range]]:
        return ((topic, range_) for topic in self.topics for range_ in topic.ranges)


def plan(
    names: Sequence[str],
    kafka: KafkaQuestions,
    *,
    from_ms: int | None = None,
    to_ms: int | None = None,
) -> Plan:
    """Asks Kafka for the ranges to read now; topics that are not there count as empty.

    Times choose *offsets*, by Kafka's index; they are no filter. With LogAppendTime that is the
    same. With CreateTime records stand in the order in which they came: some in the range may have
    other timestamps, and some with timestamps of the range may stand outside of it.

    Args:
        names: The topics.
        kafka: Whom to ask.
        from_ms: From the first record with this timestamp or a later one; None: the earliest.
        to_ms: Up to before the first record with this timestamp or a later one; None: the end now.

    Raises:
        KafkaSourceError: Kafka does not answer, or refuses to.
    """
    found = kafka.describe(names)
    topics = {name: topic for name in names if (topic := found[name]) is not None}
    ranges = _ranges(topics, kafka, from_ms, to_ms)
    return Plan(
        tuple(
            TopicPlan(name, topic.topic_id, tuple(ranges[name, p] for p in topic.partitions))
            for name, topic in topics.items()
        ),
        missing=tuple(name for name in names if found[name] is None),
    )


def _ranges(
    topics: Mapping[str, TopicNow], kafka: KafkaQuestions, from_ms: int | None, to_ms: int | None
) -> dict[Place, Range]:
    places = [(name, number) for name, topic in topics.items() for number in topic.partitions]
    low = kafka.earliest(places)
    # In this order: records between the two were undecided at the second request.
    log_ends = kafka.log_ends(places)
    stable = kafka.stable_ends(places)
    # And these last: "none" means none before the end requested earlier.
    starts = _since(from_ms, places, kafka)
    ends = _since(to_ms, places, kafka)
    ranges = {}
    for place in places:
        end = stable[place]
        if to_ms is not None:
            end = min(end, _or(ends[place], end))
        start = low[place]
        if from_ms is not None:
            start = max(start, _or(starts[place], end))
        held_back = end == stable[place] < log_ends[place]
        ranges[place] = Range(
            place[1],
            min(start, end),
            end,
            open_until=log_ends[place] if held_back else None,
            cut=from_ms is not None and 0 < start == low[place] == starts[place],
        )
    return ranges


def _since(
    timestamp_ms: int | None, places: Sequence[Place], kafka: KafkaQuestions
) -> Mapping[Place, int | None]:
    return {} if timestamp_ms is None else kafka.first_since(places, timestamp_ms)


def _or(offset: int | None, otherwise: int) -> int:
    return otherwise if offset is None else offset


def check_topics(plan: Plan, kafka: KafkaQuestions) -> None:
    """Confirms, after a read, that it was of the planned topics: ids are never given again.

    Raises:
        KafkaSourceError: TOPIC_GONE or TOPIC_RECREATED.
    """
    found = kafka.describe([topic.name for topic in plan.topics])
    for topic in plan.topics:
        _check_topic(topic, found[topic.name])


def check(plan: Plan, kafka: KafkaQuestions, *, is_followed: bool = False) -> None:
    """Holds a plan against what Kafka has now: says why a read of it failed, if that shows.

    Args:
        plan: It.
        kafka: Whom to ask.
        is_followed: Reading goes on where the ranges end, so empty ones say from where.

    Raises:
        KafkaSourceError: Not all of it can be read any more.
    """
    check_topics(plan, kafka)
    ranges = {
        (topic.name, r.partition): r
        for topic in plan.topics
        for r in topic.ranges
        if is_followed or r.start < r.end
    }
    low = kafka.earliest(ranges)
    stable = kafka.stable_ends(ranges)
    for place, range_ in ranges.items():
        _check_range(place, range_, low[place], stable[place])


def _check_range(place: Place, range_: Range, low: int, stable: int) -> None:
    if low > range_.start:
        raise KafkaSourceError(
            Reason.OFFSETS_GONE,
            f"{place[0]} [{place[1]}]: offsets {range_.start} to {min(low, range_.end)} of a range "
            f"that ends at {range_.end} are gone, the first that is there is {low}: retention (or "
            "DeleteRecords) was faster. Read a later range, or lengthen the topic's retention "
            "(retention.ms, retention.bytes)",
        )
    if stable < range_.end:
        raise KafkaSourceError(
            Reason.OFFSETS_NOT_THERE,
            f"{place[0]} [{place[1]}]: the partition ends at {stable}, and at planning there was "
            f"something up to {range_.end}: Kafka lost its end (an unclean leader election?)",
        )


def _check_topic(planned: TopicPlan, now: TopicNow | None) -> None:
    if now is None:
        raise KafkaSourceError(
            Reason.TOPIC_GONE,
            f"{planned.name}: deleted since the read was planned; what was read of it is not its "
            "whole",
        )
    if None not in (planned.topic_id, now.topic_id) and now.topic_id != planned.topic_id:
        raise KafkaSourceError(
            Reason.TOPIC_RECREATED,
            f"{planned.name}: deleted and made again since the read was planned (topic id "
            f"{planned.topic_id}, now {now.topic_id}): the offsets mean other records; run this "
            "again",
        )
