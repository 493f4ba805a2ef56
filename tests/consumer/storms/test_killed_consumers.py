"""Three consumers that are killed again and again: each message's history follows its plan.

In short, test_changing_rights.py kills those that keep no order, and takes away rights as well.
`DELAYWHEEL_DRILL_S=300 pytest tests/consumer/storms/test_killed_consumers.py` kills for five
minutes each kind of consumer, or `-k asyncio` one, and `DELAYWHEEL_DRILL_REST_S` says how long it
waits afterwards for what is left: on a busy machine that is much. Eager members have names and are
killed each second. The others have none, and their group waits for the end of a session after each
kill: they are killed each eighth second.
"""

from __future__ import annotations

import os
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from local.loopback.kafka import KafkaBroker
from support.consumer.ended import (
    PARTITIONS,
    PATIENCE_S,
    Ends,
    check_writes,
    wait_until_passed,
)
from support.consumer.killed import Consumers, still_away
from support.consumer.plan import Plan
from support.kafka.read_committed import (
    CommittedReader,
    create_topic,
    delete_topic,
    wait_decided,
)
from support.process.night import NIGHT, at_night
from support.services.waiting import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

DRILL_S = float(os.environ.get("DELAYWHEEL_DRILL_S", "60" if NIGHT else "8"))
SHORT_SESSIONS = {"session.timeout.ms": "6000", "heartbeat.interval.ms": "1000"}
"""The shortest that brokers take; with KIP-848 it is the broker's to say."""
KINDS: dict[str, dict[str, Any]] = {
    "eager": {},
    "cooperative": {"rebalances": "cooperative", "kafka": SHORT_SESSIONS},
    "consumer": {"rebalances": "consumer"},
    "asyncio": {"is_async": True},
}
"""How the partitions of a group move, or its handlers run."""
RATE = 25
KEYS = 50
EVERY_S = 5.0
"""How often a topic is recreated."""


def make_plan(
    broker: KafkaBroker, cluster: str, folder: Path, *, ordered: bool = False, **kind: Any
) -> Plan:
    name = uuid.uuid4().hex[:8]
    topic = f"orders-{name}"
    create_topic(broker.address, topic, partitions=PARTITIONS)
    written = f"written-{name}"
    create_topic(broker.address, written, partitions=PARTITIONS)
    return Plan(
        broker.address,
        cluster,
        topic,
        group=f"group-{name}",
        seed=7,
        handled=str(folder / "handled"),
        written=written,
        ordered=ordered,
        **kind,
    )


def send_and_kill(
    plan: Plan, consumers: Consumers, disturb: Callable[[int], bool] = lambda _: False
) -> tuple[int, int]:
    """Sends messages while consumers are killed; returns the numbers of both.

    Args:
        plan: What the consumers do.
        consumers: Who is killed.
        disturb: Is called when so many are sent, and all of them are in Kafka; whether the topic is
            another one since.
    """
    settings = {"bootstrap.servers": plan.bootstrap, "linger.ms": 5}
    producer = Producer(settings)
    chance = random.Random(plan.seed)
    every_s = 1 if plan.rebalances == "eager" else 8
    sent, kills = 0, 0
    began_s = time.monotonic()
    next_kill_s = began_s + 4
    while time.monotonic() < began_s + DRILL_S:
        while sent < (time.monotonic() - began_s) * RATE:
            producer.produce(plan.topic, b"%d" % sent, key=b"%d" % (sent % KEYS))
            sent += 1
        assert producer.flush(PATIENCE_S) == 0
        if disturb(sent):
            producer = Producer(settings)
        if time.monotonic() > next_kill_s:
            consumers.kill(chance.randrange(3))
            kills += 1
            next_kill_s = time.monotonic() + every_s
        time.sleep(0.02)
    return sent, kills


