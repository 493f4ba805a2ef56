"""What a wheel holds after its writer ended, however it ended.

What can have happened, and what is done about it:

===============================  ======================  =====================================
found                            can come from           done
===============================  ======================  =====================================
bytes behind a slot's last row   death before the rows   cut: they were never acknowledged
a slot file without any row      death before the rows   deleted, as above
a torn row at the index's end    death within the rows   cut, as above
a frame without its row          crash of the machine    the row is written again
a row without its frame          crash of the machine,   kept and reported: the frame may have
                                 a bad medium            been acknowledged
neither, but later frames        crash of the machine    a hole row, reported, as above
neither, up to the committed     crash of the machine    the same, if no other member can have
end                                                      them
frames beyond the committed end  crash within the cut    cut, with their rows
a frame noted as lacking         what was found, or      read again, and reported until it is
                                 lost, before            mended
===============================  ======================  =====================================

The death of a process leaves all that it wrote, in its order: rows and frames agree, and only
tails are cut. A crash of the machine can lose any write that no checkpoint covers, so all that
came later is read again, frame by frame. Running it twice, or being stopped within it, does no
harm: bytes of whole frames are never touched, and rows are derived from them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from delaywheel import layout
from delaywheel.disk import Disk, File
from delaywheel.format import (
    HEADER_LENGTH_BYTES,
    HOLE_ROW,
    INDEX_ROW,
    INDEX_ROW_LENGTH_BYTES,
    DamageReason,
    Frame,
    FrameDamaged,
    decode_frame,
    decode_header,
    index_row_of,
)
from delaywheel.identity import WheelId
from delaywheel.index import ROWS_PER_SEGMENT, IndexReader, list_segments, read_segments
from delaywheel.reader import DamagedFrame, WheelReader
from delaywheel.slotfiles import list_slots
from delaywheel.wheel import Checkpoint, load_checkpoint, load_meta, save_checkpoint


class Cut(NamedTuple):
    """Bytes that no row speaks of and that were cut off."""

    path: Path
    offset: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a wheel holds."""

    last_seq: int  # the last frame that counts
    cut: list[Cut]
    damaged: list[int]  # seqs up to last_seq that cannot be read from this disk


def recover_wheel(
    disk: Disk, data: Path, wheel: WheelId, *, os_crashed: bool, floor: int = 0
) -> Recovered:
    """Makes index and slot files of a wheel agree. Nobody may be writing it.

    Args:
        disk: where the data folder lies.
        data: the data folder.
        wheel: which one.
        os_crashed: the machine started anew since the wheel was written.
        floor: slots below are finished; that their files are deleted is no damage.

    Raises:
        WheelMissing: there is no such wheel.
    """
    meta = load_meta(disk, data, wheel)
    folder = layout.wheel_folder(data, wheel)
    cut = _cut_torn_row(disk, folder)
    checkpoint = load_checkpoint(disk, folder)
    if os_crashed:
        # A mirror's missing end is fetched; that of a wheel held here alone is lost.
        end_seq = (meta.final_seq or 0) if len(meta.members) == 1 else 0
        safe_seq = min(checkpoint.seq, _last_seq(disk, folder))
        damaged = _rebuild_rows(disk, folder, wheel, floor, safe_seq=safe_seq, end_seq=end_seq)
    else:
        damaged = _damaged_at_the_end(disk, data, wheel)
    if meta.final_seq is not None:
        cut_beyond(disk, folder, meta.final_seq)
    cut += _cut_tails(disk, folder, floor)
    last_seq = _last_seq(disk, folder)
    noted = _still_damaged(disk, data, wheel, checkpoint.lacking, floor)
    found = {*damaged, *noted, *_holes(disk, folder)}
    lacking = sorted(seq for seq in found if seq <= last_seq)
    if os_crashed:
        save_checkpoint(disk, folder, Checkpoint(last_seq, tuple(lacking)))
    return Recovered(last_seq, cut, lacking)


def cut_beyond(
    disk: Disk, folder: Path, final_seq: int, between: Callable[[], object] = lambda: None
) -> None:
    """Cuts all frames with a greater seq, durably. Nobody may be writing.

    Their rows go last, so that it can be repeated when it was stopped within. ``between`` is called
    after each file.
    """
    ends: dict[int, int] = {}
    beyond = [np.empty(0, dtype=INDEX_ROW)]
    for first_seq, rows in read_segments(disk, folder):
        kept = max(0, final_seq - first_seq + 1)
        _raise_ends(ends, rows[:kept])
        beyond.append(rows[kept:])
    removed = np.concatenate(beyond)
    if len(removed):
        for slot in np.unique(removed["slot"][removed["length"] > 0]).tolist():
            path = layout.slot_path(folder, slot)
            if disk.exists(path):
                _cut_slot(disk, path, ends.get(slot, 0))
                between()
        _end_index(disk, folder, final_seq)


