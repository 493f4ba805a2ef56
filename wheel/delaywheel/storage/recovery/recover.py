"""Recovers a wheel after its writer ended, in any way.

What can have happened, and what is done about it:

===============================  ======================  =====================================
found                            can come from           done
===============================  ======================  =====================================
bytes behind a slot's last row   death before the rows   cut: they were never acknowledged
a slot file without any row      death before the rows   deleted, as above
slot files, and no index at all  a bad medium, or death  all behind the last deleted segment
                                 before the first rows   is read again, and gets rows
the same behind a full segment   a bad medium, or death  the same, behind that segment
                                 before the rows
a torn row at the index's end    death within the rows   cut, as above
a frame without its row          crash of the machine    the row is written again
a row without its frame          crash of the machine,   kept and reported: the frame may have
                                 a bad medium            been acknowledged
neither, but later frames        crash of the machine    a hole row, reported, as above
neither, up to the committed     crash of the machine    the same, if no other member can have
end                                                      them
frames beyond the committed end  crash within the cut    cut, with their rows
a frame noted as missing         what was found, or      read again, and reported until it is
                                 lost, before            repaired
a row of zeros, or one that      a bad medium            written again if its frame lies in some
cannot be read                                           slot file; otherwise a hole, reported
a segment that is missing, or    a bad medium            all behind it is read again, as after a
short, or ends before the                                crash of the machine
checkpoint
a checkpoint that is damaged     a bad medium            everything is read again, from the first
                                                         existing segment on
a slot file that cannot be       a bad medium            left as it is; its frames are reported
opened
a file on its way to the place   death while it moved    deleted
of one that the medium refuses
===============================  ======================  =====================================

The death of a process leaves all that it wrote, in order: rows and frames agree, and only tails are
cut, in the slots of the last group, which were announced. A crash of the machine can lose any write
that no checkpoint covers, so everything later is read again, frame by frame, and every slot file is
checked for being longer than it should be. Running recovery twice, or interrupting it, is harmless:
bytes of whole frames are never touched, and rows are derived from them.

The slot table shows where the frames of a slot end (slot_table.py), so that the whole index need
not be read. Bytes are cut because of it only if a frame begins there that is newer than every row;
if anything else lies there, the index decides.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.files.index import (
    ROWS_PER_SEGMENT,
    IndexReader,
    last_seq_of,
    list_segments,
    read_raw_rows,
)
from delaywheel.storage.files.slot_files import (
    announced_slots,
    forget_announced,
    slot_sizes,
)
from delaywheel.storage.files.slot_table import load_head
from delaywheel.storage.files.wheel_folder import (
    Checkpoint,
    load_checkpoint,
    load_meta,
    save_checkpoint,
)
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Disk, is_medium_error
from delaywheel.storage.folder.steps import Steps
from delaywheel.storage.frames.format import DamageReason, Frame
from delaywheel.storage.frames.rows import INDEX_ROW_LENGTH_BYTES, Places, checked_rows, is_hole
from delaywheel.storage.reading.places import SlotPlaces, finding_rows
from delaywheel.storage.reading.reader import DamagedFrame, WheelReader
from delaywheel.storage.reading.unlisted import walk_headers, with_unlisted
from delaywheel.storage.recovery.found_rows import lost_behind
from delaywheel.storage.recovery.rebuilding import HourSizes, longer_files, rebuild_rows
from delaywheel.storage.writing.cutting import cut_beyond, cut_slot
from delaywheel.storage.writing.restoring import restoring
from delaywheel.storage.writing.table_writer import SlotTable


class CutTail(NamedTuple):
    """Bytes without a row, which were cut off."""

    path: Path
    offset: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a wheel holds."""

    last_seq: int  # the last frame that counts
    cut: list[CutTail]
    damaged: SeqSet  # seqs up to last_seq that cannot be read from this disk
    nowhere: SeqSet = NO_SEQS  # those of them that lie in no slot file


