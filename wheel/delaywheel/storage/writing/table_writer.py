"""Keeps a wheel's slot table current (slot_table.py), as its only writer.

A refresh counts the rows added since the last one, once they fill a segment, hour by hour, and puts
the hours' files on the medium before the head that refers to them. It waits for the medium, so it
belongs on the thread of checkpoints, after one: it counts only rows that are on the medium. If
interrupted anywhere, the next one repeats it, and no row is counted twice.
"""

import threading
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.files.index import ROWS_PER_SEGMENT, IndexReader, find_holes, read_raw_rows
from delaywheel.storage.files.slot_table import (
    ENTRY,
    ENTRY_LENGTH_BYTES,
    UNIT_BYTES,
    TableHead,
    checks_of,
    load_head,
    read_entries,
    save_head,
)
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Disk
from delaywheel.storage.folder.layout import SECONDS_PER_HOUR
from delaywheel.storage.frames.rows import (
    INDEX_ROW,
    Places,
    checked_rows,
    is_hole,
    message_counts,
    withdrawn_counts,
)
from delaywheel.storage.reading.places import returned, rows_of_slots

# While a table is rebuilt, this much is counted before it is put on the medium.
_SEGMENTS_AT_ONCE = 16


class SlotTable:
    """The writer of one wheel's table. ``refresh`` is for one thread, the others for any."""

    def __init__(self, disk: Disk, folder: Path, *, refresh_rows: int = ROWS_PER_SEGMENT) -> None:
        """Continues with the existing table; it may lag so many rows, roughly, behind the index."""
        self._disk = disk
        self._folder = folder
        self._refresh_rows = refresh_rows
        self._lock = threading.Lock()
        self._changed: set[int] = set()
        self._cuts = 0
        self._closed = False
        self.head = load_head(disk, folder)

    def change(self, slots: Iterable[int]) -> None:
        """Notes slots whose rows were replaced and must be counted again."""
        with self._lock:
            self._changed.update(slots)

    def cut(self, final_seq: int, slots: Iterable[int], top_slot: int) -> None:
        """Durably notes the slots of frames beyond a seq, before these are cut.

        `top_slot` is the greatest slot of those that stay.
        """
        with self._lock:
            self._cuts += 1
            head = self.head
            self._save(
                TableHead(
                    min(head.seq, final_seq),
                    min(head.top_slot, top_slot),
                    head.hours,
                    head.stale.union(slots),
                    head.holes.within(1, final_seq),
                )
            )

    def close(self) -> None:
        """Stops writing the table, which gets another writer."""
        with self._lock:
            self._closed = True

    def refresh(self, synced_seq: int, *, floor: int) -> None:
        """Counts rows up to a seq, all on the medium, if there are enough of them.

        Finished slots are no longer counted. After an OSError the table merely lags behind.
        """
        if not self._is_worth_it(synced_seq, floor):
            return
        is_used = True
        while is_used and self.head.seq < synced_seq:
            to_seq = min(synced_seq, self.head.seq + _SEGMENTS_AT_ONCE * ROWS_PER_SEGMENT)
            is_used = self._refresh(to_seq, floor)
        if is_used and self._is_worth_it(synced_seq, floor):  # not for new rows: they are counted
            self._refresh(self.head.seq, floor)

    def _is_worth_it(self, synced_seq: int, floor: int) -> bool:
        first_hour = floor // SECONDS_PER_HOUR
        with self._lock:
            is_behind = synced_seq - self.head.seq >= self._refresh_rows
            is_wrong = self.head.stale or (self.head.hours and self._changed)
            is_old = min(self.head.hours, default=first_hour) < first_hour
            return not self._closed and bool(is_behind or is_wrong or is_old)

    def _refresh(self, to_seq: int, floor: int) -> bool:
        """Moves the head to a seq; False if what it counted is invalid by then."""
        with self._lock:
            head, cuts = self.head, self._cuts
            changed, self._changed = self._changed, set()
        try:
            places, top_slot, holes = self._rows(head, to_seq, floor)
            with closing(IndexReader(self._disk, self._folder)) as index:
                mended = returned(index, head.holes)
            old_holes = head.holes - mended.seqs
            top_slot = max(top_slot, *mended.slots, -1)
            again = head.stale | changed | mended.slots
            recounted = np.array([slot for slot in again if slot >= floor], np.int64)
            if len(recounted):
                # What was counted once may be a hole by now: it is no longer counted.
                old_holes = find_holes(self._disk, self._folder, 1, head.seq)
                places = self._with_recounted(places, recounted)
            hours, damaged = self._write(places, recounted)
        except OSError:
            self.change(changed)
            raise
        old = {hour for hour in {**head.hours, **hours} if hour < floor // SECONDS_PER_HOUR}
        with self._lock:
            if self._closed or self._cuts != cuts:
                self._changed |= changed
                return False
            stale = frozenset(slot for slot in damaged if slot >= floor)
            kept = {hour: n for hour, n in {**head.hours, **hours}.items() if hour not in old}
            self._save(TableHead(to_seq, top_slot, kept, stale, old_holes | holes))
        for hour in old:
            self._disk.delete(layout.table_path(self._folder, hour))
        return True

    def _rows(self, head: TableHead, to_seq: int, floor: int) -> tuple[Places, int, SeqSet]:
        """Returns seqs and rows to count, the greatest slot up to ``to_seq``, and holes."""
        top_slot, holes = head.top_slot, NO_SEQS
        seqs, found = [np.empty(0, np.int64)], [np.empty(0, INDEX_ROW)]
        for first_seq, raw in read_raw_rows(self._disk, self._folder, head.seq + 1, to_seq):
            rows = checked_rows(raw)
            holes |= SeqSet.where(first_seq, is_hole(rows))
            there = np.flatnonzero(rows["length"])
            top_slot = max(top_slot, int(rows["slot"][there].astype(np.int64).max(initial=-1)))
            there = there[rows["slot"][there] >= floor]
            seqs.append(first_seq + there)
            found.append(rows[there])
        return (np.concatenate(seqs), np.concatenate(found)), top_slot, holes

    def _with_recounted(self, places: Places, slots: NDArray[np.int64]) -> Places:
        """Returns these places, with those of all frames of some slots."""
        seqs, rows = places
        to_seq = max(self.head.seq, int(seqs.max(initial=0)))
        all_seqs, all_rows = rows_of_slots(self._disk, self._folder, slots, to_seq)
        others = ~np.isin(rows["slot"], slots)
        return np.concatenate((seqs[others], all_seqs)), np.concatenate((rows[others], all_rows))

    def _write(
        self, places: Places, recounted: NDArray[np.int64]
    ) -> tuple[dict[int, int], set[int]]:
        """Counts frames hour by hour; returns the hours, and the slots with damaged entries.

        Each hour comes with how many of its slots count frames.
        """
        seqs, rows = places
        row_hours, recounted_hours = rows["slot"] // SECONDS_PER_HOUR, recounted // SECONDS_PER_HOUR
        order = np.argsort(row_hours, kind="stable")
        seqs, rows, row_hours = seqs[order], rows[order], row_hours[order]
        hours = np.union1d(row_hours, recounted_hours)
        edges = np.searchsorted(row_hours, hours), np.searchsorted(row_hours, hours, side="right")
        written: dict[int, int] = {}
        damaged: set[int] = set()
        for hour, first, end in zip(
            hours.tolist(), *(edge.tolist() for edge in edges), strict=True
        ):
            seconds = recounted[recounted_hours == hour] - hour * SECONDS_PER_HOUR
            written[hour], wrong = self._write_hour(
                hour, seconds, (seqs[first:end], rows[first:end])
            )
            damaged |= wrong
        if len(hours):
            self._disk.sync_folder(layout.table_folder(self._folder))
        return written, damaged

    def _write_hour(
        self, hour: int, recounted: NDArray[np.int64], places: Places
    ) -> tuple[int, set[int]]:
        """Counts the frames of an hour, and puts changed entries on the medium.

        Returns how many slots count frames, and those with damaged entries.
        """
        first_slot, path = hour * SECONDS_PER_HOUR, layout.table_path(self._folder, hour)
        entries, is_damaged = (
            np.zeros(SECONDS_PER_HOUR, ENTRY),
            np.zeros(SECONDS_PER_HOUR, np.bool_),
        )
        if hour in self.head.hours or self._disk.exists(path):
            entries, is_damaged = read_entries(self._disk, self._folder, self.head, hour)
        entries[recounted], is_damaged[recounted] = 0, False
        changed = np.union1d(recounted, _count(entries, first_slot, places))
        checks = checks_of(entries, first_slot)
        # A damaged entry stays so until it is recounted.
        entries["check"] = np.where(is_damaged, ~checks, checks)
        if len(changed):
            first, end = int(changed[0]), int(changed[-1]) + 1
            with closing(self._disk.open(path, create=True)) as file:
                file.write_at((entries[first:end].tobytes(),), first * ENTRY_LENGTH_BYTES)
                file.sync_data()
        wrong = set((np.flatnonzero(is_damaged) + first_slot).tolist())
        return int(np.count_nonzero((entries["frames"] > 0) & ~is_damaged)), wrong

    def _save(self, head: TableHead) -> None:
        save_head(self._disk, self._folder, head)
        self.head = head


def _count(entries: NDArray[Any], first_slot: int, places: Places) -> NDArray[np.int64]:
    """Counts frames that are not counted yet; returns the seconds that change."""
    seqs, rows = places
    seconds = rows["slot"].astype(np.int64) - first_slot
    new = seqs > entries["last_seq"][seconds]
    seqs, rows, seconds = seqs[new], rows[new], seconds[new]
    lengths = rows["length"].astype(np.int64) // UNIT_BYTES
    for name, counts in (
        ("length", lengths),
        ("messages", message_counts(rows)),
        ("cancels", withdrawn_counts(rows)),
        ("frames", np.ones(len(rows))),
    ):
        # The sums of one slot file are exact in a double.
        entries[name] += np.bincount(seconds, counts, SECONDS_PER_HOUR).astype(np.uint32)
    ends = rows["offset"] // UNIT_BYTES + lengths
    np.maximum.at(entries["end"], seconds, ends.astype(np.uint32))
    np.maximum.at(entries["last_seq"], seconds, seqs.astype(np.uint64))
    return np.unique(seconds)
