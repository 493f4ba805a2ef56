"""A leader's clients are closed empty and before the process ends, and look topics up together.

Their brokers are librdkafka's own, in this process, and slow to answer: they prove nothing about
transactions, but nothing here depends on what they answer.
"""

from __future__ import annotations

import threading
import time
from typing import ClassVar

import pytest

from delaywheel_replica.cleaner.kafka import producers as producers_module
from delaywheel_replica.cleaner.kafka.producers import (
    LeaderProducers,
    TransactionalProducer,
    wait_closed,
)
from delaywheel_replica.cleaner.outside.ports import IDS, Record
from delaywheel_replica.core.protocol.transaction_outcomes import TransactionState
from delaywheel_replica.kafka_settings import KafkaNames, KafkaSettings

RECORDS = 2_000
INIT_MS = 9_000
SETTINGS = KafkaSettings(
    KafkaNames("closing"),
    {"bootstrap.servers": "none", "test.mock.num.brokers": 1, "test.mock.broker.rtt": 200},
)


def records() -> list[Record]:
    return [Record(f"t{n % 50}", None, bytes(100), [("h", b"v")]) for n in range(RECORDS)]


class LooksUp:
    """A client that counts what it is asked for."""

    asked: ClassVar[list[str | None]] = []

    def __init__(self, *_: object, **__: object) -> None:
        """Connects to nothing."""

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> None:
        assert timeout > 0
        self.asked.append(topic)


def test_many_topics_are_looked_up_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that forwards waits for it, and a thousand calls take longer than a term."""
    monkeypatch.setattr(producers_module, "Producer", LooksUp)
    producer = TransactionalProducer(SETTINGS, "a", log_level=2)
    assert producer.warm(["a", "b"], 1_000)
    assert producer.warm([f"t{number}" for number in range(1_000)], 1_000)
    assert LooksUp.asked == ["a", "b", None]


def test_a_client_that_is_closed_has_no_record_left() -> None:
    producer = TransactionalProducer(SETTINGS, "a", log_level=2)
    assert producer.init(INIT_MS).verdict is TransactionState.CONTINUE
    producer.begin()
    assert producer.write(records()) == []
    producer.close()
    assert producer.flush(0), "nothing is left to answer"
    producer.close()


def test_an_end_waits_for_clients_that_are_being_closed() -> None:
    threads_before = set(threading.enumerate())
    producers = LeaderProducers(SETTINGS)
    for number in range(IDS):
        assert producers.init(number, INIT_MS).verdict is TransactionState.CONTINUE
        producers.begin(number)
        assert producers.write(number, records()) == []
    waits = threading.Thread(target=producers.commit, args=[0, records()[0], 500])
    waits.start()  # as when a candidacy ends while one of its calls is under way
    producers.destroy()
    assert wait_closed(30)
    waits.join()
    assert set(threading.enumerate()) <= threads_before
    began_s = time.monotonic()
    assert wait_closed(30)
    assert time.monotonic() - began_s < 5
