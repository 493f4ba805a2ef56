"""A copy of a wheel: which frames it takes, refuses and repairs, and where it ends."""

import errno
from collections.abc import Collection, Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest

from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.files.handles import HandleCache
from delaywheel.storage.files.index import IndexWriter, list_segments
from delaywheel.storage.files.undeletable import Undeletable
from delaywheel.storage.files.wheel_folder import (
    Checkpoint,
    WheelState,
    load_meta,
    make_wheel,
)
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.steps import finish
from delaywheel.storage.frames.bundle import FrameCopy
from delaywheel.storage.frames.format import DamageReason, Frame, FrameDamaged, index_row_of
from delaywheel.storage.frames.rows import GONE_ROW, HOLE_ROW, INDEX_ROW
from delaywheel.storage.reading.reader import DamagedFrame, WheelReader
from delaywheel.storage.recovery.recover import Recovered
from delaywheel.storage.recovery.verify import verify_wheel
from delaywheel.storage.writing import refused_pages
from delaywheel.storage.writing.dial import Dial, DialView
from delaywheel.storage.writing.wheel import OriginWheel
from sim.machine.disk import Fault, SimulatedDisk, SimulatedManyFiles
from support.wheels.copies import (
    bundled,
    copies_of,
    flipped,
    open_copy,
    recover_wheel,
    rows_of,
    slots_of,
)
from support.wheels.messages import BASE_SLOT, message
from support.wheels.segments import small_segments
from support.wheels.wheels import append, checkpoint_of, delete_below, mark_wheel, new_wheel

DATA = Path("/data")
DIAL_ROWS = 64


class Pair:
    """An origin and one copy, on separate disks."""

    def __init__(self, slots: tuple[int, ...] = (0, 1, 0, 2, 0), *, value_bytes: int = 5) -> None:
        self.origin_disk, self.disk = SimulatedDisk(), SimulatedDisk()
        self.origin: OriginWheel = new_wheel(self.origin_disk, DATA)
        self.wheel = self.origin.wheel
        self.folder = layout.wheel_folder(DATA, self.wheel)
        for number, ahead in enumerate(slots):
            each = message(number, slot=BASE_SLOT + ahead, value=bytes(value_bytes))
            append(self.origin, [each])
        self.copies = copies_of(self.origin_disk, DATA, self.wheel)
        self.dial = Dial(self.disk, DATA, DIAL_ROWS)
        make_wheel(self.disk, DATA, self.origin.meta)
        self.mirror = open_copy(
            self.disk, DATA, self.wheel, HandleCache(self.disk, 2), dial=self.dial, table_rows=2
        )

    def reopened(self, *, os_crashed: bool = False, floor: int = 0) -> Recovered:
        """Restarts the process, or the machine."""
        self.disk.restart()
        recovered = recover_wheel(self.disk, DATA, self.wheel, os_crashed=os_crashed, floor=floor)
        self.dial = Dial(self.disk, DATA, DIAL_ROWS)
        self.mirror = open_copy(
            self.disk,
            DATA,
            self.wheel,
            HandleCache(self.disk, 2),
            damaged=recovered.damaged,
            dial=self.dial,
            table_rows=2,
        )
        counting = self.dial.adding_wheel(self.disk, DATA, self.wheel, floor=floor)
        self.mirror.not_counted = finish(counting)
        return recovered

    def append(self, copies: Sequence[FrameCopy]) -> FrameDamaged | None:
        return self.mirror.append(bundled(copies))

    def repair(self, copies: Sequence[FrameCopy]) -> list[FrameDamaged]:
        return self.mirror.repair(bundled(copies))

    def slot_path(self, ahead: int = 0) -> Path:
        return layout.slot_path(self.folder, BASE_SLOT + ahead)

    def counted(self) -> dict[int, int]:
        rows = DialView(self.disk, DATA).rows()
        return {int(row["slot"]) - BASE_SLOT: int(row["messages"]) for row in rows}

    def assert_same(self) -> None:
        assert rows_of(self.disk, DATA, self.wheel) == rows_of(self.origin_disk, DATA, self.wheel)
        assert slots_of(self.disk, DATA, self.wheel) == slots_of(self.origin_disk, DATA, self.wheel)
        assert not list(verify_wheel(self.disk, DATA, self.wheel))


def test_a_copy_has_the_same_bytes_at_the_same_places() -> None:
    pair = Pair()
    assert pair.append(pair.copies) is None
    pair.assert_same()
    assert (pair.mirror.last_seq, pair.mirror.top_slot) == (5, BASE_SLOT + 2)
    assert not pair.mirror.missing
    assert pair.counted() == {0: 3, 1: 1, 2: 1}
    assert pair.reopened() == Recovered(5, [], NO_SEQS)
    assert (pair.mirror.last_seq, pair.mirror.top_slot) == (5, BASE_SLOT + 2)


def test_what_is_held_is_passed_over_and_a_gap_ends_the_list() -> None:
    pair = Pair()
    pair.append(pair.copies[:2])
    pair.append([*pair.copies[:3], pair.copies[4]])
    assert pair.mirror.last_seq == 3
    pair.append(pair.copies[1:])
    pair.assert_same()


@pytest.mark.parametrize("byte", [0, 6, 12, 20, 90])
def test_a_damaged_frame_ends_the_list(byte: int) -> None:
    pair = Pair()
    assert pair.append(flipped(pair.copies, 2, byte)) is not None
    assert pair.mirror.last_seq == 2
    assert pair.append(pair.copies) is None
    pair.assert_same()


