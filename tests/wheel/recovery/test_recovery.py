import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.files.handles import HandleCache
from delaywheel.storage.files.index import IndexWriter, list_segments
from delaywheel.storage.files.undeletable import Undeletable
from delaywheel.storage.files.wheel_folder import (
    Checkpoint,
    WheelMissing,
    load_checkpoint,
)
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.folder.steps import finish
from delaywheel.storage.frames.format import DamageReason, Frame
from delaywheel.storage.reading.reader import DamagedFrame, WheelReader
from delaywheel.storage.recovery.recover import CutTail, Recovered, recovering
from delaywheel.storage.writing.restoring import move_rows
from delaywheel.storage.writing.wheel import OriginWheel
from sim.machine.disk import Crash, Fault, SimulatedDisk, SimulatedFile
from support.wheels.copies import bundled, copies_of, open_copy, recover_wheel
from support.wheels.messages import BASE_SLOT, Message, message
from support.wheels.segments import small_segments
from support.wheels.wheels import append, delete_below, new_wheel, read_all

DATA = Path("/data")


def wheel_of_three() -> tuple[SimulatedDisk, OriginWheel, dict[int, list[Message]]]:
    """Seqs 1 and 3 in one slot, 2 in the next."""
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA)
    frames: dict[int, list[Message]] = {}
    for number, ahead in enumerate([0, 1, 0]):
        frames |= append(wheel, [message(number, slot=BASE_SLOT + ahead)])
    return disk, wheel, frames


def slot_file(wheel: OriginWheel, ahead: int = 0) -> Path:
    return layout.slot_path(layout.wheel_folder(DATA, wheel.wheel), BASE_SLOT + ahead)


def index_file(wheel: OriginWheel) -> Path:
    return layout.index_path(layout.wheel_folder(DATA, wheel.wheel), 0)


@pytest.mark.parametrize("os_crashed", [False, True])
def test_nothing_to_do(*, os_crashed: bool) -> None:
    disk, wheel, frames = wheel_of_three()
    recovered = recover_wheel(disk, DATA, wheel.wheel, os_crashed=os_crashed)
    assert recovered == Recovered(3, [], NO_SEQS)
    assert read_all(disk, DATA, wheel.wheel) == frames


def test_tails_that_no_row_speaks_of_are_cut() -> None:
    disk, wheel, frames = wheel_of_three()
    whole, index = disk.content(slot_file(wheel)), disk.content(index_file(wheel))
    disk.set_content(index_file(wheel), index + b"torn")
    disk.set_content(slot_file(wheel), whole + b"tail")
    disk.set_content(slot_file(wheel, 5), b"no row at all")
    wheel._slots.announce([BASE_SLOT, BASE_SLOT + 5, BASE_SLOT + 6])
    recovered = recover_wheel(disk, DATA, wheel.wheel, os_crashed=False)
    assert sorted(recovered.cut) == sorted(
        [
            CutTail(index_file(wheel), len(index), 4),
            CutTail(slot_file(wheel), len(whole), 4),
            CutTail(slot_file(wheel, 5), 0, 13),
        ]
    )
    assert recovered.last_seq == 3
    assert disk.content(slot_file(wheel)) == whole
    assert disk.content(index_file(wheel)) == index
    assert not disk.exists(slot_file(wheel, 5))
    assert read_all(disk, DATA, wheel.wheel) == frames


