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
tails are cut, of those slots to which the last group went: they were announced. A crash of the
machine can lose any write that no checkpoint covers, so all that came later is read again, frame
by frame, and every slot file is looked at whether it is longer than it should be. Running it
twice, or being stopped within it, does no harm: bytes of whole frames are never touched, and rows
are derived from them.

Where the frames of a slot end, the slot table says (slottable.py), so that nobody reads the whole
index. Bytes are cut on its word only where a frame begins that came later than every row; where
anything else lies, the index is asked.
"""

import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from delaywheel import layout
from delaywheel.disk import Disk, File
from delaywheel.format import (
    HEADER_LENGTH_BYTES,
    DamageReason,
    Frame,
    FrameDamaged,
    decode_frame,
    decode_header,
    index_row_of,
)
from delaywheel.identity import WheelId
from delaywheel.index import (
    ROWS_PER_SEGMENT,
    IndexReader,
    list_segments,
    read_raw_rows,
    top_slot_of,
)
from delaywheel.places import Places, SlotPlaces, rows_of_slots
from delaywheel.reader import DamagedFrame, WheelReader
from delaywheel.rows import HOLE_ROW, INDEX_ROW, INDEX_ROW_LENGTH_BYTES, checked_rows
from delaywheel.slotfiles import announced_slots, forget_announced, slot_sizes
from delaywheel.slottable import UNIT_BYTES, TableHead, load_head, read_entries
from delaywheel.tablewriter import SlotTable
from delaywheel.unlisted import with_unlisted
from delaywheel.walk import walk_headers
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
        longer = _longer_files(disk, folder, slot_sizes(disk, folder), safe_seq)
        damaged = _rebuild_rows(
            disk, folder, wheel, floor, longer, safe_seq=safe_seq, end_seq=end_seq
        )
        slots = list(longer)
    else:
        damaged = _damaged_at_the_end(disk, data, wheel)
        sizes = _announced_sizes(disk, folder, floor)
        slots = list(_longer_files(disk, folder, sizes, _last_seq(disk, folder)))
    if meta.final_seq is not None:
        cut_beyond(disk, folder, meta.final_seq, SlotTable(disk, folder))
    last_seq = _last_seq(disk, folder)
    cut += _cut_tails(disk, folder, wheel, [slot for slot in slots if slot >= floor], last_seq)
    noted = _still_damaged(disk, data, wheel, checkpoint.lacking, floor)
    found = {*damaged, *noted, *_holes(disk, folder, checkpoint.seq, last_seq)}
    lacking = sorted(seq for seq in found if seq <= last_seq)
    if os_crashed:
        save_checkpoint(disk, folder, Checkpoint(last_seq, tuple(lacking)))
    forget_announced(disk, folder)
    return Recovered(last_seq, cut, lacking)


def cut_beyond(
    disk: Disk,
    folder: Path,
    final_seq: int,
    table: SlotTable,
    between: Callable[[], object] = lambda: None,
) -> None:
    """Cuts all frames with a greater seq, durably. Nobody may be writing.

    Their rows go last, so that it can be repeated when it was stopped within. ``between`` is called
    after each file.
    """
    last_seq = _last_seq(disk, folder)
    if last_seq <= final_seq:
        return
    behind = [rows for _, rows in read_raw_rows(disk, folder, final_seq + 1, last_seq)]
    rows = checked_rows(np.concatenate(behind or [np.empty(0, INDEX_ROW)]))
    slots = np.unique(rows["slot"][rows["length"] > 0]).astype(np.int64)
    top_slot = table.head.top_slot
    if len(slots) and slots[-1] >= top_slot:
        top_slot = -1
        for _, kept in read_raw_rows(disk, folder, 1, final_seq):
            top_slot = top_slot_of(kept, top_slot)
    table.cut(final_seq, slots.tolist(), top_slot)
    between()
    ends: dict[int, int] = {}
    _raise_ends(ends, rows_of_slots(disk, folder, slots, final_seq)[1])
    for slot in slots.tolist():
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


def _holes(disk: Disk, folder: Path, safe_seq: int, last_seq: int) -> Iterator[int]:
    """Those behind the checkpoint, which notes those before it."""
    hole = _row_of(HOLE_ROW)
    for first_seq, rows in read_raw_rows(disk, folder, safe_seq + 1, last_seq):
        yield from (first_seq + np.flatnonzero(checked_rows(rows) == hole)).tolist()


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


def _cut_tails(
    disk: Disk, folder: Path, wheel: WheelId, slots: Sequence[int], last_seq: int
) -> list[Cut]:
    """Cuts slot files behind the last frame that has a row.

    Durably, so that a later crash of the machine does not bring them back. Should it do so after
    a death in between, they are what they were: never acknowledged, and beyond any committed T.

    While the index has holes, what cannot be told to be later stays: it may be what they lost.
    """
    ends: dict[int, int] = {}
    unsure: list[int] = []
    reader = IndexReader(disk, folder)
    places = SlotPlaces(disk, folder, wheel, reader)
    for slot in slots:
        size = _size(disk, layout.slot_path(folder, slot))
        if size is None:
            continue
        found = places.quick(slot, last_seq)
        end = 0 if found is None else _end_of(found[1])
        if found is not None and (
            size == end or _begins_later(disk, folder, wheel, (slot, end), last_seq)
        ):
            ends[slot] = end
        else:
            unsure.append(slot)
    reader.close()
    if unsure and not _has_holes(disk, folder, last_seq):
        ends.update(_ends_by_index(disk, folder, wheel, unsure, last_seq))
    cut = []
    for slot, end in ends.items():
        path = layout.slot_path(folder, slot)
        length = _cut_slot(disk, path, end)
        if length:
            cut.append(Cut(path, end, length))
    return cut


def _has_holes(disk: Disk, folder: Path, last_seq: int) -> bool:
    return next(_holes(disk, folder, 0, last_seq), None) is not None


def _begins_later(
    disk: Disk, folder: Path, wheel: WheelId, place: tuple[int, int], last_seq: int
) -> bool:
    """Whether a frame begins at a place of a slot's file that came later than every row."""
    slot, offset = place
    try:
        file = disk.open_read(layout.slot_path(folder, slot))
        try:
            for _, header in walk_headers(file, wheel, slot, offset, file.size()):
                return header.seq > last_seq
        finally:
            file.close()
    except OSError as error:
        if error.errno != errno.EIO:
            raise
    return False