def test_right_bytes_in_a_wrong_place_are_refused() -> None:
    pair = Pair()
    first, second, *_ = pair.copies
    row = np.frombuffer(second.row, dtype=INDEX_ROW).copy()
    for name, value in (("slot", BASE_SLOT), ("offset", 4), ("length", 8), ("messages", 2)):
        wrong = row.copy()
        wrong[name] = value
        length = int(wrong["length"][0])
        moved = FrameCopy(2, wrong.tobytes(), second.content[:length])
        assert pair.append([first, moved]) is not None
    assert pair.append([second._replace(seq=2, content=first.content)]) is not None
    other = WheelReader(pair.origin_disk, DATA, pair.wheel)
    assert isinstance(other.frame(2), Frame)
    assert pair.mirror.last_seq == 1


def test_a_frame_is_never_written_over_another_one() -> None:
    """A holder whose index lies about an offset; the bytes themselves are right."""
    pair = Pair()
    pair.append(pair.copies[:2])
    third = WheelReader(pair.origin_disk, DATA, pair.wheel).frame(3)
    assert isinstance(third, Frame)
    refused = pair.append([pair.copies[2]._replace(row=index_row_of(third, 0))])
    assert refused is not None
    assert refused.reason is DamageReason.MISPLACED
    pair.mirror.note_damaged(2)
    assert pair.repair([pair.copies[1]]) == []
    pair.append(pair.copies)
    pair.assert_same()


@pytest.mark.parametrize("path_part", ["slot", "index"])
@pytest.mark.parametrize("countdown", range(3))
@pytest.mark.parametrize("written_bytes", [0, 7, 16, 40, 100])
def test_after_a_failed_write_the_same_places_are_written_again(
    path_part: str, countdown: int, written_bytes: int
) -> None:
    pair = Pair()
    pair.disk.faults.append(Fault("write", errno.ENOSPC, path_part, countdown, written_bytes))
    failures = 0
    for begin in range(0, 5, 2):
        try:
            pair.append(pair.copies[begin : begin + 2])
        except OSError:
            failures += 1
        reader = WheelReader(pair.disk, DATA, pair.wheel)
        assert reader.last_seq() == pair.mirror.last_seq
        for seq in range(1, reader.last_seq() + 1):
            assert isinstance(reader.frame(seq), Frame)
    assert failures == 1
    pair.append(pair.copies)
    pair.assert_same()
    assert pair.counted() == {0: 3, 1: 1, 2: 1}


def test_a_full_disk_gets_its_bytes_back() -> None:
    pair = Pair()
    pair.append(pair.copies[:1])
    before = slots_of(pair.disk, DATA, pair.wheel)
    pair.disk.capacity_bytes = pair.disk.used_bytes + 40
    with pytest.raises(OSError, match="No space"):
        pair.append(pair.copies)
    assert {
        slot: content for slot, content in slots_of(pair.disk, DATA, pair.wheel).items() if content
    } == before
    pair.disk.capacity_bytes = None
    pair.append(pair.copies)
    pair.assert_same()


def test_finished_slots_have_rows_only() -> None:
    pair = Pair()
    finished = copies_of(pair.origin_disk, DATA, pair.wheel, floor=BASE_SLOT + 1)
    assert [bool(copy.content) for copy in finished] == [False, True, False, True, False]
    pair.mirror.raise_floor(BASE_SLOT + 1)
    pair.append(finished)
    assert rows_of(pair.disk, DATA, pair.wheel) == [copy.row for copy in pair.copies]
    assert not pair.disk.exists(pair.slot_path())
    assert not pair.mirror.missing
    assert pair.counted() == {1: 1, 2: 1}


def test_a_finished_slot_never_gets_its_file_back() -> None:
    pair = Pair()
    pair.append(pair.copies[:3])
    delete_below(pair.mirror, BASE_SLOT + 1)
    pair.append(pair.copies)
    pair.repair(pair.copies)
    assert list(slots_of(pair.disk, DATA, pair.wheel)) == [BASE_SLOT + 1, BASE_SLOT + 2]
    assert pair.mirror.last_seq == 5


def test_rows_of_deleted_segments_are_taken_as_they_are() -> None:
    pair = Pair()
    gone = [FrameCopy(seq, GONE_ROW, b"") for seq in (1, 2)]
    pair.append([*gone, *pair.copies[2:]])
    assert rows_of(pair.disk, DATA, pair.wheel)[:3] == [GONE_ROW, GONE_ROW, pair.copies[2].row]
    assert not pair.mirror.missing
    # The file is sparse: earlier frames are finished, and their length is unknown.
    offset = np.frombuffer(pair.copies[2].row, dtype=INDEX_ROW)["offset"][0]
    assert pair.disk.content(pair.slot_path())[:offset] == bytes(offset)
    assert isinstance(WheelReader(pair.disk, DATA, pair.wheel).frame(3), Frame)
    assert pair.reopened() == Recovered(5, [], NO_SEQS)


def test_a_hole_is_missing_until_it_is_repaired() -> None:
    pair = Pair()
    hole = FrameCopy(1, HOLE_ROW, b"")
    pair.append([hole, *pair.copies[1:]])
    assert list(pair.mirror.missing) == [1]
    first = SeqSet.of([1])
    assert pair.reopened() == Recovered(5, [], first, nowhere=first), "no restart forgets it"
    assert pair.repair([hole]) == []
    assert list(pair.mirror.missing) == [1]
    assert pair.repair(pair.copies[:1]) == []
    assert not pair.mirror.missing
    pair.assert_same()
    assert pair.counted() == {0: 3, 1: 1, 2: 1}
    assert pair.reopened() == Recovered(5, [], NO_SEQS)


