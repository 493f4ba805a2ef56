"""RetryConsumer on a real Kafka: the records that each way of settling leaves there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from confluent_kafka import Consumer, Message, Producer, TopicPartition

from delaywheel.consumer import (
    ConsumerError,
    ConsumerReason,
    ConsumerTrouble,
    ReceivedMessage,
    RetryConsumer,
)
from local.loopback.kafka import KafkaBroker
from support.kafka.read_committed import CommittedReader, create_topic, delete_topic, headers_of
from support.services.waiting import wait_until

pytestmark = pytest.mark.kafka

GROUP = "billing"
PATIENCE_S = 60.0
QUICK = {"heartbeat.interval.ms": 500}
"""Members hear of a rebalance with the answer to a heartbeat; by default they send one in 3 s."""

Send = Callable[..., None]


@pytest.fixture
def send(kafka: KafkaBroker, orders: str) -> Send:
    producer = Producer({"bootstrap.servers": kafka.address, "linger.ms": 0})

    def produce(value: bytes | None, *, topic: str = orders, **more: object) -> None:
        producer.produce(topic, value=value, **more)  # type: ignore[arg-type]
        assert producer.flush(PATIENCE_S) == 0

    return produce


@pytest.fixture
def consume(kafka: KafkaBroker, cluster: str, orders: str) -> Callable[..., RetryConsumer]:
    def make(**options: object) -> RetryConsumer:
        reported = {"retry": ("100ms", "200ms"), "cluster": cluster, "kafka": QUICK, **options}
        return RetryConsumer(orders, group=GROUP, bootstrap=kafka.address, **reported)  # type: ignore[arg-type]

    return make


def next_message(consumer: RetryConsumer) -> ReceivedMessage:
    message = consumer.receive(PATIENCE_S)
    assert message is not None, consumer.trouble
    return message


def letters(kafka: KafkaBroker, orders: str, count: int) -> list[tuple[Message, dict[str, bytes]]]:
    with CommittedReader(kafka.address, f"{orders}-dead-{GROUP}", partitions=2) as reader:
        read = reader.wait_for(count)
    return [(one, {n: v for n, v in headers_of(one) if v is not None}) for one in read]


def committed(kafka: KafkaBroker, topic: str) -> int:
    """Records of a topic that the group has passed."""
    consumer = Consumer({"bootstrap.servers": kafka.address, "group.id": GROUP})
    reported = consumer.committed([TopicPartition(topic, n) for n in range(2)], timeout=PATIENCE_S)
    consumer.close()
    return sum(max(one.offset, 0) for one in reported)


def test_no_lag_stays_at_rest(
    kafka: KafkaBroker, orders: str, consume: Callable[..., RetryConsumer]
) -> None:
    """Ends of transactions lie behind the last records, of the source and of the retry topic."""
    producer = Producer({"bootstrap.servers": kafka.address, "transactional.id": orders})
    producer.init_transactions(PATIENCE_S)
    for partition in range(2):
        producer.begin_transaction()
        producer.produce(orders, b"once again", partition=partition)
        producer.commit_transaction(PATIENCE_S)
    retries = f"{orders}-retry-{GROUP}"
    places = [TopicPartition(topic, n) for topic in (orders, retries) for n in range(2)]
    with consume() as consumer:
        for message in (next_message(consumer) for _ in range(4)):
            if message.attempt == 1:
                message.retry("100ms")
            else:
                message.done()
        reader = Consumer({"bootstrap.servers": kafka.address, "group.id": GROUP})

        def lags() -> list[int]:
            return [
                reader.get_watermark_offsets(at)[1] - max(0, at.offset)
                for at in reader.committed(places, timeout=PATIENCE_S)
            ]

        assert sum(lags()) > 0
        wait_until("nothing is left of any partition", lambda: not any(lags()))
        reader.close()


def test_what_handlers_write_is_there_if_their_records_are_done(
    kafka: KafkaBroker, orders: str, send: Send, consume: Callable[..., RetryConsumer]
) -> None:
    bills, small = f"bills-{orders}", f"small-{orders}"
    create_topic(kafka.address, bills)
    create_topic(kafka.address, small, config={"max.message.bytes": "1000"})
    for value in (b"good", b"slow", b"nowhere", b"large"):
        send(value, key=b"k")
    topics = {b"nowhere": f"no-{orders}", b"large": small}
    with consume(retry=("100ms",)) as consumer:
        while consumer.counts.done < 2 or consumer.counts.dead < 2:
            message = next_message(consumer)
            with message:
                value = b"%b %d" % (message.value or b"", message.attempt)
                message.produce(topics.get(message.value or b"", bills), value * 400)
                message.produce(bills, value, key=b"k", headers={"trace": b"7"})
                message.produce(bills, b"later " + value, after="200ms")
                if message.value == b"slow" and message.attempt == 1:
                    raise OSError("down")
            assert consumer.flush(PATIENCE_S)
    with CommittedReader(kafka.address, bills) as reader:
        read = reader.wait_for(6)
    now = [b"good 1", b"slow 2"]
    assert [one.value() for one in read if one.key() == b"k"] == now
    later = sorted(one.value() or b"" for one in read if dict(headers_of(one)).get("dw-id"))
    assert later == [b"later " + value for value in now]
    assert all(headers_of(one) == [("trace", b"7")] for one in read if one.key() == b"k")
    assert len(read) == 6
    for letter, reported in letters(kafka, orders, 2):
        detail = reported["dw-dead-detail"].decode()
        assert detail.startswith(f"WriteRefusedError: {'topic ' * (letter.value() == b'nowhere')}")
        assert topics[letter.value() or b""] in detail


def test_what_would_come_back_after_its_life_is_a_dead_letter(
    kafka: KafkaBroker, orders: str, send: Send, consume: Callable[..., RetryConsumer]
) -> None:
    send(b"ours", headers=[("ttl", (30).to_bytes(8, "big"))])
    with consume(expired="dead") as consumer:
        assert next_message(consumer).retry(after="1m")
        assert consumer.flush(PATIENCE_S)
    assert consumer.counts.expired == 1
    ((_, reported),) = letters(kafka, orders, 1)
    assert reported["dw-dead-reason"] == b"EXPIRED"
    assert committed(kafka, orders) >= 1


def test_a_long_handler_keeps_its_place_in_the_group(
    send: Send, consume: Callable[..., RetryConsumer]
) -> None:
    send(b"long")
    limits = {"max.poll.interval.ms": 6_000, "session.timeout.ms": 6_000}
    with consume(kafka=limits) as consumer:
        with next_message(consumer):
            time.sleep(8)
        assert consumer.flush(PATIENCE_S)
        assert (consumer.counts.done, consumer.counts.forgotten) == (1, 0)


def test_back_pressure_pauses_and_goes_on(
    send: Send, consume: Callable[..., RetryConsumer]
) -> None:
    for number in range(60):
        send(b"%d" % number)
    with consume(max_held=20) as consumer:
        held = [next_message(consumer) for _ in range(20)]
        assert not consumer.receive_batch(1000, 2), "more than may be held"
        for message in held:
            message.done()
        seen = len(held)
        consumer.pause()
        assert consumer.receive(0.3) is None
        consumer.resume()
        while seen < 60:
            with next_message(consumer):
                seen += 1
        assert consumer.flush(PATIENCE_S)
        assert consumer.counts.done == 60


def test_a_stop_leaves_to_others_what_was_not_settled(
    send: Send, consume: Callable[..., RetryConsumer]
) -> None:
    for number in range(10):
        send(b"%d" % number, partition=0)
    with consume(drain="200ms") as first:
        batch = [next_message(first) for _ in range(4)]
        for message in (batch[0], batch[1], batch[3]):
            message.done()
        first.stop()
        assert list(first) == []
    assert (first.counts.done, batch[2].done()) == (2, False)
    with consume() as second:
        values: list[bytes | None] = []
        while len(values) < 8:
            with next_message(second) as message:
                values.append(message.value)
    assert values == [b"%d" % number for number in range(2, 10)]


def test_a_rebalance_waits_for_what_is_in_hand(
    send: Send, consume: Callable[..., RetryConsumer]
) -> None:
    for partition in range(2):
        for number in range(5):
            send(b"%d/%d" % (partition, number), partition=partition)
    with consume() as first:
        in_hand = [next_message(first) for _ in range(10)]
        with consume() as second:
            # The second joins only when the first has given up what it has: after these.
            threading.Timer(1.0, lambda: [message.done() for message in in_hand]).start()
            wait_until("it has joined", lambda: second.partitions)
            assert first.counts.done == 10
            assert second.receive(0.5) is None


def test_a_consumer_without_partitions_waits_for_its_turn(
    kafka: KafkaBroker, cluster: str, orders: str, send: Send
) -> None:
    topic = f"narrow-{orders}"
    create_topic(kafka.address, topic)

    def consumer() -> RetryConsumer:
        return RetryConsumer(
            topic,
            group=GROUP,
            bootstrap=kafka.address,
            cluster=cluster,
            ordered=True,
            kafka=QUICK,
        )

    with consumer() as second:
        with consumer() as first:
            send(b"1", topic=topic, key=b"k")
            both = (first, second)
            deadline = time.monotonic() + PATIENCE_S
            while first.counts.done + second.counts.done == 0:
                for one in both:
                    message = one.receive(0.1)
                    if message is not None:
                        message.done()
                assert time.monotonic() < deadline
        send(b"2", topic=topic, key=b"k")
        message = next_message(second)
        assert message.value == b"2"
        message.done()  # else its end would wait for that


def test_order_needs_as_many_partitions(
    kafka: KafkaBroker, orders: str, consume: Callable[..., RetryConsumer]
) -> None:
    create_topic(kafka.address, f"{orders}-retry-{GROUP}", partitions=3)
    with pytest.raises(ConsumerError) as reported, consume(ordered=True) as consumer:
        consumer.receive()
    assert reported.value.reason is ConsumerReason.ORDER_IMPOSSIBLE


def test_what_cannot_be_is_refused_by_name(kafka: KafkaBroker, cluster: str, orders: str) -> None:
    def reason_of(topic: str, **options: object) -> ConsumerReason:
        consumer = RetryConsumer(topic, group=GROUP, bootstrap=kafka.address, **options)  # type: ignore[arg-type]
        with pytest.raises(ConsumerError) as reported, consumer:
            consumer.receive()
        assert str(reported.value).endswith(reported.value.reason.advice)
        return reported.value.reason

    assert reason_of("nowhere", cluster=cluster) is ConsumerReason.TOPIC_MISSING
    setting = reason_of(orders, cluster=cluster, kafka={"sessions.timeout": 1})
    assert setting is ConsumerReason.SETTING_INVALID
    small, dead = f"small-{orders}", f"small-{orders}-dead-{GROUP}"
    create_topic(kafka.address, small)
    create_topic(kafka.address, dead, config={"max.message.bytes": "1000"})
    assert reason_of(small, cluster=cluster) is ConsumerReason.TOPIC_TOO_SMALL


def test_a_group_that_shares_partitions_in_another_way_is_named(
    kafka: KafkaBroker, orders: str, send: Send, consume: Callable[..., RetryConsumer]
) -> None:
    other = Consumer(
        {
            "bootstrap.servers": kafka.address,
            "group.id": GROUP,
            "partition.assignment.strategy": "cooperative-sticky",
        }
    )
    other.subscribe([orders])
    send(b"1")
    wait_until("it has joined", lambda: other.poll(0.1) or other.assignment())
    with pytest.raises(ConsumerError) as reported, consume() as consumer:
        consumer.receive(PATIENCE_S)
    assert reported.value.reason is ConsumerReason.GROUP_DIFFERS
    other.close()


def test_a_mistyped_cluster_is_told_once_with_the_one_that_there_is(
    kafka: KafkaBroker, cluster_id: str, orders: str, caplog: pytest.LogCaptureFixture
) -> None:
    ingress = f"delaywheel-{cluster_id}-ingress"
    create_topic(kafka.address, ingress)
    with RetryConsumer(orders, group=GROUP, bootstrap=kafka.address, cluster="typo") as consumer:
        assert consumer.receive(2) is None  # it has asked several times by then
        assert ingress in (consumer.trouble or "").partition("there is ")[2]
    (told,) = [line.getMessage() for line in caplog.records if "typo" in line.getMessage()]
    assert told.startswith("NO_INGRESS: ")


def test_without_an_ingress_topic_it_waits_and_stops_if_that_goes(
    kafka: KafkaBroker, cluster_id: str, orders: str, send: Send
) -> None:
    """Neither is the record passed, nor is its handler called again and again."""
    ingress = f"delaywheel-{cluster_id}-ingress"
    send(b"1")

    def start() -> RetryConsumer:
        return RetryConsumer(orders, group=GROUP, bootstrap=kafka.address, cluster=cluster_id)

    handled = []

    def retry_all() -> None:
        with start() as consumer:
            for message in consumer:
                handled.append(message.value)
                if len(handled) == 1:
                    delete_topic(kafka.address, ingress)
                message.retry()

    def make_ingress() -> None:
        with start() as waiting:
            wait_until("it says so", lambda: ingress in (waiting.trouble or ""))
            assert list(waiting.health.troubles) == [ConsumerTrouble.NO_INGRESS]
            create_topic(kafka.address, ingress)
            message = waiting.receive(PATIENCE_S)
            assert message is not None
            assert waiting.health.is_well
            message.nack()

    make_ingress()
    with pytest.raises(ConsumerError, match=ingress) as reported:
        retry_all()
    assert reported.value.reason is ConsumerReason.INGRESS_MISSING
    assert handled == [b"1"]
    assert committed(kafka, orders) == 0

    create_topic(kafka.address, ingress)
    with start() as consumer, next_message(consumer) as message:
        assert (message.value, message.attempt) == (b"1", 1)
    assert consumer.counts.done == 1
