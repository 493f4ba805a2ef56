"""Holes in the index: finds them, and checks whether their frames still lie in slot files.

A hole may be of any second, so no second is known to be complete while there is one:

| the frame of a hole | is |
|---|---|
| lies intact in some slot file | found with its second, where it lies (unlisted.py) |
| lies nowhere | missing, possibly from any second that is read |

To find such frames, all slot files of the wheel are searched. That takes long; it is done once for
each hole, by the reader that needs to know. Files that could not be read are searched again.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.files.index import IndexReader, read_raw_rows
from delaywheel.storage.files.slot_table import UNIT_BYTES
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Disk, File
from delaywheel.storage.frames.format import MAGIC, FrameDamaged, decode_frame, index_row_of
from delaywheel.storage.frames.rows import checked_rows, is_hole
from delaywheel.storage.reading.walk import walk_headers

_PIECE_BYTES = 1024 * 1024


def find_holes(disk: Disk, folder: Path, first_seq: int, last_seq: int) -> SeqSet:
    """Returns the holes between two seqs, from the whole index."""
    holes = NO_SEQS
    for begin, rows in read_raw_rows(disk, folder, first_seq, last_seq):
        holes |= SeqSet.where(begin, is_hole(checked_rows(rows)))
    return holes


def still_holes(index: IndexReader, seqs: SeqSet) -> SeqSet:
    """Returns which of these seqs are still holes."""
    holes = NO_SEQS
    for first, last in seqs.spans:
        holes |= SeqSet.where(first, is_hole(index.rows(first, last)))
    return holes


def lying_in_files(
    disk: Disk, folder: Path, wheel: WheelId, seqs: SeqSet, slots: Iterable[int]
) -> tuple[SeqSet, list[int]]:
    """Returns which of these frames lie intact in the files of some slots, at any place.

    Also returns the slots whose files could not be read.
    """
    found: set[int] = set()
    unread: list[int] = []
    for slot in slots:
        try:
            found.update(rows_in_file(disk, folder, wheel, slot, seqs))
        except OSError:
            unread.append(slot)
        if len(found) == len(seqs):
            break
    return SeqSet.of(found), unread


def rows_in_file(
    disk: Disk, folder: Path, wheel: WheelId, slot: int, seqs: SeqSet
) -> dict[int, bytes]:
    """Returns the index rows of those of these frames that lie intact in one slot's file.

    Raises:
        OSError: The file cannot be read.
    """
    try:
        file = disk.open_read(layout.slot_path(folder, slot))
    except FileNotFoundError:
        return {}
    try:
        return dict(_rows_in(file, wheel, slot, seqs))
    finally:
        file.close()


def _rows_in(file: File, wheel: WheelId, slot: int, seqs: SeqSet) -> Iterator[tuple[int, bytes]]:
    """Walks from frame to frame; where none begins, tries the next possible place."""
    offset, size = 0, file.size()
    while offset < size:
        for begin, header in walk_headers(file, wheel, slot, offset, size):
            if header.seq in seqs:
                row = _row_at(file, wheel, slot, begin, header.length_bytes)
                if row is not None:
                    yield header.seq, row
            offset = begin + header.length_bytes
        offset = _next_magic(file, offset + UNIT_BYTES, size)


def _row_at(file: File, wheel: WheelId, slot: int, offset: int, length_bytes: int) -> bytes | None:
    """Returns the row of the frame that begins here; None if it is damaged."""
    content = file.read_at(length_bytes, offset)
    try:
        return index_row_of(decode_frame(content, wheel=wheel, slot=slot, seq=None), offset)
    except FrameDamaged:
        return None


def possible_frames(disk: Disk, folder: Path, slot: int, offset: int) -> list[int]:
    """Returns where frames may begin in a slot file behind an offset; nowhere if it fails."""
    found: list[int] = []
    try:
        file = disk.open_read(layout.slot_path(folder, slot))
    except OSError:
        return found
    try:
        size = file.size()
        at = _next_magic(file, offset + UNIT_BYTES, size)
        while at < size:
            found.append(at)
            at = _next_magic(file, at + UNIT_BYTES, size)
    except OSError:
        pass
    finally:
        file.close()
    return found


def _next_magic(file: File, offset: int, size: int) -> int:
    """Returns where the next frame may begin; the end if there is no such place."""
    while offset < size:
        piece = file.read_at(min(_PIECE_BYTES, size - offset), offset)
        at = piece.find(MAGIC)
        while at > 0 and at % UNIT_BYTES:
            at = piece.find(MAGIC, at + 1)
        if at >= 0:
            return offset + at
        offset += _PIECE_BYTES
    return offset
