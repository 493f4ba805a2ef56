"""Names, partitions and settings of the topics that a group has of its own."""

from __future__ import annotations

import threading
import uuid
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType  # type: ignore[attr-defined] # its stubs re-export without saying so

from delaywheel.consumer import ConsumerTrouble, GroupTopic, ReceivedMessage, RetryConsumer
from delaywheel.consumer.engine import loop
from delaywheel.consumer.kafka import member
from delaywheel.consumer.settings import read_settings
from local.loopback.kafka import KafkaBroker
from support.kafka.read_committed import create_topic
from support.services.waiting import wait_until

PATIENCE_S = 60.0


def test_names_hold_topic_and_group() -> None:
    settings = read_settings(
        ["a", "b"],
        "g",
        "nowhere",
        {"retry_topic": GroupTopic("{group}.again.{topic}"), "dead_topic": GroupTopic("g.{topic}")},
    )
    assert [(one.retry, one.dead, one.order) for one in settings.topics] == [
        ("g.again.a", "g.a", "a-order-g"),
        ("g.again.b", "g.b", "b-order-g"),
    ]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("again.{topic}", "it must have {group}"),
        ("again.{group}", "for more than one use"),
        ("{topic}.{group}.{use}", "there is no {use}"),
        ("{topic} of {group}", "Kafka takes letters"),
        ("delaywheel-{topic}-{group}-dead", "keeps its own records there"),
    ],
)
def test_other_names_are_refused(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_settings(["a", "b"], "my-group", "nowhere", {"retry_topic": GroupTopic(name)})


@pytest.mark.parametrize("topic", ["a b", "..", "ö"])
def test_a_topic_that_kafka_cannot_have_is_refused(topic: str) -> None:
    with pytest.raises(ValueError, match=r"neither '\.' nor '\.\.'"):
        read_settings(topic, "g", "nowhere", {})


def test_one_name_for_two_uses_is_refused() -> None:
    same = GroupTopic("{topic}.{group}")
    with pytest.raises(ValueError, match=r"a\.g: for more than one use"):
        read_settings("a", "g", "nowhere", {"retry_topic": same, "dead_topic": same})


def test_what_the_promises_rest_on_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cleanup\.policy"):
        GroupTopic(config={"cleanup.policy": "compact"})


@pytest.mark.kafka
def test_a_topic_is_created_as_it_is_wanted(kafka: KafkaBroker, cluster: str, orders: str) -> None:
    wanted = GroupTopic("{group}.again.{topic}", partitions=3, config={"retention.ms": "777000"})
    with RetryConsumer(
        orders, group="g", bootstrap=kafka.address, cluster=cluster, retry_topic=wanted
    ) as consumer:
        wait_until("it has partitions", lambda: bool(consumer.partitions))
        name = f"g.again.{orders}"
        assert sum(one.topic == name for one in consumer.partitions) == 3
    resource = ConfigResource(ResourceType.TOPIC, name)
    admin = AdminClient({"bootstrap.servers": kafka.address})
    config = admin.describe_configs([resource])[resource].result()
    assert config["retention.ms"].value == "777000"


@pytest.mark.kafka
@pytest.mark.parametrize("rebalances", ["eager", "cooperative", "consumer"])
def test_a_topic_that_a_pattern_matches_is_read_while_it_exists(
    kafka: KafkaBroker, cluster: str, monkeypatch: pytest.MonkeyPatch, rebalances: Any
) -> None:
    monkeypatch.setattr(loop, "_LOOK_S", 0.2)
    source = f"by-pattern-{uuid.uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": kafka.address})

    def send(*values: bytes) -> None:
        producer = Producer({"bootstrap.servers": kafka.address})
        for value in values:
            producer.produce(source, value)
        assert producer.flush(30) == 0

    with RetryConsumer(
        f"^{source}",
        group="g",
        bootstrap=kafka.address,
        cluster=cluster,
        retry=("100ms",),
        rebalances=rebalances,
    ) as consumer:

        def missing() -> bool:
            return ConsumerTrouble.NO_TOPIC in consumer.health.troubles

        wait_until("nothing is there", missing)
        create_topic(kafka.address, f"{source}-retry-another")
        create_topic(kafka.address, source)
        send(b"first", b"second")
        seen: list[tuple[bytes | None, int]] = []
        while len(seen) < 4:
            message = consumer.receive(60)
            assert message is not None
            seen.append((message.value, message.attempt))
            with message:
                if message.attempt == 1:
                    raise OSError("down")
        assert sorted(seen) == [(value, n) for value in (b"first", b"second") for n in (1, 2)]
        assert {one.topic for one in consumer.partitions} == {source, f"{source}-retry-g"}
        assert consumer.flush()
        send(b"in hand")
        message = consumer.receive(60)
        assert message is not None
        admin.delete_topics([source, f"{source}-retry-g", f"{source}-dead-g"])[source].result()
        wait_until("it is gone", lambda: missing() and not consumer.partitions)
        assert message.done() is False
        create_topic(kafka.address, source)
        send(b"anew")
        message = consumer.receive(60)
        assert message is not None
        assert message.value == b"anew"
        assert message.done()
        wait_until("all is well", lambda: consumer.health.is_well)