def _ends_by_index(
    disk: Disk, folder: Path, wheel: WheelId, slots: Sequence[int], last_seq: int
) -> dict[int, int]:
    """Where slots end by the index, and by what frames say of themselves whose rows it lost."""
    seqs, rows = rows_of_slots(disk, folder, np.array(slots), last_seq)
    ends = {}
    for slot in slots:
        of_slot = rows["slot"] == slot
        listed: Places = (seqs[of_slot], rows[of_slot])
        path = layout.slot_path(folder, slot)
        ends[slot] = _end_of(with_unlisted(disk, path, wheel, slot, listed, last_seq)[1])
    return ends


def _end_of(rows: NDArray[Any]) -> int:
    return int((rows["offset"].astype(np.int64) + rows["length"]).max(initial=0))


def _size(disk: Disk, path: Path) -> int | None:
    """The length of a file; None: it is not there."""
    try:
        file = disk.open_read(path)
    except FileNotFoundError:
        return None
    try:
        return file.size()
    finally:
        file.close()


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


def _longer_files(
    disk: Disk, folder: Path, sizes: Iterable[tuple[int, list[tuple[int, int]]]], safe_seq: int
) -> dict[int, int]:
    """The slots whose files hold more than frames up to a seq, and where those end.

    Args:
        disk: where it lies.
        folder: of the wheel.
        sizes: hour by hour, slots and the lengths of their files.
        safe_seq: frames up to this are on the medium.
    """
    head = load_head(disk, folder)
    if head.seq > safe_seq:  # the index has lost what the table counts
        disk.delete(layout.table_head_path(folder))
        disk.sync_folder(layout.table_folder(folder))
        head = TableHead()
    behind: dict[int, int] = {}
    for _, rows in read_raw_rows(disk, folder, head.seq + 1, safe_seq):
        _raise_ends(behind, checked_rows(rows))
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
    if unsure:
        ends_of: dict[int, int] = dict.fromkeys(unsure, 0)
        _raise_ends(ends_of, rows_of_slots(disk, folder, np.array(unsure), safe_seq)[1])
        longer.update(ends_of)
    return longer


