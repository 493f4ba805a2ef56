"""A partition that a consumer writes, or reads, has one copy, whose broker is away."""

from __future__ import annotations

import threading

import pytest
from confluent_kafka import Producer, TopicCollection

from delaywheel.consumer import ConsumerEvents, ConsumerTrouble, Partition, RetryConsumer
from delaywheel.consumer.engine import held_up
from delaywheel.ingress import ingress_topic
from delaywheel.kafka_admin import KafkaAdmin
from local.loopback.brokers import Brokers
from support.kafka.read_committed import create_topic, read_all
from support.process.night import at_night
from support.services.waiting import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]

WRITTEN, OTHER = 0, 1
LATE = 1
AWAY = 3
UNABLE = "no leader, or too few replicas in sync, of a partition"
PATIENT_S = 120.0
"""On busy brokers; nothing here tests how fast they are."""


class FailedCommits(ConsumerEvents):
    """What is said of transactions that fail."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def commit_failed(self, why: str) -> None:
        self.texts.append(why)


def test_a_partition_without_leader_holds_up_who_writes_there_alone(
    brokers: Brokers, cluster_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, bills = f"orders-{cluster_id}", f"bills-{cluster_id}"
    create_topic(brokers.address, ingress_topic(cluster_id))
    create_topic(brokers.address, orders, partitions=2)
    # Kafka 3.6 asks a topic with one copy for two as well, if its settings say two.
    create_topic(brokers.address, bills, config={"min.insync.replicas": "1"})
    brokers.reassign({(bills, 0): [AWAY]})
    wait_until("it has one copy", lambda: brokers.copies(bills) == {0: [AWAY]})
    producer = Producer({"bootstrap.servers": brokers.address})
    admin = KafkaAdmin({"bootstrap.servers": brokers.address, "log_level": 0})
    sent, failed = 0, FailedCommits()

    def send(count: int = 10) -> None:
        nonlocal sent
        for number in range(sent, sent + count):
            for partition in (WRITTEN, OTHER):
                producer.produce(orders, b"%d" % number, partition=partition)
        sent += count
        producer.flush()

    with RetryConsumer(
        orders,
        group="g",
        bootstrap=brokers.address,
        cluster=cluster_id,
        retry=(),
        events=failed,
    ) as consumer:

        def handle() -> None:
            for message in consumer:
                if message.at.number == WRITTEN:
                    message.produce(bills, message.value)
                message.done()

        handler = threading.Thread(target=handle)
        handler.start()
        send()
        wait_until("all are done", lambda: consumer.counts.done == 2 * sent, timeout_s=PATIENT_S)
        # Any broker is named as the controller, and a client believed it for five minutes.
        wait_until("it is named", lambda: admin.list_topics(orders).controller_id == AWAY)
        monkeypatch.setattr(held_up, "FIRST_S", 0.5)
        brokers.each[AWAY - 1].kill()  # Kafka names it as the leader for 9 s yet
        try:
            send()
            held = ConsumerTrouble.HELD_UP
            wait_until(
                "it is held up", lambda: held in consumer.health.troubles, timeout_s=PATIENT_S
            )
            for leads in (True, False):
                if not leads:
                    wait_until("it is missed", lambda: brokers.leaders()[bills, 0] < 0)
                send()
                wait_until(
                    "others go on", lambda: consumer.counts.done == 10 + sent, timeout_s=PATIENT_S
                )
            assert admin.describe_topics(TopicCollection([orders]))[orders].result().partitions
            assert held in consumer.health.troubles
            assert f"{bills}: {UNABLE}" in failed.texts, "it did not wait for its time"
        finally:
            brokers.each[AWAY - 1].start()
        wait_until("all are done", lambda: consumer.counts.done == 2 * sent, timeout_s=PATIENT_S)
        assert consumer.health.is_well
        consumer.stop()
        handler.join()
    values = [message.value() for message in read_all(brokers.address, bills, at_least=sent)]
    assert values == [b"%d" % number for number in range(sent)]
    brokers.wait_until_in_sync()


@at_night  # tests/consumer/driven/test_positions.py has the rule, with a Kafka that is not there
def test_a_partition_without_leader_is_begun_with_later(brokers: Brokers, cluster_id: str) -> None:
    """Where it ends nobody says; the others are begun with, and it once there is a leader."""
    topic, seen = f"split-{cluster_id}", list[bytes | None]()
    create_topic(brokers.address, ingress_topic(cluster_id))
    create_topic(brokers.address, topic, partitions=2, config={"min.insync.replicas": "1"})
    brokers.reassign({(topic, LATE): [AWAY]})
    wait_until("it has one copy", lambda: brokers.copies(topic)[LATE] == [AWAY])
    producer = Producer({"bootstrap.servers": brokers.address})
    brokers.each[AWAY - 1].stop()
    try:
        wait_until("it has no leader", lambda: brokers.leaders()[topic, LATE] < 0)
        with RetryConsumer(
            topic,
            group="g",
            bootstrap=brokers.address,
            cluster=cluster_id,
            retry=(),
            start="latest",
        ) as consumer:

            def handle() -> None:
                for message in consumer:
                    with message:
                        seen.append(message.value)

            handler = threading.Thread(target=handle)
            handler.start()
            lacks, other = ConsumerTrouble.NO_LEADER, Partition(topic, 0)
            wait_until("it is told", lambda: lacks in consumer.health.troubles, timeout_s=PATIENT_S)
            assert f"{topic}/{LATE}" in consumer.health.troubles[lacks]
            wait_until("the other is begun with", lambda: other in consumer.partitions)
            producer.produce(topic, b"at once", partition=0)
            producer.produce(topic, b"later", partition=LATE)
            wait_until("that is handled", lambda: seen == [b"at once"], timeout_s=PATIENT_S)
            assert Partition(topic, LATE) not in consumer.partitions
            brokers.each[AWAY - 1].start()
            producer.flush()
            wait_until("both are", lambda: seen == [b"at once", b"later"], timeout_s=PATIENT_S)
            wait_until("all is well", lambda: consumer.health.is_well, timeout_s=PATIENT_S)
            consumer.stop()
            handler.join()
    finally:
        if not brokers.each[AWAY - 1].running:
            brokers.each[AWAY - 1].start()
    brokers.wait_until_in_sync()
