"""Rebuilds index rows from frames after the machine has crashed.

Any write that no checkpoint covers may be lost. So every slot file is checked for being longer than
the frames up to the checkpoint; what lies beyond is read, frame by frame.
"""

import errno
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.seqset import SeqSet
from delaywheel.storage.files.index import ROWS_PER_SEGMENT, read_raw_rows
from delaywheel.storage.files.slot_table import UNIT_BYTES, TableHead, load_head, read_entries
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Disk, File
from delaywheel.storage.folder.steps import Steps
from delaywheel.storage.frames.format import (
    HEADER_LENGTH_BYTES,
    DamageReason,
    Frame,
    FrameDamaged,
    decode_frame,
    decode_header,
    index_row_of,
)
from delaywheel.storage.frames.rows import HOLE_ROW, INDEX_ROW, INDEX_ROW_LENGTH_BYTES, checked_rows
from delaywheel.storage.reading.places import finding_rows
from delaywheel.storage.writing.cutting import end_index, last_seq_of, raise_ends

HourSizes = tuple[int, list[tuple[int, int]]]
"""An hour since 1970, and slots of it with the lengths of their files."""


def longer_files(
    disk: Disk, folder: Path, sizes: Iterable[HourSizes], safe_seq: int
) -> Steps[dict[int, int]]:
    """Yields slots whose files hold more than the frames up to a seq, and where those end.

    Args:
        disk: Where the files lie.
        folder: The wheel's folder.
        sizes: Slots and the lengths of their files, hour by hour.
        safe_seq: Frames up to this are on the medium.
    """
    head = load_head(disk, folder)
    if head.seq > safe_seq:  # the index has lost what the table counts
        disk.delete(layout.table_head_path(folder))
        yield
        disk.sync_folder(layout.table_folder(folder))
        head = TableHead()
    behind: dict[int, int] = {}
    for _, rows in read_raw_rows(disk, folder, head.seq + 1, safe_seq):
        raise_ends(behind, checked_rows(rows))
        yield
    longer: dict[int, int] = {}
    unsure: list[int] = []
    for hour, sizes_of_hour in sizes:
        ends, damaged = _table_ends(disk, folder, head, hour)
        for slot, size in sizes_of_hour:
            second = slot - hour * layout.SECONDS_PER_HOUR
            end = max(ends[second], behind.get(slot, 0))
            if damaged[second] or slot in head.stale:
                unsure.append(slot)
            elif size > end or end == 0:
                longer[slot] = end
        yield
    if unsure:
        ends_of: dict[int, int] = dict.fromkeys(unsure, 0)
        _, rows_of_unsure = yield from finding_rows(disk, folder, np.array(unsure), safe_seq)
        raise_ends(ends_of, rows_of_unsure)
        longer.update(ends_of)
    return longer


def rebuild_rows(
    disk: Disk,
    folder: Path,
    wheel: WheelId,
    floor: int,
    longer: dict[int, int],
    *,
    safe_seq: int,
    end_seq: int,
) -> Steps[SeqSet]:
    """Rebuilds all rows after the checkpoint from frames; returns the damaged seqs.

    The rows go at least up to ``end_seq``.
    """
    indexed: dict[int, bytes] = {}
    last_row = last_seq_of(disk, folder)
    yield
    for first_seq, raw in read_raw_rows(disk, folder, safe_seq + 1, last_row):
        rows = checked_rows(raw)
        numbers = np.flatnonzero(rows["length"] > 0).tolist()
        indexed.update((first_seq + number, rows[number].tobytes()) for number in numbers)
        yield
    found = yield from _frames_behind(disk, folder, wheel, longer, indexed)
    last_seq = max([safe_seq, end_seq, *found, *indexed])
    rows = np.full(last_seq - safe_seq, np.frombuffer(HOLE_ROW, INDEX_ROW)[0])
    for by_seq in (indexed, found):
        behind = [seq for seq in by_seq if seq > safe_seq]
        written = b"".join([by_seq[seq] for seq in behind])
        rows[np.array(behind, np.int64) - safe_seq - 1] = np.frombuffer(written, INDEX_ROW)
    yield from _write_rows(disk, folder, safe_seq, rows)
    is_finished = (rows["slot"] > 0) & (rows["slot"] < floor)
    return SeqSet.where(safe_seq + 1, ~is_finished) - SeqSet.of(found)


def _frames_behind(
    disk: Disk, folder: Path, wheel: WheelId, longer: dict[int, int], indexed: dict[int, bytes]
) -> Steps[dict[int, bytes]]:
    """Returns rows of whole frames beyond the safe ends of their slot files, by seq.

    After a damaged frame, the walk continues where, according to a row, the next frame begins or
    one ends.
    """
    indexed_offsets: dict[int, set[int]] = {}
    for row in indexed.values():
        slot, offset, length_bytes, _ = np.frombuffer(row, INDEX_ROW)[0].item()
        indexed_offsets.setdefault(slot, set()).update((offset, offset + length_bytes))
    found: dict[int, bytes] = {}
    for slot, begin in longer.items():
        file = disk.open_read(layout.slot_path(folder, slot))
        try:
            resume_at = sorted(indexed_offsets.get(slot, ()))
            for offset, frame in _walk(file, wheel, slot, (begin, file.size()), resume_at):
                found[frame.seq] = index_row_of(frame, offset)
        finally:
            file.close()
        yield
    return found


def _table_ends(
    disk: Disk, folder: Path, head: TableHead, hour: int
) -> tuple[list[int], list[bool]]:
    """Returns where the slots of an hour end by the table, and which entries are damaged."""
    if hour not in head.hours:
        return [0] * layout.SECONDS_PER_HOUR, [False] * layout.SECONDS_PER_HOUR
    entries, damaged = read_entries(disk, folder, hour)
    ends = entries["end"].astype(np.int64) * UNIT_BYTES
    # An entry that counted frames beyond the head says where those end.
    return ends.tolist(), (damaged | (entries["last_seq"] > head.seq)).tolist()


def _walk(
    file: File, wheel: WheelId, slot: int, part: tuple[int, int], resume_at: list[int]
) -> Iterator[tuple[int, Frame]]:
    """Yields the whole frames in a part of a slot file, with their offsets."""
    offset, end = part
    while offset < end:
        try:
            frame = _read_frame(file, wheel, slot, offset, end)
        except FrameDamaged:
            offset = next((place for place in resume_at if place > offset), end)
            continue
        yield offset, frame
        offset += frame.length_bytes


def _read_frame(file: File, wheel: WheelId, slot: int, offset: int, end: int) -> Frame:
    try:
        header = file.read_at(HEADER_LENGTH_BYTES, offset)
        length = decode_header(header, available_bytes=end - offset).length_bytes
        return decode_frame(file.read_at(length, offset), wheel=wheel, slot=slot, seq=None)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise FrameDamaged(DamageReason.UNREADABLE, str(error)) from error


def _write_rows(disk: Disk, folder: Path, safe_seq: int, rows: NDArray[Any]) -> Steps[None]:
    """Writes the rows after the checkpoint, and ends the index with the last one."""
    at = safe_seq
    while len(rows):
        segment, row = divmod(at, ROWS_PER_SEGMENT)
        part, rows = rows[: ROWS_PER_SEGMENT - row], rows[ROWS_PER_SEGMENT - row :]
        file = disk.open(layout.index_path(folder, segment), create=True)
        try:
            file.write_at((part.tobytes(),), row * INDEX_ROW_LENGTH_BYTES)
            yield
            file.sync_data()
        finally:
            file.close()
        at += len(part)
        yield
    yield from end_index(disk, folder, at)