def test_a_hole_of_a_finished_slot_is_filled_by_a_row() -> None:
    for row, floor in ((GONE_ROW, BASE_SLOT + 3), (Pair().copies[0].row, BASE_SLOT + 1)):
        pair = Pair()
        pair.append([FrameCopy(1, HOLE_ROW, b""), *pair.copies[1:]])
        bare = FrameCopy(1, row, b"")
        pair.mirror.raise_floor(floor - 1)
        (refused,) = pair.repair([bare])
        assert "not finished here" in str(refused)
        assert list(pair.mirror.missing) == [1]
        pair.mirror.raise_floor(floor)
        assert pair.repair([bare]) == []
        assert not pair.mirror.missing
        assert rows_of(pair.disk, DATA, pair.wheel)[0] == row


def test_no_row_is_replaced_by_one_that_says_it_is_gone() -> None:
    """A frame that is damaged here is pending, whatever a peer says of its index segment."""
    pair = Pair()
    pair.append(pair.copies)
    pair.mirror.note_damaged(2)
    pair.disk.flip_bit(pair.slot_path(1), 700)
    pair.mirror.raise_floor(BASE_SLOT + 9)
    gone = FrameCopy(2, GONE_ROW, b"")
    assert len(pair.repair([gone])) == 1
    assert rows_of(pair.disk, DATA, pair.wheel)[1] == pair.copies[1].row


def test_a_frame_without_content_finishes_nothing() -> None:
    pair = Pair()
    pair.append(pair.copies[:3])
    for row in (pair.copies[3].row, GONE_ROW):
        refused = pair.append([FrameCopy(4, row, b""), pair.copies[4]])
        assert "not finished here" in str(refused)
        assert pair.mirror.last_seq == 3
    pair.append(pair.copies[3:])
    delete_below(pair.mirror, BASE_SLOT)
    pair.assert_same()
    assert not pair.mirror.missing


@pytest.mark.parametrize("number", range(5))
def test_a_damaged_frame_is_repaired_in_its_place(number: int) -> None:
    pair = Pair()
    pair.append(pair.copies)
    slot, offset, _, _ = np.frombuffer(pair.copies[number].row, dtype=INDEX_ROW)[0].item()
    path = layout.slot_path(pair.folder, slot)
    pair.disk.flip_bit(path, 8 * (offset + 30))
    seq = number + 1
    assert isinstance(WheelReader(pair.disk, DATA, pair.wheel).frame(seq), DamagedFrame)
    pair.mirror.note_damaged(seq)
    pair.mirror.checkpoint()
    assert pair.reopened().damaged == SeqSet.of([seq]), "no restart forgets it"
    assert len(pair.repair(flipped(pair.copies, number, 70))) == 1
    assert list(pair.mirror.missing) == [seq]
    assert pair.repair(pair.copies) == []
    assert not pair.mirror.missing
    pair.assert_same()
    assert pair.reopened() == Recovered(5, [], NO_SEQS)


def test_a_damaged_row_is_repaired_and_hits_no_other_frame() -> None:
    for bit in range(0, 8 * 12, 5):
        pair = Pair()
        pair.append(pair.copies)
        index = layout.index_path(pair.folder, 0)
        pair.disk.flip_bit(index, 8 * 16 * 2 + bit)
        assert pair.repair(pair.copies) == []
        pair.assert_same()


@pytest.mark.parametrize("by_repair", [False, True])
def test_frames_whose_rows_are_lost_and_come_back_are_counted_once(*, by_repair: bool) -> None:
    pair = Pair()
    pair.append(pair.copies)
    for _ in range(2):
        pair.disk.zero_somewhere("index", Random(0))  # all of it
        if by_repair:
            assert pair.repair(pair.copies) == []
        else:
            every = SeqSet([(1, 5)])
            assert finish(pair.mirror.reading_again(every)) == every
        pair.assert_same()
        assert pair.counted() == {0: 3, 1: 1, 2: 1}


@pytest.mark.parametrize("table", ["none", "made with holes", "made before", "recounted since"])
def test_what_a_start_counts_without_a_row_is_not_counted_again(table: str) -> None:
    """A repair cannot see what the slot table counts; nor, if it was recounted, can a start."""
    pair = Pair()
    if table in {"none", "made with holes"}:
        pair.append([FrameCopy(1, HOLE_ROW, b""), *pair.copies[1:]])
    else:
        pair.append(pair.copies)
    if table != "none":
        pair.mirror.checkpoint()
    if table in {"made before", "recounted since"}:
        pair.disk.zero_somewhere("index", Random(0))  # all of it
        for ahead in range(3):
            pair.disk.delete(pair.slot_path(ahead))
    if table == "recounted since":
        assert pair.repair([pair.copies[3]]) == []
        pair.mirror.checkpoint()
    assert pair.reopened().damaged
    assert pair.repair(pair.copies) == []
    pair.assert_same()
    assert pair.counted() == {0: 3, 1: 1, 2: 1}
    pair.reopened()
    assert pair.counted() == {0: 3, 1: 1, 2: 1}


