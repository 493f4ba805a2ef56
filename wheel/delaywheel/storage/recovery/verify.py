"""Checks every frame of a data folder; reports what is wrong, and where.

It only reads. While a node is writing, bytes behind the last row of its open wheel may belong to a
group that is being written; everything else is checked as if nobody wrote. The index of one wheel
at a time is held in memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import NameInvalidError, WheelId
from delaywheel.storage.files.index import ROWS_PER_SEGMENT, list_segments, read_segments
from delaywheel.storage.files.slot_files import list_slots
from delaywheel.storage.files.wheel_folder import MetaDamaged, MetaTooNew, WheelMissing, load_meta
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Disk
from delaywheel.storage.folder.node_file import NodeFileDamaged, load_node_state
from delaywheel.storage.frames.rows import INDEX_ROW, INDEX_ROW_LENGTH_BYTES, Places, is_hole
from delaywheel.storage.reading.reader import DamagedFrame, read_frames
from delaywheel.storage.recovery.recover import file_size


class Problem(Enum):
    """The kinds of problems."""

    NODE_FILE = "node.json cannot be understood"
    STRAY_FOLDER = "a folder that is no wheel's"
    META = "meta.json is missing or cannot be understood"
    INDEX_TORN = "the index ends within a row"
    INDEX_SHORT = "a segment of the index is missing or too short"
    HOLE = "the place of a frame was lost in a crash of the machine"
    FRAME = "a frame cannot be read"
    OVERLAP = "frames lie over one another, or out of order"
    GAP = "bytes between frames that no row speaks of"
    TAIL = "bytes behind the last frame that no row speaks of"
    UNREFERENCED = "a slot file that no row speaks of"


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem that was found."""

    problem: Problem
    path: Path
    detail: str = ""
    wheel: WheelId | None = None
    slot: int | None = None
    seq: int | None = None
    offset: int | None = None

    def __str__(self) -> str:
        place = [
            f"{name} {value}"
            for name, value in (
                ("wheel", self.wheel),
                ("slot", self.slot),
                ("seq", self.seq),
                ("offset", self.offset),
            )
            if value is not None
        ]
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.path}: {', '.join([*place, self.problem.value])}{detail}"


def verify_folder(disk: Disk, data: Path, *, floor: int = 0) -> Iterator[Finding]:
    """Yields everything that is wrong in a folder, where files below the floor may be deleted."""
    try:
        load_node_state(disk, data)
    except NodeFileDamaged as error:
        yield Finding(Problem.NODE_FILE, data / "node.json", str(error))
    for name in disk.list_folder(layout.wheels_folder(data)):
        try:
            wheel = WheelId.parse(name)
        except NameInvalidError as error:
            path = layout.wheels_folder(data) / name
            yield Finding(Problem.STRAY_FOLDER, path, str(error))
            continue
        yield from verify_wheel(disk, data, wheel, floor=floor)


def verify_wheel(disk: Disk, data: Path, wheel: WheelId, *, floor: int = 0) -> Iterator[Finding]:
    """Yields everything that is wrong in one wheel."""
    folder = layout.wheel_folder(data, wheel)
    try:
        load_meta(disk, data, wheel)
    except (MetaDamaged, MetaTooNew, WheelMissing) as error:
        yield Finding(Problem.META, layout.meta_path(folder), str(error), wheel)
    yield from _verify_segments(disk, folder, wheel)
    seqs, rows = _all_rows(disk, folder)
    for seq in seqs[is_hole(rows)].tolist():
        yield Finding(Problem.HOLE, folder, wheel=wheel, seq=seq)
    has_frame = (rows["length"] > 0) & (rows["slot"] >= floor)
    seqs, rows = seqs[has_frame], rows[has_frame]
    order = np.lexsort((seqs, rows["slot"]))
    seqs, rows = seqs[order], rows[order]
    slots, firsts = np.unique(rows["slot"], return_index=True)
    edges = [*firsts.tolist(), len(rows)]
    for slot, (first, last) in zip(slots.tolist(), pairwise(edges), strict=True):
        places = seqs[first:last], rows[first:last]
        yield from _verify_slot(disk, folder, wheel, slot, places)
    for slot in sorted(set(list_slots(disk, folder, floor)) - set(slots.tolist())):
        path = layout.slot_path(folder, slot)
        yield Finding(Problem.UNREFERENCED, path, wheel=wheel, slot=slot)


def _verify_segments(disk: Disk, folder: Path, wheel: WheelId) -> Iterator[Finding]:
    """Checks segments: leading ones may be deleted, all others must be whole."""
    segments = list_segments(disk, folder)
    for segment in range(segments[0], segments[-1] + 1) if segments else ():
        path = layout.index_path(folder, segment)
        size = file_size(disk, path) or 0
        if segment < segments[-1] and size != ROWS_PER_SEGMENT * INDEX_ROW_LENGTH_BYTES:
            yield Finding(Problem.INDEX_SHORT, path, f"{size} bytes", wheel)
        elif size % INDEX_ROW_LENGTH_BYTES:
            yield Finding(Problem.INDEX_TORN, path, f"{size} bytes", wheel)


def _all_rows(disk: Disk, folder: Path) -> tuple[NDArray[np.int64], NDArray[Any]]:
    seqs = [np.empty(0, dtype=np.int64)]
    rows = [np.empty(0, dtype=INDEX_ROW)]
    for first_seq, part in read_segments(disk, folder):
        seqs.append(np.arange(first_seq, first_seq + len(part)))
        rows.append(part)
    return np.concatenate(seqs), np.concatenate(rows)


def _verify_slot(
    disk: Disk, folder: Path, wheel: WheelId, slot: int, places: Places
) -> Iterator[Finding]:
    path = layout.slot_path(folder, slot)
    seqs, rows = places
    end = 0
    frames = read_frames(disk, folder, wheel, slot, places)
    offsets, lengths = rows["offset"].tolist(), rows["length"].tolist()
    for frame, seq, offset, length in zip(frames, seqs.tolist(), offsets, lengths, strict=True):
        if isinstance(frame, DamagedFrame):
            yield Finding(Problem.FRAME, path, frame.detail, wheel, slot, seq, offset)
        if offset != end:
            problem = Problem.OVERLAP if offset < end else Problem.GAP
            yield Finding(problem, path, f"{end} was expected", wheel, slot, seq, offset)
        end = max(end, offset + length)
    size = file_size(disk, path) or 0
    if size > end:
        yield Finding(Problem.TAIL, path, f"{size - end} bytes", wheel, slot, offset=end)