def recovering(
    disk: Disk,
    data: Path,
    wheel: WheelId,
    *,
    os_crashed: bool,
    may_be_cached: bool = False,
    floor: int = 0,
    at_start: bool = False,
    must_read: bool = False,
) -> Steps[Recovered]:
    """Makes a wheel's index and slot files agree; it must have no writer.

    Args:
        os_crashed: The machine was restarted since the wheel was written, or may have been.
        may_be_cached: A process of this boot may have written it: what is read may lie in the page
            cache alone. Implied unless ``os_crashed``.
        floor: Slots below are finished; their deleted files are not damage.
        at_start: An earlier process wrote it: its last segment may be missing.
        must_read: Do not conclude where the wheel ends from slot files that the medium does not
            return.

    Raises:
        WheelMissing: There is no such wheel.
        OSError: ``must_read``, and such a file may hold frames that have no rows.
    """
    meta = load_meta(disk, data, wheel)
    folder = layout.wheel_folder(data, wheel)
    checkpoint = load_checkpoint(disk, folder)
    with suppress(OSError):  # it is in nobody's way
        disk.delete(layout.moving_path(folder))
    yield from _delete_finished_segments(disk, folder, checkpoint)
    cut = yield from _cut_torn_row(disk, folder)
    known = checkpoint or Checkpoint(_first_seq(disk, folder) - 1, first_segment=None)
    # What was cut at the committed end is not lost.
    synced_seq = min(known.seq, known.seq if meta.final_seq is None else meta.final_seq)
    lost_seq = lost_behind(disk, folder, checkpoint, synced_seq, at_start=at_start)
    yield
    if os_crashed or checkpoint is None or lost_seq is not None:
        # A mirror's missing end is fetched; that of a wheel held only here is lost.
        end_seq = (meta.final_seq or 0) if len(meta.members) == 1 else 0
        safe_seq = min(known.seq, last_seq_of(disk, folder))
        safe_seq = safe_seq if lost_seq is None else min(safe_seq, lost_seq)
        yield
        longer = yield from longer_files(disk, folder, slot_sizes(disk, folder), safe_seq)
        damaged = yield from rebuild_rows(
            disk,
            folder,
            wheel,
            floor,
            longer,
            safe_seq=safe_seq,
            end_seq=max(end_seq, synced_seq),
            must_read=must_read,
        )
        slots = list(longer)
    else:
        damaged = yield from _damaged_at_the_end(disk, data, wheel, floor)
        last_seq = last_seq_of(disk, folder)
        yield
        sizes = yield from _announced_sizes(disk, folder, floor)
        slots = list((yield from longer_files(disk, folder, sizes, last_seq)))
    if meta.final_seq is not None:
        yield from cut_beyond(disk, folder, meta.final_seq, SlotTable(disk, folder))
    last_seq = last_seq_of(disk, folder)
    yield
    slots = [slot for slot in slots if slot >= floor]
    cut += yield from _cut_tails(disk, folder, wheel, slots, last_seq)
    head = load_head(disk, folder)
    noted = yield from _still_damaged(disk, data, wheel, known.missing | head.holes, floor)
    found = damaged | noted
    # Of rows that the slot table has not counted it would seem that no frame has their slots, and
    # the wheel would be deleted too early. Of all others, only those of lost pages are looked for.
    for holes in _holes(disk, folder, last_seq, checked_from=min(known.seq, head.seq) + 1):
        found |= holes
        yield
    missing = found.within(1, last_seq)
    restored = yield from restoring(disk, folder, wheel, missing, floor=floor)
    for seqs in restored.by_slot.values():
        missing -= seqs
    if os_crashed or checkpoint is None or lost_seq is not None:
        is_synced = os_crashed and not may_be_cached
        seq = last_seq if is_synced else min(known.seq, last_seq)
        recorded = Checkpoint(seq, missing.within(1, seq), known.first_segment)
        save_checkpoint(disk, folder, recorded)
        yield
    with suppress(OSError):  # then the next start examines a few slots needlessly
        forget_announced(disk, folder)
    nowhere = restored.nowhere if restored.unread_slot < 0 else NO_SEQS
    return Recovered(last_seq, cut, missing, nowhere)


