"""Events of a trace in memory, one at a time, as tests look at them."""

from collections.abc import Mapping
from threading import Lock
from typing import Any, Final

from delaywheel.trace.batch import Rows
from delaywheel.trace.counts import Cell, CellKey
from delaywheel.trace.options import TraceOptions


class MemoryTrace:
    """Keeps events as they would be written; a sink of `EventReports`."""

    def __init__(self, kept: list[dict[str, Any]], options: TraceOptions) -> None:
        self._kept: Final = kept
        self._options: Final = options
        self._lock: Final = Lock()

    def add(self, kind: str, rows: Rows, _length_bytes: int) -> None:
        """Keeps events of one kind."""
        prepared = self._options.prepared(rows)
        events = [
            {"kind": str(kind), **dict(zip(prepared, values, strict=True))}
            for values in zip(*prepared.values(), strict=True)
        ]
        with self._lock:
            self._kept.extend(events)

    def drop(self, count: int, why: str) -> None:
        """Forgets failures of which there are too many."""

    def count(self, cells: Mapping[CellKey, Cell]) -> None:
        """Forgets counts."""

    def begin_counts(self) -> None:
        """Knows nobody who reads counts."""

    def flush(self, _timeout_s: float) -> bool:
        """Does nothing: all are kept at once."""
        return True
