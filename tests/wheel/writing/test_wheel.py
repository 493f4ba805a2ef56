import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest

from delaywheel.identity import NameInvalidError, WheelId
from delaywheel.storage.files import slot_files
from delaywheel.storage.files.handles import HandleCache
from delaywheel.storage.files.slot_files import SlotFiles, SlotFull, list_slots
from delaywheel.storage.files.slot_table import load_head
from delaywheel.storage.files.undeletable import Undeletable
from delaywheel.storage.files.wheel_folder import (
    MetaDamaged,
    WheelExists,
    WheelMeta,
    WheelMissing,
    WheelState,
    delete_halves,
    deleting_wheel,
    list_wheels,
    load_meta,
)
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.folder.steps import finish
from delaywheel.storage.frames.format import DamageReason, Frame
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.frames.rows import message_counts, withdrawn_counts
from delaywheel.storage.reading.reader import DamagedFrame, WheelReader
from delaywheel.storage.writing.wheel import SlotFinished, WheelBroken
from sim.machine.disk import Crash, Fault, SimulatedDisk
from support.wheels.copies import bundled, copy_of, rows_by_seq
from support.wheels.messages import BASE_SLOT, Message, columns_of, message, messages_of, names_of
from support.wheels.segments import small_segments
from support.wheels.wheels import (
    ACCEPTED_AT_MS,
    append,
    checkpoint_of,
    delete_below,
    mark_wheel,
    new_wheel,
    read_all,
)

DATA = Path("/data")
SECONDS_OF_A_WEEK = 7 * 24 * 3600


def test_slots_over_seven_days_with_a_bounded_number_of_open_files(tmp_path: Path) -> None:
    disk = PosixDisk()
    wheel = new_wheel(disk, tmp_path, handles=16)
    written = {}
    open_before = _open_slot_files(tmp_path)
    for part in range(15):
        slots = range(BASE_SLOT + part, BASE_SLOT + SECONDS_OF_A_WEEK, 7919)
        group = [message(part, slot=slot) for slot in slots]
        written.update(append(wheel, group))
        assert _open_slot_files(tmp_path) - open_before <= 16
    assert len(written) == sum(
        len(range(BASE_SLOT + part, BASE_SLOT + SECONDS_OF_A_WEEK, 7919)) for part in range(15)
    )
    assert read_all(disk, tmp_path, wheel.wheel) == written
    wheel.close()
    assert _open_slot_files(tmp_path) == 0


def _open_slot_files(data: Path) -> int:
    links = [path.resolve() for path in Path("/proc/self/fd").iterdir()]
    return sum(path.suffix == ".slot" and data in path.parents for path in links)


def test_near_slots_keep_their_handles_while_far_ones_come_and_go() -> None:
    disk = SimulatedDisk()
    disk.make_folder(DATA)
    handles = HandleCache(disk, 4)
    handles.now_slot = BASE_SLOT
    slots = SlotFiles(DATA, handles)

    def append(slot: int, content: bytes) -> None:
        (offset,) = slots.places(np.array([slot]), np.array([0, len(content)])).tolist()
        wrote = slots.append(bundled([copy_of(1, content, slot=slot, offset=offset)]))
        assert (wrote.frames, wrote.failure) == (1, None)

    append(BASE_SLOT + 1, b"near")
    for ahead in range(1000, 1010):
        append(BASE_SLOT + ahead, b"far")
        assert len(handles) <= 4
    assert (1, BASE_SLOT + 1) in handles._handles
    # When all are near, the one longest not used goes: the bound comes first.
    for ahead in range(10):
        append(BASE_SLOT + ahead, b"near")
    assert len(handles) == 4


def test_a_wheel_is_never_opened_twice() -> None:
    disk = SimulatedDisk()
    new_wheel(disk, DATA).close()
    with pytest.raises(WheelExists):
        new_wheel(disk, DATA)


def test_a_wheel_is_on_the_medium_before_its_first_frame() -> None:
    for effects in range(20):
        disk = SimulatedDisk()
        disk.crash_after(effects)
        try:
            new_wheel(disk, DATA)
        except Crash:
            disk.restart()
            assert list_wheels(disk, DATA) in ([], [WheelId("node-1", 1)])
            continue
        break
    else:
        pytest.fail("creating a wheel takes more effects than expected")


