"""Three consumers that are killed again and again: each message's history follows its plan.

`DELAYWHEEL_DRILL_S=300 pytest tests/consumer/test_killed_consumers.py` kills for five minutes;
`DELAYWHEEL_DRILL_NODES=3` has three nodes of delaywheel do it, and with
`DELAYWHEEL_DRILL_REBALANCES=consumer` partitions move by KIP-848; where keys keep their order, they
move eagerly.
"""

from __future__ import annotations

import os
import random
import time
import uuid
from pathlib import Path
from typing import Literal

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from local.loopback.kafka import KafkaBroker
from support.consumer.killed import Consumers, check_histories, still_away
from support.consumer.plan import Plan
from support.kafka.read_committed import CommittedReader, create_topic

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

DRILL_S = float(os.environ.get("DELAYWHEEL_DRILL_S", "12"))
REBALANCES: Literal["eager", "consumer"] = (
    "consumer" if os.environ.get("DELAYWHEEL_DRILL_REBALANCES") == "consumer" else "eager"
)
RATE = 25
KEYS = 50
PARTITIONS = 3
PATIENCE_S = 120.0


def make_plan(kafka: KafkaBroker, cluster: str, folder: Path, *, ordered: bool) -> Plan:
    name = uuid.uuid4().hex[:8]
    topic = f"orders-{name}"
    create_topic(kafka.address, topic, partitions=PARTITIONS)
    handled = str(folder / "handled")
    rebalances = "eager" if ordered else REBALANCES
    group = f"group-{name}"
    return Plan(kafka.address, cluster, topic, group, 7, handled, ordered, rebalances=rebalances)


def send_and_kill(plan: Plan, consumers: Consumers) -> tuple[int, int]:
    """Sends messages while consumers are killed; returns the numbers of both."""
    producer = Producer({"bootstrap.servers": plan.bootstrap, "linger.ms": 5})
    chance = random.Random(plan.seed)
    sent, kills = 0, 0
    began_s = time.monotonic()
    next_kill_s = began_s + 4
    while time.monotonic() < began_s + DRILL_S:
        while sent < (time.monotonic() - began_s) * RATE:
            producer.produce(plan.topic, b"%d" % sent, key=b"%d" % (sent % KEYS))
            sent += 1
        producer.flush(PATIENCE_S)
        if time.monotonic() > next_kill_s:
            consumers.kill(chance.randrange(3))
            kills += 1
            next_kill_s = time.monotonic() + 1
        time.sleep(0.02)
    assert consumers.are_alive()
    return sent, kills


@pytest.mark.timeout(DRILL_S + 3 * PATIENCE_S)
def test_each_history_is_its_plans(
    kafka: KafkaBroker, cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(kafka, cluster, tmp_path, ordered=False)
    topic = plan.topic
    with Consumers(plan, tmp_path) as consumers:
        sent, kills = send_and_kill(plan, consumers)
        retries = sum(map(plan.retries, range(sent)))
        deaths = sum(map(plan.dies, range(sent)))
        with CommittedReader(
            kafka.address, f"{topic}-retry-{plan.group}", partitions=PARTITIONS
        ) as reader:
            back = reader.wait_for(retries, timeout_s=PATIENCE_S)
        with CommittedReader(
            kafka.address, f"{topic}-dead-{plan.group}", partitions=PARTITIONS
        ) as reader:
            dead = reader.wait_for(deaths, timeout_s=PATIENCE_S)
        wait_until_passed(kafka, plan, sent, retries)
        assert consumers.are_alive()
    # Everything is passed: what more there were would be there by now.
    for name, count in (
        (f"{topic}-retry-{plan.group}", retries),
        (f"{topic}-dead-{plan.group}", deaths),
    ):
        with CommittedReader(kafka.address, name, partitions=PARTITIONS) as reader:
            assert len(reader.read_to_end()) == count
    latest_ms = check_histories(plan, sent, back, dead)
    with capsys.disabled():
        reported = f"{sent} messages, {kills} kills, {retries} retries, {deaths} dead letters"
        print(f"\n{reported}; a retry came {latest_ms} ms late at most")  # noqa: T201


@pytest.mark.timeout(DRILL_S + 6 * PATIENCE_S)
def test_keys_keep_their_order(kafka: KafkaBroker, cluster: str, tmp_path: Path) -> None:
    plan = make_plan(kafka, cluster, tmp_path, ordered=True)
    with Consumers(plan, tmp_path) as consumers:
        sent, _ = send_and_kill(plan, consumers)
        deaths = sum(map(plan.dies, range(sent)))
        with CommittedReader(
            kafka.address, f"{plan.topic}-dead-{plan.group}", partitions=PARTITIONS
        ) as reader:
            dead = reader.wait_for(deaths, timeout_s=4 * PATIENCE_S)
        deadline = time.monotonic() + 4 * PATIENCE_S
        while len(ended_in_order(plan)) < sent:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        wait_until_passed(kafka, plan, sent, deaths)
        assert consumers.are_alive()
    died = sorted(int(message.value() or b"") for message in dead)
    assert died == [number for number in range(sent) if plan.dies(number)]
    assert ended_in_order(plan) == set(range(sent))
    order = f"{plan.topic}-order-{plan.group}"
    assert still_away(kafka.address, order, partitions=PARTITIONS) == []


def ended_in_order(plan: Plan) -> set[int]:
    """Messages whose last attempt has begun; none began before earlier ones of its key."""
    ended: set[int] = set()
    for line in Path(plan.handled).read_bytes().splitlines():
        number, attempt = map(int, line.split())
        assert ended.issuperset(range(number % KEYS, number, KEYS)), line
        if attempt == plan.retries(number) + 1:
            ended.add(number)
    return ended


def wait_until_passed(kafka: KafkaBroker, plan: Plan, sent: int, retries: int) -> None:
    """The group has passed every record; a transaction's markers take offsets of their own."""
    consumer = Consumer({"bootstrap.servers": kafka.address, "group.id": plan.group})
    retry = f"{plan.topic}-retry-{plan.group}"
    wanted = [
        TopicPartition(name, number) for name in (plan.topic, retry) for number in range(PARTITIONS)
    ]
    deadline = time.monotonic() + PATIENCE_S
    while True:
        reported = consumer.committed(wanted, timeout=PATIENCE_S)
        behind = 0
        for one in reported:
            _, end = consumer.get_watermark_offsets(one, timeout=PATIENCE_S)
            # Behind the last record of the retry topic comes the marker of its transaction.
            behind += max(0, end - max(one.offset, 0) - (1 if one.topic == retry else 0))
        if not behind:
            consumer.close()
            return
        assert time.monotonic() < deadline, (behind, sent, retries)
        time.sleep(0.2)