@pytest.mark.skipif("DELAYWHEEL_DRILL_S" not in os.environ, reason="for minutes; see above")
@pytest.mark.timeout(DRILL_S + 3 * PATIENCE_S)
@pytest.mark.parametrize("kind", KINDS)
def test_each_history_is_its_plans(
    kafka: KafkaBroker, cluster: str, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(kafka, cluster, tmp_path, **KINDS[kind])
    with Consumers(plan, tmp_path) as consumers:
        sent, kills = send_and_kill(plan, consumers)
        ends = Ends.of(plan, sent)
        wait_until_passed(plan)
        consumers.check_alive()
    latest_ms = ends.check()
    with capsys.disabled():
        late = f"a retry came {latest_ms} ms late at most"
        print(f"\n{sent} messages, {kills} kills, {ends}; {late}")  # noqa: T201


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
        are_ended = lambda: len(ended_in_order(plan)) >= sent  # noqa: E731
        wait_until("all have ended", are_ended, timeout_s=4 * PATIENCE_S, every_s=0.2)
        wait_until_passed(plan)
        consumers.check_alive()
    died = sorted(int(message.value() or b"") for message in dead)
    assert died == [number for number in range(sent) if plan.dies(number)]
    check_writes(plan, sent)
    assert ended_in_order(plan) == set(range(sent))
    order = f"{plan.topic}-order-{plan.group}"
    assert still_away(kafka.address, order, partitions=PARTITIONS) == []


class Remaking:
    """Deletes a topic again and again, and recreates it.

    Every second time its group has passed all of it before. A consumer that starts while there is
    no topic stops, and is started again.
    """

    def __init__(self, kafka: KafkaBroker, plan: Plan, consumers: Consumers) -> None:
        self._kafka = kafka
        self._plan = plan
        self._consumers = consumers
        self.stops = 0
        self._next_s = time.monotonic() + EVERY_S
        self.begins = [0]
        """The first message in each of the topics."""
        self.is_whole: list[bool] = []
        """Whether all of a topic was passed."""

    def __call__(self, sent: int) -> bool:
        self.restart_stopped()
        if time.monotonic() < self._next_s:
            return False
        is_whole = len(self.is_whole) % 2 == 0
        if is_whole:
            wait_until_passed(self._plan, [self._plan.topic])
        delete_topic(self._kafka.address, self._plan.topic)
        create_topic(self._kafka.address, self._plan.topic, partitions=PARTITIONS)
        self.is_whole.append(is_whole)
        self.begins.append(sent)
        self._next_s = time.monotonic() + EVERY_S
        return True

    def restart_stopped(self) -> None:
        """Starts those again that found no topic; at a slow start that is noticed late."""
        self.stops += self._consumers.restart_stopped("TOPIC_MISSING")

    def parts(self, sent: int) -> Iterator[tuple[range, bool]]:
        """Yields the messages of each topic, and whether each must have ended."""
        ends = [*self.begins[1:], sent]
        for begin, end, is_whole in zip(self.begins, ends, [*self.is_whole, True], strict=True):
            yield range(begin, end), is_whole


@at_night  # test_positions.py has a topic that is made anew, with a Kafka that is not there
@pytest.mark.timeout(DRILL_S + 6 * PATIENCE_S)
def test_records_of_a_topic_that_is_recreated_are_handled(
    kafka: KafkaBroker, cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(kafka, cluster, tmp_path)
    with Consumers(plan, tmp_path) as consumers:
        remaking = Remaking(kafka, plan, consumers)
        sent, kills = send_and_kill(plan, consumers, remaking)
        wait_until_passed(plan, [plan.topic])
        attempts = Counter(Path(plan.handled).read_bytes().splitlines())
        # What was begun ends, whatever became of its topic.
        wanted = {
            number
            for those, is_whole in remaking.parts(sent)
            for number in those
            if is_whole or attempts[b"%d 2" % number]
        }
        lines = {
            b"%d %d" % (number, attempt)
            for number in wanted
            for attempt in range(1, plan.retries(number) + 2)
        }
        deadline = time.monotonic() + PATIENCE_S
        while missing := lines - set(Path(plan.handled).read_bytes().splitlines()):
            assert time.monotonic() < deadline, sorted(missing)[:20]
            time.sleep(0.2)
        wait_until_passed(plan, [f"{plan.topic}-retry-{plan.group}"])
        remaking.restart_stopped()
    letters = f"{plan.topic}-dead-{plan.group}"
    wait_decided(kafka.address, letters, partitions=PARTITIONS)
    with CommittedReader(kafka.address, letters, partitions=PARTITIONS) as reader:
        dead = sorted(int(message.value() or b"") for message in reader.read_to_end())
    assert dead == sorted(set(dead))
    assert {number for number in wanted if plan.dies(number)} <= set(dead)
    assert all(plan.dies(number) for number in dead)
    handled = Path(plan.handled).read_bytes().splitlines()
    again = len(handled) - len(set(handled))
    reported = f"{sent} messages, {kills} kills, recreated {len(remaking.is_whole)} times"
    with capsys.disabled():
        print(f"\n{reported}; {again} handler calls more than the plan's")  # noqa: T201
    assert len(remaking.is_whole) >= DRILL_S // EVERY_S // 2
    assert remaking.stops <= len(remaking.is_whole)
    # Each brings back what was in hand or not yet committed: of two seconds at most, on machines
    # that are so busy that a commit takes one.
    assert again <= (kills + len(remaking.is_whole)) * 2 * RATE


def ended_in_order(plan: Plan) -> set[int]:
    """Messages whose last attempt has begun; none began before earlier ones of its key."""
    ended: set[int] = set()
    for line in Path(plan.handled).read_bytes().splitlines():
        number, attempt = map(int, line.split())
        assert ended.issuperset(range(number % KEYS, number, KEYS)), line
        if attempt == plan.retries(number) + 1:
            ended.add(number)
    return ended
