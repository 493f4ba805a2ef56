"""The dial: one row of counts for each second, shared with readers in other processes.

A slot's row is ``slot % rows``. With rows = span + late window + slack, no two slots that can hold
messages share a row, except in an older backlog: then the newer slot has the row, and the older one
is found by its folder's name. A row proves its slot; 0 = empty.

It counts what lies on this node's disk: the frames of its own wheels and of its copies of others',
each message once for the one copy that is here.

It is a cache: counted while frames are written, and rebuilt at every start from the slot tables and
the index rows behind them. Readers take no lock and may see a half-changed row; only what people
look at may depend on it.
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.files.index import read_raw_rows
from delaywheel.storage.files.slot_table import UNIT_BYTES, TableHead, load_head, read_entries
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Disk
from delaywheel.storage.folder.steps import Steps
from delaywheel.storage.frames.kinds import WITHDRAWING, Kind
from delaywheel.storage.frames.rows import (
    FEW_FRAMES,
    checked_rows,
    each_row,
    is_hole,
    message_counts,
    withdrawn_counts,
)

DIAL_ROW: Final[np.dtype[Any]] = np.dtype(
    [
        ("slot", "<i8"),
        ("messages", "<u8"),
        ("length_bytes", "<u8"),
        ("frames", "<u8"),
        ("cancels", "<u8"),
        ("wheels", "<u8"),  # how many wheels have frames in the slot
    ]
)

_NO_ROWS: Final = np.empty(0, DIAL_ROW)

HORIZONS: Final = (
    ("overdue", 0),
    ("1s", 1),
    ("10s", 10),
    ("1m", 60),
    ("10m", 600),
    ("1h", 3_600),
    ("1d", 86_400),
    ("beyond", None),
)
"""Names of ranges of dues, and how many seconds from now each ends; each begins where the one
before it ends. A slot is a second, so "1s" is the current second."""

_PIECE_ROWS: Final = 1 << 15


class Pending(NamedTuple):
    """Pending messages within one horizon."""

    horizon: str
    messages: int
    length_bytes: int


class Dial:
    """The only writer of the dial."""

    def __init__(self, disk: Disk, data: Path, rows: int) -> None:
        """Maps an empty dial of span + late window + slack rows, one a second."""
        disk.make_folder(data)
        # All zeros from the start: a long span takes no time then, and memory only as it is used.
        self._table = disk.map_array(layout.dial_path(data), DIAL_ROW, rows, writable=True)
        self._floor = 0

    def add(self, index_rows: NDArray[Any]) -> None:
        """Counts frames, given as the index rows of one wheel."""
        if len(index_rows) <= FEW_FRAMES:
            self._add_few(index_rows)
            return
        index_rows = index_rows[index_rows["length"] > 0]
        self._take(index_rows["slot"].astype(np.int64))
        self._count(np.add, index_rows)

    def _add_few(self, index_rows: NDArray[Any]) -> None:
        table = self._table
        for row in each_row(index_rows):
            place = row.slot % len(table)
            slot, messages, length_bytes, frames, cancels, wheels = table[place].item()
            if not row.length_bytes or row.slot < max(slot, self._floor):
                continue
            if row.slot > slot:
                messages = length_bytes = frames = cancels = wheels = 0
            table[place] = (
                row.slot,
                messages + (row.rows if row.kind is Kind.MESSAGES else 0),
                length_bytes + row.length_bytes,
                frames + 1,
                cancels + (row.rows if row.kind in WITHDRAWING else 0),
                wheels + (not row.offset),
            )

    def remove(self, index_rows: NDArray[Any]) -> None:
        """Subtracts frames that `add` counted and that were cut off."""
        self._count(np.subtract, index_rows[index_rows["length"] > 0])

    def adding_wheel(self, disk: Disk, data: Path, wheel: WheelId, *, floor: int) -> Steps[SeqSet]:
        """Counts a wheel's frames in slots at or above ``floor``.

        Uses its slot table, and index rows where the table lacks something or may be wrong. Returns
        the frames that it did not count, as they have no row. One that lost its row after the table
        had counted it is counted; if entries are doubtful as well, it is not known of which, and
        all are returned: a message more is better than a second left out.
        """
        folder = layout.wheel_folder(data, wheel)
        head, not_counted = load_head(disk, folder), NO_SEQS
        if head.holes:  # it may count their frames or not: it does not know their slots
            head = TableHead()
        doubtful = [np.array(sorted(head.stale), np.int64)]
        for hour in sorted(head.hours):
            entries, damaged = read_entries(disk, folder, head, hour)
            slots = np.arange(len(entries)) + hour * layout.SECONDS_PER_HOUR
            damaged |= np.isin(slots, doubtful[0]) | (entries["last_seq"] > head.seq)
            doubtful.append(slots[damaged])
            there = (entries["frames"] > 0) & ~damaged & (slots >= floor)
            self._add_entries(slots[there], entries[there])
            yield
        by_rows = np.concatenate(doubtful)
        from_seq = 1 if len(by_rows) else head.seq + 1
        for first_seq, raw in read_raw_rows(disk, folder, from_seq, 1 << 62):
            rows = checked_rows(raw)
            not_counted |= SeqSet.where(first_seq, is_hole(rows))
            is_left = np.arange(first_seq, first_seq + len(rows)) > head.seq
            is_left |= np.isin(rows["slot"], by_rows)
            self.add(rows[is_left & (rows["slot"] >= floor)])
            yield
        return not_counted

    def clear_below(self, floor: int) -> None:
        """Empties the rows of finished slots, whether they had a file or not.

        Only the seconds since an earlier floor are examined: rows emptied for that are never filled
        again.
        """
        if floor <= self._floor:
            return
        rows = len(self._table)
        for first in range(max(self._floor, floor - rows), floor, _PIECE_ROWS):
            places = np.arange(first, min(first + _PIECE_ROWS, floor)) % rows
            slots = self._table["slot"][places]
            self._table[places[(slots > 0) & (slots < floor)]] = 0
        self._floor = floor

    def _take(self, slots: NDArray[np.int64]) -> None:
        """Has these slots take over their rows from lesser slots; finished ones get none."""
        places = slots % len(self._table)
        order = np.argsort(slots, kind="stable")
        taken = np.maximum(self._table["slot"][places[order]], self._floor - 1)
        newer = order[slots[order] > taken]
        # If two slots share a row, the last assignment is the greater slot's.
        self._table[places[newer]] = 0
        self._table["slot"][places[newer]] = slots[newer]

    def _add_entries(self, slots: NDArray[np.int64], entries: NDArray[Any]) -> None:
        self._take(slots)
        self._change(
            np.add,
            slots,
            messages=entries["messages"],
            length_bytes=entries["length"].astype(np.uint64) * np.uint64(UNIT_BYTES),
            frames=entries["frames"],
            cancels=entries["cancels"],
            wheels=np.ones(len(slots)),
        )

    def _count(self, change: np.ufunc, index_rows: NDArray[Any]) -> None:
        self._change(
            change,
            index_rows["slot"].astype(np.int64),
            messages=message_counts(index_rows),
            length_bytes=index_rows["length"],
            frames=np.ones(len(index_rows)),
            cancels=withdrawn_counts(index_rows),
            wheels=index_rows["offset"] == 0,
        )

    def _change(self, change: np.ufunc, slots: NDArray[np.int64], **counts: NDArray[Any]) -> None:
        """Adds to or subtracts from rows that still belong to the same slot."""
        places = slots % len(self._table)
        has_row = self._table["slot"][places] == slots
        for name, each in counts.items():
            change.at(self._table[name], places[has_row], each[has_row].astype(np.uint64))


class DialView:
    """The dial, for readers in any process."""

    def __init__(self, disk: Disk, data: Path) -> None:
        """Maps the dial; raises FileNotFoundError if no node ever ran on this folder."""
        path = layout.dial_path(data)
        with closing(disk.open_read(path)) as file:
            rows = file.size() // DIAL_ROW.itemsize
        self._table = disk.map_array(path, DIAL_ROW, rows, writable=False)

    def rows(self, from_slot: int = 1, to_slot: int | None = None) -> NDArray[Any]:
        """Returns copies of the rows of ``from_slot`` <= slot < ``to_slot``, ascending."""
        rows = np.concatenate([*self._pieces(from_slot, to_slot), _NO_ROWS])
        return rows[np.argsort(rows["slot"], kind="stable")]

    def sums(self, from_slot: int, to_slot: int | None, bucket_s: int) -> NDArray[Any]:
        """Returns the same, summed by multiples of a bucket's seconds; `slot` is its first one."""
        pieces = (_summed(piece, bucket_s) for piece in self._pieces(from_slot, to_slot))
        # A bucket may lie in several pieces.
        return _summed(np.concatenate([*pieces, _NO_ROWS]), bucket_s)

    def _pieces(self, from_slot: int, to_slot: int | None) -> Iterator[NDArray[Any]]:
        """Yields the rows: one call on a long span would block all other threads until its end."""
        first, rows = max(from_slot, 1), len(self._table)
        last = np.iinfo(np.int64).max if to_slot is None else to_slot
        if last - first >= rows:
            for start in range(0, rows, _PIECE_ROWS):
                piece = self._table[start : start + _PIECE_ROWS].copy()
                yield piece[(piece["slot"] >= first) & (piece["slot"] < last)]
            return
        for start in range(first, last, _PIECE_ROWS):
            slots = np.arange(start, min(start + _PIECE_ROWS, last))
            piece = self._table[slots % rows]
            yield piece[piece["slot"] == slots]

    def pending(self, now_slot: int, done_slot: int) -> tuple[Pending, ...]:
        """Returns what is pending, grouped by how far ahead it is due.

        A cancel removes one message of its second; the bytes of cancelled messages are unknown.
        Exact if no sum exceeds 2^53, no message is there twice, and none was cancelled or released
        by more than one row. Slots before `done_slot` are done; a slot counts as a whole.
        """
        ends = np.array([end for _, end in HORIZONS if end is not None], np.int64)
        sums = np.zeros((2, len(HORIZONS)))
        for piece in self._pieces(done_slot, None):
            places = np.searchsorted(ends, piece["slot"] - now_slot, side="right")
            for row, counts in enumerate((uncancelled(piece), piece["length_bytes"])):
                sums[row] += np.bincount(places, counts, len(HORIZONS))
        return tuple(
            Pending(name, int(messages), int(length_bytes))
            for (name, _), messages, length_bytes in zip(HORIZONS, *sums, strict=True)
        )


def uncancelled(rows: NDArray[Any]) -> NDArray[np.int64]:
    """Returns of each row how many messages are not cancelled; see `DialView.pending`."""
    left = rows["messages"].astype(np.int64) - rows["cancels"].astype(np.int64)
    return np.maximum(left, 0)


def _summed(rows: NDArray[Any], bucket_s: int) -> NDArray[Any]:
    """Returns one row for each bucket, ascending; of wheels the most of a row."""
    if not len(rows):
        return rows
    rows = rows[np.argsort(rows["slot"], kind="stable")]
    buckets = rows["slot"] // bucket_s * bucket_s
    starts = np.flatnonzero(np.diff(buckets, prepend=-1))
    sums = np.empty(len(starts), DIAL_ROW)
    sums["slot"] = buckets[starts]
    for name in ("messages", "length_bytes", "frames", "cancels"):
        sums[name] = np.add.reduceat(rows[name], starts)
    sums["wheels"] = np.maximum.reduceat(rows["wheels"], starts)
    return sums
