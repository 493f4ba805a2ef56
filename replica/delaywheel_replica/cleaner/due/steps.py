"""Cuts the next transaction: the messages between one progress and the next.

Progress is (w, p, V): every message in frames <= V with due <= w is done, and of millisecond w + 1
those up to position p. A step is one of

===========  ===============================  ============================================
kind         leads to                         and takes
===========  ===============================  ============================================
finish       (w, p', V) or (w + 1, none, V)   of millisecond w + 1 what follows p; no other
                                              step is possible while p is set
late         (w, none, V')                    of the frames in (V, V'] what is due by w, and
                                              what their releases let go; V' lies before the
                                              first frame that does not fit
due          (w', none, A)                    all late ones, and from frames <= A what is due
                                              in (w, w'], whole milliseconds
split        (w', p, A)                       the first of millisecond w' + 1, which alone is
                                              larger than the caps
===========  ===============================  ============================================

with A what is admitted (see tail.py). So w moves only together with V' = A, and every decision
follows from the state before, the state after and the frames <= V': a new leader that begins from a
committed progress decides in the same way. A frame that alone exceeds a cap is taken alone. No step
takes what was done ahead of w, before an operator set it back (core/protocol/progress.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delaywheel_replica.cleaner.due.rows import (
    DroppedRows,
    DueRows,
    Records,
    join_rows,
    record_lengths_bytes,
)
from delaywheel_replica.cleaner.due.runs import NO_ROWS, WheelNumbers
from delaywheel_replica.cleaner.due.seconds import FORWARDED, Bounds, Second
from delaywheel_replica.cleaner.due.tail import Tail
from delaywheel_replica.cleaner.due.window import Window
from delaywheel_replica.core.protocol.progress import Position, Progress
from delaywheel_replica.core.protocol.reschedules import MessageKey


@dataclass(frozen=True, slots=True)
class Step:
    """One transaction's worth: exactly the messages between two states of progress."""

    before: Progress
    after: Progress
    """Where this step leads, with the floor of `before`; the caller may raise the floor."""
    messages: DueRows
    dropped: DroppedRows
    behind: bool
    """More is due than this step takes: ask again at once after `done`."""

    def __bool__(self) -> bool:
        """Whether it holds anything; if not, a commit would only move progress."""
        return bool(len(self.messages) or len(self.dropped))


class _Part(NamedTuple):
    """What a step takes from one second, in order."""

    second: Second
    rows: NDArray[np.intp]
    records: Records


