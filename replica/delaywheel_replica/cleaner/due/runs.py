"""Sorted runs over one second's messages, merged as they grow.

A second may hold a million messages when a frame of three arrives for it: sorting all again
would cost more than the rest of the transaction. So each addition is a run of its own, sorted
twice (by due and by the mix of the key), and runs are merged once the newer one has half the
size of the older: at most log2(n) runs, and each message is sorted again log2(n) times.

Order inside a run is (due, wheel, seq, row): the order in which progress counts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel_replica.cleaner.due.duplicates import equal_neighbours, spread_ranges
from delaywheel_replica.cleaner.due.rows import Records
from delaywheel_replica.core.protocol.progress import Position

NO_ROWS: NDArray[np.intp] = np.empty(0, np.intp)
_LOOKED_AT = 1_024
"""Rows that are looked at together for one that is not released: mostly among the first."""


class WheelNumbers:
    """Numbers for wheels in order of first use, and their rank by name."""

    def __init__(self) -> None:
        self.names: list[WheelId] = []
        self.ranks = np.empty(0, np.int64)
        self._numbers: dict[WheelId, int] = {}

    def add(self, wheel: WheelId) -> int:
        """Returns the number of a wheel, assigned on first use."""
        number = self._numbers.get(wheel)
        if number is None:
            number = self._numbers[wheel] = len(self.names)
            self.names.append(wheel)
            self.ranks = np.argsort(
                np.array(sorted(self._numbers.values(), key=self.names.__getitem__))
            )
        return number

    def sort(self, records: Records, *first: NDArray[np.generic]) -> NDArray[np.intp]:
        """Returns the order of messages by position; `first` are more significant keys."""
        ranks = self.ranks[records["wheel"]]
        return np.lexsort((records["row"], records["seq"], ranks, *first))

    def up_to(self, records: Records, position: Position) -> NDArray[np.bool_]:
        """Marks messages that lie up to this position."""
        rank = self.ranks[self.add(position.wheel)]
        ranks, seqs = self.ranks[records["wheel"]], records["seq"]
        in_frame = (seqs == position.seq) & (records["row"] <= position.row)
        in_wheel = (ranks == rank) & ((seqs < position.seq) | in_frame)
        up_to: NDArray[np.bool_] = (ranks < rank) | in_wheel
        return up_to

    def position(self, record: np.void) -> Position:
        """Returns the position of one message."""
        return Position(self.names[int(record["wheel"])], int(record["seq"]), int(record["row"]))


@dataclass(frozen=True, slots=True)
class Run:
    """Some messages of a second: row numbers in two orders.

    What was done ahead of w is not taken again, so it has no place among what falls due.
    """

    offsets_ms: NDArray[np.uint16]  # due within the second; ascending
    rows: NDArray[np.intp]  # in the order of offsets_ms, then position
    mixes: NDArray[np.uint64]  # ascending
    mix_rows: NDArray[np.intp]  # in the order of mixes
    first: Position
    last: Position  # the least and greatest position in it


class Runs:
    """All messages of one second, in as few sorted runs as possible."""

    def __init__(self, slot: int, wheels: WheelNumbers) -> None:
        self._start_ms = slot * 1000
        self._wheels = wheels
        self._runs: list[Run] = []

    def add(self, records: Records, begin: int) -> None:
        """Adds `records[begin:]`, which must be in order of position.

        Marks messages whose mix was there before, or comes twice, on both sides as suspect.
        """
        added = records[begin:]
        offsets_ms = (added["due_ms"] - self._start_ms).astype(np.uint16)
        by_due = np.argsort(offsets_ms, kind="stable")
        if added["ahead"].any():
            by_due = by_due[~added["ahead"][by_due]]
        mixes = added["mix"].copy()
        by_mix = np.argsort(mixes)
        run = Run(
            offsets_ms=offsets_ms[by_due],
            rows=by_due + begin,
            mixes=mixes[by_mix],
            mix_rows=by_mix + begin,
            first=self._wheels.position(added[0]),
            last=self._wheels.position(added[-1]),
        )
        suspect = records["suspect"]
        suspect[run.mix_rows] = equal_neighbours(run.mixes)
        for older in self._runs:
            numbers, members = _equal_ranges(older.mixes, run.mixes)
            if len(numbers):
                suspect[run.mix_rows[numbers]] = True
                suspect[older.mix_rows[members]] = True
        self._runs.append(run)
        self._merge(records)

    def after(
        self,
        records: Records,
        due_ms: int,
        position: Position | None,
        upto_ms: int,
        limit: int,
        skips: NDArray[np.bool_] | None = None,
    ) -> NDArray[np.intp]:
        """Returns the first `limit` rows beyond (due, position) and due by `upto_ms`, in order.

        Everything due by `due_ms` is done, and of the millisecond after what lies up to the
        position. Rows that `skips` marks are left out, and do not count.
        """
        end = self._offset(upto_ms + 1)
        begin = self._offset(due_ms + 1)
        found = []
        for run in self._runs:
            first = int(run.offsets_ms.searchsorted(begin))
            if position is not None:
                first = self._beyond(records, run, first, begin, position)
            last = int(run.offsets_ms.searchsorted(end))
            if skips is None:
                last = min(last, first + limit)
            rows = run.rows[first:last]
            if skips is not None:
                rows = rows[~skips[rows]][:limit]
            if len(rows):
                found.append(rows)
        if not found:
            return NO_ROWS
        if len(found) == 1:
            return found[0]
        rows = np.concatenate(found)
        chosen = records.take(rows)
        return rows[self._wheels.sort(chosen, chosen["due_ms"])[:limit]]

    def next_due_ms(self, due_ms: int, released: NDArray[np.int64] | None = None) -> int | None:
        """Returns the earliest due beyond `due_ms`.

        Rows for which `released` is not 0 go before their due, and do not count.
        """
        begin = self._offset(due_ms + 1)
        firsts = [
            int(run.offsets_ms[place])
            for run in self._runs
            if (place := _first_kept(run, begin, released)) < len(run.offsets_ms)
        ]
        return self._start_ms + min(firsts) if firsts else None

    def with_mixes(self, mixes: NDArray[np.uint64]) -> NDArray[np.intp]:
        """Returns the rows of all messages with one of these mixes, ascending."""
        wanted = np.unique(mixes)
        found = [run.mix_rows[_equal_ranges(run.mixes, wanted)[1]] for run in self._runs]
        return np.sort(np.concatenate(found)) if found else NO_ROWS

    def _offset(self, due_ms: int) -> np.uint16:
        # Of the type of the column: else searchsorted would copy the column first.
        return np.uint16(min(max(due_ms - self._start_ms, 0), 1000))

    def _beyond(
        self, records: Records, run: Run, first: int, offset: np.uint16, position: Position
    ) -> int:
        """Returns where, from `first` on, the rows of this offset behind this position begin."""
        end = int(run.offsets_ms.searchsorted(offset, side="right"))

        def position_of(place: int) -> Position:
            return self._wheels.position(records[run.rows[place]])

        places: Sequence[int] = range(first, end)
        key: Callable[[int], Position] = position_of
        return first + bisect_right(places, position, key=key)

    def _merge(self, records: Records) -> None:
        runs = self._runs
        while len(runs) > 1 and 2 * len(runs[-1].mixes) >= len(runs[-2].mixes):
            newer, older = runs.pop(), runs.pop()
            runs.append(self._merged(records, older, newer))

    def _merged(self, records: Records, older: Run, newer: Run) -> Run:
        offsets_ms = np.concatenate((older.offsets_ms, newer.offsets_ms))
        rows = np.concatenate((older.rows, newer.rows))
        if older.last < newer.first:
            by_due = np.argsort(offsets_ms, kind="stable")
        else:
            by_due = self._wheels.sort(records.take(rows), offsets_ms)
        mixes = np.concatenate((older.mixes, newer.mixes))
        by_mix = np.argsort(mixes)
        return Run(
            offsets_ms=offsets_ms[by_due],
            rows=rows[by_due],
            mixes=mixes[by_mix],
            mix_rows=np.concatenate((older.mix_rows, newer.mix_rows))[by_mix],
            first=min(older.first, newer.first),
            last=max(older.last, newer.last),
        )


def _first_kept(run: Run, offset: np.uint16, released: NDArray[np.int64] | None) -> int:
    """Returns the first place from this offset on of a row that is not released; else the end."""
    place = int(run.offsets_ms.searchsorted(offset))
    while released is not None and place < len(run.rows):
        kept = released[run.rows[place : place + _LOOKED_AT]] == 0
        if kept.any():
            return place + int(kept.argmax())
        place += len(kept)
    return place


def _equal_ranges(
    ascending: NDArray[np.uint64], wanted: NDArray[np.uint64]
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Returns pairs (number in `wanted`, place in `ascending`) of equal values."""
    first = ascending.searchsorted(wanted)
    if not (ascending.take(first, mode="clip") == wanted).any():
        return NO_ROWS, NO_ROWS
    end = ascending.searchsorted(wanted, side="right")
    return spread_ranges(first, end)
