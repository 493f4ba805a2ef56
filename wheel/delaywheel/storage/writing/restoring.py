"""Restores index rows that were lost, from the frames to which they referred.

A frame proves itself: checksum, wheel, slot and seq show where it belongs. So a row that was lost,
with a page of zeros for example, is written again from its frame, wherever that lies.

If the medium refuses a row in its place, the whole segment moves to a new file with its name. Rows
that could neither be read nor restored stay unreadable there, so that they are waited for as
before. What is merely not returned for now stays where it is.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.files.index import ROWS_PER_SEGMENT, find_holes, read_raw_rows
from delaywheel.storage.files.slot_files import list_slots
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Disk, is_medium_error
from delaywheel.storage.folder.steps import Steps
from delaywheel.storage.frames.rows import HOLE_ROW, INDEX_ROW_LENGTH_BYTES
from delaywheel.storage.reading.unlisted import rows_in_file


class Restored(NamedTuple):
    """What a search for the frames of holes has found."""

    by_slot: dict[int, SeqSet]
    """The seqs that were restored, by slot: their rows can be read."""
    nowhere: SeqSet = NO_SEQS
    """The holes whose frames lie in none of the slot files that could be read."""
    unread_slot: int = -1
    """The greatest slot whose file could not be read; -1: there is none."""


def restoring(
    disk: Disk,
    folder: Path,
    wheel: WheelId,
    seqs: SeqSet,
    *,
    floor: int,
    moved: Callable[[], object] = lambda: None,
) -> Steps[Restored]:
    """Restores the rows of holes, among some frames, whose frames lie intact in slot files.

    `moved` is called when a segment was moved: who writes to it has to open it again.
    """
    holes = _holes_among(disk, folder, seqs)
    yield
    restored: dict[int, SeqSet] = {}
    not_taken: dict[int, dict[int, bytes]] = {}  # rows by slot and seq
    unread_slot = -1
    if not holes:
        return Restored(restored)
    for slot in list_slots(disk, folder, floor):
        found: dict[int, bytes] = {}
        with _medium_errors() as errors:
            found = rows_in_file(disk, folder, wheel, slot, holes)
        if errors:
            unread_slot = max(unread_slot, slot)
        with _medium_errors() as refusals:
            _rewrite(disk, folder, found)
        yield
        if found:
            seqs = SeqSet.of(found)
            # Written is not readable: of a row that nobody can read, the slot would be unknown.
            # Such rows are looked for again, as the medium may lose them before they can be read.
            left = _holes_among(disk, folder, seqs)
            restored[slot] = seqs - left
            if left and refusals:
                not_taken[slot] = {seq: row for seq, row in found.items() if seq in left}
            holes -= seqs
            if not holes:
                break
    if not_taken:
        rows = {seq: row for found in not_taken.values() for seq, row in found.items()}
        with suppress(OSError):  # they are missing as before, and looked for again
            move_rows(disk, folder, rows, extends=False)
        moved()
        for slot, found in not_taken.items():
            seqs = SeqSet.of(found)
            restored[slot] |= seqs - _holes_among(disk, folder, seqs)
        yield
    return Restored(restored, holes, unread_slot)


@contextmanager
def _medium_errors() -> Iterator[list[OSError]]:
    """Ends the context at an error of the medium, and keeps it; all others are raised."""
    errors: list[OSError] = []
    try:
        yield errors
    except OSError as error:
        if not is_medium_error(error):
            raise
        errors.append(error)


def _holes_among(disk: Disk, folder: Path, seqs: SeqSet) -> SeqSet:
    holes = NO_SEQS
    for first, last in seqs.spans:
        holes |= find_holes(disk, folder, first, last)
    return holes


def _by_segment(rows: dict[int, bytes]) -> dict[int, dict[int, bytes]]:
    by_segment: dict[int, dict[int, bytes]] = defaultdict(dict)
    for seq, row in rows.items():
        segment, place = divmod(seq - 1, ROWS_PER_SEGMENT)
        by_segment[segment][place] = row
    return by_segment


def move_rows(disk: Disk, folder: Path, rows: dict[int, bytes], *, extends: bool = True) -> None:
    """Puts rows, ascending by seq, that the medium refuses in new files, with their whole segments.

    Whoever writes to such a segment, or reads it, has to open it again. Each moves in one step:
    nothing may be written to it between reading and replacing it.

    Args:
        extends: Whether they may lie behind what is there, after holes perhaps; otherwise those
            are left out, because they were cut meanwhile.

    Raises:
        OSError: The medium does not take a new file either.
    """
    for segment, places in _by_segment(rows).items():
        path, first_seq = layout.index_path(folder, segment), segment * ROWS_PER_SEGMENT + 1
        if not (extends or disk.exists(path)):  # deleted meanwhile: finished
            continue
        content = bytearray()
        for _, there in read_raw_rows(disk, folder, first_seq, first_seq + ROWS_PER_SEGMENT - 1):
            content += there.tobytes()
        for place, row in places.items():
            begin = place * INDEX_ROW_LENGTH_BYTES
            if extends:
                content += HOLE_ROW * ((begin - len(content)) // INDEX_ROW_LENGTH_BYTES)
            if extends or begin < len(content):
                content[begin : begin + INDEX_ROW_LENGTH_BYTES] = row
        disk.replace_file(path, bytes(content), beside=layout.moving_path(folder))


def _rewrite(disk: Disk, folder: Path, rows: dict[int, bytes]) -> None:
    for segment, places in _by_segment(rows).items():
        path = layout.index_path(folder, segment)
        # One that was deleted meanwhile is finished.
        with suppress(FileNotFoundError), closing(disk.open(path)) as file:
            rows_there = file.size() // INDEX_ROW_LENGTH_BYTES
            for place, row in places.items():
                if place < rows_there:  # others were cut meanwhile
                    file.write_at((row,), place * INDEX_ROW_LENGTH_BYTES)
            file.sync_data()