def test_what_could_not_be_read_at_a_start_is_counted_once_it_can() -> None:
    pair = Pair()
    pair.append(pair.copies)
    pair.disk.failing_reads = "index.", errno.EIO
    missing = pair.reopened().damaged
    assert pair.counted() == {}
    pair.disk.failing_reads = None
    for _ in range(2):
        assert finish(pair.mirror.reading_again(missing)) == missing
        assert pair.counted() == {0: 3, 1: 1, 2: 1}


def test_a_repair_goes_to_the_file_that_has_the_name() -> None:
    pair = Pair((0, 0, 0))
    pair.append(pair.copies)
    pair.disk.delete(pair.slot_path())  # behind the back of the mirror, which has it open
    pair.mirror.note_damaged(2)
    for copy in pair.copies:
        assert pair.repair([copy]) == []
    assert not pair.mirror.missing
    pair.assert_same()


def test_repair_of_what_is_whole_writes_nothing() -> None:
    pair = Pair()
    pair.append(pair.copies)
    effects = pair.disk.effects
    assert pair.repair(pair.copies) == []
    assert pair.disk.effects == effects


@pytest.mark.parametrize("final_seq", range(6))
def test_the_end_cuts_rows_frames_and_counts(final_seq: int) -> None:
    pair, shorter = Pair(), Pair((0, 1, 0, 2, 0)[:final_seq])
    pair.append(pair.copies)
    pair.mirror.checkpoint()
    pair.mirror.note_damaged(5)
    pair.mirror.end_at(final_seq)
    assert (pair.mirror.last_seq, pair.mirror.top_slot) == (
        final_seq,
        max((BASE_SLOT + (0, 1, 0, 2, 0)[at] for at in range(final_seq)), default=-1),
    )
    assert rows_of(pair.disk, DATA, pair.wheel) == [copy.row for copy in shorter.copies]
    assert slots_of(pair.disk, DATA, pair.wheel) == slots_of(shorter.origin_disk, DATA, pair.wheel)
    assert sum(pair.counted().values()) == final_seq
    meta = load_meta(pair.disk, DATA, pair.wheel)
    assert (meta.state, meta.final_seq) == (WheelState.CLOSED, final_seq)
    pair.append(pair.copies)
    assert pair.mirror.last_seq == final_seq, "nothing comes behind the end"
    missing = [5] if final_seq == 5 else []
    assert pair.mirror.missing == SeqSet.of(missing)
    for os_crashed in (False, True):
        assert pair.reopened(os_crashed=os_crashed).last_seq == final_seq
    pair.mirror.end_at(final_seq)
    with pytest.raises(ValueError, match="was closed at"):
        pair.mirror.end_at(final_seq + 1)


def test_a_copy_closed_beyond_what_it_holds_goes_on_up_to_there() -> None:
    pair = Pair()
    pair.append(pair.copies[:2])
    pair.mirror.end_at(4)
    pair.append(pair.copies)
    assert pair.mirror.last_seq == 4


def test_a_cut_that_the_medium_refuses_is_done_the_next_time() -> None:
    for operation in ("sync", "delete", "write"):
        for countdown in range(6):
            pair = Pair()
            pair.append(pair.copies)
            pair.disk.faults.append(Fault(operation, countdown=countdown))
            for _ in range(2):
                try:
                    pair.mirror.end_at(1)
                except OSError:
                    continue
            assert rows_of(pair.disk, DATA, pair.wheel) == [pair.copies[0].row]
            slots = {BASE_SLOT: pair.copies[0].content}
            assert slots_of(pair.disk, DATA, pair.wheel) == slots


def test_a_checkpoint_says_what_is_on_the_medium() -> None:
    pair = Pair()
    pair.append(pair.copies[:3])
    pair.mirror.note_damaged(2)
    pair.mirror.checkpoint()
    assert checkpoint_of(pair.disk, pair.folder) == Checkpoint(3, SeqSet.of([2]))
    pair.repair(pair.copies)
    pair.append(pair.copies)
    pair.mirror.checkpoint()
    assert checkpoint_of(pair.disk, pair.folder) == Checkpoint(5)
    effects = pair.disk.effects
    pair.mirror.checkpoint()
    assert pair.disk.effects == effects, "nothing was written since"


def test_a_new_process_syncs_what_the_last_one_wrote() -> None:
    pair = Pair()
    pair.append(pair.copies)
    pair.reopened()
    pair.mirror.checkpoint()
    assert checkpoint_of(pair.disk, pair.folder).seq == 5
    assert all(
        not content.unsynced for name, content in pair.disk._files.items() if name.endswith(".slot")
    )
    assert not pair.disk._files[str(layout.index_path(pair.folder, 0))].unsynced


def test_after_a_failed_sync_everything_is_written_again() -> None:
    """The kernel drops pages that it could not write, and marks them as clean."""
    pair = Pair()
    pair.append(pair.copies[:2])
    pair.mirror.checkpoint()
    pair.disk.flip_bit(pair.slot_path(1), 700)
    pair.repair(pair.copies[:2])
    pair.append(pair.copies[:4])
    pair.disk.faults.append(Fault("sync", path_part="slot"))
    with pytest.raises(OSError, match="Input/output"):
        pair.mirror.sync()
    for ahead in range(3):  # behind the checkpoint, mended, behind the checkpoint
        pair.disk.faults.append(Fault("write", path_part=pair.slot_path(ahead).name))
        with pytest.raises(OSError, match="Input/output"):
            pair.mirror.checkpoint()
    pair.mirror.checkpoint()
    pair.disk.lose_unsynced()
    assert not pair.disk._unsynced_names
    assert pair.reopened(os_crashed=True) == Recovered(4, [], NO_SEQS)
    assert checkpoint_of(pair.disk, pair.folder) == Checkpoint(4)


