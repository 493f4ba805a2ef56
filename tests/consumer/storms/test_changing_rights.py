"""Consumers that are killed while rights are taken away and given back, and sizes are lowered.

`DELAYWHEEL_DRILL_S=300 pytest tests/consumer/storms/test_changing_rights.py` does it for five
minutes, a night for one; in a push each of the rights to write is taken away once.
Consumers stop, and are started again; with `DELAYWHEEL_DRILL_WAIT=10m` they wait for their rights.
"""

from __future__ import annotations

import os
import random
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import ResourceType  # type: ignore[attr-defined] # missing in its stubs

from delaywheel import ingress
from delaywheel.consumer import ConsumerReason
from support.consumer.killed import Consumers, check_histories
from support.consumer.plan import Plan
from support.kafka.read_committed import (
    CommittedReader,
    create_topic,
    headers_of,
    set_topic,
)
from support.kafka.rights import Rights
from support.process.night import NIGHT
from support.services.waiting import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

DRILL_S = float(os.environ.get("DELAYWHEEL_DRILL_S", "60" if NIGHT else "14"))
WAIT = os.environ.get("DELAYWHEEL_DRILL_WAIT")
ADVICE = str(ConsumerReason.NOT_AUTHORIZED.advice)
RATE = 25
PARTITIONS = 3
PATIENCE_S = float(os.environ.get("DELAYWHEEL_DRILL_REST_S", "120"))
_OWN = uuid.uuid4().hex[:8]
TOPIC, WRITTEN, GROUP = f"orders-{_OWN}", f"bills-{_OWN}", f"g-{_OWN}"
RETRY, DEAD = f"{TOPIC}-retry-{GROUP}", f"{TOPIC}-dead-{GROUP}"
SIZE = "max.message.bytes"
EVERY_S, AWAY_S = 4.0, 2.0
RESTART_S = 1.0
"""So often those that stopped are looked for: each start costs, and they stop again at once."""


@pytest.fixture
def rights(users_rights: Rights, cluster: str) -> Rights:
    given, ingress_topic = users_rights, ingress.ingress_topic(cluster)
    for name in (TOPIC, RETRY, DEAD, WRITTEN):
        create_topic(given.address, name, partitions=PARTITIONS)
        for operation in ("READ", "WRITE", "DESCRIBE", "DESCRIBE_CONFIGS"):
            given.allow(ResourceType.TOPIC, name, operation, prefixed=False)
    for operation in ("WRITE", "DESCRIBE", "DESCRIBE_CONFIGS"):
        given.allow(ResourceType.TOPIC, ingress_topic, operation, prefixed=False)
    given.allow(ResourceType.GROUP, GROUP, "READ", prefixed=False)
    given.allow(ResourceType.GROUP, ingress_topic, "DESCRIBE", prefixed=False)
    ids = f"delaywheel-retry-{GROUP}-"
    given.allow(ResourceType.TRANSACTIONAL_ID, ids, "WRITE", prefixed=True)
    return given


class Trouble:
    """Takes one thing away after another, and gives it back."""

    def __init__(self, rights: Rights, cluster: str) -> None:
        self._rights = rights
        self._taken = (
            *((DEAD, "WRITE"), (WRITTEN, "WRITE"), (ingress.ingress_topic(cluster), "WRITE")),
            *((TOPIC, "READ"), (RETRY, "READ")),
        )
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
        kind = self._changes % (len(self._taken) + 1)
        self._changes += 1
        if kind == len(self._taken):
            set_topic(self._rights.address, DEAD, SIZE, "100")
            self._undo = lambda: set_topic(self._rights.address, DEAD, SIZE, "10000000")
        else:
            topic, operation = self._taken[kind]
            self._rights.deny(ResourceType.TOPIC, topic, operation)
            self._undo = lambda: self._rights.give_back(ResourceType.TOPIC, topic)
        self._next_s = time.monotonic() + AWAY_S

    def end(self) -> None:
        """Gives back what is away."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()


@pytest.mark.timeout(DRILL_S + 4 * PATIENCE_S)
def test_each_history_is_its_plans_whatever_is_taken_away(
    rights: Rights, cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    user = {name: text for name, text in rights.user_settings.items() if name[0] == "s"}
    plan = Plan(
        rights.user_settings["bootstrap.servers"],
        cluster,
        TOPIC,
        GROUP,
        7,
        str(tmp_path / "handled"),
        written=WRITTEN,
        kafka=user,
        wait_for_rights=WAIT,
    )
    with Consumers(plan, tmp_path) as consumers:
        sent, kills, stops = send_and_disturb(rights, plan, consumers)
        retries = sum(map(plan.retries, range(sent)))
        deaths = sum(map(plan.dies, range(sent)))
        with (
            CommittedReader(rights.address, RETRY, partitions=PARTITIONS) as retried,
            CommittedReader(rights.address, DEAD, partitions=PARTITIONS) as letters,
            CommittedReader(rights.address, WRITTEN, partitions=PARTITIONS) as written,
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


def send_and_disturb(rights: Rights, plan: Plan, consumers: Consumers) -> tuple[int, int, int]:
    """Sends messages meanwhile; returns how many, and how many kills and stops there were."""
    producer = Producer({"bootstrap.servers": rights.address, "linger.ms": 5})
    chance, trouble = random.Random(plan.seed), Trouble(rights, plan.cluster)
    sent = kills = stops = 0
    began_s = time.monotonic()
    next_kill_s, next_restart_s = began_s + 4, began_s
    while time.monotonic() < began_s + DRILL_S:
        while sent < (time.monotonic() - began_s) * RATE:
            producer.produce(TOPIC, b"%d" % sent, key=b"%d" % (sent % 50))
            sent += 1
        producer.flush(PATIENCE_S)
        trouble.change_if_due()
        if time.monotonic() > next_restart_s:
            stops += consumers.restart_stopped()
            next_restart_s = time.monotonic() + RESTART_S
        if time.monotonic() > next_kill_s:
            consumers.kill(chance.randrange(3))
            kills += 1
            next_kill_s = time.monotonic() + 1
        time.sleep(0.2)
    trouble.end()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        stops += consumers.restart_stopped()
        time.sleep(RESTART_S)
    return sent, kills, stops