def _announced_sizes(
    disk: Disk, folder: Path, floor: int
) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """As `slot_sizes`, of the slots to which the last group went."""
    slots = [slot for slot in announced_slots(disk, folder) if slot >= floor]
    for hour, group in groupby(slots, key=lambda slot: slot // layout.SECONDS_PER_HOUR):
        sizes = ((slot, _size(disk, layout.slot_path(folder, slot))) for slot in group)
        yield hour, [(slot, size) for slot, size in sizes if size is not None]


def _table_ends(
    disk: Disk, folder: Path, head: TableHead, hour: int
) -> tuple[list[int], list[bool]]:
    """Where the slots of an hour end by the table, and which of its entries are damaged."""
    if hour not in head.hours:
        return [0] * layout.SECONDS_PER_HOUR, [False] * layout.SECONDS_PER_HOUR
    entries, damaged = read_entries(disk, folder, hour)
    ends = entries["end"].astype(np.int64) * UNIT_BYTES
    # One that counted frames beyond the head says where those end.
    return ends.tolist(), (damaged | (entries["last_seq"] > head.seq)).tolist()


def _rebuild_rows(
    disk: Disk,
    folder: Path,
    wheel: WheelId,
    floor: int,
    longer: dict[int, int],
    *,
    safe_seq: int,
    end_seq: int,
) -> list[int]:
    """Derives all rows behind the checkpoint from the frames; returns the damaged seqs.

    The rows go at least up to ``end_seq``.
    """
    told: dict[int, bytes] = {}
    last_row = _last_seq(disk, folder)
    for first_seq, raw in read_raw_rows(disk, folder, safe_seq + 1, last_row):
        told.update(
            (seq, row.tobytes())
            for seq, row in enumerate(checked_rows(raw), first_seq)
            if int(row["length"]) > 0
        )
    found = _frames_behind(disk, folder, wheel, longer, told)
    last_seq = max([safe_seq, end_seq, *found, *told])
    rows_by_seq = {
        seq: found.get(seq) or told.get(seq) or HOLE_ROW
        for seq in range(safe_seq + 1, last_seq + 1)
    }
    _write_rows(disk, folder, safe_seq, rows_by_seq)
    lost = (seq for seq in rows_by_seq if seq not in found)
    return [seq for seq in lost if not 0 < _row_of(rows_by_seq[seq])["slot"] < floor]


def _frames_behind(
    disk: Disk, folder: Path, wheel: WheelId, longer: dict[int, int], told: dict[int, bytes]
) -> dict[int, bytes]:
    """Rows of all whole frames that lie behind the safe end of their slot file, by seq.

    Where a frame is damaged, the walk goes on at the next place that a row speaks of.
    """
    told_offsets: dict[int, list[int]] = {}
    for row in map(_row_of, told.values()):
        told_offsets.setdefault(int(row["slot"]), []).append(int(row["offset"]))
    found: dict[int, bytes] = {}
    for slot, begin in longer.items():
        file = disk.open_read(layout.slot_path(folder, slot))
        try:
            resume_at = sorted(told_offsets.get(slot, []))
            for offset, frame in _walk(file, wheel, slot, (begin, file.size()), resume_at):
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
    try:
        header = file.read_at(HEADER_LENGTH_BYTES, offset)
        length = decode_header(header, available_bytes=end - offset).length_bytes
        return decode_frame(file.read_at(length, offset), wheel=wheel, slot=slot, seq=None)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise FrameDamaged(DamageReason.UNREADABLE, str(error)) from error


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