def test_what_is_missing_is_noted_behind_a_checkpoint_that_failed_and_is_there() -> None:
    """Its file has the name, and the folder could not be synced."""
    pair = Pair()
    pair.append(pair.copies)
    pair.mirror.sync()
    pair.disk.faults.append(Fault("sync", path_part="checkpoint"))
    with pytest.raises(OSError, match="Input/output"):
        pair.mirror.checkpoint(syncs=False)
    pair.disk.flip_bit(pair.slot_path(1), 700)
    pair.repair(pair.copies)
    pair.disk.sync_folder(pair.folder)  # as the kernel does of its own accord
    pair.disk.lose_unsynced()
    assert pair.reopened(os_crashed=True).damaged == SeqSet.of([2])


def test_the_last_segment_stays_though_a_cut_made_it_the_last_while_others_are_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_segments(monkeypatch, 2)
    pair = Pair()
    pair.append(pair.copies)
    pair.mirror.raise_floor(BASE_SLOT + 3)
    deleting = pair.mirror.delete_finished(Undeletable())
    while next(deleting) is not None:
        pass
    pair.mirror.end_at(4)
    assert not list(deleting)
    assert list_segments(pair.disk, pair.folder) == [1]
    assert pair.reopened().last_seq == 4


def test_what_an_earlier_process_noted_as_missing_outlives_the_machine() -> None:
    """It died behind the rename: the file has its name, which is perhaps not on the medium."""
    pair = Pair()
    pair.append(pair.copies)
    pair.mirror.checkpoint()
    pair.disk.flip_bit(pair.slot_path(1), 700)
    pair.disk.faults.append(Fault("sync", path_part="checkpoint"))
    with pytest.raises(OSError, match="Input/output"):
        pair.repair(pair.copies)
    assert pair.reopened().damaged == SeqSet.of([2])
    assert pair.repair(pair.copies) == []
    pair.disk.lose_unsynced()
    assert pair.reopened(os_crashed=True).damaged == SeqSet.of([2])


def test_what_is_written_again_is_synced_again_whatever_a_sync_had_covered() -> None:
    pair = Pair()
    pair.append(pair.copies[:1])
    pair.mirror.sync()
    pair.append(pair.copies[1:2])
    pair.disk.faults.append(Fault("sync", path_part="slot"))
    with pytest.raises(OSError, match="Input/output"):
        pair.mirror.sync()
    pair.mirror.checkpoint()
    slots = [pair.disk._files[str(pair.slot_path(ahead))] for ahead in range(2)]
    assert not any(content.unsynced for content in slots)


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each sync whether files were closed before: the kernel may forget what became of them."""
    closed, real = list[bool](), SimulatedManyFiles.sync

    def sync(files: SimulatedManyFiles, paths: Collection[Path], *, were_closed: bool) -> None:
        closed.append(were_closed)
        real(files, paths, were_closed=were_closed)

    monkeypatch.setattr(SimulatedManyFiles, "sync", sync)
    return closed


def test_what_is_opened_again_for_a_repair_was_closed_before_its_sync(closed: list[bool]) -> None:
    pair = Pair()
    pair.append(pair.copies[:2])
    pair.disk.flip_bit(pair.slot_path(1), 700)
    pair.repair(pair.copies[:2])
    pair.mirror.sync()
    pair.mirror.sync()
    assert closed == [True, False]


def test_what_another_writer_has_left_was_closed_before_its_sync(closed: list[bool]) -> None:
    """A node that leaves its wheel continues it as a copy: few files were synced one by one."""
    pair = Pair()
    pair.append(pair.copies)
    pair.reopened()
    pair.mirror.sync()
    pair.mirror.sync()
    assert closed == [True, False]


def test_an_origin_that_is_closed_while_it_is_swept_leaves_its_checkpoint_to_the_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the copy's would say that the segments which the origin has deleted since are lost."""
    small_segments(monkeypatch, 2)
    pair = Pair()
    disk, origin = pair.origin_disk, pair.origin
    origin.raise_floor(BASE_SLOT + 3)
    deleting = origin.delete_finished(Undeletable())
    assert [next(deleting) for _ in range(3)] == [BASE_SLOT, BASE_SLOT + 1, BASE_SLOT + 2]
    origin.close()
    copy = open_copy(disk, DATA, pair.wheel, HandleCache(disk, 2))
    list(deleting)
    copy.checkpoint()
    copy.close()
    floor = BASE_SLOT + 3
    recovered = recover_wheel(disk, DATA, pair.wheel, os_crashed=False, floor=floor)
    assert recovered == Recovered(5, [], NO_SEQS)


def test_what_is_written_again_was_closed_before_its_sync(closed: list[bool]) -> None:
    pair = Pair()
    pair.append(pair.copies[:2])
    pair.disk.faults.append(Fault("sync", path_part="slot"))
    with pytest.raises(OSError, match="Input/output"):
        pair.mirror.sync()
    pair.mirror.sync()
    pair.append(pair.copies[2:3])
    pair.mirror.sync()
    assert closed == [False, True, False]


