"""A leader's clients are closed empty and before the process ends, and look topics up together.

Their brokers are librdkafka's own, in this process, and slow to answer: they prove nothing about
transactions, but nothing here depends on what they answer.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
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
from support.services.waiting import wait_until

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


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_what_was_not_inited_goes_with_its_term() -> None:
    """Its client goes on for as long as it lives, and would fence the next leader."""
    away = replace(SETTINGS, client={"bootstrap.servers": "127.0.0.1:1", "log_level": 0})
    producers = LeaderProducers(away)
    with no_garbage_collection():
        threads = [
            threading.Thread(target=producers.init, args=[number, 10 * INIT_MS])
            for number in range(IDS)
        ]
        for thread in threads:
            thread.start()
        wait_until("all are being inited", lambda: len(producers._producers) == IDS, timeout_s=30)
        clients = [weakref.ref(one) for one in producers._producers.values()]
        producers.destroy()
        assert wait_closed(30)
        for thread in threads:
            thread.join(INIT_MS / 1000)
        assert [client() for client in clients] == [None] * IDS


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
