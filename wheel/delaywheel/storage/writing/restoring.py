"""Restores index rows that were lost, from the frames to which they referred.

A frame proves itself: checksum, wheel, slot and seq show where it belongs. So a row that was lost,
with a page of zeros for example, is written again from its frame, wherever that lies.
"""

from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.files.index import ROWS_PER_SEGMENT, read_raw_rows
from delaywheel.storage.files.slot_files import list_slots
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Disk
from delaywheel.storage.folder.medium_errors import is_medium_error
from delaywheel.storage.folder.steps import Steps
from delaywheel.storage.frames.rows import INDEX_ROW_LENGTH_BYTES, checked_rows, is_hole
from delaywheel.storage.reading.holes import rows_in_file


class Restored(NamedTuple):
    """What a search for the frames of holes has found."""

    by_slot: dict[int, SeqSet]
    """The seqs that were restored, by slot: their rows can be read."""
    nowhere: SeqSet = NO_SEQS
    """The holes whose frames lie in none of the slot files that could be read."""
    unread_slot: int = -1
    """The greatest slot whose file could not be read; -1: there is none."""


def restoring(
    disk: Disk, folder: Path, wheel: WheelId, seqs: SeqSet, *, floor: int
) -> Steps[Restored]:
    """Restores the rows of holes whose frames lie intact in slot files.

    Args:
        disk: Where the wheel lies.
        folder: The wheel's folder.
        wheel: The wheel's name.
        seqs: Some frames; those that are no holes are left out.
        floor: Slots below are finished.
    """
    holes = _holes_among(disk, folder, seqs)
    yield
    restored: dict[int, SeqSet] = {}
    unread_slot = -1
    if not holes:
        return Restored(restored)
    for slot in list_slots(disk, folder, floor):
        found: dict[int, bytes] = {}
        try:
            found = rows_in_file(disk, folder, wheel, slot, holes)
        except OSError as error:
            if not is_medium_error(error):
                raise
            unread_slot = max(unread_slot, slot)
        try:
            _rewrite(disk, folder, found)
        except OSError as error:
            if not is_medium_error(error):
                raise
        yield
        if found:
            seqs = SeqSet.of(found)
            # Written is not readable: of a row that nobody can read, the slot would be unknown.
            # Such rows are looked for again, as the medium may lose them before they can be read.
            restored[slot] = seqs - _holes_among(disk, folder, seqs)
            holes -= seqs
            if not holes:
                break
    return Restored(restored, holes, unread_slot)


def _holes_among(disk: Disk, folder: Path, seqs: SeqSet) -> SeqSet:
    holes = NO_SEQS
    for first, last in seqs.spans:
        for first_seq, rows in read_raw_rows(disk, folder, first, last):
            holes |= SeqSet.where(first_seq, is_hole(checked_rows(rows)))
    return holes


def _rewrite(disk: Disk, folder: Path, rows: dict[int, bytes]) -> None:
    """Writes these rows durably."""
    by_segment: dict[int, dict[int, bytes]] = defaultdict(dict)
    for seq, row in rows.items():
        segment, place = divmod(seq - 1, ROWS_PER_SEGMENT)
        by_segment[segment][place] = row
    for segment, places in by_segment.items():
        with suppress(FileNotFoundError):  # deleted meanwhile: finished
            file = disk.open(layout.index_path(folder, segment))
            try:
                rows_there = file.size() // INDEX_ROW_LENGTH_BYTES
                for place, row in places.items():
                    if place < rows_there:  # others were cut meanwhile
                        file.write_at((row,), place * INDEX_ROW_LENGTH_BYTES)
                file.sync_data()
            finally:
                file.close()
