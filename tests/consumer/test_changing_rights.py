"""Consumers that are killed while rights are taken away and given back, and sizes are lowered.

`DELAYWHEEL_DRILL_S=300 pytest tests/consumer/test_changing_rights.py` does it for five minutes.
Consumers stop, and are started again; with `DELAYWHEEL_DRILL_WAIT=10m` they wait for their rights.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import ResourceType  # type: ignore[attr-defined] # missing in its stubs

from delaywheel import ingress
from delaywheel.consumer import ConsumerReason
from local.loopback.cluster import LocalCluster
from support.consumer.killed import Consumers, check_histories
from support.consumer.plan import Plan
from support.kafka.authorized import AuthorizingBroker
from support.kafka.read_committed import (
    CommittedReader,
    create_topic,
    headers_of,
    set_topic,
    topic_exists,
)
from support.services.service import wait_until
from support.services.trio import NO_METRICS

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

DRILL_S = float(os.environ.get("DELAYWHEEL_DRILL_S", "20"))
WAIT = os.environ.get("DELAYWHEEL_DRILL_WAIT")
ADVICE = str(ConsumerReason.NOT_AUTHORIZED.advice)
RATE = 25
PARTITIONS = 3
PATIENCE_S = float(os.environ.get("DELAYWHEEL_DRILL_PATIENCE_S", "120"))
CLUSTER = "guarded"
TOPIC = "orders"
GROUP = "g"
RETRY, DEAD = f"{TOPIC}-retry-{GROUP}", f"{TOPIC}-dead-{GROUP}"
WRITTEN = "bills"
INGRESS = ingress.ingress_topic(CLUSTER)
SIZE = "max.message.bytes"
EVERY_S, AWAY_S = 4.0, 2.0
RIGHTS = ((DEAD, "WRITE"), (WRITTEN, "WRITE"), (INGRESS, "WRITE"), (TOPIC, "READ"), (RETRY, "READ"))


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[AuthorizingBroker]:
    with AuthorizingBroker(tmp_path / "kafka") as running:
        for name in (TOPIC, RETRY, DEAD, WRITTEN):
            create_topic(running.address, name, partitions=PARTITIONS)
            for operation in ("READ", "WRITE", "DESCRIBE", "DESCRIBE_CONFIGS"):
                running.allow(ResourceType.TOPIC, name, operation, prefixed=False)
        for operation in ("WRITE", "DESCRIBE", "DESCRIBE_CONFIGS"):
            running.allow(ResourceType.TOPIC, INGRESS, operation, prefixed=False)
        running.allow(ResourceType.GROUP, GROUP, "READ", prefixed=False)
        running.allow(ResourceType.GROUP, INGRESS, "DESCRIBE", prefixed=False)
        running.allow(
            ResourceType.TRANSACTIONAL_ID, f"delaywheel-retry-{GROUP}-", "WRITE", prefixed=True
        )
        yield running


class Trouble:
    """Takes one thing away after another, and gives it back."""

    def __init__(self, broker: AuthorizingBroker) -> None:
        self._broker = broker
        self._changes = 0
        self._undo: Callable[[], None] | None = None
        self._next_s = time.monotonic() + EVERY_S

    def change_if_due(self) -> None:
        """Takes something away, or gives it back, if it is time."""
        if time.monotonic() < self._next_s:
            return
        if self._undo is not None:
            self.end()
            self._next_s = time.monotonic() + EVERY_S - AWAY_S
            return
        kind = self._changes % (len(RIGHTS) + 1)
        self._changes += 1
        if kind == len(RIGHTS):
            set_topic(self._broker.address, DEAD, SIZE, "100")
            self._undo = lambda: set_topic(self._broker.address, DEAD, SIZE, "10000000")
        else:
            topic, operation = RIGHTS[kind]
            self._broker.deny(ResourceType.TOPIC, topic, operation)
            self._undo = lambda: self._broker.give_back(ResourceType.TOPIC, topic)
        self._next_s = time.monotonic() + AWAY_S

    def end(self) -> None:
        """Gives back what is away."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()


