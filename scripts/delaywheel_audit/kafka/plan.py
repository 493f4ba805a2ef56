"""Fixes what is read before the first record: a range of offsets for each partition.

A range ends at the last stable offset at most: below it every transaction is decided forever. So a
task that Spark runs again reads the same records, and several reads of one plan agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from delaywheel_audit.kafka.errors import KafkaSourceError, Reason
from delaywheel_audit.kafka.options import SourceOptions, invalid
from delaywheel_audit.kafka.questions import KafkaQuestions, Place, TopicNow

MAX_SLICES = 10_000
"""Limit for one plan: more tasks would only be overhead."""

ASSUMED_RECORD_BYTES = 1024
"""Size of a record, where none could be examined."""


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
    ranges: tuple[Range, ...]
    record_bytes: int = ASSUMED_RECORD_BYTES
    """The mean size of a few records."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The range that one Spark task reads."""

    topic: str
    topic_id: str | None
    partitions: int
    """The topic's id, at planning."""
    partition: int
    start: int
    end: int


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

    def slices(self, *, records: int | None, size: int) -> list[Slice]:
        """Divides the ranges into Spark's tasks.

        Args:
            records: Offsets of one task; None: by size.
            size: Approximate bytes of one task.
        """
        per_topic = {t.name: records or max(1, size // t.record_bytes) for t in self.topics}
        wanted = sum(-(-(r.end - r.start) // per_topic[t.name]) for t, r in self._ranges())
        coarser = -(-wanted // MAX_SLICES)
        return [
            Slice(topic.name, topic.topic_id, len(topic.ranges), range_.partition, start, end)
            for topic, range_ in self._ranges()
            for start, end in _cut(range_, per_topic[topic.name] * max(1, coarser))
        ]

    def to_json(self) -> str:
        """Returns a JSON document for the option `ranges`, which makes a read repeat this plan."""
        return json.dumps(
            {
                topic.name: {
                    "id": topic.topic_id,
                    "record_bytes": topic.record_bytes,
                    "partitions": {str(r.partition): [r.start, r.end] for r in topic.ranges},
                }
                for topic in self.topics
            }
        )

    def _ranges(self) -> Iterator[tuple[TopicPlan, Range]]:
        return ((topic, range_) for topic in self.topics for range_ in topic.ranges)


def _cut(range_: Range, offsets: int) -> Iterator[tuple[int, int]]:
    """Yields pieces of equal length, none longer than `offsets`."""
    length = range_.end - range_.start
    pieces = -(-length // offsets)
    for number in range(pieces):
        yield (
            range_.start + length * number // pieces,
            range_.start + length * (number + 1) // pieces,
        )


def plan(options: SourceOptions, kafka: KafkaQuestions) -> Plan:
    """Asks Kafka for the ranges to read now.

    Raises:
        KafkaSourceError: A topic is missing, or Kafka does not answer.
    """
    if options.ranges is not None:
        return _given(options.ranges, kafka)
    names: Sequence[str] = options.topics
    if options.topics_pattern is not None:
        names = kafka.names_matching(options.topics_pattern)
    found = kafka.describe(names)
    missing = tuple(name for name in names if found[name] is None)
    # A missing topic that matched the pattern was deleted: it holds nothing.
    if missing and not options.skips_missing and options.topics_pattern is None:
        raise KafkaSourceError(
            Reason.TOPIC_MISSING,
            f"{', '.join(missing)}: Kafka has no such topic, or these credentials may not see it "
            "(option missingTopics=skip counts it as empty)",
        )
    topics = {name: topic for name in names if (topic := found[name]) is not None}
    ranges = _ranges(options, topics, kafka)
    return Plan(
        tuple(
            TopicPlan(name, topic.topic_id, tuple(ranges[name, p] for p in topic.partitions))
            for name, topic in topics.items()
        ),
        missing,
    )


def _ranges(
    options: SourceOptions, topics: Mapping[str, TopicNow], kafka: KafkaQuestions
) -> dict[Place, Range]:
    places = [(name, number) for name, topic in topics.items() for number in topic.partitions]
    low = kafka.earliest(places)
    # In this order: records between the two were undecided at the second request.
    log_ends = kafka.log_ends(places)
    stable = kafka.stable_ends(places)
    # And these last: "none" means none before the end requested earlier.
    starts = _since(options.starting_ms, places, kafka)
    ends = _since(options.ending_ms, places, kafka)
    ranges = {}
    for place in places:
        end = stable[place]
        if options.ending_ms is not None:
            end = min(end, _or(ends[place], end))
        start = low[place]
        if options.starting_ms is not None:
            start = max(start, _or(starts[place], end))
        held_back = end == stable[place] < log_ends[place]
        ranges[place] = Range(
            place[1],
            min(start, end),
            end,
            open_until=log_ends[place] if held_back else None,
            cut=options.starting_ms is not None and 0 < start == low[place] == starts[place],
        )
    return ranges


def _since(
    timestamp_ms: int | None, places: Sequence[Place], kafka: KafkaQuestions
) -> Mapping[Place, int | None]:
    return {} if timestamp_ms is None else kafka.first_since(places, timestamp_ms)


def _or(offset: int | None, otherwise: int) -> int:
    return otherwise if offset is None else offset


def _given(text: str, kafka: KafkaQuestions) -> Plan:
    """Checks an earlier plan against what Kafka has now."""
    topics = _parsed(text)
    found = kafka.describe([topic.name for topic in topics])
    for topic in topics:
        check_topic(topic.name, topic.topic_id, found[topic.name])
    places = [(t.name, r.partition) for t in topics for r in t.ranges if r.start < r.end]
    unknown = [(n, p) for n, p in places if p not in _partitions(found[n])]
    if unknown:
        raise KafkaSourceError(
            Reason.TOPIC_GONE, f"ranges: {unknown[0][0]} has no partition {unknown[0][1]}"
        )
    low = kafka.earliest(places)
    stable = kafka.stable_ends(places)
    for topic in topics:
        for range_ in topic.ranges:
            place = topic.name, range_.partition
            if place in low:
                _check_range(place, range_, low[place], stable[place])
    return Plan(topics)


def _partitions(topic: TopicNow | None) -> tuple[int, ...]:
    return () if topic is None else topic.partitions


def _check_range(place: Place, range_: Range, low: int, stable: int) -> None:
    if low > range_.start:
        raise offsets_gone(*place, wanted=range_.start, end=range_.end, low=low)
    if stable < range_.end:
        raise KafkaSourceError(
            Reason.OFFSETS_NOT_THERE,
            f"{place[0]} [{place[1]}]: the range ends at {range_.end}, and what is decided ends at "
            f"{stable}: Kafka lost its end, or the range is of another cluster",
        )


def check_topic(name: str, planned_id: str | None, now: TopicNow | None) -> None:
    """Raises unless the topic is still the planned one."""
    if now is None:
        raise KafkaSourceError(
            Reason.TOPIC_GONE,
            f"{name}: deleted since the read was planned; what was read of it is not its whole",
        )
    if planned_id is not None and now.topic_id is not None and now.topic_id != planned_id:
        raise KafkaSourceError(
            Reason.TOPIC_RECREATED,
            f"{name}: deleted and made again since the read was planned (topic id {planned_id}, "
            f"now {now.topic_id}): the offsets mean other records; run this again",
        )


def offsets_gone(
    topic: str, partition: int, *, wanted: int, end: int, low: int
) -> KafkaSourceError:
    """Returns the error for records that were deleted before they were read."""
    return KafkaSourceError(
        Reason.OFFSETS_GONE,
        f"{topic} [{partition}]: offsets {wanted} to {min(low, end)} of a range that ends at {end} "
        f"are gone, the first that is there is {low}: retention (or DeleteRecords) was faster. "
        "Read a later range, or lengthen the topic's retention (retention.ms, retention.bytes)",
    )


def _parsed(text: str) -> tuple[TopicPlan, ...]:
    """Parses what `Plan.to_json` or a person wrote; id and record_bytes may be absent."""
    try:
        return tuple(_topic_plan(name, one) for name, one in json.loads(text).items())
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise invalid(
            'ranges: not {"<topic>": {"partitions": {"<number>": [<start>, <end>], …}}, …}, '
            f"offsets of 0 and above: {error}"
        ) from error


def _topic_plan(name: str, document: Mapping[str, Any]) -> TopicPlan:
    ranges = []
    for partition, (start, end) in document["partitions"].items():
        if not 0 <= int(start) <= int(end):
            raise ValueError(f"{name} [{partition}]: from {start} to {end}")
        ranges.append(Range(int(partition), int(start), int(end)))
    return TopicPlan(
        name,
        document.get("id"),
        tuple(ranges),
        max(1, int(document.get("record_bytes", ASSUMED_RECORD_BYTES))),
    )