def test_a_repair_that_a_crash_of_the_machine_undoes_is_missing_again() -> None:
    pair = Pair()
    pair.append(pair.copies)
    pair.mirror.checkpoint()
    pair.disk.flip_bit(pair.slot_path(1), 700)
    pair.repair(pair.copies)
    pair.disk.lose_unsynced()
    assert pair.reopened(os_crashed=True).damaged == SeqSet.of([2])


def test_a_new_process_syncs_what_the_last_one_repaired() -> None:
    pair = Pair()
    pair.append(pair.copies)
    pair.mirror.checkpoint()
    pair.disk.flip_bit(pair.slot_path(1), 700)
    pair.repair(pair.copies)
    assert pair.reopened() == Recovered(5, [], NO_SEQS)
    pair.mirror.checkpoint()
    pair.disk.lose_unsynced()
    assert pair.reopened(os_crashed=True) == Recovered(5, [], NO_SEQS)
    pair.assert_same()


def test_a_cut_that_a_crash_kept_from_beginning_is_made_by_recovery() -> None:
    for os_crashed in (False, True):
        pair = Pair()
        pair.append(pair.copies)
        mark_wheel(pair.disk, DATA, pair.wheel, WheelState.CLOSED, final_seq=2)
        assert pair.reopened(os_crashed=os_crashed).last_seq == 2
        assert list(slots_of(pair.disk, DATA, pair.wheel)) == [BASE_SLOT, BASE_SLOT + 1]


def test_segments_with_a_hole_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    small_segments(monkeypatch, 2)
    pair = Pair()
    pair.append([pair.copies[0], FrameCopy(2, HOLE_ROW, b""), *pair.copies[2:]])
    floor = BASE_SLOT + 3
    index = IndexWriter(pair.disk, pair.folder)
    assert not list(index.delete_below(floor, print, Undeletable()))
    pair.repair(pair.copies)
    delete_below(pair.mirror, floor)
    assert rows_of(pair.disk, DATA, pair.wheel)[:4] == [GONE_ROW] * 4
    assert pair.mirror.last_seq == 5
    assert pair.reopened(floor=floor) == Recovered(5, [], NO_SEQS)


def test_missing_frames_below_the_floor_are_finished() -> None:
    pair = Pair()
    pair.append(pair.copies)
    pair.mirror.note_damaged(1)
    pair.mirror.note_damaged(2)
    delete_below(pair.mirror, BASE_SLOT + 1)
    assert pair.mirror.missing == SeqSet.of([2])


@pytest.mark.parametrize("counted_again", [False, True])
def test_the_top_slot_is_that_of_rows_too_that_were_unreadable_when_counted(
    *, counted_again: bool
) -> None:
    pair = Pair(slots=(0, 0, 3, 0, 0))
    pair.append(pair.copies)
    pair.disk.failing_reads = "index.", errno.EIO
    pair.mirror.checkpoint()
    pair.disk.failing_reads = None
    if counted_again:
        pair.mirror.checkpoint()
        append(pair.origin, [message(7)])
        append(pair.origin, [message(8)])
        pair.append(copies_of(pair.origin_disk, DATA, pair.wheel))
        pair.mirror.checkpoint()
    pair.reopened()
    assert pair.mirror.top_slot == BASE_SLOT + 3


def test_the_top_slot_is_that_of_rows_too_that_were_unreadable_at_the_start() -> None:
    pair = Pair(slots=(0, 0, 3, 0, 0))
    pair.append(pair.copies)
    pair.disk.failing_reads = "index.", errno.EIO
    missing = pair.reopened().damaged
    pair.disk.failing_reads = None
    assert finish(pair.mirror.reading_again(missing)) == SeqSet([(1, 5)])
    assert pair.mirror.top_slot == BASE_SLOT + 3


@pytest.mark.parametrize("by_repair", [False, True])
def test_what_could_not_be_read_at_the_start_is_synced_once_it_can(*, by_repair: bool) -> None:
    """A checkpoint meanwhile covered it as missing; the next one says that it is on the medium."""
    pair = Pair()
    pair.append(pair.copies)
    pair.disk.failing_reads = "index.", errno.EIO
    missing = pair.reopened().damaged
    pair.mirror.checkpoint(refreshes=False)
    pair.disk.failing_reads = None
    assert (
        pair.repair(pair.copies) == [] if by_repair else finish(pair.mirror.reading_again(missing))
    )
    assert not pair.mirror.missing
    pair.mirror.checkpoint()
    pair.disk.lose_unsynced()
    assert pair.reopened(os_crashed=True) == Recovered(5, [], NO_SEQS)
    pair.assert_same()


def test_rows_are_restored_once_the_slot_files_can_be_read() -> None:
    pair = Pair()
    pair.append(pair.copies)
    pair.disk.zero_somewhere("index", Random(0))  # all of it
    for seq in range(1, 6):
        pair.mirror.note_damaged(seq)
    pair.disk.failing_reads = ".slot", errno.EIO
    assert finish(pair.mirror.reading_again(pair.mirror.missing)) == NO_SEQS
    pair.disk.failing_reads = None
    assert finish(pair.mirror.reading_again(pair.mirror.missing)) == SeqSet([(1, 5)])
    rows = rows_of(pair.disk, DATA, pair.wheel)
    assert rows == rows_of(pair.origin_disk, DATA, pair.wheel)


def test_a_row_that_is_lost_after_its_frame_was_unreadable_is_restored() -> None:
    pair = Pair()
    pair.append(pair.copies)
    pair.mirror.note_damaged(3)
    pair.disk.failing_reads = ".slot", errno.EIO
    assert finish(pair.mirror.reading_again(SeqSet.of([3]))) == NO_SEQS
    pair.disk.failing_reads = None
    pair.disk.zero_somewhere("index", Random(0))
    assert finish(pair.mirror.reading_again(SeqSet.of([3]))) == SeqSet.of([3])


