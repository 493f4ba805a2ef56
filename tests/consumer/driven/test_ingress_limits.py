"""What ingress would refuse is not sent there: it is a dead letter of the group's own, whole."""

from __future__ import annotations

import pytest

from delaywheel.consumer import ConsumerError, ConsumerReason
from delaywheel.consumer import records as consumed
from delaywheel.consumer.block import RecordBlock
from delaywheel.consumer.message import Outcome
from delaywheel.consumer.records import Partition, RecordHeaders
from delaywheel.ingress import HEADERS_MOST, IngressLimits
from delaywheel.transactional import ANY_PARTITION, Outgoing
from delaywheel_replica.core.ingress.place import IngressPlace
from delaywheel_replica.core.ingress.reading import CommittedRecord, Delayed, IngressRules, read
from support.consumer.driven import DrivenConsumer, start
from support.consumer.fake_kafka import INGRESS, FakeKafka

NOW_MS = 1_700_000_000_000
LIMITS = IngressLimits(span_ms=60_000, message_bytes=1_000)


def sent(kafka: FakeKafka, consumer: DrivenConsumer, after: str = "5s") -> Outgoing:
    """Retries one record; returns what was written for it."""
    consumer.run_once()
    [message] = consumer.take()
    message.retry(after)
    consumer.run_once()
    return kafka.committed_records[-1]


@pytest.mark.parametrize("headers", [[], [("a", b"1"), ("bb", None)], [("h" * 20, b"x" * 30)] * 9])
def test_sizes_are_judged_as_ingress_does(headers: RecordHeaders) -> None:
    rules = IngressRules({}, LIMITS.message_bytes, frozenset())
    kafka = FakeKafka(partitions=1, limits=LIMITS)
    engine = start(kafka).engine
    policy = engine._state.policy
    assert policy is not None
    judged = set()
    for size in range(LIMITS.message_bytes):
        place = consumed.Place(kafka.source, 0, 0, NOW_MS)
        record = consumed.Incoming(place, b"k", b"v" * size, headers)
        [fetched] = consumed.fetched_of([record])
        message = RecordBlock(engine.desk, fetched, is_retry=False).message(0)
        settled = policy.retry(message, "5s", None, NOW_MS)
        # A retry that is made whatever the limits.
        policy.learn_limits(None)
        asked = policy.retry(message, "5s", None, NOW_MS).record
        policy.learn_limits(LIMITS)
        assert asked is not None
        given = CommittedRecord(
            IngressPlace(INGRESS, 0, 0), 5, asked.key, asked.value, asked.headers
        )
        is_taken = isinstance(read(given, rules), Delayed)
        # It may be on the safe side by the three headers that ingress does not pass on.
        if settled.outcome is Outcome.RETRIED:
            assert is_taken, size
        judged.add((settled.outcome, is_taken))
    assert {(Outcome.RETRIED, True), (Outcome.DEAD, False)} <= judged


def test_delays_beyond_the_span_are_dead_letters_or_stop_the_start() -> None:
    kafka = FakeKafka(partitions=1, limits=LIMITS)
    consumer = start(kafka)
    for after, reason in (("60s", None), ("61s", b"DELAY_BEYOND_SPAN")):
        kafka.send(b"v", key=b"k")
        assert dict(sent(kafka, consumer, after).headers).get("dw-dead-reason") == reason
        kafka.logs.pop(Partition(kafka.retry, 0), None)
    with pytest.raises(ConsumerError) as reported:
        DrivenConsumer(kafka, retry=("5s", "2m"))
    assert reported.value.reason is ConsumerReason.DELAY_BEYOND_SPAN


def test_too_many_headers_are_a_dead_letter() -> None:
    kafka = FakeKafka(partitions=1)
    consumer = start(kafka)
    consumer.engine._state.policy._most_bytes = dict.fromkeys(
        (INGRESS, kafka.dead, kafka.retry), 1 << 30
    )
    kafka.send(b"v", headers=[("a", None)] * HEADERS_MOST)
    assert sent(kafka, consumer).topic == kafka.dead


def test_a_partition_that_the_topic_of_retries_lacks_is_not_asked_for() -> None:
    kafka = FakeKafka(partitions=2, retry_partitions=1)
    consumer = start(kafka, keep_partition=True)
    for number, asked in ((0, b"0"), (1, None)):
        kafka._append(Partition(kafka.source, number), b"k", b"v", [])
        consumer.run_once()
        [message] = consumer.take()
        message.retry()
        consumer.run_once()
        assert dict(kafka.committed_records[-1].headers).get("dw-partition") == asked
        kafka.logs.pop(Partition(kafka.retry, 0), None)
        kafka.logs.pop(Partition(kafka.retry, 1), None)


def test_where_partitions_of_ingress_are_read_no_further_retries_go_to_the_others() -> None:
    for numbers in ((), (2, 5)):
        limits = LIMITS._replace(read=numbers)
        kafka = FakeKafka(partitions=1, limits=IngressLimits.of_note(limits.as_note()))
        consumer = start(kafka)
        for number in range(9):
            kafka.send(b"v", key=b"%d" % number)
            sent(kafka, consumer)
        written = [one.partition for one in kafka.committed_records if one.topic == INGRESS]
        assert set(written) == (set(numbers) or {ANY_PARTITION})


def test_the_header_that_the_cluster_reads_means_nothing_on_the_way() -> None:
    limits = LIMITS._replace(ttl_header="x-life")
    kafka = FakeKafka(partitions=1, limits=IngressLimits.of_note(limits.as_note()))
    consumer = start(kafka)
    kafka.send(b"v", headers=[("x-life", b"1")])
    assert "x-life" not in dict(sent(kafka, consumer).headers)
    consumer.run_once()
    assert consumer.take()[0].headers == [("x-life", b"1")]
