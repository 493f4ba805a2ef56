# ruff: noqa: ARG002 - the producers ignore most of their arguments
"""Around a forwarder where nothing fails: producers, dead letters, background calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

from delaywheel_replica.cleaner.delivery.dead_letters import DeadLetters, Plan
from delaywheel_replica.cleaner.due.rows import DueRows
from delaywheel_replica.cleaner.ingress.term import Ingress, IngressSettings
from delaywheel_replica.cleaner.outside.clocks import SystemClock
from delaywheel_replica.cleaner.outside.ports import KafkaCallEnd, Record, RefusedRecord
from delaywheel_replica.core.ingress.reading import IngressRules
from delaywheel_replica.core.protocol.transaction_outcomes import TransactionState
from delaywheel_replica.kafka_settings import KafkaNames

T = TypeVar("T")


class CommittingProducers:
    """Keeps what it is given, and commits all of it."""

    is_untaken: Callable[[], bool]
    alone: int | None = None
    answered_ms: int | None = None
    throttled_until_ms: int | None = None

    def __init__(self) -> None:
        self.committed: list[Record] = []
        self._open: list[Record] = []

    def init(self, number: int, timeout_ms: int) -> KafkaCallEnd:
        raise NotImplementedError

    def begin(self, number: int) -> None:
        self._open = []

    def write(self, number: int, records: Iterable[Record]) -> list[RefusedRecord]:
        self._open += records
        return []

    def write_own(self, number: int, records: Iterable[Record]) -> None:
        self._open += records

    def flush(self, number: int, timeout_ms: int) -> bool:
        return True

    def commit(self, number: int, last: Record, timeout_ms: int) -> KafkaCallEnd:
        self.committed += [*self._open, last]
        return KafkaCallEnd(TransactionState.COMMITTED)

    def warm(self, topics: Iterable[str], timeout_ms: int) -> bool:
        raise NotImplementedError

    def destroy(self) -> None:
        raise NotImplementedError


class AllGoes(DeadLetters):
    """Everything can be delivered."""

    def __init__(self) -> None:
        """Nothing is known."""

    def plan(self, rows: DueRows, ahead: object = None) -> Plan:
        del ahead
        return Plan(rows)

    def are_untaken(self, rows: DueRows) -> bool:
        del rows
        return False

    would_stick = are_untaken

    def committed(self) -> None:
        """Nothing was tried."""

    def failed(self, rows: DueRows) -> None:
        """Lets the next transaction try the same."""


class AtOnce:
    """Runs background calls where they are made: `Runner`."""

    def start(self, job: Callable[[], None]) -> None:
        job()

    def together(self, calls: Iterable[Callable[[], T]]) -> list[T]:
        return [call() for call in calls]

    def pause(self, seconds: float) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing runs."""


def no_ingress() -> Ingress:
    """The ingress of a cluster without ingress topics."""
    settings = IngressSettings(
        KafkaNames("c"), frozenset(), IngressRules({}, 1, frozenset()), span_ms=1, letter_bytes=1
    )
    nothing = cast("Any", None)
    return Ingress(nothing, lambda: None, settings, runner=AtOnce(), clock=SystemClock())