def _first_seq(disk: Disk, folder: Path) -> int:
    return min(list_segments(disk, folder), default=0) * ROWS_PER_SEGMENT + 1


def _delete_finished_segments(
    disk: Disk, folder: Path, checkpoint: Checkpoint | None
) -> Steps[None]:
    """Deletes segments again whose deletion a crash of the machine has undone."""
    first = None if checkpoint is None else checkpoint.first_segment
    for segment in list_segments(disk, folder):
        if first is not None and segment < first:
            disk.delete(layout.index_path(folder, segment))
            yield


def _holes(disk: Disk, folder: Path, last_seq: int, *, checked_from: int) -> Iterator[SeqSet]:
    """Yields the holes up to a seq, segment by segment.

    Check values of rows before ``checked_from`` are not compared, which is fifty times as fast.
    """
    for first_seq, raw in read_raw_rows(disk, folder, 1, last_seq):
        is_suspect = raw["length"] == 0
        is_suspect[max(0, checked_from - first_seq) :] = True
        places = np.flatnonzero(is_suspect)
        are_holes = np.zeros(len(raw), np.bool_)
        are_holes[places] = is_hole(checked_rows(raw[places]))
        yield SeqSet.where(first_seq, are_holes)


def _still_damaged(
    disk: Disk, data: Path, wheel: WheelId, seqs: SeqSet, floor: int
) -> Steps[SeqSet]:
    """Returns which of these seqs still cannot be read and are not finished."""
    holes, damaged = NO_SEQS, []
    with closing(WheelReader(disk, data, wheel)) as reader:
        for first_seq, rows in reader.rows_of(seqs):
            holes |= SeqSet.where(first_seq, is_hole(rows))
            yield
            is_placed = (rows["slot"] >= max(floor, 1)) & (rows["length"] > 0)
            for seq in (np.flatnonzero(is_placed) + first_seq).tolist():
                if isinstance(_read(reader, seq), DamagedFrame):
                    damaged.append(seq)
                yield
    return holes | SeqSet.of(damaged)


def _read(reader: WheelReader, seq: int) -> Frame | DamagedFrame:
    """Reads a frame, trying twice: if no other node has it, nothing else would retry."""
    found = reader.frame(seq)
    if isinstance(found, DamagedFrame) and found.reason is DamageReason.UNREADABLE:
        return reader.frame(seq)
    return found


def _cut_torn_row(disk: Disk, folder: Path) -> Steps[list[CutTail]]:
    cut = []
    for segment in list_segments(disk, folder)[-1:]:
        path = layout.index_path(folder, segment)
        try:
            file = disk.open(path)
        except OSError as error:
            if not is_medium_error(error):
                raise
            break  # its rows are holes (index.py), and one that is torn is ignored
        with closing(file):
            size = file.size()
            torn = size % INDEX_ROW_LENGTH_BYTES
            if torn:
                file.truncate(size - torn)
                yield
                file.sync_data()
                cut.append(CutTail(path, size - torn, torn))
        yield
    return cut


def _damaged_at_the_end(disk: Disk, data: Path, wheel: WheelId, floor: int) -> Steps[SeqSet]:
    """Reads frames backwards from the last one until one is good or of a finished slot."""
    with closing(WheelReader(disk, data, wheel)) as reader:
        good = last_seq = reader.last_seq()
        while good > 0:
            good = yield from _begin_of_holes(reader, good)
            frame = _read(reader, good) if good else None
            if frame is None or isinstance(frame, Frame) or _is_finished(frame, floor):
                break
            good -= 1
            yield
    return NO_SEQS.with_span(good + 1, last_seq)


def _is_finished(frame: DamagedFrame, floor: int) -> bool:
    return frame.is_finished or 0 < frame.slot < floor


def _begin_of_holes(reader: WheelReader, last_seq: int) -> Steps[int]:
    """Returns the last seq up to this one that is not a hole; 0 if there is none."""
    rows_at_once = 1
    while last_seq > 0:
        first_seq = max(1, last_seq - rows_at_once + 1)
        others = np.flatnonzero(~is_hole(reader.rows(first_seq, last_seq)))
        if len(others):
            return first_seq + int(others[-1])
        last_seq = first_seq - 1
        rows_at_once = min(2 * rows_at_once, ROWS_PER_SEGMENT)
        yield
    return 0


