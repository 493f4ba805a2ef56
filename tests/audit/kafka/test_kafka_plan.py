"""Ranges to read, on the real broker. About 5 s."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel_audit.kafka import read
from delaywheel_audit.kafka.errors import KafkaSourceError, Reason
from delaywheel_audit.kafka.plan import MAX_SLICES, Plan, Range, TopicPlan
from delaywheel_audit.kafka.source import pin
from local.loopback.kafka import free_ports
from support.kafka.audit_topic import AuditTopic, numbered

MakeTopic = Callable[..., AuditTopic]

BASE_MS = 1_767_225_600_000


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 60)), min_size=1, max_size=3),
    st.integers(1, 20),
)
def test_slices_are_the_ranges_without_hole_or_overlap(
    ranges: list[tuple[int, int]], records: int
) -> None:
    whole = [Range(n, start, start + length) for n, (start, length) in enumerate(ranges)]
    slices = Plan((TopicPlan("t", "id", tuple(whole)),)).slices(records=records, size=1)
    for range_ in whole:
        pieces = [(s.start, s.end) for s in slices if s.partition == range_.partition]
        offsets = [offset for start, end in pieces for offset in range(start, end)]
        assert offsets == list(range(range_.start, range_.end))
        assert all(0 < end - start <= records for start, end in pieces)


def test_slices_by_size_and_never_too_many() -> None:
    topic = TopicPlan("t", None, (Range(0, 0, 1000), Range(1, 5, 5)), record_bytes=100)
    assert len(Plan((topic,)).slices(records=None, size=10_000)) == 10
    heavy = replace(topic, record_bytes=1_000_000)
    assert len(Plan((heavy,)).slices(records=None, size=10_000)) == 1000
    long = replace(topic, ranges=(Range(0, 0, 1 << 50),))
    assert len(Plan((long,)).slices(records=1, size=0)) <= MAX_SLICES


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        '{"t": []}',
        '{"t": {}}',
        '{"t": {"partitions": {"x": [0, 1]}}}',
        '{"t": {"partitions": {"0": [2, 1]}}}',
        '{"t": {"partitions": {"0": [-1, 1]}}}',
        '{"t": {"partitions": {"0": [1]}}}',
    ],
)
def test_ranges_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(KafkaSourceError, match="OPTION_INVALID: ranges"):
        pin({"kafka.bootstrap.servers": "127.0.0.1:1", "ranges": text})


def test_a_broker_that_is_away_is_said_in_bounded_time() -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    for what in ({"topics": "x"}, {"topicsPattern": "x"}):
        with pytest.raises(KafkaSourceError) as caught:
            pin({"kafka.bootstrap.servers": address, "timeoutMs": "4000", **what})
        assert caught.value.reason is Reason.BROKER_AWAY
        assert address in caught.value.message


@pytest.mark.kafka
def test_tls_towards_a_port_without_it_is_said(topic: MakeTopic) -> None:
    with pytest.raises(KafkaSourceError) as caught:
        topic().plan(**{"kafka.security.protocol": "ssl", "timeoutMs": "4000"})
    assert caught.value.reason is Reason.BROKER_AWAY
    assert "last it said: ssl://" in caught.value.message


@pytest.mark.kafka
def test_all_that_is_there(topic: MakeTopic) -> None:
    made = topic(partitions=3)
    made.produce(numbered(7), partition=0)
    made.produce(numbered(4), partition=2)
    made.delete_records(2, partition=0)
    plan = made.plan()
    (only,) = plan.topics
    assert only.topic_id
    assert only.ranges == (Range(0, 2, 7), Range(1, 0, 0), Range(2, 0, 4))
    assert plan.ends() == {made.name: {0: 7, 1: 0, 2: 4}}
    assert plan.remarks() == []
    assert [(s.partition, s.start, s.end) for s in plan.slices(records=3, size=0)] == [
        *((0, 2, 4), (0, 4, 7)),
        *((2, 0, 2), (2, 2, 4)),
    ]


@pytest.mark.kafka
def test_a_topic_of_which_nothing_is_there_has_no_slices(topic: MakeTopic) -> None:
    assert topic(partitions=2).plan().slices(records=None, size=1) == []


@pytest.mark.kafka
def test_missing_topics(topic: MakeTopic) -> None:
    made = topic()
    names = {"topics": f"{made.name},no-such-topic,not/legal"}
    with pytest.raises(KafkaSourceError, match="TOPIC_MISSING: no-such-topic, not/legal: "):
        made.plan(**names)
    plan = made.plan(**names, missingTopics="skip")
    assert plan.missing == ("no-such-topic", "not/legal")
    assert [t.name for t in plan.topics] == [made.name]
    assert len(plan.remarks()) == 2


@pytest.mark.kafka
def test_topics_by_pattern(topic: MakeTopic) -> None:
    one, other = topic(), topic()
    options = one.options()
    del options["topics"]
    plan = pin(options | {"topicsPattern": f"{one.name}|{other.name}|no-such"})
    assert [t.name for t in plan.topics] == sorted([one.name, other.name])
    # The name as a whole.
    assert pin(options | {"topicsPattern": one.name[:-1]}).topics == ()


@pytest.mark.kafka
@pytest.mark.parametrize(
    ("starting", "ending", "start", "end"),
    [
        (None, None, 0, 10),
        (0, None, 0, 10),
        (1000, 1009, 0, 9),
        (1003, 1006, 3, 6),
        (1003, 1003, 3, 3),
        (500, 1001, 0, 1),
        (1009, 5000, 9, 10),
        (5000, None, 10, 10),
        (5000, 6000, 10, 10),
        (None, 500, 0, 0),
    ],
)
def test_offsets_from_timestamps(
    topic: MakeTopic, starting: int | None, ending: int | None, start: int, end: int
) -> None:
    made = topic()
    made.produce(numbered(10), timestamps=[BASE_MS + 1000 + n for n in range(10)])
    times = {"startingTimestampMs": starting, "endingTimestampMs": ending}
    plan = made.plan(**{name: str(BASE_MS + at) for name, at in times.items() if at is not None})
    assert plan.topics[0].ranges == (Range(0, start, end),)


@pytest.mark.kafka
def test_a_time_of_which_the_first_records_are_gone_is_said(topic: MakeTopic) -> None:
    made = topic()
    made.produce(numbered(10), timestamps=[BASE_MS + n for n in range(10)])
    made.delete_records(6)
    plan = made.plan(startingTimestampMs=str(BASE_MS + 2))
    assert plan.topics[0].ranges == (Range(0, 6, 10, cut=True),)
    (line,) = plan.remarks()
    assert line.startswith(f"{made.name} [0]: what is left begins at offset 6, within the time ")
    assert made.plan(startingTimestampMs=str(BASE_MS + 7)).remarks() == []
    assert made.plan().remarks() == []
    before = made.plan(startingTimestampMs="0", endingTimestampMs=str(BASE_MS + 2))
    assert [range_.start == range_.end for range_ in before.topics[0].ranges] == [True]
    assert len(before.remarks()) == 1


@pytest.mark.kafka
def test_an_open_transaction_ends_the_range_and_is_said(topic: MakeTopic) -> None:
    made = topic()
    made.produce(numbered(3))
    producer = made.open_transaction([b"undecided"])
    made.produce(numbered(2))
    plan = made.plan()
    assert plan.topics[0].ranges == (Range(0, 0, 3, open_until=6),)
    (line,) = plan.remarks()
    assert line.startswith(f"{made.name} [0]: a transaction is open at offset 3; ")
    producer.abort_transaction(10)
    made.settle()
    assert made.plan().topics[0].ranges == (Range(0, 0, 7),)
    # A range that ends before it is not held back by it.
    assert made.plan(endingTimestampMs="1").remarks() == []


@pytest.mark.kafka
def test_a_plan_is_taken_up_again_and_held_against_kafka(topic: MakeTopic) -> None:
    made = topic(partitions=2)
    made.produce(numbered(5))
    plan = made.plan()
    made.produce(numbered(5))
    made.produce(numbered(5), partition=1)
    again = made.plan(ranges=plan.to_json())
    assert again == plan

    made.delete_records(2)
    with pytest.raises(KafkaSourceError) as caught:
        made.plan(ranges=plan.to_json())
    assert caught.value.reason is Reason.OFFSETS_GONE
    assert f"{made.name} [0]: offsets 0 to 2 of a range that ends at 5" in caught.value.message


@pytest.mark.kafka
@pytest.mark.parametrize(
    ("partition", "end", "reason"),
    [("0", 9, Reason.OFFSETS_NOT_THERE), ("7", 1, Reason.TOPIC_GONE)],
)
def test_ranges_that_kafka_does_not_have(
    topic: MakeTopic, partition: str, end: int, reason: Reason
) -> None:
    made = topic()
    made.produce(numbered(3))
    ranges = {made.name: {"partitions": {partition: [0, end]}}}
    with pytest.raises(KafkaSourceError) as caught:
        made.plan(ranges=json.dumps(ranges))
    assert caught.value.reason is reason


@pytest.mark.kafka
def test_sizes_are_learnt_from_a_few_records(
    topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "_SAMPLE_S", 60.0)  # for a busy machine
    made = topic()
    made.produce([b"x" * 1000] * 300, key=b"y" * 200, headers=[("h", b"z" * 300), ("n", None)])
    plan = made.plan()
    assert 1500 <= plan.topics[0].record_bytes <= 1550
    assert len(plan.slices(records=None, size=50 * 1550)) == 6
    assert made.plan(ranges=plan.to_json()).topics[0].record_bytes == plan.topics[0].record_bytes


@pytest.mark.kafka
def test_sizes_where_the_middle_shows_nothing_are_assumed(topic: MakeTopic) -> None:
    made = topic()
    made.transaction([b"x"] * 20, commits=False)
    assert len(made.plan().slices(records=None, size=1024 * 7)) == 3
