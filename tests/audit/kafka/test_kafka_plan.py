"""Ranges to read, on the real broker. About 5 s."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from delaywheel_audit.kafka.client import ClientSettings
from delaywheel_audit.kafka.errors import KafkaSourceError, Reason
from delaywheel_audit.kafka.plan import Plan, Range, TopicPlan, check, check_topics, plan
from delaywheel_audit.kafka.questions import KafkaQuestions
from local.loopback.kafka import free_ports
from support.kafka.audit_topic import AuditTopic, numbered

MakeTopic = Callable[..., AuditTopic]

BASE_MS = 1_767_225_600_000


def test_what_is_empty_is_not_read() -> None:
    topics = TopicPlan("t", "id", (Range(0, 3, 7), Range(1, 5, 5))), TopicPlan("u", "id", ())
    assert Plan(topics).offsets() == {"t": {0: Range(0, 3, 7)}}
    assert Plan(topics).size() == 4


def test_what_is_behind_some_offsets_is_read_from_there() -> None:
    ranges = Range(0, 3, 7), Range(1, 5, 9), Range(2, 0, 4), Range(3, 1, 2)
    rest = Plan((TopicPlan("t", "id", ranges),)).beginning({("t", 0): 5, ("t", 1): 2, ("t", 2): 8})
    assert rest.offsets() == {"t": {0: Range(0, 5, 7), 1: Range(1, 5, 9), 3: Range(3, 1, 2)}}


def test_a_broker_that_is_away_is_said_in_bounded_time() -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    client = ClientSettings({"bootstrap.servers": address}, timeout_s=4)
    with pytest.raises(KafkaSourceError) as caught:
        plan(["x"], KafkaQuestions(client))
    assert caught.value.reason is Reason.BROKER_AWAY
    assert address in caught.value.message


@pytest.mark.kafka
def test_tls_towards_a_port_without_it_is_said(topic: MakeTopic) -> None:
    made = topic()
    client = made.client(timeout_s=4, security_protocol="ssl")
    with pytest.raises(KafkaSourceError) as caught:
        plan([made.name], KafkaQuestions(client))
    assert caught.value.reason is Reason.BROKER_AWAY
    assert "last it said: ssl://" in caught.value.message


@pytest.mark.kafka
def test_all_that_is_there(topic: MakeTopic) -> None:
    made = topic(partitions=3)
    made.produce(numbered(7), partition=0)
    made.produce(numbered(4), partition=2)
    made.delete_records(2, partition=0)
    found = made.plan()
    (only,) = found.topics
    assert only.topic_id
    assert only.ranges == (Range(0, 2, 7), Range(1, 0, 0), Range(2, 0, 4))
    assert found.ends() == {made.name: {0: 7, 1: 0, 2: 4}}
    assert found.remarks() == []


@pytest.mark.kafka
def test_topics_that_are_not_there_are_empty(topic: MakeTopic) -> None:
    made = topic()
    found = plan([made.name, "no-such-topic", "not/legal"], KafkaQuestions(made.client()))
    assert found.missing == ("no-such-topic", "not/legal")
    assert [t.name for t in found.topics] == [made.name]
    assert len(found.remarks()) == 2


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
    times = {"from_ms": starting, "to_ms": ending}
    found = made.plan(**{name: BASE_MS + at for name, at in times.items() if at is not None})
    assert found.topics[0].ranges == (Range(0, start, end),)


@pytest.mark.kafka
def test_a_time_of_which_the_first_records_are_gone_is_said(topic: MakeTopic) -> None:
    made = topic()
    made.produce(numbered(10), timestamps=[BASE_MS + n for n in range(10)])
    made.delete_records(6)
    found = made.plan(from_ms=BASE_MS + 2)
    assert found.topics[0].ranges == (Range(0, 6, 10, cut=True),)
    (line,) = found.remarks()
    assert line.startswith(f"{made.name} [0]: what is left begins at offset 6, within the time ")
    assert made.plan(from_ms=BASE_MS + 7).remarks() == []
    assert made.plan().remarks() == []
    before = made.plan(from_ms=0, to_ms=BASE_MS + 2)
    assert [range_.start == range_.end for range_ in before.topics[0].ranges] == [True]
    assert len(before.remarks()) == 1


@pytest.mark.kafka
def test_an_open_transaction_ends_the_range_and_is_said(topic: MakeTopic) -> None:
    made = topic()
    made.produce(numbered(3))
    producer = made.open_transaction([b"undecided"])
    made.produce(numbered(2))
    found = made.plan()
    assert found.topics[0].ranges == (Range(0, 0, 3, open_until=6),)
    (line,) = found.remarks()
    assert line.startswith(f"{made.name} [0]: a transaction is open at offset 3; ")
    producer.abort_transaction(10)
    made.settle()
    assert made.plan().topics[0].ranges == (Range(0, 0, 7),)
    # A range that ends before it is not held back by it.
    assert made.plan(to_ms=1).remarks() == []


@pytest.mark.kafka
def test_a_plan_is_held_against_what_kafka_has_now(topic: MakeTopic) -> None:
    made = topic(partitions=2)
    made.produce(numbered(5))
    planned, asked = made.plan(), KafkaQuestions(made.client())
    made.produce(numbered(5))
    made.produce(numbered(5), partition=1)
    check(planned, asked)

    made.delete_records(2)
    with pytest.raises(KafkaSourceError) as caught:
        check(planned, asked)
    assert caught.value.reason is Reason.OFFSETS_GONE
    assert f"{made.name} [0]: offsets 0 to 2 of a range that ends at 5" in caught.value.message
    check_topics(planned, asked)  # they may have been deleted after they were read

    (only,) = made.plan().topics
    further = Plan((replace(only, ranges=(Range(0, 5, 12),)),))
    with pytest.raises(KafkaSourceError, match=r"OFFSETS_NOT_THERE: .* ends at 10, "):
        check(further, asked)


@pytest.mark.kafka
def test_topics_deleted_or_made_again_since_planning(topic: MakeTopic) -> None:
    made = topic()
    made.produce(numbered(10))
    planned, asked = made.plan(), KafkaQuestions(made.client())
    made.delete()
    for ask in (check_topics, check):
        with pytest.raises(KafkaSourceError, match=f"TOPIC_GONE: {made.name}"):
            ask(planned, asked)
    made.create()
    made.produce([b"of another"] * 10)
    for ask in (check_topics, check):
        with pytest.raises(KafkaSourceError, match=f"TOPIC_RECREATED: {made.name}"):
            ask(planned, asked)