def test_meta_is_kept_and_a_damaged_one_is_named() -> None:
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA).wheel
    mark_wheel(disk, DATA, wheel, WheelState.CLOSED, final_seq=7)
    assert load_meta(disk, DATA, wheel) == WheelMeta(
        wheel, {"node-1": "storage"}, 1, 7200, WheelState.CLOSED, 7
    )
    path = layout.meta_path(layout.wheel_folder(DATA, wheel))
    good = disk.content(path)
    of_another = good.replace(b"node-1.1", b"node-1.2")
    with_list = re.sub(rb"\{[^{}]*\}", b"[]", good)
    for content in (b"", b"{}", b"[]", of_another, with_list):
        disk.set_content(path, content)
        with pytest.raises(MetaDamaged):
            load_meta(disk, DATA, wheel)
    with pytest.raises(WheelMissing):
        load_meta(disk, DATA, WheelId("node-1", 9))


@pytest.mark.parametrize("countdown", range(4))
@pytest.mark.parametrize("written_bytes", [0, 5, 16, 20])
def test_after_a_failed_write_only_frames_with_rows_count(
    countdown: int, written_bytes: int
) -> None:
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA)
    first = append(wheel, [message(1)])
    group = [message(number, slot=BASE_SLOT + number) for number in range(3)]
    # First it is announced where they go.
    disk.faults.append(Fault("write", countdown=1 + countdown, written_bytes=written_bytes))
    with pytest.raises(WheelBroken) as broken:
        append(wheel, group)
    # Three writes of frames come first; the fourth is the one of their rows.
    expected = countdown if countdown < 3 else written_bytes // 16
    assert list(rows_by_seq(broken.value.done)) == list(range(2, 2 + expected))
    assert wheel.last_seq == 1 + expected
    found = read_all(disk, DATA, wheel.wheel)
    assert found == first | {2 + row: [group[row]] for row in range(expected)}
    for refused in (lambda: append(wheel, group), wheel.sync, wheel.checkpoint):
        with pytest.raises(WheelBroken):
            refused()


@pytest.mark.parametrize("path_part", [".slot", "index"])
def test_a_failed_sync_breaks_the_wheel_for_good(path_part: str) -> None:
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA)
    append(wheel, [message()])
    disk.faults.append(Fault("sync", path_part=path_part))
    with pytest.raises(WheelBroken):
        wheel.checkpoint()
    with pytest.raises(WheelBroken):
        wheel.sync()