def _cut_tails(
    disk: Disk, folder: Path, wheel: WheelId, slots: Sequence[int], last_seq: int
) -> Steps[list[CutTail]]:
    """Cuts slot files after the last frame that has a row.

    Durably, so that a later crash of the machine does not bring them back. If the machine crashes
    before that, they are what they were: never acknowledged, and beyond any committed T.

    While the index has holes, bytes that are not known to be later stay: the holes may stand for
    them.
    """
    ends: dict[int, int] = {}
    unsure: list[int] = []
    with closing(IndexReader(disk, folder)) as reader:
        places = SlotPlaces(disk, folder, wheel, reader)
        for slot in slots:
            size = file_size(disk, layout.slot_path(folder, slot))
            if size is None:
                continue
            yield
            found = places.quick(slot, last_seq)
            yield
            end = 0 if found is None else _end_of(found[1])
            if found is not None and (
                size == end or _begins_later(disk, folder, wheel, (slot, end), last_seq)
            ):
                ends[slot] = end
            else:
                unsure.append(slot)
            yield
    if unsure and not (yield from _has_holes(disk, folder, last_seq)):
        ends.update((yield from _ends_by_index(disk, folder, wheel, unsure, last_seq)))
    cut = []
    for slot, end in ends.items():
        path = layout.slot_path(folder, slot)
        length = yield from cut_slot(disk, path, end)
        if length:
            cut.append(CutTail(path, end, length))
        yield
    return cut


def _has_holes(disk: Disk, folder: Path, last_seq: int) -> Steps[bool]:
    for holes in _holes(disk, folder, last_seq, checked_from=1):
        if holes:
            return True
        yield
    return False


def _begins_later(
    disk: Disk, folder: Path, wheel: WheelId, place: tuple[int, int], last_seq: int
) -> bool:
    """Whether a frame that is newer than every row begins at a place of a slot's file."""
    slot, offset = place
    try:
        with closing(disk.open_read(layout.slot_path(folder, slot))) as file:
            for _, headers in walk_headers(file, wheel, slot, offset):
                return bool(headers["seq"][0] > last_seq)
    except OSError as error:
        if not is_medium_error(error):
            raise
    return False


def _ends_by_index(
    disk: Disk, folder: Path, wheel: WheelId, slots: Sequence[int], last_seq: int
) -> Steps[dict[int, int]]:
    """Returns where slots end by the index, and by frames whose rows it has lost."""
    seqs, rows = yield from finding_rows(disk, folder, np.array(slots), last_seq)
    ends = {}
    for slot in slots:
        of_slot = rows["slot"] == slot
        listed: Places = (seqs[of_slot], rows[of_slot])
        path = layout.slot_path(folder, slot)
        ends[slot] = _end_of(with_unlisted(disk, path, wheel, slot, listed, last_seq)[1])
        yield
    return ends


def _end_of(rows: NDArray[Any]) -> int:
    return int((rows["offset"].astype(np.int64) + rows["length"]).max(initial=0))


def file_size(disk: Disk, path: Path) -> int | None:
    """Returns the length of a file; None if it does not exist, or cannot be opened."""
    try:
        file = disk.open_read(path)
    except OSError as error:
        if not (is_medium_error(error) or isinstance(error, FileNotFoundError)):
            raise
        return None
    with closing(file):
        return file.size()


def _announced_sizes(disk: Disk, folder: Path, floor: int) -> Steps[list[HourSizes]]:
    """Yields the same as `slot_sizes`, for the slots of the last group."""
    sizes: dict[int, list[tuple[int, int]]] = {}
    for slot in announced_slots(disk, folder):
        size = file_size(disk, layout.slot_path(folder, slot)) if slot >= floor else None
        if size is not None:
            sizes.setdefault(slot // layout.SECONDS_PER_HOUR, []).append((slot, size))
        yield
    return list(sizes.items())
