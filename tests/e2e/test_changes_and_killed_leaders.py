"""Three real nodes: messages are rescheduled, and many cancelled, while leaders are killed."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Self

import pytest

from delaywheel import Client, DelaywheelError, Message, RescheduleOutcome
from local.loopback.cluster import LocalCluster
from local.loopback.kafka import KafkaBroker
from support.kafka.read_committed import CommittedReader
from support.services.service import wait_until
from support.services.trio import NO_METRICS

pytestmark = pytest.mark.kafka

KILLS = 2
AHEAD_S = 25
FARTHER_S = 10
PAUSE_S = 0.1


@pytest.fixture
def cluster(kafka: KafkaBroker, tmp_path: Path, cluster_id: str) -> Iterator[LocalCluster]:
    settings = {"cluster_id": cluster_id, "late_window_seconds": 30, **NO_METRICS}
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

    @property
    def answered(self) -> int:
        """How many were changed."""
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


def _has_more(changing: Changing, than: int) -> bool:
    return changing.answered > than


def _is_led(cluster: LocalCluster) -> bool:
    """Whether a node leads; nodes that died are started again meanwhile."""
    cluster.watch()
    return cluster.leader() is not None


def test_never_both_never_none_though_leaders_are_killed(
    cluster: LocalCluster, kafka: KafkaBroker, topic: str
) -> None:
    with Changing(Client(cluster.nodes[0].address, timeout=30.0), topic) as changing:
        for _ in range(KILLS):
            enough = changing.answered + 20
            wait_until("some are changed", partial(_has_more, changing, enough), timeout_s=120)
            leader = wait_until("somebody leads", cluster.leader)
            leader.kill()
            wait_until("another leads", partial(_is_led, cluster), timeout_s=120)
            cluster.wait_until_accepting()
        enough = changing.answered + 20
        wait_until("some are changed", partial(_has_more, changing, enough), timeout_s=120)
    last_s = max(changing.rescheduled.values())
    expected = set(changing.rescheduled)
    with CommittedReader(kafka.address, topic) as reader:
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
