# ruff: noqa: ARG002 - the producers ignore most of their arguments
"""Producers that keep what they are given, and commit all of it."""

from __future__ import annotations

from collections.abc import Iterable

from delaywheel_replica.cleaner.outside.ports import KafkaCallEnd, Record, RefusedRecord
from delaywheel_replica.core.protocol.transaction_outcomes import TransactionState


class CommittingProducers:
    """Commits everything."""

    answered_ms: int | None = None

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

    def flush(self, number: int, timeout_ms: int) -> None:
        """Nothing waits."""

    def commit(self, number: int, last: Record, timeout_ms: int) -> KafkaCallEnd:
        self.committed += [*self._open, last]
        return KafkaCallEnd(TransactionState.COMMITTED)

    def warm(self, topics: Iterable[str], timeout_ms: int) -> bool:
        raise NotImplementedError

    def destroy(self) -> None:
        raise NotImplementedError