class Draft:
    """A step that is being filled."""

    def __init__(
        self,
        progress: Progress,
        wheels: WheelNumbers,
        cap_messages: int,
        cap_bytes: int,
        withdrawn: frozenset[MessageKey] = frozenset(),
    ) -> None:
        self._before = progress
        self._withdrawn = withdrawn
        self._wheels = wheels
        self._room_messages = cap_messages
        self._room_bytes = cap_bytes
        self._parts: list[_Part] = []
        self._due_ms = progress.due_ms
        self._position = progress.position
        self._seqs = progress.seqs
        self._full = False

    @property
    def is_empty(self) -> bool:
        """Whether no message was taken."""
        return not self._parts

    def take_late(self, tail: Tail) -> bool:
        """Moves V as far as the late messages fit; False if not to everything admitted."""
        seqs = dict(self._before.seqs)
        seqs.update((wheel, seq) for wheel, seq in tail.admitted.items() if seq)
        taken: dict[int, tuple[Second, list[NDArray[np.intp]]]] = {}
        for wheel, frames in sorted(tail.late.items()):
            for frame in frames:
                rows = frame.rows_after(self._before.due_ms)
                records = frame.second.records(rows)
                if len(rows) > self._fitting(records, at_least=0 if taken else len(rows)):
                    seqs[wheel] = frame.seq - 1
                    self._full = True
                    break
                if len(rows):
                    self._use(records)
                    taken.setdefault(frame.second.slot, (frame.second, []))[1].append(rows)
        for _, (second, parts) in sorted(taken.items()):
            rows = second.in_order(np.concatenate(parts))
            self._parts.append(_Part(second, rows, second.records(rows)))
        self._seqs = seqs
        return not self._full

    def take_due(self, window: Window, now_ms: int) -> None:
        """Moves w as far as whole milliseconds fit, or splits the first one."""
        end_ms = min(now_ms, window.loaded_to_ms())
        for second in window.present():
            if second.slot * 1000 > end_ms:
                break
            rows = second.due(self._before.due_ms, None, end_ms, self._room_messages + 1)
            if len(rows) and not self._take_milliseconds(second, rows):
                return
        self._due_ms = max(self._due_ms, end_ms)

    def finish(self, window: Window, position: Position) -> None:
        """Continues in the millisecond that is split."""
        due_ms = self._before.due_ms + 1
        if window.loaded_to_ms() < due_ms:
            return
        second = window.get(due_ms // 1000)
        rows = NO_ROWS
        if second is not None:
            rows = second.due(self._before.due_ms, position, due_ms, self._room_messages + 1)
            records = second.records(rows)
            end = self._fitting(records, at_least=1)
            if len(rows):
                self._take(second, rows[:end], records[:end])
            if end < len(rows):
                self._split(records, end)
                return
        self._due_ms, self._position = due_ms, None
        self._full = True  # V rested meanwhile

    def step(self, now_ms: int) -> Step:
        """Returns the filled step."""
        before = self._before
        after = before.moved(self._due_ms, self._position, self._seqs)
        bounds = None
        forwarded, dropped = [], []
        for part in self._parts:
            bounds = bounds or self._bounds(after)
            outcomes, differ = part.second.outcomes(part.rows, part.records, bounds)
            rows = part.second.messages(part.records)
            if outcomes.any():
                drops = outcomes != FORWARDED
                dropped.append((rows.take(drops), outcomes[drops], differ[drops]))
                rows = rows.take(~drops)
            forwarded.append(rows)
        return Step(
            before=before,
            after=after,
            messages=join_rows(forwarded, self._wheels.names),
            dropped=_joined(dropped, self._wheels),
            behind=self._full or after.position is not None or after.due_ms < now_ms,
        )

    def _take_milliseconds(self, second: Second, rows: NDArray[np.intp]) -> bool:
        """Takes whole milliseconds that fit; False if not all did, and w is set."""
        records = second.records(rows)
        end = self._fitting(records, at_least=1 if self.is_empty else 0)
        if end == len(rows):
            self._take(second, rows, records)
            return True
        dues_ms = records["due_ms"]
        whole = int(dues_ms.searchsorted(dues_ms[end]))
        self._due_ms = int(dues_ms[end]) - 1
        if whole:
            self._take(second, rows[:whole], records[:whole])
        elif self.is_empty:
            self._split(records, end)
            self._take(second, rows[:end], records[:end])
        self._full = True
        return False

    def _split(self, records: Records, end: int) -> None:
        """Stops within a millisecond, before records[end]."""
        self._position = self._wheels.position(records[end - 1])
        self._full = True

    def _fitting(self, records: Records, *, at_least: int) -> int:
        ends = np.cumsum(record_lengths_bytes(records))
        fitting = min(int(ends.searchsorted(self._room_bytes, side="right")), self._room_messages)
        return min(max(fitting, at_least), len(records))

    def _take(self, second: Second, rows: NDArray[np.intp], records: Records) -> None:
        self._parts.append(_Part(second, rows, records))
        self._use(records)

    def _use(self, records: Records) -> None:
        self._room_messages = max(self._room_messages - len(records), 0)
        self._room_bytes -= int(record_lengths_bytes(records).sum())

    def _bounds(self, after: Progress) -> Bounds:
        before = self._before
        return Bounds(
            before.due_ms,
            self._by_number(before),
            self._by_number(after),
            before.ahead,
            self._withdrawn,
        )

    def _by_number(self, progress: Progress) -> NDArray[np.int64]:
        """Returns V as an array by wheel number."""
        return np.array([progress.seq(wheel) for wheel in self._wheels.names], np.int64)


def _joined(
    parts: list[tuple[DueRows, NDArray[np.uint8], NDArray[np.bool_]]], wheels: WheelNumbers
) -> DroppedRows:
    rows = join_rows([rows for rows, _, _ in parts], wheels.names)
    if not parts:
        return DroppedRows(rows, np.empty(0, np.uint8), np.empty(0, np.bool_))
    outcomes = np.concatenate([outcomes for _, outcomes, _ in parts])
    return DroppedRows(rows, outcomes, np.concatenate([differ for _, _, differ in parts]))
