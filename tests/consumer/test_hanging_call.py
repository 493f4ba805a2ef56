"""Calls of the Kafka client that do not end in time, or are refused until it looks again."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient

from delaywheel.consumer import Partition
from delaywheel.consumer.kafka import KafkaBroker, transaction
from delaywheel.consumer.kafka.topics import ends_of, first_since
from delaywheel.consumer.port import TransactionFailure
from delaywheel.consumer.records import Passed
from delaywheel.consumer.settings import read_settings
from support.kafka.fenced_admin import FencedAdmin


class FakeProducer:
    """Its offsets are taken once it learns of that, or are refused."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.goes_on = threading.Event()
        self.calls: list[str] = []
        self._refusal = refusal
        if refusal is not None:
            self.goes_on.set()

    def begin_transaction(self) -> None:
        self.calls.append("begin")

    def flush(self, _timeout_s: float) -> int:
        return 0

    def send_offsets_to_transaction(self, *_: Any) -> None:
        self.goes_on.wait()
        if self._refusal is not None:
            raise self._refusal

    def commit_transaction(self, _timeout_s: float) -> None:
        self.calls.append("commit")


def commit(producer: FakeProducer) -> TransactionFailure | None:
    broker = KafkaBroker(read_settings("orders", "group", "nowhere:1", {}))
    broker._producer = cast("Producer", producer)
    return broker.commit((), {Partition("orders", 0): Passed(5)}, b"membership")


def test_offsets_that_are_never_answered_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the only broker was restarted: its producer is replaced."""
    monkeypatch.setattr(transaction, "CALL_S", 0.05)
    producer = FakeProducer()
    assert commit(producer) == TransactionFailure("the coordinator of the group did not answer")
    assert producer.calls == ["begin"]
    producer.goes_on.set()


def test_offsets_that_are_refused_fail_the_transaction() -> None:
    producer = FakeProducer(KafkaException("ILLEGAL_GENERATION"))
    assert commit(producer) == TransactionFailure("ILLEGAL_GENERATION")
    assert producer.calls == ["begin"]


def test_offsets_that_are_taken_are_committed() -> None:
    producer = FakeProducer()
    producer.goes_on.set()
    assert commit(producer) is None
    assert producer.calls == ["begin", "commit"]


def test_offsets_are_asked_again_with_the_epoch_of_the_present_leader() -> None:
    at = Partition("orders", 0)
    assert ends_of(cast("AdminClient", FencedAdmin()), [at]) == {at: 7}
    assert first_since(cast("AdminClient", FencedAdmin()), at, 1) == 7