@pytest.mark.timeout(DRILL_S + 4 * PATIENCE_S)
def test_each_history_is_its_plans_whatever_is_taken_away(
    broker: AuthorizingBroker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    user = {name: text for name, text in broker.user_settings.items() if name[0] == "s"}
    plan = Plan(
        broker.user_settings["bootstrap.servers"],
        CLUSTER,
        TOPIC,
        GROUP,
        7,
        str(tmp_path / "handled"),
        written=WRITTEN,
        kafka=user,
        wait_for_rights=WAIT,
    )
    settings = {"cluster_id": CLUSTER, **NO_METRICS}
    node = LocalCluster(kafka=broker.address, folder=tmp_path / "nodes", settings=settings)
    with node as cluster:
        cluster.wait_until_accepting()
        wait_until("there is an ingress topic", lambda: topic_exists(broker.address, INGRESS))
        with Consumers(plan, tmp_path) as consumers:
            sent, kills, stops = send_and_disturb(broker, plan, consumers)
            retries = sum(map(plan.retries, range(sent)))
            deaths = sum(map(plan.dies, range(sent)))
            with (
                CommittedReader(broker.address, RETRY, partitions=PARTITIONS) as retried,
                CommittedReader(broker.address, DEAD, partitions=PARTITIONS) as letters,
                CommittedReader(broker.address, WRITTEN, partitions=PARTITIONS) as written,
            ):
                back = retried.wait_for(retries, timeout_s=PATIENCE_S)
                dead = letters.wait_for(deaths, timeout_s=PATIENCE_S)
                written.wait_for(len(plan.writes(sent)), timeout_s=PATIENCE_S)
                wait_until("all is handled", lambda: len(attempts(plan)) == sent + retries)
                assert len(back + retried.read_to_end()) >= retries
                assert (len(retried.messages), len(letters.messages)) == (retries, deaths)
                written.read_to_end()
                values = sorted(one.value() or b"" for one in written.messages)
                assert values == plan.writes(sent)
            stops += consumers.restart_stopped()
    check_histories(plan, sent, back, dead)
    assert all(dict(headers_of(one))["dw-dead-reason"] == b"ATTEMPTS_EXHAUSTED" for one in dead)
    lines = Path(plan.handled).read_bytes().splitlines()
    again = len(lines) - len(set(lines))
    with capsys.disabled():
        reported = (
            f"{sent} messages, {kills} kills, {stops} stops, {retries} retries, {deaths} dead"
        )
        print(f"\n{reported}; {again} handler calls more than the plan's")  # noqa: T201
    # A topic that is too small at a start stops that consumer; a right that is waited for does not.
    stopped = [log for log in tmp_path.glob("consumer-*.log") if ADVICE in log.read_text()]
    assert WAIT is None or not stopped
    # Each interruption brings back what was in hand or not yet committed, of a second or so.
    assert again <= (kills + stops) * RATE


def attempts(plan: Plan) -> set[bytes]:
    """Each attempt that has begun."""
    return set(Path(plan.handled).read_bytes().splitlines())


def send_and_disturb(
    broker: AuthorizingBroker, plan: Plan, consumers: Consumers
) -> tuple[int, int, int]:
    """Sends messages meanwhile; returns how many, and how many kills and stops there were."""
    producer = Producer({"bootstrap.servers": broker.address, "linger.ms": 5})
    chance, trouble = random.Random(plan.seed), Trouble(broker)
    sent = kills = stops = 0
    began_s = time.monotonic()
    next_kill_s = began_s + 4
    while time.monotonic() < began_s + DRILL_S:
        while sent < (time.monotonic() - began_s) * RATE:
            producer.produce(TOPIC, b"%d" % sent, key=b"%d" % (sent % 50))
            sent += 1
        producer.flush(PATIENCE_S)
        trouble.change_if_due()
        stops += consumers.restart_stopped()
        if time.monotonic() > next_kill_s:
            consumers.kill(chance.randrange(3))
            kills += 1
            next_kill_s = time.monotonic() + 1
        time.sleep(0.2)
    trouble.end()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        stops += consumers.restart_stopped()
        time.sleep(0.2)
    return sent, kills, stops
