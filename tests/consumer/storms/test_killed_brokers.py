"""Brokers that are killed one after another: each message's history follows its plan all the same.

    export DELAYWHEEL_DRILL_KAFKAS=3 DELAYWHEEL_DRILL_S=300
    pytest tests/consumer/storms/test_killed_brokers.py

Each is away for longer than its session, and has all copies again before the next one is killed.
Printed is what that cost three consumers: records that were handled twice, and after each kill the
longest time in which no record was handled for the first time, of any partition and of each alone.
"""

from __future__ import annotations

import os
import time
import uuid
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Literal

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from local.loopback.brokers import Brokers
from local.loopback.kafka import KafkaBroker
from support.consumer.ended import PARTITIONS, PATIENCE_S, Ends, wait_until_passed
from support.consumer.killed import Consumers
from support.consumer.plan import Plan
from support.kafka.read_committed import CommittedReader, create_topic

DRILL_S = float(os.environ.get("DELAYWHEEL_DRILL_S", "0"))
SEVERAL = int(os.environ.get("DELAYWHEEL_DRILL_KAFKAS", "1")) > 1

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.slow,
    pytest.mark.skipif(not (DRILL_S and SEVERAL), reason="for minutes; see above"),
    pytest.mark.timeout(DRILL_S + 4 * PATIENCE_S),
]

RATE = 50
KEYS = 50
CALM_S, AWAY_S = 10.0, 15.0
"""Kafka gives a broker up after a session of 9 s."""


class Killing:
    """Kills one broker after another, first a group's coordinator, and starts it again.

    Attributes:
        kills_s: When.
    """

    def __init__(self, brokers: Brokers, group: str) -> None:
        self._brokers = brokers
        self._group = group
        self._first = 0
        self._next_s = time.monotonic() + CALM_S
        self._is_away = False
        self.kills_s: list[float] = []

    def kill_if_due(self) -> None:
        """Does what it is time for."""
        if time.monotonic() < self._next_s:
            return
        if self._is_away:
            self.end()
        elif self._brokers.behind():
            self._next_s = time.monotonic() + 1
        else:
            if not self.kills_s:
                self._first = self._coordinator() - 1
            self._broker.kill()
            self._is_away = True
            self.kills_s.append(time.monotonic())
            self._next_s = self.kills_s[-1] + AWAY_S

    def end(self) -> None:
        """Starts what is away; it comes when it can."""
        if self._is_away:
            self._broker.begin()
            self._is_away = False
        self._next_s = time.monotonic() + CALM_S

    def _coordinator(self) -> int:
        admin = AdminClient({"bootstrap.servers": self._brokers.address})
        (told,) = admin.describe_consumer_groups([self._group]).values()
        return int(told.result(PATIENCE_S).coordinator.id)

    @property
    def _broker(self) -> KafkaBroker:
        number = self._first + len(self.kills_s) - self._is_away
        return self._brokers.each[number % len(self._brokers.each)]


class Seen:
    """When each message was handled for the first time."""

    def __init__(self, plan: Plan) -> None:
        self._handled = Path(plan.handled)
        self._read_bytes = 0
        self.at_s: dict[int, float] = {}

    def look(self) -> None:
        """Notes what was handled since the last look."""
        if not self._handled.exists():
            return
        with self._handled.open("rb") as file:
            file.seek(self._read_bytes)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for line in whole.splitlines():
            self.at_s.setdefault(int(line.split()[0]), time.monotonic())


def longest_s(times_s: Iterable[float], begin_s: float, end_s: float) -> float:
    """Returns the longest time between two of these within a range."""
    within = sorted([begin_s, *(one for one in times_s if begin_s < one < end_s), end_s])
    return max(b - a for a, b in pairwise(within))


@pytest.mark.parametrize("rebalances", ["eager", "consumer"])
def test_each_history_is_its_plans_whichever_broker_dies(
    kafka: Brokers,
    cluster: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    rebalances: Literal["eager", "consumer"],
) -> None:
    name = uuid.uuid4().hex[:8]
    topic, written = f"orders-{name}", f"written-{name}"
    for one in (topic, written):
        create_topic(kafka.address, one, partitions=PARTITIONS)
    handled = str(tmp_path / "handled")
    plan = Plan(
        *(kafka.address, cluster, topic, f"group-{name}", 7, handled, written),
        rebalances=rebalances,
        has_names=True,
    )
    producer = Producer({"bootstrap.servers": kafka.address, "enable.idempotence": True})
    with Consumers(plan, tmp_path) as consumers:
        seen, killing, sent = Seen(plan), Killing(kafka, plan.group), 0
        began_s = time.monotonic()
        while time.monotonic() < began_s + DRILL_S:
            while sent < (time.monotonic() - began_s) * RATE:
                producer.produce(topic, b"%d" % sent, key=b"%d" % (sent % KEYS))
                sent += 1
            producer.poll(0)
            killing.kill_if_due()
            seen.look()
            time.sleep(0.02)
        end_s = time.monotonic()
        killing.end()
        kafka.wait_until_in_sync()
        assert producer.flush(PATIENCE_S) == 0
        ends = Ends.of(plan, sent)
        wait_until_passed(plan)
        consumers.check_alive()
    latest_ms = ends.check()
    with CommittedReader(kafka.address, topic, partitions=PARTITIONS) as reader:
        lanes = {int(one.value() or b""): one.partition() for one in reader.read_to_end()}
    attempts = Counter(Path(plan.handled).read_bytes().splitlines())
    again = sum(attempts.values()) - len(attempts)
    with capsys.disabled():
        print(f"\n{sent} messages, {len(killing.kills_s)} kills, {ends}, {again} handled again")  # noqa: T201
        for kill_s, next_s in zip(killing.kills_s, [*killing.kills_s[1:], end_s], strict=True):
            times_s = [
                [at_s for number, at_s in seen.at_s.items() if lane in (None, lanes[number])]
                for lane in (None, *range(PARTITIONS))
            ]
            nobody, *each = (f"{longest_s(one, kill_s, next_s):.1f}" for one in times_s)
            print(f"nothing for {nobody} s, of each partition {', '.join(each)} s")  # noqa: T201
        print(f"a retry came {latest_ms} ms late at most")  # noqa: T201