@pytest.mark.parametrize("kind", ["index", "slot"])
def test_what_a_death_left_of_a_file_that_moved_is_deleted(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = PosixDisk()
    wheel = new_wheel(disk, tmp_path)
    append(wheel, [message(1)])
    wheel.close()
    copy = open_copy(disk, tmp_path, wheel.wheel, HandleCache(disk, 2))
    folder = layout.wheel_folder(tmp_path, wheel.wheel)
    refused = bundled(copies_of(disk, tmp_path, wheel.wheel)).only()

    def die(_: int) -> None:
        raise Crash

    moves: dict[str, Callable[[], object]] = {
        "index": lambda: move_rows(disk, folder, {1: refused.row}),
        "slot": lambda: copy._move(refused.slot),
    }
    copy._refused.put(refused)
    monkeypatch.setattr(os, "fsync", die)
    with pytest.raises(Crash):
        moves[kind]()
    monkeypatch.undo()
    assert disk.exists(layout.moving_path(folder))
    recover_wheel(disk, tmp_path, wheel.wheel, os_crashed=False)
    assert not disk.exists(layout.moving_path(folder))
    assert not list(tmp_path.rglob("*.tmp"))


def test_only_files_that_were_announced_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, wheel, frames = wheel_of_three()
    for number in range(20):
        frames |= append(wheel, [message(number, slot=BASE_SLOT + 100 + number)])
    wheel.checkpoint()
    frames |= append(wheel, [message(50, slot=BASE_SLOT + 7), message(51)])
    opened: list[Path] = []
    open_read = disk.open_read

    def noted(path: Path) -> SimulatedFile:
        opened.append(path)
        return open_read(path)

    monkeypatch.setattr(disk, "open_read", noted)
    assert recover_wheel(disk, DATA, wheel.wheel, os_crashed=False) == Recovered(25, [], NO_SEQS)
    slots = {path for path in opened if path.suffix == ".slot"}
    assert slots == {slot_file(wheel), slot_file(wheel, 7)}
    assert read_all(disk, DATA, wheel.wheel) == frames


@pytest.mark.parametrize("os_crashed", [False, True])
def test_no_byte_is_cut_on_the_word_of_a_wrong_table(*, os_crashed: bool) -> None:
    disk, wheel, frames = wheel_of_three()
    wheel.checkpoint()
    frames |= append(wheel, [message(8)])
    folder = layout.wheel_folder(DATA, wheel.wheel)
    table = layout.table_path(folder, BASE_SLOT // 3600)
    disk.set_content(table, bytes(len(disk.content(table))))
    content = disk.content(slot_file(wheel))
    disk.set_content(slot_file(wheel), content + b"torn")
    recovered = recover_wheel(disk, DATA, wheel.wheel, os_crashed=os_crashed)
    assert recovered == Recovered(4, [CutTail(slot_file(wheel), len(content), 4)], NO_SEQS)
    assert read_all(disk, DATA, wheel.wheel) == frames


def test_frames_bring_lost_rows_back() -> None:
    disk, wheel, frames = wheel_of_three()
    disk.set_content(index_file(wheel), b"")
    assert recover_wheel(disk, DATA, wheel.wheel, os_crashed=True) == Recovered(3, [], NO_SEQS)
    assert read_all(disk, DATA, wheel.wheel) == frames


def test_a_lost_frame_between_others_is_reported_not_hidden() -> None:
    disk, wheel, frames = wheel_of_three()
    disk.delete(slot_file(wheel, 1))
    assert recover_wheel(disk, DATA, wheel.wheel, os_crashed=True).damaged == SeqSet.of([2])
    lost = WheelReader(disk, DATA, wheel.wheel).frame(2)
    assert isinstance(lost, DamagedFrame)
    assert (lost.slot, lost.messages, lost.reason) == (BASE_SLOT + 1, 1, DamageReason.GONE)
    del frames[2]
    assert read_all(disk, DATA, wheel.wheel) == frames


def test_a_frame_lost_with_its_row_leaves_a_hole() -> None:
    disk, wheel, frames = wheel_of_three()
    disk.delete(slot_file(wheel, 1))
    disk.set_content(index_file(wheel), b"")
    lost = Recovered(3, [], SeqSet.of([2]), nowhere=SeqSet.of([2]))
    assert recover_wheel(disk, DATA, wheel.wheel, os_crashed=True) == lost
    hole = WheelReader(disk, DATA, wheel.wheel).frame(2)
    assert isinstance(hole, DamagedFrame)
    assert (hole.slot, hole.reason) == (0, DamageReason.HOLE)
    del frames[2]
    assert read_all(disk, DATA, wheel.wheel) == frames
    again = recover_wheel(disk, DATA, wheel.wheel, os_crashed=False)
    assert again == lost, "no start forgets what is missing"


def test_frames_without_rows_are_found_behind_a_damaged_one_that_has_its_row() -> None:
    disk, wheel, frames = wheel_of_three()
    frames |= append(wheel, [message(7)])
    rows = disk.content(index_file(wheel))
    disk.set_content(index_file(wheel), rows[:48])  # the last one is lost
    at = int(WheelReader(disk, DATA, wheel.wheel).rows(3, 3)["offset"][0])
    content = bytearray(disk.content(slot_file(wheel)))
    content[at] ^= 1
    disk.set_content(slot_file(wheel), bytes(content))
    recovered = recover_wheel(disk, DATA, wheel.wheel, os_crashed=True)
    assert recovered == Recovered(4, [], SeqSet.of([3]))
    assert disk.content(index_file(wheel)) == rows
    found = read_all(disk, DATA, wheel.wheel)
    assert isinstance(found.pop(3), DamagedFrame)
    del frames[3]
    assert found == frames


def test_deleted_slots_are_no_damage() -> None:
    disk, wheel, _ = wheel_of_three()
    delete_below(wheel, BASE_SLOT + 1)
    floor = BASE_SLOT + 1
    for os_crashed in (False, True):
        recovered = recover_wheel(disk, DATA, wheel.wheel, os_crashed=os_crashed, floor=floor)
        assert recovered == Recovered(3, [], NO_SEQS)


def test_only_what_came_after_the_checkpoint_is_read_again() -> None:
    disk, wheel, _ = wheel_of_three()
    wheel.checkpoint()
    append(wheel, [message(7)])
    damaged = bytearray(disk.content(slot_file(wheel)))
    damaged[80] ^= 1
    damaged[-80] ^= 1
    disk.set_content(slot_file(wheel), bytes(damaged))
    recovered = recover_wheel(disk, DATA, wheel.wheel, os_crashed=True)
    assert recovered == Recovered(4, [], SeqSet.of([4]))


def test_damage_at_the_very_end_is_seen_even_without_a_crash_of_the_machine() -> None:
    disk, wheel, _ = wheel_of_three()
    disk.flip_bit(slot_file(wheel), 8 * len(disk.content(slot_file(wheel))) - 1)
    assert recover_wheel(disk, DATA, wheel.wheel, os_crashed=False).damaged == SeqSet.of([3])


def test_what_fails_once_is_read_again() -> None:
    """With one member no node could repair it, and none would look again."""
    disk, wheel, _ = wheel_of_three()
    for times, damaged in ((1, []), (2, [3])):
        disk.faults += [Fault("open", path_part=".slot") for _ in range(times)]
        recovered = recover_wheel(disk, DATA, wheel.wheel, os_crashed=False)
        assert recovered == Recovered(3, [], SeqSet.of(damaged))


@pytest.mark.parametrize("wears", [False, True])
@pytest.mark.parametrize("os_crashed", [False, True])
def test_a_bad_sector_of_the_index_hides_only_its_own_rows(
    *, os_crashed: bool, wears: bool
) -> None:
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA, table_rows=1 << 20)
    frames: dict[int, list[Message]] = {}
    for number in range(600):
        frames |= append(wheel, [message(number, slot=BASE_SLOT + number % 5)])
    disk.spoil(index_file(wheel), 4096 + 512, 4096 + 1024, wears=wears)
    recovered = recover_wheel(disk, DATA, wheel.wheel, os_crashed=os_crashed)
    assert recovered == Recovered(600, [], NO_SEQS), "rows are written again from the frames"
    reader = WheelReader(disk, DATA, wheel.wheel)
    for seq in (1, 256, 513, 600):
        assert isinstance(reader.frame(seq), Frame)
    assert isinstance(reader.frame(300), Frame)
    assert read_all(disk, DATA, wheel.wheel) == frames, "each frame proves itself"


@pytest.mark.parametrize("os_crashed", [False, True])
def test_rows_that_cannot_be_read_since_a_checkpoint_are_missing(*, os_crashed: bool) -> None:
    """Neither the slot table nor the top slot would say that their seconds have any frames."""
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA, table_rows=1 << 20)
    for number in range(600):
        append(wheel, [message(number, slot=BASE_SLOT + number % 5)])
    wheel.checkpoint()
    disk.spoil(index_file(wheel), 4096 + 512, 4096 + 1024)
    for ahead in range(5):
        disk.delete(slot_file(wheel, ahead))
    recovered = recover_wheel(disk, DATA, wheel.wheel, os_crashed=os_crashed)
    assert set(range(257, 513)) <= set(recovered.damaged)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_an_index_that_is_gone_before_it_was_synced_is_written_again(*, checkpoints: bool) -> None:
    """Nothing else says that there were rows: the slot files do."""
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA)
    if checkpoints:
        wheel.checkpoint()
    frames = append(wheel, [message(1)]) | append(wheel, [message(2, slot=BASE_SLOT + 1)])
    disk.delete(index_file(wheel))
    assert recover_wheel(disk, DATA, wheel.wheel, os_crashed=False) == Recovered(2, [], NO_SEQS)
    assert read_all(disk, DATA, wheel.wheel) == frames