def send_in_turn(address: str, source: str) -> None:
    """Makes a topic with six records of each of two keys, in a partition each."""
    create_topic(address, source, partitions=2)
    producer = Producer({"bootstrap.servers": address})
    for number in range(6):
        for partition, key in enumerate((b"a", b"b")):
            producer.produce(source, b"%d" % number, key=key, partition=partition)
    assert producer.flush(PATIENCE_S) == 0


@pytest.mark.kafka
def test_several_members_keep_the_order_in_all_topics_of_a_pattern(
    kafka: KafkaBroker, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_LOOK_S", 0.2)
    name = uuid.uuid4().hex[:8]
    handled: dict[tuple[str, bytes | None], list[tuple[int, int]]] = defaultdict(list)
    threads = set[int]()

    def handle(message: ReceivedMessage) -> None:
        number = int(message.value or b"")
        threads.add(threading.get_ident())
        handled[message.topic, message.key].append((number, message.attempt))
        if number == 1 and message.attempt == 1:
            raise OSError("down")

    first, second = (
        RetryConsumer(
            f"^ordered-{name}",
            group="g",
            bootstrap=kafka.address,
            cluster=cluster,
            retry=("100ms",),
            ordered=True,
        )
        for _ in range(2)
    )
    send_in_turn(kafka.address, f"ordered-{name}-0")
    send_in_turn(kafka.address, f"ordered-{name}-1")
    with first, second, ThreadPoolExecutor(2) as pool:
        running = [pool.submit(one.run, handle) for one in (first, second)]
        wait_until("both have some", lambda: bool(first.partitions and second.partitions))
        send_in_turn(kafka.address, f"ordered-{name}-2")  # appears while they are at work
        ends = [(f"ordered-{name}-{n}", key) for n in range(3) for key in (b"a", b"b")]
        wait_until("all have ended", lambda: all((5, 1) in handled[end] for end in ends))
        first.stop()
        second.stop()
        for one in running:
            one.result(PATIENCE_S)
    assert len(threads) == 2
    for seen in handled.values():
        firsts = list(dict.fromkeys(seen))  # a rebalance may bring back what was in hand
        assert firsts == [(0, 1), (1, 1), (1, 2), (2, 1), (3, 1), (4, 1), (5, 1)]


@pytest.mark.kafka
def test_a_named_topic_whose_absence_was_seen_is_read_once_it_is_recreated(
    kafka: KafkaBroker, cluster: str, orders: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's own settings would let it look again after five minutes."""
    monkeypatch.setattr(loop, "_LOOK_S", 0.2)
    monkeypatch.setattr(member, "TOPICS_EVERY_MS", 1_000)
    admin = AdminClient({"bootstrap.servers": kafka.address})
    with RetryConsumer(orders, group="g", bootstrap=kafka.address, cluster=cluster) as consumer:

        def is_read() -> bool:
            return any(one.topic == orders for one in consumer.partitions)

        wait_until("it is read", is_read)
        admin.delete_topics([orders])[orders].result()
        wait_until("it is gone", lambda: not is_read())
        create_topic(kafka.address, orders)
        producer = Producer({"bootstrap.servers": kafka.address})
        producer.produce(orders, b"anew")
        assert producer.flush(30) == 0
        message = consumer.receive(60)
        assert message is not None
        assert message.value == b"anew"
        assert message.done()
