"""Reading a range whole or not at all, on the real broker. About 20 s."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from confluent_kafka import Message
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from delaywheel_audit.kafka.columns import batch_of, schema_of
from delaywheel_audit.kafka.errors import KafkaSourceError, Reason
from delaywheel_audit.kafka.options import SourceOptions
from delaywheel_audit.kafka.plan import Plan, Slice
from delaywheel_audit.kafka.read import read_slice
from local.loopback.kafka import KafkaBroker
from support.kafka.audit_topic import AuditTopic, numbered, only_slice
from support.kafka.proxy import KafkaProxy
from support.kafka.read_committed import add_partitions, create_topic
from support.kafka.unreadable import send_unreadable

pytestmark = pytest.mark.kafka

MakeTopic = Callable[..., AuditTopic]

# Little is fetched ahead: what happens between two batches is felt by the second.
SLOW = {
    "kafka.queued.max.messages.kbytes": "1",
    "kafka.queued.min.messages": "1",
    "kafka.fetch.message.max.bytes": "1000",
}


def reading(
    topic: AuditTopic, piece: Slice, *, batch_records: int = 10, **more: str
) -> Iterator[list[Message]]:
    options = SourceOptions.of(topic.options(**SLOW, **more))
    return read_slice(
        options.client, piece, timeout_s=options.timeout_s, batch_records=batch_records
    )


def offsets(batches: Iterator[list[Message]]) -> list[int | None]:
    return [message.offset() for batch in batches for message in batch]


def failure(topic: AuditTopic, plan: Plan) -> KafkaSourceError:
    with pytest.raises(KafkaSourceError) as caught:
        topic.values(plan)
    return caught.value


def test_reads_what_is_between_start_and_end(topic: MakeTopic) -> None:
    made = topic()
    made.produce(numbered(100))
    piece = Slice(made.name, None, 1, 0, 13, 57)
    assert offsets(reading(made, piece)) == list(range(13, 57))


def test_headers_that_the_client_cannot_read_stop_nothing(topic: MakeTopic) -> None:
    made = topic()
    send_unreadable(made.bootstrap, made.name)
    made.produce([b"behind"], headers=[("trace", b"1")])
    (messages,) = reading(made, Slice(made.name, None, 1, 0, 0, 2))
    schema = schema_of(["value", "headers"])
    batch = batch_of(messages, topic=made.name, partition=0, schema=schema)
    assert batch.to_pylist() == [
        {"value": b"v", "headers": []},
        {"value": b"behind", "headers": [{"name": "trace", "value": b"1"}]},
    ]


def test_batches_are_bounded_by_records_and_bytes(topic: MakeTopic) -> None:
    made = topic()
    made.produce([b"x" * 1000] * 100)
    piece = only_slice(made.plan())
    client = SourceOptions.of(made.options()).client
    by_records = list(read_slice(client, piece, timeout_s=20, batch_records=30))
    assert [len(batch) for batch in by_records] == [30, 30, 30, 10]
    assert offsets(reading(made, piece, batch_records=1)) == list(range(100))
    slow = SourceOptions.of(made.options(**SLOW)).client
    by_bytes = list(read_slice(slow, piece, timeout_s=20, batch_bytes=5_000))
    assert sum(map(len, by_bytes)) == 100
    assert all(len(batch) < 20 for batch in by_bytes)


def test_aborted_records_are_invisible(topic: MakeTopic) -> None:
    made = topic()
    made.transaction(numbered(3))
    made.transaction([b"aborted"] * 5, commits=False)
    made.transaction(numbered(3, start=3))
    assert made.values(made.plan()) == numbered(6)


def test_ranges_whose_last_offsets_are_never_seen_come_to_their_end(topic: MakeTopic) -> None:
    made = topic()
    made.produce(numbered(2))  # 0, 1
    made.transaction(numbered(2, start=2))  # 2, 3, its marker 4
    made.transaction([b"aborted"] * 3, commits=False)  # 5, 6, 7, its marker 8
    plan = made.plan()
    assert plan.ends() == {made.name: {0: 9}}
    assert made.values(plan) == numbered(4)
    # Ends in the middle: before a marker, at aborted records; and starts there.
    for start, end in ((0, 4), (0, 6), (3, 5), (4, 5), (4, 8), (6, 7), (8, 9)):
        piece = Slice(made.name, None, 1, 0, start, end)
        assert offsets(reading(made, piece)) == list(range(start, min(end, 4)))


def test_any_number_of_slices_reads_the_same(topic: MakeTopic) -> None:
    made = topic(partitions=2)
    made.transaction(numbered(10))
    made.transaction([b"aborted"] * 10, commits=False)
    made.transaction(numbered(10, start=10))
    made.produce(numbered(10, start=20), partition=1)
    plan = made.plan()
    for records in (100, 12, 5):
        assert made.values(plan, records=records) == numbered(30)


def test_an_open_transaction_is_not_read_and_a_second_try_reads_the_same(topic: MakeTopic) -> None:
    made = topic()
    made.produce(numbered(3))
    producer = made.open_transaction(numbered(2, start=3))
    plan = made.plan()
    assert made.values(plan) == numbered(3)
    producer.commit_transaction(10)
    made.settle()
    made.produce(numbered(2, start=5))
    assert made.values(plan) == numbered(3)
    assert made.values(made.plan()) == numbered(7)


def test_what_retention_took_between_planning_and_reading_is_missed_by_name(
    topic: MakeTopic,
) -> None:
    made = topic()
    made.produce(numbered(10))
    plan = made.plan()
    made.delete_records(4)
    error = failure(made, plan)
    assert error.reason is Reason.OFFSETS_GONE
    assert f"{made.name} [0]: offsets 0 to 4 of a range that ends at 10" in error.message
    # What is still there may be read.
    assert made.values(made.plan()) == numbered(6, start=4)


def test_what_retention_took_while_reading_is_missed_by_name(topic: MakeTopic) -> None:
    made = topic()
    made.produce([os.urandom(500) for _ in range(400)])
    batches = reading(made, only_slice(made.plan()))
    assert len(next(batches)) == 10
    made.delete_records(399)
    with pytest.raises(KafkaSourceError) as caught:
        list(batches)
    assert caught.value.reason is Reason.OFFSETS_GONE
    assert "to 399 of a range that ends at 400" in caught.value.message


def test_retention_that_took_the_whole_range_is_missed_by_name(topic: MakeTopic) -> None:
    made = topic()
    made.produce(numbered(10))
    plan = made.plan()
    made.produce(numbered(10))
    made.delete_records(15)
    assert failure(made, plan).reason is Reason.OFFSETS_GONE


def test_a_topic_deleted_since_planning(topic: MakeTopic) -> None:
    made = topic()
    made.produce(numbered(10))
    plan = made.plan()
    made.delete()
    assert failure(made, plan).reason is Reason.TOPIC_GONE


def test_a_topic_deleted_while_reading(topic: MakeTopic) -> None:
    made = topic()
    made.produce([os.urandom(500) for _ in range(400)])
    batches = reading(made, only_slice(made.plan()))
    next(batches)
    made.delete()
    with pytest.raises(KafkaSourceError, match="TOPIC_GONE"):
        list(batches)


@pytest.mark.parametrize("records", [3, 10, 30])
def test_a_topic_made_again_since_planning(topic: MakeTopic, records: int) -> None:
    made = topic()
    made.produce(numbered(10))
    plan = made.plan()
    made.delete()
    made.create()
    made.produce([b"of another"] * records)
    assert failure(made, plan).reason is Reason.TOPIC_RECREATED


def test_topics_and_partitions_added_while_reading_are_not_read(
    kafka: KafkaBroker, topic: MakeTopic, caplog: pytest.LogCaptureFixture
) -> None:
    made = topic()
    made.produce([os.urandom(500) for _ in range(100)])
    piece = only_slice(made.plan())
    batches = reading(made, piece)
    seen = next(batches)
    create_topic(kafka.address, f"{made.name}-more")
    add_partitions(kafka.address, made.name, 3)
    with caplog.at_level(logging.WARNING):
        rest = [message for batch in batches for message in batch]
    assert [m.offset() for m in seen + rest] == list(range(100))
    assert f"{made.name}: has 3 partitions now, 1 are read" in caplog.text


def test_a_broker_that_comes_back_is_waited_for(kafka: KafkaBroker) -> None:
    with KafkaProxy(kafka):
        made = AuditTopic(kafka.proxy_address)
        made.produce([os.urandom(500) for _ in range(100)])
        batches = reading(made, only_slice(made.plan()))
        seen = next(batches)
    rest: list[int | None] = []
    reader = threading.Thread(target=lambda: rest.extend(offsets(batches)))
    reader.start()
    reader.join(1)  # nothing listens meanwhile: it continues for that long
    assert reader.is_alive()
    with KafkaProxy(kafka):
        reader.join(60)
    assert offsets(iter([seen])) + rest == list(range(100))


def test_a_broker_that_stays_away_is_said_in_bounded_time(kafka: KafkaBroker) -> None:
    with KafkaProxy(kafka):
        made = AuditTopic(kafka.proxy_address)
        made.produce([os.urandom(500) for _ in range(400)])
        batches = reading(made, only_slice(made.plan()), timeoutMs="5000")
        next(batches)
    began = time.monotonic()
    with pytest.raises(KafkaSourceError) as caught:
        list(batches)
    assert caught.value.reason is Reason.BROKER_AWAY
    assert kafka.proxy_address in caught.value.message
    assert time.monotonic() - began < 30


def test_offsets_that_never_were_are_said(topic: MakeTopic) -> None:
    made = topic()
    made.produce(numbered(5))
    for start, end in ((0, 9), (7, 9)):
        piece = Slice(made.name, None, 1, 0, start, end)
        with pytest.raises(KafkaSourceError) as caught:
            list(reading(made, piece, timeoutMs="4000"))
        assert caught.value.reason is Reason.OFFSETS_NOT_THERE
        assert "ends at 5" in caught.value.message


@contextmanager
def quick_cleaner(bootstrap: str) -> Iterator[None]:
    """The broker looks for segments to compact ten times a second, not every 15 s."""
    admin = AdminClient({"bootstrap.servers": bootstrap})

    def change(how: AlterConfigOpType) -> None:
        entry = ConfigEntry("log.cleaner.backoff.ms", "100", incremental_operation=how)
        wanted = ConfigResource(ResourceType.BROKER, "1", incremental_configs=[entry])
        admin.incremental_alter_configs([wanted])[wanted].result()

    change(AlterConfigOpType.SET)
    try:
        yield
    finally:
        change(AlterConfigOpType.DELETE)


def test_gaps_of_compaction_are_no_end(kafka: KafkaBroker, topic: MakeTopic) -> None:
    settings = {
        "cleanup.policy": "compact",
        "segment.bytes": str(1024 * 1024),
        "min.cleanable.dirty.ratio": "0.01",
    }
    made = topic(config=settings)
    count = 24  # of 200 kB: five to a segment
    with quick_cleaner(kafka.address):
        for number in range(count):
            made.produce([b"%d" % number + os.urandom(200_000)], key=b"%d" % (number % 2))
        plan = made.plan()
        assert plan.ends() == {made.name: {0: count}}
        deadline = time.monotonic() + 60
        while len(made.values(plan)) > count // 2:
            assert time.monotonic() < deadline, "nothing was compacted"
            time.sleep(0.1)
    # Segments are exchanged one after another: what is compared must be of one state.
    pieces = [Slice(made.name, None, 1, 0, start, start + 2) for start in range(0, count, 5)]
    kept: list[int | None] = []
    while (seen := offsets(reading(made, only_slice(plan)))) != kept:
        assert time.monotonic() < deadline, "it is compacted without end"
        kept, inside = seen, [offsets(reading(made, piece)) for piece in pieces]
    assert kept[-1] == count - 1
    assert inside == [[at for at in kept if at in range(p.start, p.end)] for p in pieces]