def test_frames_behind_a_damaged_one_are_found_without_any_index() -> None:
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA)
    frames: dict[int, list[Message]] = {}
    for number in range(3):
        frames |= append(wheel, [message(number)])
    length = len(disk.content(slot_file(wheel))) // 3
    disk.flip_bit(slot_file(wheel), 8 * (length + length // 2))
    disk.delete(index_file(wheel))
    recovered = recover_wheel(disk, DATA, wheel.wheel, os_crashed=True)
    assert recovered == Recovered(3, [], SeqSet.of([2]), SeqSet.of([2]))
    for seq in (1, 3):
        assert isinstance(WheelReader(disk, DATA, wheel.wheel).frame(seq), Frame)


@pytest.mark.parametrize("operation", ["open", "read"])
def test_a_start_may_wait_for_slot_files_that_say_where_the_wheel_ends(operation: str) -> None:
    disk, wheel, frames = wheel_of_three()
    disk.set_content(index_file(wheel), b"")
    fault = Fault(operation, path_part=slot_file(wheel, 1).name)
    disk.faults += [fault]
    with pytest.raises(OSError, match="Input/output"):
        finish(recovering(disk, DATA, wheel.wheel, os_crashed=True, must_read=True))
    assert finish(recovering(disk, DATA, wheel.wheel, os_crashed=True, must_read=True)).damaged == (
        NO_SEQS
    )
    assert read_all(disk, DATA, wheel.wheel) == frames


def test_an_index_that_cannot_be_opened_hides_its_rows_as_long_as_that_lasts() -> None:
    disk, wheel, frames = wheel_of_three()
    disk.faults += [Fault("open", path_part="index") for _ in range(99)]
    recovered = recover_wheel(disk, DATA, wheel.wheel, os_crashed=False)
    unread = SeqSet.of([1, 2, 3])
    assert recovered == Recovered(3, [], unread)
    reader = WheelReader(disk, DATA, wheel.wheel)
    assert reader.last_seq() == 3
    assert isinstance(reader.frame(2), DamagedFrame)
    assert read_all(disk, DATA, wheel.wheel) == frames, "each frame proves itself"
    disk.faults.clear()
    assert isinstance(reader.frame(2), Frame)
    assert recover_wheel(disk, DATA, wheel.wheel, os_crashed=False) == Recovered(3, [], NO_SEQS)


def test_a_segment_that_cannot_be_opened_is_neither_shortened_nor_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_segments(monkeypatch, 2)
    disk, wheel, _ = wheel_of_three()
    disk.faults += [Fault("open", path_part="index") for _ in range(99)]
    index = IndexWriter(disk, index_file(wheel).parent)
    assert not list(index.delete_below(BASE_SLOT + 9, print, Undeletable()))
    assert WheelReader(disk, DATA, wheel.wheel).last_seq() == 3


def test_a_bad_sector_of_a_slot_file_hides_only_its_own_frames() -> None:
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA)
    frames: dict[int, list[Message]] = {}
    for number in range(10):
        frames |= append(wheel, [message(number, value=bytes(9000))])
    length = len(disk.content(slot_file(wheel))) // 10
    disk.spoil(slot_file(wheel), 4 * length + 4096, 4 * length + 4097)
    found = read_all(disk, DATA, wheel.wheel)
    lost = {seq: each for seq, each in found.items() if isinstance(each, DamagedFrame)}
    assert set(lost) == {5}
    assert lost[5].reason is DamageReason.UNREADABLE
    assert set(found) == set(frames)
    recovered = recover_wheel(disk, DATA, wheel.wheel, os_crashed=True)
    assert recovered == Recovered(10, [], SeqSet.of([5]))


def test_an_empty_wheel_and_a_missing_one() -> None:
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA).wheel
    for os_crashed in (False, True):
        assert recover_wheel(disk, DATA, wheel, os_crashed=os_crashed) == Recovered(0, [], NO_SEQS)
    with pytest.raises(WheelMissing):
        recover_wheel(disk, DATA, WheelId("node-1", 2), os_crashed=False)


