"""Rebuilds index rows from frames after the machine has crashed.

Any write that no checkpoint covers may be lost. So every slot file is checked for being longer than
the frames up to the checkpoint; what lies beyond is read, frame by frame.
"""

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import numpy as np

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.files.index import last_seq_of, read_raw_rows
from delaywheel.storage.files.slot_table import UNIT_BYTES, TableHead, load_head, read_entries
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Disk, is_medium_error
from delaywheel.storage.folder.steps import Steps
from delaywheel.storage.frames.format import FrameDamaged, index_row_of
from delaywheel.storage.frames.rows import checked_rows, is_gone, is_hole
from delaywheel.storage.reading.places import finding_rows
from delaywheel.storage.reading.unlisted import frame_at, next_magic
from delaywheel.storage.recovery.found_rows import FoundRows, whole_segments
from delaywheel.storage.writing.cutting import end_index, raise_ends

HourSizes = tuple[int, list[tuple[int, int]]]
"""An hour since 1970, and slots of it with the lengths of their files."""


def longer_files(
    disk: Disk, folder: Path, sizes: Iterable[HourSizes], safe_seq: int
) -> Steps[dict[int, int]]:
    """Yields slots whose files hold more than the frames up to a seq, and where those end."""
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
        ends = np.zeros(layout.SECONDS_PER_HOUR, np.int64)
        damaged = np.zeros(layout.SECONDS_PER_HOUR, np.bool_)
        if hour in head.hours:
            entries, damaged = read_entries(disk, folder, head, hour)
            ends = entries["end"].astype(np.int64) * UNIT_BYTES
            # An entry that counted frames beyond the head says where those end.
            damaged |= entries["last_seq"] > head.seq
        for slot, size in sizes_of_hour:
            second = slot - hour * layout.SECONDS_PER_HOUR
            end = max(int(ends[second]), behind.get(slot, 0))
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
    must_read: bool,
) -> Steps[SeqSet]:
    """Rebuilds all rows after the checkpoint from frames; returns the damaged seqs.

    The rows go at least up to ``end_seq``. Memory is bounded, but for one byte a row. With
    ``must_read``, raises OSError if the medium does not return a file that may hold later frames.
    """
    found = FoundRows(disk, folder, safe_seq)
    for slot, begin in longer.items():
        _gather(disk, folder, wheel, (slot, begin), found, must_read=must_read)
        if found.is_full:
            yield from found.put()
        yield
    last_row = last_seq_of(disk, folder)
    yield
    yield from found.put()
    last_seq = max(safe_seq, end_seq, found.last_seq)
    for first_seq, raw in read_raw_rows(disk, folder, safe_seq + 1, last_row):
        numbers = np.flatnonzero(~is_hole(checked_rows(raw)))
        last_seq = max(last_seq, first_seq + int(numbers[-1]) if len(numbers) else 0)
        yield
    yield from whole_segments(disk, folder, safe_seq + 1, last_seq)
    yield from end_index(disk, folder, last_seq)
    damaged = NO_SEQS
    for first_seq, raw in read_raw_rows(disk, folder, safe_seq + 1, last_seq):
        rows = checked_rows(raw)
        is_finished = is_gone(rows) | ((rows["slot"] > 0) & (rows["slot"] < floor))
        is_whole = is_finished | (found.marks(first_seq, len(rows)) & ~is_hole(rows))
        damaged |= SeqSet.where(first_seq, ~is_whole)
        yield
    return damaged


def _gather(
    disk: Disk,
    folder: Path,
    wheel: WheelId,
    place: tuple[int, int],
    found: FoundRows,
    *,
    must_read: bool,
) -> None:
    """Gathers the rows of a slot's whole frames behind a place of its file.

    Behind a damaged frame the walk goes on wherever another one may begin.
    """
    slot, offset = place
    try:
        file = disk.open_read(layout.slot_path(folder, slot))
    except OSError as error:
        is_medium = is_medium_error(error)
        if (must_read and is_medium) or not (is_medium or isinstance(error, FileNotFoundError)):
            raise
        return  # its frames are those that their rows speak of
    with closing(file):
        end = file.size()
        while offset < end:
            try:
                frame = frame_at(file, wheel, slot, offset, end)
            except (FrameDamaged, OSError) as error:
                if isinstance(error, OSError) and (must_read or not is_medium_error(error)):
                    raise
                offset = next_magic(file, offset + UNIT_BYTES, must_read=must_read)
                continue
            found.add(frame.seq, index_row_of(frame, offset))
            offset += frame.length_bytes