def test_a_row_that_is_lost_after_a_start_that_could_not_read_its_frame_is_restored() -> None:
    pair = Pair()
    pair.append(pair.copies)
    pair.disk.failing_reads = ".slot", errno.EIO
    assert 5 in pair.reopened().damaged
    pair.disk.failing_reads = None
    pair.disk.zero_somewhere("index", Random(0))
    assert finish(pair.mirror.reading_again(SeqSet.of([5]))) == SeqSet.of([5])


def test_rows_that_nothing_restores_stay_unreadable_when_their_segment_moves() -> None:
    pair = Pair()
    pair.append(pair.copies)
    pair.disk.spoil(layout.index_path(pair.folder, 0), 0, 1, wears=True)
    pair.disk.delete(pair.slot_path(1))
    for seq in range(1, 6):
        pair.mirror.note_damaged(seq)
    assert finish(pair.mirror.reading_again(pair.mirror.missing)) == SeqSet([(1, 1), (3, 5)])
    assert pair.mirror.unreadable_rows(2) == SeqSet.of([2]), "it is waited for as before"


def test_a_segment_that_takes_no_further_rows_moves_to_a_new_file() -> None:
    pair = Pair()
    pair.append(pair.copies[:4])
    pair.disk.spoil(layout.index_path(pair.folder, 0), 0, 1, wears=True)
    assert pair.append(pair.copies) is None
    assert pair.mirror.last_seq == 5
    for seq in range(1, 5):
        pair.mirror.note_damaged(seq)
    assert finish(pair.mirror.reading_again(pair.mirror.missing)) == SeqSet([(1, 4)])
    pair.assert_same()


def test_rows_of_finished_frames_are_repaired_where_the_medium_takes_none() -> None:
    pair = Pair()
    pair.append(pair.copies)
    pair.disk.spoil(layout.index_path(pair.folder, 0), 0, 1, wears=True)
    for seq in range(1, 6):
        pair.mirror.note_damaged(seq)
    floor = BASE_SLOT + 2
    pair.mirror.raise_floor(floor)
    list(pair.mirror.delete_finished(Undeletable()))
    bare = [copy._replace(content=b"") for copy in pair.copies if copy.seq != 4]
    assert pair.repair([*bare[:3], pair.copies[3], bare[3]]) == []
    assert not pair.mirror.missing
    assert rows_of(pair.disk, DATA, pair.wheel) == rows_of(pair.origin_disk, DATA, pair.wheel)


def test_rows_move_although_another_slot_file_cannot_be_read() -> None:
    pair = Pair()
    pair.append(pair.copies)
    pair.disk.spoil(layout.index_path(pair.folder, 0), 0, 1, wears=True)
    pair.disk.spoil(pair.slot_path(2), 0, 1)
    for seq in range(1, 6):
        pair.mirror.note_damaged(seq)
    there = finish(pair.mirror.reading_again(pair.mirror.missing))
    assert there == SeqSet([(1, 3), (5, 5)])


def test_a_reader_finds_the_rows_of_a_segment_that_moved_without_asking_for_the_end() -> None:
    pair = Pair()
    pair.append(pair.copies)
    reader = WheelReader(pair.disk, DATA, pair.wheel)
    pair.disk.spoil(layout.index_path(pair.folder, 0), 0, 1, wears=True)
    assert reader.holes_anywhere(reader.last_seq(), NO_SEQS) == SeqSet([(1, 5)])
    for seq in range(1, 6):
        pair.mirror.note_damaged(seq)
    finish(pair.mirror.reading_again(pair.mirror.missing))
    assert not reader.holes_anywhere(5, NO_SEQS)


def test_a_slot_file_moves_once_all_frames_of_a_bad_page_have_come() -> None:
    pair = Pair()
    pair.append(pair.copies[:4])
    pair.disk.spoil(pair.slot_path(), 0, 1)  # of frames 1 and 3; 5 goes behind them
    with pytest.raises(OSError, match=r"\.slot"):
        pair.append(pair.copies)
    assert pair.mirror.missing == SeqSet.of([1, 3])
    assert [fault.reason for fault in pair.repair(pair.copies[:1])] == [DamageReason.UNREADABLE]
    assert pair.mirror.not_returned == SeqSet.of([1])
    assert pair.repair(pair.copies[2:3]) == []
    assert not pair.mirror.missing
    assert pair.append(pair.copies) is None
    pair.assert_same()
    pair.mirror.checkpoint()
    pair.disk.lose_unsynced()
    assert pair.reopened(os_crashed=True) == Recovered(5, [], NO_SEQS)


def test_a_slot_file_moves_off_a_page_that_large_frames_share() -> None:
    pair = Pair((0, 0), value_bytes=3 << 20)
    pair.append(pair.copies)
    shared = len(pair.copies[0].content)
    pair.disk.spoil(pair.slot_path(), shared, shared + 1)
    for copy in pair.copies:
        pair.mirror.note_damaged(copy.seq)
    assert len(pair.repair(pair.copies[:1])) == 1
    assert pair.repair(pair.copies[1:]) == []
    pair.assert_same()


