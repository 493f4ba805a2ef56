"""Cuts a wheel: frames after a seq, the end of a slot file, the end of the index.

Everything in pieces, each no longer than it takes to open or sync one file. The wheel must have no
writer meanwhile.
"""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delaywheel.storage.files.index import (
    ROWS_PER_SEGMENT,
    last_seq_of,
    list_segments,
    read_raw_rows,
    top_slot_of,
)
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Disk, is_medium_error
from delaywheel.storage.folder.steps import Steps
from delaywheel.storage.frames.rows import INDEX_ROW, INDEX_ROW_LENGTH_BYTES, checked_rows
from delaywheel.storage.reading.places import finding_rows
from delaywheel.storage.writing.table_writer import SlotTable


def cut_beyond(disk: Disk, folder: Path, final_seq: int, table: SlotTable) -> Steps[None]:
    """Cuts all frames with greater seqs, durably.

    Rows are cut last, so that the work can be repeated after an interruption.
    """
    last_seq = last_seq_of(disk, folder)
    if last_seq <= final_seq:
        return
    behind = [np.empty(0, INDEX_ROW)]
    for _, part in read_raw_rows(disk, folder, final_seq + 1, last_seq):
        behind.append(part)
        yield
    rows = checked_rows(np.concatenate(behind))
    slots = np.unique(rows["slot"][rows["length"] > 0]).astype(np.int64)
    top_slot = table.head.top_slot
    if len(slots) and slots[-1] >= top_slot:
        top_slot = -1
        for _, kept in read_raw_rows(disk, folder, 1, final_seq):
            top_slot = top_slot_of(kept, top_slot)
            yield
    table.cut(final_seq, slots.tolist(), top_slot)
    yield
    ends: dict[int, int] = {}
    raise_ends(ends, (yield from finding_rows(disk, folder, slots, final_seq))[1])
    for slot in slots.tolist():
        path = layout.slot_path(folder, slot)
        if disk.exists(path):
            yield from cut_slot(disk, path, ends.get(slot, 0))
            yield
    yield from end_index(disk, folder, final_seq)


def cut_slot(disk: Disk, path: Path, end: int) -> Steps[int]:
    """Cuts a slot file durably; deletes it if nothing is left. Returns how much was cut.

    A file that cannot be opened is left as it is, since no row will refer to what lies behind.
    """
    try:
        file = disk.open(path)
    except OSError as error:
        if not is_medium_error(error):
            raise
        return 0
    with closing(file):
        size = file.size()
        if size > end > 0:
            file.truncate(end)
            yield
            file.sync_data()
    if end == 0:
        disk.delete(path)
        yield
        disk.sync_folder(path.parent)
    return max(0, size - end)


def end_index(disk: Disk, folder: Path, last_seq: int) -> Steps[None]:
    """Cuts all rows after a seq durably, from the end backwards."""
    segments = list_segments(disk, folder)
    for segment in reversed(segments):
        path = layout.index_path(folder, segment)
        kept = max(0, last_seq - segment * ROWS_PER_SEGMENT)
        if kept == 0 and segment > segments[0]:
            disk.delete(path)
            yield
        elif kept < ROWS_PER_SEGMENT:
            with closing(disk.open(path)) as file:
                if file.size() > kept * INDEX_ROW_LENGTH_BYTES:
                    file.truncate(kept * INDEX_ROW_LENGTH_BYTES)
                    yield
                    file.sync_data()
    disk.sync_folder(folder)


def raise_ends(ends: dict[int, int], rows: NDArray[Any]) -> None:
    """Raises the ends of slots to those of these frames."""
    rows = rows[rows["length"] > 0]
    frame_ends = rows["offset"].astype(np.int64) + rows["length"]
    slots, places = np.unique(rows["slot"], return_inverse=True)
    greatest = np.zeros(len(slots), dtype=np.int64)
    np.maximum.at(greatest, places, frame_ends)
    for slot, end in zip(slots.tolist(), greatest.tolist(), strict=True):
        ends[slot] = max(ends.get(slot, 0), end)
