"""Where clients and consumers report what has happened; a sink gets what is told of it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from delaywheel.errors import DelaywheelError
from delaywheel.message import clock_ns
from delaywheel.trace.changed import ChangedFields, changed_rows
from delaywheel.trace.counts import Cell, CellKey, ExactCounts
from delaywheel.trace.options import TraceOptions
from delaywheel.trace.reporter import CLOSE_S, EventSink
from delaywheel.trace.sampling import Chosen, Sampling
from delaywheel.trace.schema import EventKind
from delaywheel.trace.sent import sent_cells, sent_rows

if TYPE_CHECKING:
    from delaywheel.message import Result


_LOG: Final = logging.getLogger("delaywheel.trace")


class _Guard:
    """Logs what is raised within it: a defect of the trace is no failure of what it tells of."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if isinstance(error, Exception):
            _LOG.error("an event could not be told: a defect", exc_info=error)
        return isinstance(error, Exception)


_GUARD: Final = _Guard()


class EventRun(Protocol):
    """Events of one kind that come together: what is known of each, and what is asked for."""

    def roots(self) -> list[bytes]:
        """Returns of each the root of its way: the 16 bytes of an id, or the text of a place."""

    def failed(self) -> list[int]:
        """Returns the rows of failures, ascending."""

    def cells(self, time_ms: int) -> dict[CellKey, Cell]:
        """Returns what all of them add to the counts."""

    def rows(
        self, chosen: Sequence[int] | None, options: TraceOptions, time_ms: int
    ) -> tuple[dict[str, list[Any]], int]:
        """Returns the columns of these rows, and the length of their texts; None: of all."""


class EventReports:
    """Takes what clients and consumers report, and gives what is told of it to a sink."""

    def __init__(self, sink: EventSink, options: TraceOptions) -> None:
        self._sink: Final = sink
        self._options: Final = options
        self._sampling: Final = Sampling(options.sample)

    def flush(self, timeout: float = CLOSE_S) -> bool:
        """Waits until what has happened so far is written, or dropped; False on timeout."""
        return self._sink.flush(timeout)

    def dropped(self, count: int, why: str) -> None:
        """Counts events that were not taken; not for programs."""
        self._sink.drop(count, why)

    def exact_counts(self) -> ExactCounts:
        """Returns counts for one consumer's own transactions; not for programs."""
        return ExactCounts(self._sink.begin_counts)

    def sent(self, results: Sequence[Result], cost_s: float, attempts: int) -> None:
        """Reports the final answers to messages that were sent together; not for programs."""
        with _GUARD:
            failed = [row for row, result in enumerate(results) if result.handle is None]
            messages = [result.message for result in results]
            self._sink.count(sent_cells(results, messages, failed))
            chosen = self._sampling.of_sent([message.id for message in messages], failed)
            if chosen.rows is not None:
                results = [results[row] for row in chosen.rows]
            self._report(
                EventKind.SENT,
                chosen,
                *sent_rows(self._options, results, _now_ms(), int(cost_s * 1e6), attempts),
            )

    def changed(self, what: str, messages: Iterable[ChangedFields], cost_s: float) -> None:
        """Reports the final answers to changes asked for together; not for programs."""
        with _GUARD:
            many = list(messages)
            failed = [
                row
                for row, (*_, outcome, _) in enumerate(many)
                if isinstance(outcome, DelaywheelError)
            ]
            chosen = self._sampling.of_others([id_ for _, id_, *_ in many], failed)
            if chosen.rows is not None:
                many = [many[row] for row in chosen.rows]
            rows = changed_rows(what, many, _now_ms(), int(cost_s * 1e6))
            self._report(EventKind.CHANGED, chosen, rows, 0)

    def processed(self, run: EventRun, *, is_counted: bool = False) -> None:
        """Reports outcomes that are committed, and perhaps counted; not for programs."""
        with _GUARD:
            if not is_counted:
                self._sink.count(run.cells(_now_ms()))
            roots = () if self._sampling.takes_all else run.roots()
            chosen = self._sampling.of_others(roots, run.failed())
            rows = run.rows(chosen.rows, self._options, _now_ms())
            self._report(EventKind.PROCESSED, chosen, *rows)

    def written(self, run: EventRun, *, is_counted: bool = False) -> None:
        """Reports records that were written to an ingress topic, or not; not for programs."""
        with _GUARD:
            if not is_counted:
                self._sink.count(run.cells(_now_ms()))
            chosen = self._sampling.of_sent(run.roots(), run.failed())
            rows = run.rows(chosen.rows, self._options, _now_ms())
            self._report(EventKind.SENT, chosen, *rows)

    def _report(
        self, kind: EventKind, chosen: Chosen, rows: Mapping[str, list[Any]], length_bytes: int
    ) -> None:
        if chosen.dropped:
            self._sink.drop(chosen.dropped, "there are too many failures")
        if rows["time_ms"]:
            self._sink.add(kind, rows, length_bytes)


def _now_ms() -> int:
    return clock_ns() // 1_000_000