def test_a_page_that_nobody_has_read_yet_is_missing_when_a_frame_of_it_is_refused() -> None:
    pair = Pair((0, 0, 0, 1))
    pair.append(pair.copies)
    pair.disk.spoil(pair.slot_path(), 0, 1)
    pair.mirror.note_damaged(2)
    assert len(pair.repair(pair.copies[1:2])) == 1
    assert pair.mirror.missing == SeqSet([(1, 3)])
    assert pair.repair([pair.copies[0], pair.copies[2]]) == []
    assert not pair.mirror.missing
    pair.assert_same()


def test_a_refused_frame_beyond_the_end_of_the_wheel_does_not_come_back() -> None:
    pair = Pair((0, 0, 0))
    pair.append(pair.copies)
    pair.disk.spoil(pair.slot_path(), 0, 1)
    pair.mirror.note_damaged(3)
    assert len(pair.repair(pair.copies[2:])) == 1
    pair.mirror.end_at(2)
    assert pair.repair(pair.copies[:2]) == []
    kept = pair.copies[:2]
    assert rows_of(pair.disk, DATA, pair.wheel) == [copy.row for copy in kept]
    assert pair.disk.content(pair.slot_path()) == b"".join(copy.content for copy in kept)


def test_a_bad_page_stays_while_the_frame_of_a_lost_row_may_lie_there() -> None:
    pair = Pair((0, 0, 0))
    pair.append(pair.copies)
    pair.mirror.sync()
    index = layout.index_path(pair.folder, 0)
    rows = pair.disk.content(index)
    pair.disk.set_content(index, rows[:16] + bytes(16) + rows[32:])  # that of frame 2
    pair.disk.failing_reads = ".slot", errno.EIO
    for seq in (1, 2, 3):
        pair.mirror.note_damaged(seq)
    for _ in (1, 3):
        pair.disk.faults.append(Fault("write", errno.EIO, ".slot"))
    assert len(pair.repair([pair.copies[0], pair.copies[2]])) == 2
    pair.disk.failing_reads = None
    assert finish(pair.mirror.reading_again(SeqSet([(1, 3)]))) == SeqSet([(1, 3)])
    pair.assert_same()


def test_a_slot_file_without_a_lacking_frame_moves_though_another_is_lost() -> None:
    pair = Pair((0, 1, 0))
    lost = pair.copies[1]._replace(row=HOLE_ROW, content=b"")
    pair.append([pair.copies[0], lost, pair.copies[2]])
    pair.disk.spoil(pair.slot_path(), 0, 1)
    for seq in (1, 3):
        pair.mirror.note_damaged(seq)
    pair.repair([pair.copies[0], pair.copies[2]])
    assert pair.mirror.missing == SeqSet.of([2])


def test_a_slot_file_whose_new_name_was_not_synced_gets_it_synced_later() -> None:
    pair = Pair((0, 0, 0))
    pair.append(pair.copies[:2])
    pair.mirror.checkpoint()
    pair.disk.spoil(pair.slot_path(), 0, 1)
    for seq in (1, 2):
        pair.mirror.note_damaged(seq)
    pair.disk.faults.append(Fault("sync", errno.EIO, ".slot"))
    assert len(pair.repair(pair.copies[:2])) == 2
    assert pair.append(pair.copies) is None
    pair.mirror.checkpoint()
    pair.disk.lose_unsynced()
    assert 3 not in pair.reopened(os_crashed=True).damaged
    assert isinstance(WheelReader(pair.disk, DATA, pair.wheel).frame(3), Frame)


def test_a_slot_file_for_which_there_is_no_space_stays() -> None:
    pair = Pair((0, 0))
    pair.append(pair.copies)
    pair.disk.spoil(pair.slot_path(), 0, 1)
    for seq in (1, 2):
        pair.mirror.note_damaged(seq)
    pair.disk.capacity_bytes = pair.disk.used_bytes
    assert len(pair.repair(pair.copies)) == 2
    assert pair.mirror.not_returned == SeqSet([(1, 2)])


def test_a_slot_file_is_not_filled_up_to_a_frame_far_behind_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = Pair((0, 0, 0))
    pair.append(pair.copies)
    pair.disk.set_content(pair.slot_path(), pair.copies[0].content)
    monkeypatch.setattr(refused_pages, "MOST_BYTES", len(pair.copies[0].content))
    pair.mirror.note_damaged(3)
    pair.disk.faults.append(Fault("write", errno.EIO, ".slot"))
    assert len(pair.repair(pair.copies[2:])) == 1
    assert pair.disk.content(pair.slot_path()) == pair.copies[0].content


def test_rows_go_to_the_new_file_of_a_segment_whose_name_could_not_be_synced() -> None:
    pair = Pair((0, 0, 0))
    pair.append(pair.copies[:1])
    index = layout.index_path(pair.folder, 0)
    for operation in ("write", "sync"):
        pair.disk.faults.append(Fault(operation, errno.EIO, index.name))
    with pytest.raises(OSError, match="index"):
        pair.append(pair.copies[:2])
    assert pair.append(pair.copies) is None
    pair.assert_same()


def test_a_slot_file_that_is_too_large_to_move_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refused_pages, "MOST_BYTES", 10)
    pair = Pair((0, 0, 1))
    pair.append(pair.copies)
    pair.disk.spoil(pair.slot_path(), 0, 1)
    for seq in (1, 2):
        pair.mirror.note_damaged(seq)
    assert len(pair.repair(pair.copies[:2])) == 2
    assert pair.mirror.not_returned == SeqSet([(1, 2)])