def _last_seq(disk: Disk, folder: Path) -> int:
    reader = IndexReader(disk, folder)
    try:
        return reader.last_seq()
    finally:
        reader.close()


def _holes(disk: Disk, folder: Path) -> Iterator[int]:
    hole = _row_of(HOLE_ROW)
    for first_seq, rows in read_segments(disk, folder):
        yield from (first_seq + np.flatnonzero(rows == hole)).tolist()


def _still_damaged(
    disk: Disk, data: Path, wheel: WheelId, seqs: Sequence[int], floor: int
) -> list[int]:
    """Those of these seqs that still cannot be read and are not finished."""
    reader = WheelReader(disk, data, wheel)
    try:
        frames = [_read(reader, seq) for seq in seqs if reader.has(seq)]
    finally:
        reader.close()
    return [
        frame.seq
        for frame in frames
        if isinstance(frame, DamagedFrame)
        and (frame.reason is DamageReason.HOLE or frame.slot >= max(floor, 1))
    ]


def _read(reader: WheelReader, seq: int) -> Frame | DamagedFrame:
    """A frame. What fails once may well be read: nobody looks again where no other node has it."""
    found = reader.frame(seq)
    if isinstance(found, DamagedFrame) and found.reason is DamageReason.UNREADABLE:
        return reader.frame(seq)
    return found


def _cut_torn_row(disk: Disk, folder: Path) -> list[Cut]:
    cut = []
    for segment in list_segments(disk, folder)[-1:]:
        path = layout.index_path(folder, segment)
        file = disk.open(path)
        try:
            size = file.size()
            torn = size % INDEX_ROW_LENGTH_BYTES
            if torn:
                file.truncate(size - torn)
                file.sync_data()
                cut.append(Cut(path, size - torn, torn))
        finally:
            file.close()
    return cut


def _damaged_at_the_end(disk: Disk, data: Path, wheel: WheelId) -> list[int]:
    """Reads frames from the last one backwards until one is good, or was deleted."""
    reader = WheelReader(disk, data, wheel)
    damaged = []
    for seq in range(reader.last_seq(), 0, -1):
        frame = _read(reader, seq)
        if isinstance(frame, Frame) or frame.reason is DamageReason.GONE:
            break
        damaged.append(seq)
    reader.close()
    return damaged[::-1]


def _cut_tails(disk: Disk, folder: Path, floor: int) -> list[Cut]:
    """Cuts every slot file behind the last frame that has a row.

    Durably, so that a later crash of the machine does not bring them back. Should it do so after
    a death in between, they are what they were: never acknowledged, and beyond any committed T.
    """
    ends: dict[int, int] = {}
    for _, rows in read_segments(disk, folder):
        _raise_ends(ends, rows)
    cut = []
    for slot in list_slots(disk, folder, floor):
        path = layout.slot_path(folder, slot)
        end = ends.get(slot, 0)
        length = _cut_slot(disk, path, end)
        if length:
            cut.append(Cut(path, end, length))
    return cut


def _cut_slot(disk: Disk, path: Path, end: int) -> int:
    """Ends a slot file, durably; without anything left it is deleted. How much was cut."""
    file = disk.open(path)
    try:
        size = file.size()
        if size > end > 0:
            file.truncate(end)
            file.sync_data()
    finally:
        file.close()
    if end == 0:
        disk.delete(path)
        disk.sync_folder(path.parent)
    return max(0, size - end)


def _raise_ends(ends: dict[int, int], rows: NDArray[Any]) -> None:
    """Notes where the last frame of each slot ends."""
    rows = rows[rows["length"] > 0]
    frame_ends = rows["offset"].astype(np.int64) + rows["length"]
    slots, places = np.unique(rows["slot"], return_inverse=True)
    greatest = np.zeros(len(slots), dtype=np.int64)
    np.maximum.at(greatest, places, frame_ends)
    for slot, end in zip(slots.tolist(), greatest.tolist(), strict=True):
        ends[slot] = max(ends.get(slot, 0), end)


# --- after a crash of the machine


