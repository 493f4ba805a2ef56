"""Three real nodes on a real broker: leaders are killed; nothing is lost, or left behind.

Meanwhile messages are sent, rescheduled, and cancelled in groups.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Self

import pytest

from delaywheel import Client, DelaywheelError, Message, RescheduleOutcome
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from local.loopback.cluster import LocalCluster
from local.loopback.kafka import KafkaBroker
from local.loopback.node import Node
from support.kafka.read_committed import CommittedReader, create_topic
from support.services.load import Load, assert_arrived
from support.services.service import wait_until
from support.services.trio import NO_METRICS, seen_by

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(600)]

KILLS = 3
AHEAD_S = 15
FARTHER_S = 5
PAUSE_S = 0.3


@pytest.fixture
def cluster(kafka: KafkaBroker, tmp_path: Path, cluster_id: str) -> Iterator[LocalCluster]:
    settings = {
        "cluster_id": cluster_id,
        "late_window_seconds": 5,
        "ledger_seal_seconds": 1,
        **NO_METRICS,
    }
    with LocalCluster(
        nodes=3, kafka=kafka.address, folder=tmp_path / "cluster", settings=settings
    ) as running:
        running.wait_until_accepting()
        yield running


class Changing:
    """Sends messages, and changes them at once, on a thread until stopped.

    Attributes:
        rescheduled: value -> Unix seconds from which on it may be there, once that was answered.
        cancelled: values reported cancelled by a call for many.
        others: values with another answer, or none.
    """

    def __init__(self, client: Client, topic: str) -> None:
        self.rescheduled: dict[bytes, float] = {}
        self.cancelled: set[bytes] = set()
        self.others: set[bytes] = set()
        self._client = client
        self._topic = topic
        self._stopping = Event()
        self._thread = Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._client.close()

    def wait_for_more(self) -> None:
        """Returns when 20 more are changed than now."""
        enough = self._answered + 20
        wait_until("more are changed", lambda: self._answered > enough, timeout_s=120)

    @property
    def _answered(self) -> int:
        return len(self.rescheduled) + len(self.cancelled)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._reschedule()
            self._cancel_some()
            self._stopping.wait(PAUSE_S)

    def _reschedule(self) -> None:
        value = uuid.uuid4().bytes
        nearer = len(self.rescheduled) % 2
        due = datetime.now(UTC) + timedelta(seconds=AHEAD_S)
        to = datetime.now(UTC) + timedelta(seconds=3 if nearer else AHEAD_S + FARTHER_S)
        try:
            handle = self._client.produce(self._topic, value, deliver_at=due)
            answer = self._client.reschedule(handle, to=to)
            if answer.outcome is RescheduleOutcome.RESCHEDULED and answer.due_ms is not None:
                self.rescheduled[value] = answer.due_ms / 1000
                return
        except DelaywheelError:
            pass
        self.others.add(value)

    def _cancel_some(self) -> None:
        key, values = uuid.uuid4().bytes, [uuid.uuid4().bytes for _ in range(5)]
        due = datetime.now(UTC) + timedelta(seconds=AHEAD_S)
        messages = [Message(self._topic, each, key=key, deliver_at=due) for each in values]
        by_handle = {}
        try:
            results = self._client.produce_many(messages)
            by_handle = {
                str(result.handle): value for result, value in zip(results, values, strict=True)
            }
            answer = self._client.cancel_many(self._topic, key=key)
            self.cancelled |= {by_handle[str(handle)] for handle in answer.cancelled}
        except DelaywheelError:
            pass
        self.others |= set(values) - self.cancelled


def watched(cluster: LocalCluster, what: str, ask: Callable[[], bool]) -> None:
    """Waits; nodes that died are started again meanwhile."""

    def look() -> bool:
        cluster.watch()
        return ask()

    wait_until(what, look, timeout_s=120, every_s=0.1)


def another_leads(cluster: LocalCluster, than: Node) -> bool:
    """Whether the others hear one of them lead."""
    seen = {seen_by(node).leader.node for node in cluster.nodes if node is not than}
    return bool(seen - {"", than.id})


def is_tidy(cluster: LocalCluster) -> bool:
    """Only wheels in use are left on every node, and no finished slot file."""
    for node in cluster.nodes:
        answer = seen_by(node)
        in_use = {pb.WHEEL_STATE_OPEN, pb.WHEEL_STATE_SPARE}
        if len(answer.wheels) != 6 or any(row.state not in in_use for row in answer.wheels):
            return False
        try:
            slots = [int(path.stem) for path in node.data.rglob("*.slot")]
        except FileNotFoundError:
            return False  # it is being tidied up
        if any(slot < answer.floor for slot in slots) or answer.floor < time.time() - 60:
            return False
    return True


def test_the_leader_is_killed_again_and_again(
    cluster: LocalCluster, kafka: KafkaBroker, topic: str
) -> None:
    """Callers know one node; any two of three hold acknowledged messages, and one of them leads.

    What is changed is never at both dues, and never at none.
    """
    changes = f"{topic}-changed"
    create_topic(kafka.address, changes)
    killed = set()
    client, other = (Client(cluster.nodes[0].address, timeout=30.0) for _ in range(2))
    with Load(client, topic) as load, Changing(other, changes) as changing:
        for _ in range(KILLS):
            load.wait_for_more()
            changing.wait_for_more()
            leader = wait_until("somebody leads", cluster.leader)
            leader.kill()
            killed.add(leader.id)
            watched(cluster, "another leads", partial(another_leads, cluster, leader))
            load.wait_for_more()
            cluster.wait_until_accepting()
        load.wait_for_more()
        changing.wait_for_more()
    assert len(killed) > 1, "the leader was always the same"
    with CommittedReader(kafka.address, topic) as reader:
        assert_arrived(reader, load.acknowledged)
    with CommittedReader(kafka.address, changes) as reader:
        assert_changed(reader, changing)
    watched(cluster, "what the dead have left is closed and deleted", lambda: is_tidy(cluster))


def assert_changed(reader: CommittedReader, changing: Changing) -> None:
    """Every rescheduled message is there once, no cancelled one is, and no other one twice."""
    last_s = max(changing.rescheduled.values())
    expected = set(changing.rescheduled)
    wait_until(
        "every due is past, and every rescheduled message there",
        lambda: (
            time.time() > last_s + 5
            and expected <= {message.value() for message in reader.read_to_end()}
        ),
        timeout_s=180,
    )
    arrived = Counter(message.value() for message in reader.messages)
    assert not changing.cancelled & arrived.keys()
    assert {value: arrived[value] for value in expected} == dict.fromkeys(expected, 1)
    assert all(arrived[value] <= 1 for value in changing.others)
    assert len(changing.cancelled) > 20