def test_rows_over_several_segments_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    small_segments(monkeypatch, 4)
    for kept in range(11):
        disk = SimulatedDisk()
        wheel = new_wheel(disk, DATA)
        frames: dict[int, list[Message]] = {}
        for number in range(10):
            frames |= append(wheel, [message(number, slot=BASE_SLOT + number)])
            if number == 2:
                wheel.checkpoint()
        folder = layout.wheel_folder(DATA, wheel.wheel)
        if kept >= 3:
            _cut_index(disk, folder, kept)
        assert recover_wheel(disk, DATA, wheel.wheel, os_crashed=True) == Recovered(10, [], NO_SEQS)
        assert read_all(disk, DATA, wheel.wheel) == frames


def _cut_index(disk: SimulatedDisk, folder: Path, rows: int) -> None:
    for segment in range(3):
        path = layout.index_path(folder, segment)
        left = max(0, min(4, rows - 4 * segment))
        disk.set_content(path, disk.content(path)[: 16 * left])


@pytest.mark.parametrize("os_crashed", [False, True])
@pytest.mark.parametrize("is_synced", [False, True])
def test_rows_of_zeros_are_written_again_from_their_frames(
    *, os_crashed: bool, is_synced: bool
) -> None:
    disk, wheel, frames = wheel_of_three()
    if is_synced:
        wheel.checkpoint()
    rows = disk.content(index_file(wheel))
    disk.set_content(index_file(wheel), bytes(32) + rows[32:])
    reader = WheelReader(disk, DATA, wheel.wheel)
    zeros = reader.frame(1)
    assert isinstance(zeros, DamagedFrame)
    assert zeros.reason is DamageReason.HOLE
    assert recover_wheel(disk, DATA, wheel.wheel, os_crashed=os_crashed).damaged == NO_SEQS
    assert disk.content(index_file(wheel)) == rows
    assert read_all(disk, DATA, wheel.wheel) == frames