def _rebuild_rows(
    disk: Disk, folder: Path, wheel: WheelId, floor: int, *, safe_seq: int, end_seq: int
) -> list[int]:
    """Derives all rows behind the checkpoint from the frames; returns the damaged seqs.

    The rows go at least up to ``end_seq``.
    """
    safe_ends: dict[int, int] = {}
    told: dict[int, bytes] = {}
    for first_seq, rows in read_segments(disk, folder):
        safe = max(0, safe_seq - first_seq + 1)
        _raise_ends(safe_ends, rows[:safe])
        told.update(
            (seq, row.tobytes())
            for seq, row in enumerate(rows[safe:], first_seq + safe)
            if int(row["length"]) > 0
        )
    found = _frames_behind(disk, folder, wheel, safe_ends, told)
    last_seq = max([safe_seq, end_seq, *found, *told])
    rows_by_seq = {
        seq: found.get(seq) or told.get(seq) or HOLE_ROW
        for seq in range(safe_seq + 1, last_seq + 1)
    }
    _write_rows(disk, folder, safe_seq, rows_by_seq)
    lost = (seq for seq in rows_by_seq if seq not in found)
    return [seq for seq in lost if not 0 < _row_of(rows_by_seq[seq])["slot"] < floor]


def _frames_behind(
    disk: Disk, folder: Path, wheel: WheelId, safe_ends: dict[int, int], told: dict[int, bytes]
) -> dict[int, bytes]:
    """Rows of all whole frames that lie behind the safe end of their slot file, by seq.

    Where a frame is damaged, the walk goes on at the next place that a row speaks of.
    """
    told_offsets: dict[int, list[int]] = {}
    for row in map(_row_of, told.values()):
        told_offsets.setdefault(int(row["slot"]), []).append(int(row["offset"]))
    found: dict[int, bytes] = {}
    for slot in list_slots(disk, folder):
        file = disk.open_read(layout.slot_path(folder, slot))
        try:
            begin, size = safe_ends.get(slot, 0), file.size()
            if begin < size:
                resume_at = sorted(told_offsets.get(slot, []))
                for offset, frame in _walk(file, wheel, slot, (begin, size), resume_at):
                    found[frame.seq] = index_row_of(frame, offset)
        finally:
            file.close()
    return found


def _walk(
    file: File, wheel: WheelId, slot: int, part: tuple[int, int], resume_at: list[int]
) -> Iterator[tuple[int, Frame]]:
    """The whole frames in a part of a slot file, with their offsets."""
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
    header = file.read_at(HEADER_LENGTH_BYTES, offset)
    length = decode_header(header, available_bytes=end - offset).length_bytes
    return decode_frame(file.read_at(length, offset), wheel=wheel, slot=slot, seq=None)


def _write_rows(disk: Disk, folder: Path, safe_seq: int, rows_by_seq: dict[int, bytes]) -> None:
    """Puts the rows behind the checkpoint in place, and ends the index with the last."""
    rows = list(rows_by_seq.values())
    at = safe_seq
    while rows:
        segment, row = divmod(at, ROWS_PER_SEGMENT)
        part, rows = rows[: ROWS_PER_SEGMENT - row], rows[ROWS_PER_SEGMENT - row :]
        file = disk.open(layout.index_path(folder, segment), create=True)
        try:
            file.write_at((b"".join(part),), row * INDEX_ROW_LENGTH_BYTES)
            file.sync_data()
        finally:
            file.close()
        at += len(part)
    _end_index(disk, folder, at)


def _end_index(disk: Disk, folder: Path, last_seq: int) -> None:
    """Cuts all rows behind a seq, durably, from the end on."""
    segments = list_segments(disk, folder)
    for segment in reversed(segments):
        path = layout.index_path(folder, segment)
        kept = max(0, last_seq - segment * ROWS_PER_SEGMENT)
        if kept == 0 and segment > segments[0]:
            disk.delete(path)
        elif kept < ROWS_PER_SEGMENT:
            _end_segment(disk, path, kept * INDEX_ROW_LENGTH_BYTES)
    disk.sync_folder(folder)


def _end_segment(disk: Disk, path: Path, length_bytes: int) -> None:
    file = disk.open(path)
    try:
        if file.size() > length_bytes:
            file.truncate(length_bytes)
            file.sync_data()
    finally:
        file.close()


def _row_of(row: bytes) -> NDArray[Any]:
    return np.frombuffer(row, dtype=INDEX_ROW)[0]  # type: ignore[no-any-return]  # numpy's stubs