class Overtaken:
    """A lock that another thread held, and what it did meanwhile."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        self.meanwhile: Callable[[], object] | None = meanwhile

    def __enter__(self) -> None:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            with pytest.raises(WheelBroken):
                meanwhile()

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("waits", ["sync", "checkpoint"])
@pytest.mark.parametrize("fails", ["sync", "checkpoint"])
def test_whoever_waited_for_a_sync_that_failed_does_not_take_it_as_done(
    waits: str, fails: str
) -> None:
    """The failed writer took out what was to be synced: nothing is left to do."""
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA)
    append(wheel, [message(1)])
    wheel.checkpoint()
    append(wheel, [message(2)])
    disk.faults.append(Fault("sync", path_part=".slot"))
    wheel._sync_lock = Overtaken(getattr(wheel, fails))  # type: ignore[assignment]
    with pytest.raises(WheelBroken):
        getattr(wheel, waits)()
    assert checkpoint_of(disk, layout.wheel_folder(DATA, wheel.wheel)).seq == 1


def test_a_checkpoint_of_synced_groups_notes_what_they_synced_and_syncs_nothing() -> None:
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA)
    append(wheel, [message(1)])
    wheel.sync()
    append(wheel, [message(2)])
    synced: list[Path] = []
    disk.on_sync = synced.append
    assert wheel.checkpoint(syncs=False) == 1
    assert checkpoint_of(disk, layout.wheel_folder(DATA, wheel.wheel)).seq == 1
    assert synced == []


@pytest.mark.parametrize("path_part", ["checkpoint", "table"])
@pytest.mark.parametrize("operation", ["write", "sync"])
def test_a_checkpoint_that_finds_no_room_is_late_and_breaks_nothing(
    path_part: str, operation: str
) -> None:
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA)
    frames = append(wheel, [message(number, slot=BASE_SLOT + number) for number in range(3)])
    disk.faults.append(Fault(operation, errno.ENOSPC, path_part))
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        wheel.checkpoint()
    assert wheel.broken is None
    frames |= append(wheel, [message(9)])
    assert wheel.checkpoint() == 4
    assert checkpoint_of(disk, layout.wheel_folder(DATA, wheel.wheel)).seq == 4
    assert load_head(disk, layout.wheel_folder(DATA, wheel.wheel)).seq == 4
    assert read_all(disk, DATA, wheel.wheel) == frames


def test_a_full_disk_breaks_the_wheel_but_not_what_it_holds() -> None:
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA)
    kept = append(wheel, [message()])
    disk.capacity_bytes = disk.used_bytes + 30
    with pytest.raises(WheelBroken, match="No space left"):
        append(wheel, [message(2)])
    assert read_all(disk, DATA, wheel.wheel) == kept


def test_a_full_slot_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA)
    monkeypatch.setattr(slot_files, "SLOT_FILE_LIMIT_BYTES", 2000)
    slot_file = layout.slot_path(wheel._folder, BASE_SLOT + 1)
    group = [message(), message(1, slot=BASE_SLOT + 1, value=bytes(300))]
    append(wheel, group)
    while len(disk.content(slot_file)) <= 1500:
        append(wheel, group)
    effects = disk.effects
    with pytest.raises(SlotFull) as full:
        append(wheel, group)
    assert full.value.slot == BASE_SLOT + 1
    assert disk.effects == effects
    append(wheel, [message(1, slot=BASE_SLOT + 2)])


@pytest.mark.parametrize("left_bytes", [None, 40])
def test_a_slot_file_that_somebody_deleted_or_cut_breaks_the_wheel(left_bytes: int | None) -> None:
    """Otherwise its next frames would lie where mirrors have others."""
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA, handles=1)
    append(wheel, [message()])
    other = append(wheel, [message(1, slot=BASE_SLOT + 1)])  # the one handle moves on to this slot
    path = layout.slot_path(layout.wheel_folder(DATA, wheel.wheel), BASE_SLOT)
    if left_bytes is None:
        disk.delete(path)
    else:
        disk.set_content(path, disk.content(path)[:left_bytes])
    with pytest.raises(WheelBroken, match="deleted or cut"):
        append(wheel, [message(2)])
    frames = read_all(disk, DATA, wheel.wheel)
    assert {seq: frame for seq, frame in frames.items() if seq in other} == other
    assert max(frames) == 2


def test_slots_below_the_floor_take_nothing_any_more() -> None:
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA)
    append(wheel, [message(1), message(2, slot=BASE_SLOT + 1)])
    assert delete_below(wheel, BASE_SLOT + 1) == [BASE_SLOT]
    with pytest.raises(SlotFinished):
        append(wheel, [message(3)])
    reader = WheelReader(disk, DATA, wheel.wheel)
    assert reader.slots() == [BASE_SLOT + 1]
    gone = reader.frame(1)
    assert isinstance(gone, DamagedFrame)
    assert gone.reason is DamageReason.GONE
    assert isinstance(reader.frame(2), Frame)


def test_deletion_goes_over_hours_and_leaves_no_empty_folder() -> None:
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA)
    slots = [BASE_SLOT + hours * 3600 + extra for hours in range(4) for extra in (0, 1)]
    append(wheel, [message(slot=slot) for slot in slots])
    folder = layout.wheel_folder(DATA, wheel.wheel)
    assert list(list_slots(disk, folder, slots[1], slots[4])) == slots[1:4]
    assert delete_below(wheel, slots[5]) == slots[:5]
    assert list(list_slots(disk, folder)) == slots[5:]
    hours = disk.list_folder(layout.slots_folder(folder))
    assert len(hours) == len({slot // 3600 for slot in slots[5:]})
    assert delete_below(wheel, slots[5]) == []


def test_an_unregistered_wheel_is_deleted_whole() -> None:
    disk = SimulatedDisk()
    for number in (1, 2):
        append(new_wheel(disk, DATA, number), [message()])
    finish(deleting_wheel(disk, DATA, WheelId("node-1", 1), Undeletable()))
    assert list_wheels(disk, DATA) == [WheelId("node-1", 2)]
    assert not [path for path in disk.paths() if "node-1.1" in str(path)]


@pytest.mark.parametrize(
    ("kind", "withdrawn"), [(Kind.CANCELS, 2), (Kind.COMMITS, 0), (Kind.RELEASES, 2)]
)
def test_rows_that_name_messages_are_counted_apart(kind: Kind, withdrawn: int) -> None:
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA)
    columns = columns_of([message(1), message(2)])
    wheel.append(columns, accepted_at_ms=ACCEPTED_AT_MS)
    cancels = names_of(columns)
    wheel.append(cancels, kind=kind, accepted_at_ms=ACCEPTED_AT_MS)
    reader = WheelReader(disk, DATA, wheel.wheel)
    rows = reader.rows(1, 99)
    assert message_counts(rows).tolist() == [2, 0]
    assert withdrawn_counts(rows).tolist() == [0, withdrawn]
    first, second = reader.slot_frames(BASE_SLOT, 2)
    assert isinstance(first, Frame)
    assert isinstance(second, Frame)
    assert second.kind is kind
    assert second.columns.ids.tolist() == first.columns.ids.tolist()
    assert second.columns.due_ms.tolist() == first.columns.due_ms.tolist()


def test_a_reader_sees_nothing_beyond_the_seq_asked_for() -> None:
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA)
    reader = WheelReader(disk, DATA, wheel.wheel)
    assert reader.last_seq() == 0
    assert not reader.has(1)
    with pytest.raises(IndexError):
        reader.frame(1)
    for number in range(4):
        append(wheel, [message(number)])
        assert [_seq(frame) for frame in reader.slot_frames(BASE_SLOT, 2)] == [1, 2][: number + 1]
    assert len(list(reader.slot_frames(BASE_SLOT, 99))) == 4
    assert len(list(reader.slot_frames(BASE_SLOT, 2))) == 2
    assert list(reader.slot_frames(BASE_SLOT + 1, 99)) == []
    # The window of seconds moves back as well as on.
    assert list(reader.slot_frames(BASE_SLOT + 500, 99)) == []
    assert len(list(reader.slot_frames(BASE_SLOT, 3))) == 3


def _seq(frame: Frame | DamagedFrame) -> int:
    return frame.seq


def test_what_was_read_outlives_the_file(tmp_path: Path) -> None:
    disk = PosixDisk()
    wheel = new_wheel(disk, tmp_path)
    group = [message(number, value=bytes(5000)) for number in range(10)]
    append(wheel, group)
    reader = WheelReader(disk, tmp_path, wheel.wheel)
    (frame,) = reader.slot_frames(BASE_SLOT, 1)
    reader.close()
    delete_below(wheel, BASE_SLOT + 1)
    assert isinstance(frame, Frame)
    assert messages_of(frame.columns) == group


def test_a_row_that_speaks_of_another_frame_is_caught() -> None:
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA)
    append(wheel, [message(1)])
    append(wheel, [message(2)])
    index = layout.index_path(layout.wheel_folder(DATA, wheel.wheel), 0)
    rows = disk.content(index)
    reader = WheelReader(disk, DATA, wheel.wheel)
    disk.set_content(index, rows[:16] * 2)
    damaged = WheelReader(disk, DATA, wheel.wheel).frame(2)
    assert isinstance(damaged, DamagedFrame)
    assert damaged.reason is DamageReason.MISPLACED
    disk.set_content(index, rows[:28] + b"\x05" + rows[29:])
    damaged = reader.frame(2)
    assert isinstance(damaged, DamagedFrame)
    assert damaged.reason is DamageReason.HOLE


def test_names() -> None:
    wheel = WheelId.parse("node-1.12")
    assert (str(wheel), wheel) == ("node-1.12", WheelId("node-1", 12))
    assert WheelId("a", 9) < WheelId("a", 10) < WheelId("b", 1)
    assert WheelId("a", 1).hash64 != WheelId("a", 2).hash64
    for text in ("", "a", "a.0", "a.01", "A.1", "-a.1", "a.1 ", "a.b.1", "a" * 32 + ".1"):
        with pytest.raises(NameInvalidError):
            WheelId.parse(text)
    for node, number in (("A", 1), ("a", 0)):
        with pytest.raises(NameInvalidError):
            WheelId(node, number)


def test_hour_folders_are_named_by_their_utc_hour() -> None:
    path = layout.slot_path(DATA, 1_763_700_000)
    assert path == DATA / "slots" / "20251121T04" / "1763700000.slot"
    assert layout.hour_of_name("20251121T04") == 1_763_700_000 // 3600
    assert layout.hour_of_name("lost+found") is None


def test_rows_of_one_group_may_cross_index_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    small_segments(monkeypatch, 4)
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA)
    written: dict[int, list[Message]] = {}
    for number in range(5):
        slot = BASE_SLOT + number * 100
        written |= append(wheel, [message(number, slot=slot + ahead) for ahead in range(3)])
    reader = WheelReader(disk, DATA, wheel.wheel)
    assert reader.last_seq() == 15
    assert reader.rows(3, 13)["slot"].tolist() == [
        written[seq][0].due_ms // 1000 for seq in range(3, 14)
    ]
    assert read_all(disk, DATA, wheel.wheel) == written
    slots = sorted({messages[0].due_ms // 1000 for messages in written.values()})
    disk.delete(layout.slot_path(layout.wheel_folder(DATA, wheel.wheel), slots[7]))
    between = reader.indexed_slots(slots[2], slots[-1]).tolist()
    assert sorted(set(between)) == slots[2:-1], "whether the file is there or not"
    delete_below(wheel, BASE_SLOT + 200)
    reader = WheelReader(disk, DATA, wheel.wheel)
    assert set(reader.indexed_slots(0, slots[-1] + 1).tolist()) == set(slots[4:])
    names = disk.list_folder(layout.wheel_folder(DATA, wheel.wheel))
    assert [name for name in names if name.startswith("index")] == ["index.1", "index.2", "index.3"]
    assert reader.rows(1, 5)["length"].tolist()[:4] == [0] * 4
    assert np.count_nonzero(reader.rows(5, 15)["length"]) == 11
    delete_below(wheel, BASE_SLOT + 5000)
    assert WheelReader(disk, DATA, wheel.wheel).last_seq() == 15, "the last segment stays"


def test_no_segment_is_deleted_before_it_is_noted_as_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_segments(monkeypatch, 4)
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA)
    for ahead in range(9):
        append(wheel, [message(ahead, slot=BASE_SLOT + ahead)])
    folder = layout.wheel_folder(DATA, wheel.wheel)
    disk.faults.append(Fault("write", path_part="checkpoint"))
    with pytest.raises(OSError, match="checkpoint"):
        delete_below(wheel, BASE_SLOT + 9)
    delete_below(wheel, BASE_SLOT + 9)
    assert not disk.exists(layout.index_path(folder, 1))
    assert checkpoint_of(disk, folder).first_segment == 2


@pytest.mark.parametrize("is_swept", [True, False])
@pytest.mark.parametrize("machine_crash", [None, *range(5)])
def test_no_crash_while_a_wheel_is_deleted_leaves_its_folder_for_ever(
    is_swept: bool, machine_crash: int | None
) -> None:
    for effects in range(100):
        disk = SimulatedDisk()
        wheel = new_wheel(disk, DATA)
        append(wheel, [message(1), message(2, slot=BASE_SLOT + 9_000)])
        wheel.checkpoint()
        if is_swept:
            delete_below(wheel, BASE_SLOT + 9_001)
        disk.crash_after(effects)
        try:
            finish(deleting_wheel(disk, DATA, wheel.wheel, Undeletable()))
        except Crash:
            disk.restart(None if machine_crash is None else Random(machine_crash))
            delete_halves(disk, DATA)
            assert disk.list_folder(DATA / "wheels") == list(map(str, list_wheels(disk, DATA)))
            continue
        break
    assert effects > 2


def test_slot_files_beside_a_missing_meta_are_left_alone() -> None:
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA)
    append(wheel, [message(1)])
    before = disk.paths()
    disk.delete(DATA / "wheels" / "node-1.1" / "meta.json")
    assert delete_halves(disk, DATA) == []
    assert len(disk.paths()) == len(before) - 1


def test_groups_and_cancels_share_one_run_of_seqs() -> None:
    wheel = new_wheel(SimulatedDisk(), DATA)
    columns = columns_of([Message(BASE_SLOT * 1000, bytes(16), "t")])
    first = wheel.append(columns, accepted_at_ms=ACCEPTED_AT_MS)
    second = wheel.append(names_of(columns), kind=Kind.CANCELS, accepted_at_ms=ACCEPTED_AT_MS)
    assert [*rows_by_seq(first), *rows_by_seq(second)] == [1, 2]
