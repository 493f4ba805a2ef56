"""Transactions of a consumer on a real Kafka: one right behind another, and repeated ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from delaywheel import transactional
from delaywheel.consumer import ConsumerTrouble, Partition, RetryConsumer
from delaywheel.consumer.engine import loop
from delaywheel.consumer.kafka import KafkaBroker as ConsumersKafka
from delaywheel.consumer.kafka.order_topic import OrderTopics
from delaywheel.consumer.kafka.topics import ends_of
from delaywheel.consumer.kafka.transaction import Transaction
from delaywheel.consumer.order import Away
from delaywheel.consumer.records import Passed
from delaywheel.consumer.settings import read_settings
from delaywheel.transactional import Outgoing
from local.loopback.kafka import KafkaBroker
from support.kafka.proxy import KafkaProxy
from support.kafka.read_committed import create_topic
from support.services.waiting import wait_until

pytestmark = pytest.mark.kafka

PATIENCE_S = 60.0
RECORDS = 30


@pytest.fixture
def proxy(kafka: KafkaBroker) -> Iterator[KafkaProxy]:
    with KafkaProxy(kafka) as proxy:
        yield proxy


def test_transactions_without_records_follow_each_other(
    kafka: KafkaBroker, cluster_id: str
) -> None:
    """The end of one is still being written when the next begins: Kafka says `not now`."""
    topic = f"orders-{cluster_id}"
    for name in (topic, f"delaywheel-{cluster_id}-ingress"):
        create_topic(kafka.address, name)
    producer = Producer({"bootstrap.servers": kafka.address})
    for number in range(RECORDS):
        producer.produce(topic, b"%d" % number)
    assert producer.flush(PATIENCE_S) == 0
    with RetryConsumer(
        topic,
        group=f"group-{cluster_id}",
        bootstrap=kafka.address,
        cluster=cluster_id,
        commit_every="10s",
    ) as consumer:
        for _ in range(RECORDS):
            message = consumer.receive(PATIENCE_S)
            assert message is not None, consumer.trouble
            message.done()
            assert consumer.flush(PATIENCE_S), consumer.trouble
    assert (consumer.counts.done, consumer.counts.failed_commits) == (RECORDS, 0)
    assert consumer.counts.commits == RECORDS


def test_who_leaves_a_transaction_open_in_what_is_read_is_found(
    kafka: KafkaBroker, cluster: str, orders: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactional, "OPEN_S", 0.1)
    monkeypatch.setattr(loop, "_LOOK_S", 0.1)
    producer = Producer({"bootstrap.servers": kafka.address, "transactional.id": orders})
    producer.init_transactions(PATIENCE_S)
    with RetryConsumer(orders, group="open", bootstrap=kafka.address, cluster=cluster) as consumer:
        producer.begin_transaction()
        producer.produce(orders, b"open", partition=0)
        producer.flush(PATIENCE_S)
        found = lambda: ConsumerTrouble.TRANSACTION_OPEN in consumer.health.troubles  # noqa: E731
        wait_until("it is found", found)
        assert f"{orders}/0" in consumer.health.troubles[ConsumerTrouble.TRANSACTION_OPEN]
        assert consumer.figures.lags[Partition(orders, 0)] == 1
        producer.commit_transaction(PATIENCE_S)
        message = consumer.receive(PATIENCE_S)
        assert message is not None
        message.done()
        wait_until("nothing is left", lambda: consumer.figures.lags[Partition(orders, 0)] == 0)
        wait_until("all is well", lambda: consumer.health.is_well)


def test_a_late_copy_of_a_commit_reaches_no_later_transaction(
    kafka: KafkaBroker, cluster_id: str, proxy: KafkaProxy
) -> None:
    topic = f"orders-{cluster_id}"
    create_topic(kafka.address, topic)
    settings = read_settings(topic, f"group-{cluster_id}", kafka.proxy_address, {})
    consumers = ConsumersKafka(settings)
    consumers.renew_producer(frozenset())
    group = Consumer({"bootstrap.servers": kafka.address, "group.id": settings.group})
    membership = group.consumer_group_metadata()
    where = Partition(topic, 0)
    proxy.hold_next_end_txn()
    assert (
        consumers.commit((), {where: Passed(1)}, membership) is None
    )  # the client has repeated it
    assert proxy.held_requests == 1
    assert consumers.commit((), {where: Passed(2)}, membership) is None
    assert proxy.release_held() == [KafkaError.INVALID_PRODUCER_EPOCH]
    consumers.close()
    group.close()


def test_a_record_that_its_topic_does_not_take_is_known_as_the_cause(
    kafka: KafkaBroker, cluster_id: str
) -> None:
    topic, small = f"orders-{cluster_id}", f"small-{cluster_id}"
    create_topic(kafka.address, topic)
    create_topic(kafka.address, small, config={"max.message.bytes": "1000"})
    consumers = ConsumersKafka(
        read_settings(topic, f"group-{cluster_id}", kafka.address, {"kafka": {"linger.ms": 50}})
    )
    consumers.renew_producer(frozenset())
    group = Consumer({"bootstrap.servers": kafka.address, "group.id": f"group-{cluster_id}"})
    membership = group.consumer_group_metadata()
    where = Partition(topic, 0)
    fits, too_large = (Outgoing(small, None, b"x" * size, []) for size in (10, 2_000))
    refused = consumers.commit([fits, too_large, fits], {where: Passed(1)}, membership)
    assert refused is not None
    assert refused.is_refusal
    assert small in refused.text
    consumers.renew_producer(frozenset())
    half = Outgoing(small, None, b"x" * 600, [], 0)
    together = consumers.commit([half, half], {where: Passed(1)}, membership)
    assert together is not None, "the client has joined them"
    assert together.is_refusal
    consumers.renew_producer(frozenset())
    halves = [fits, half, half]
    assert consumers.commit(halves, {where: Passed(1)}, membership, one_by_one=True) is None
    consumers.close()
    group.close()


class DroppingProducer:
    """A client whose transaction fails before its records are sent: it says that it drops them."""

    def __init__(self) -> None:
        self._calls: list[Callable[[KafkaError, object], None]] = []

    def begin_transaction(self) -> None:
        """All is well."""

    def produce(
        self, *_: object, on_delivery: Callable[[KafkaError, object], None], **__: object
    ) -> None:
        self._calls.append(on_delivery)

    def flush(self, _: float) -> int:
        for call in self._calls:
            call(KafkaError(KafkaError._PURGE_QUEUE), None)
        return 0

    def send_offsets_to_transaction(self, *_: object) -> None:
        raise KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED, "not permitted"))


def test_a_missing_right_is_known_though_records_are_only_said_to_be_dropped() -> None:
    transaction = Transaction(cast("Producer", DroppingProducer()), lambda _: set(), lambda: False)
    failure = transaction.commit(
        [Outgoing("dead", None, b"v", [])], {Partition("a", 0): Passed(1)}, b""
    )
    assert failure is not None
    assert (failure.is_forbidden, failure.has_begun_to_end) == (True, False)
    assert "not permitted" in failure.text


def test_an_order_topic_is_read_from_what_is_left_of_it_and_then_on(
    kafka: KafkaBroker, cluster_id: str
) -> None:
    topic = f"order-{cluster_id}"
    create_topic(kafka.address, topic)
    client = {"bootstrap.servers": kafka.address}
    admin, where = AdminClient({**client}), Partition(topic, 0)
    producer = Producer(client)

    def write(offset: int, value: bytes | None) -> None:
        producer.produce(topic, value, offset.to_bytes(8, "big"), partition=0)
        assert producer.flush(PATIENCE_S) == 0

    for offset in range(4):
        write(offset, (7).to_bytes(8, "big") + b"k")
    write(1, None)
    for future in admin.delete_records([TopicPartition(topic, 0, 2)]).values():
        future.result()
    topics = OrderTopics(client, "reader", lambda wanted: ends_of(admin, wanted))
    assert topics.read([where]) == {where: [Away(2, 7, b"k"), Away(3, 7, b"k")]}
    write(2, None)
    assert topics.read([where]) == {where: [Away(3, 7, b"k")]}
    assert topics.read([where]) == {where: [Away(3, 7, b"k")]}