@pytest.mark.parametrize("os_crashed", [False, True])
@pytest.mark.parametrize("dropped", [[0], [1], [2], [1, 2], [0, 1, 2]])
def test_segments_that_the_medium_lost_come_back(
    monkeypatch: pytest.MonkeyPatch, dropped: list[int], *, os_crashed: bool
) -> None:
    small_segments(monkeypatch, 4)
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA)
    frames: dict[int, list[Message]] = {}
    for number in range(10):
        frames |= append(wheel, [message(number, slot=BASE_SLOT + number)])
    wheel.checkpoint()
    folder = layout.wheel_folder(DATA, wheel.wheel)
    for segment in dropped:
        disk.delete(layout.index_path(folder, segment))
    disk.delete(slot_file(wheel, 5))
    del frames[6]
    recovered = recover_wheel(disk, DATA, wheel.wheel, os_crashed=os_crashed)
    lost = NO_SEQS if dropped == [2] else SeqSet.of([6])  # only what lies behind is read again
    assert (recovered.last_seq, recovered.damaged & lost) == (10, lost)
    assert read_all(disk, DATA, wheel.wheel) == frames


@pytest.mark.parametrize("dropped", [[2], [1, 2]])
def test_the_last_segments_come_back_though_no_checkpoint_speaks_of_them(
    monkeypatch: pytest.MonkeyPatch, dropped: list[int]
) -> None:
    small_segments(monkeypatch, 4)
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA)
    frames = append(wheel, [message(0, slot=BASE_SLOT)])
    wheel.checkpoint()
    for number in range(1, 10):
        frames |= append(wheel, [message(number, slot=BASE_SLOT + number)])
    folder = layout.wheel_folder(DATA, wheel.wheel)
    rows = [disk.content(layout.index_path(folder, segment)) for segment in range(3)]
    for segment in dropped:
        disk.delete(layout.index_path(folder, segment))
    recovered = recover_wheel(disk, DATA, wheel.wheel, os_crashed=False)
    assert recovered == Recovered(10, [], NO_SEQS)
    assert [disk.content(layout.index_path(folder, segment)) for segment in range(3)] == rows
    assert read_all(disk, DATA, wheel.wheel) == frames


