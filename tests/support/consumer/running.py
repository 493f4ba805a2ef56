"""Real consumers with their own threads, on a Kafka in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from delaywheel.consumer.records import FetchedRecords, Partition
from delaywheel.consumer.settings import ConsumerSettings
from support.consumer.fake_kafka import FakeBroker, FakeKafka
from support.services.waiting import wait_until

PATIENCE_S = 30.0


class RunningBroker(FakeBroker):
    """A member that rests where there is nothing to fetch, and is assigned everything at once."""

    def fetch(self, most: int, timeout_s: float) -> Sequence[FetchedRecords]:
        """See `Broker`."""
        found = super().fetch(most, timeout_s)
        if not found:
            time.sleep(min(timeout_s, 0.005))
        return found


class RunningKafka(FakeKafka):
    """A Kafka of one partition, for consumers that run: each gets that partition when it is made.

    Attributes:
        members: The consumers' clients, in the order in which they were made.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: int) -> None:
        super().__init__(**{"partitions": 1, **options})  # type: ignore[arg-type]
        self.members: list[RunningBroker] = []
        monkeypatch.setattr("delaywheel.consumer.sync.KafkaBroker", self._join)

    def _join(self, _: ConsumerSettings) -> RunningBroker:
        member = RunningBroker(self)
        self.members.append(member)
        threading.Thread(target=self._assign, args=(member,), daemon=True).start()
        return member

    def _assign(self, member: RunningBroker) -> None:
        wait_until("it is called back", lambda: bool(member._callbacks))
        topics = (self.source, self.retry)
        self.rebalance({member: [Partition(t, n) for t in topics for n in range(self.partitions)]})

    def put(self, *values: bytes, key: bytes | None = None) -> None:
        """Puts records into the first partition."""
        for value in values:
            self._append(Partition(self.source, 0), key, value, [])