@pytest.mark.parametrize("deleted", [0, 1])
def test_a_segment_of_which_a_crash_kept_the_name_alone_makes_those_before_it_no_deleted_ones(
    monkeypatch: pytest.MonkeyPatch, deleted: int
) -> None:
    small_segments(monkeypatch, 4)
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA)
    for number in range(10):
        append(wheel, [message(number, slot=BASE_SLOT + number)])
        if number == 3 and deleted:
            wheel.checkpoint()
    folder, floor = layout.wheel_folder(DATA, wheel.wheel), BASE_SLOT + 4 * deleted
    delete_below(wheel, floor)
    assert list_segments(disk, folder) == [*range(deleted, 3)]
    for number in range(4 * deleted, 10):
        disk.delete(slot_file(wheel, number))
    for segment in range(deleted, 2):
        disk.delete(layout.index_path(folder, segment))
    disk.set_content(layout.index_path(folder, 2), b"")
    recovered = recover_wheel(disk, DATA, wheel.wheel, os_crashed=True, floor=floor)
    assert recovered == Recovered(4 * deleted, [], NO_SEQS)


def test_segments_that_were_deleted_are_finished_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    small_segments(monkeypatch, 4)
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA)
    for number in range(10):
        append(wheel, [message(number, slot=BASE_SLOT + number)])
    wheel.checkpoint()
    folder = layout.wheel_folder(DATA, wheel.wheel)
    old = disk.content(layout.index_path(folder, 0))
    floor = BASE_SLOT + 8
    delete_below(wheel, floor)
    assert list_segments(disk, folder) == [2]
    for garbles in (False, True):
        if garbles:
            disk.set_content(layout.checkpoint_path(folder), bytes(20))
        else:  # a crash of the machine has undone one deletion
            disk.open(layout.index_path(folder, 0), create=True).write_at([old], 0)
        recovered = recover_wheel(disk, DATA, wheel.wheel, os_crashed=True, floor=floor)
        assert recovered == Recovered(10, [], NO_SEQS)
        assert list_segments(disk, folder) == [2]
    checkpoint = load_checkpoint(disk, folder)
    assert checkpoint == Checkpoint(10, NO_SEQS, None)


@pytest.mark.parametrize("os_crashed", [False, True])
def test_a_small_file_that_cannot_be_read_keeps_no_wheel_from_its_recovery(
    *, os_crashed: bool
) -> None:
    disk, wheel, frames = wheel_of_three()
    wheel.checkpoint()
    folder = index_file(wheel).parent
    for path in (layout.checkpoint_path(folder), layout.table_head_path(folder)):
        if disk.exists(path):
            disk.spoil(path, 0, 1)
    recovered = recover_wheel(disk, DATA, wheel.wheel, os_crashed=os_crashed)
    assert recovered == Recovered(3, [], NO_SEQS)
    assert load_checkpoint(disk, folder) is not None, "it was written again"
    disk.faults += [Fault("open", path_part=f"{BASE_SLOT}.slot") for _ in range(99)]
    recovered = recover_wheel(disk, DATA, wheel.wheel, os_crashed=os_crashed)
    assert recovered.damaged == SeqSet.of([3] if not os_crashed else [])
    disk.faults.clear()
    assert read_all(disk, DATA, wheel.wheel) == frames


@pytest.mark.parametrize("os_crashed", [False, True])
def test_rows_that_stay_unreadable_are_missing_although_they_were_written_again(
    *, os_crashed: bool
) -> None:
    """Nobody would know their slots: the wheel would be deleted with what is pending."""
    disk, wheel, frames = wheel_of_three()
    disk.failing_reads = ("index.", errno.EIO)
    recovered = recover_wheel(disk, DATA, wheel.wheel, os_crashed=os_crashed)
    assert recovered == Recovered(3, [], SeqSet([(1, 3)]))
    disk.failing_reads = None
    assert recover_wheel(disk, DATA, wheel.wheel, os_crashed=False) == Recovered(3, [], NO_SEQS)
    assert read_all(disk, DATA, wheel.wheel) == frames


def test_an_index_that_takes_no_rows_at_its_end_is_made_whole_in_a_new_file() -> None:
    disk, wheel, _ = wheel_of_three()
    wheel.checkpoint()
    disk.set_content(index_file(wheel), disk.content(index_file(wheel))[:32])
    disk.spoil(index_file(wheel), 0, 1, wears=True)
    disk.delete(slot_file(wheel))
    recovered = recover_wheel(disk, DATA, wheel.wheel, os_crashed=True)
    assert (recovered.last_seq, recovered.damaged) == (3, SeqSet.of([1, 3]))
