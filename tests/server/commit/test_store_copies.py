"""The store's effects on copies, for the member machine, and while a checkpoint syncs."""

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.files.index import ROWS_PER_SEGMENT
from delaywheel.storage.files.undeletable import FIRST_PAUSE_MS, Undeletable
from delaywheel.storage.files.wheel_folder import (
    Checkpoint,
    MetaDamaged,
    MetaTooNew,
    list_wheels,
    load_meta,
)
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.steps import finish
from delaywheel.storage.frames.bundle import FrameCopy
from delaywheel.storage.frames.rows import HOLE_ROW
from delaywheel.storage.reading.reader import UNREADABLE_WAIT_MS
from delaywheel.storage.writing.dial import DialView
from delaywheel.storage.writing.mirror import MirrorWheel
from delaywheel.storage.writing.wheel import WheelBroken
from delaywheel_replica.core.node.events import HeldWheel
from delaywheel_replica.core.protocol.control import WheelRecord
from delaywheel_replica.core.protocol.frames import FrameRange, FrameSet
from delaywheel_replica.server.store.store import Store
from sim.machine.disk import Crash, Fault, SimulatedDisk
from support.server.stores import (
    CARD,
    DATA,
    MEMBERS,
    OWN,
    SEGMENT_BYTES,
    WHEEL,
    left,
    looked_into,
    open_own,
    opened,
    read,
    restarted,
    write,
    written_elsewhere,
)
from support.wheels.copies import bundled, rows_of, slots_of
from support.wheels.messages import BASE_SLOT
from support.wheels.wheels import checkpoint_of, ignored


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with capture_logs():
        yield


def test_a_copy_is_made_with_its_first_frames() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    held = store.mirror(CARD, bundled(written_elsewhere()[:2]))
    assert held == HeldWheel(CARD, 2, BASE_SLOT + 1) == store.held(WHEEL)
    meta = load_meta(disk, DATA, WHEEL)
    assert (meta.members, meta.min_insync, meta.span_seconds) == (MEMBERS, 2, 7200)
    assert restarted(disk).held_wheels() == {WHEEL: held}


def test_no_frame_is_there_before_its_wheel_is_durable() -> None:
    for effects in range(12):
        disk = SimulatedDisk()
        store = opened(disk)
        disk.crash_after(effects)
        with pytest.raises(Crash):
            store.mirror(CARD, bundled(written_elsewhere()))
        lies_there = [path for path in disk.paths() if path.suffix == ".slot"]
        meta = layout.meta_path(layout.wheel_folder(DATA, WHEEL))
        assert not lies_there or str(meta) not in disk._unsynced_names


def test_frames_whose_meta_is_lost_are_held_again() -> None:
    disk = SimulatedDisk()
    copies = written_elsewhere()
    opened(disk).mirror(CARD, bundled(copies))
    disk.delete(layout.meta_path(layout.wheel_folder(DATA, WHEEL)))
    store = restarted(disk)
    assert store.held_wheels() == {}
    assert store.mirror(CARD, bundled([])).applied == 5
    assert rows_of(disk, DATA, WHEEL) == [copy.row for copy in copies]
    counted = {int(row["slot"]): int(row["frames"]) for row in DialView(disk, DATA).rows()}
    assert counted == {BASE_SLOT: 3, BASE_SLOT + 1: 1, BASE_SLOT + 2: 1}


def test_a_wheel_made_by_a_life_that_ended_is_durable_before_its_first_frame() -> None:
    meta = layout.meta_path(layout.wheel_folder(DATA, WHEEL))
    for effects in range(8):
        disk = SimulatedDisk()
        store = opened(disk)
        disk.crash_after(effects)
        with pytest.raises(Crash):
            store.mirror(CARD, bundled(written_elsewhere()))
        restarted(disk).mirror(CARD, bundled(written_elsewhere()))
        assert str(meta) not in disk._unsynced_names


def test_with_synced_groups_what_a_life_left_is_synced_before_it_is_reported() -> None:
    for effects in range(4, 22):
        disk = SimulatedDisk()
        store = opened(disk, sync_groups=True)
        disk.crash_after(effects)
        with suppress(Crash):
            store.mirror(CARD, bundled(written_elsewhere()))
        disk.restart()
        reported = opened(disk, sync_groups=True).held_wheels().get(WHEEL)
        for content in disk._files.values():
            content.now = bytearray(content.durable)
            content.unsynced.clear()
        disk.restart()
        assert opened(disk, "boot-2", sync_groups=True).held_wheels().get(WHEEL) == reported


def test_making_that_failed_half_way_is_gone_on_with() -> None:
    copies = written_elsewhere()
    for operation in ("write", "sync"):
        for countdown in range(5):
            disk = SimulatedDisk()
            store = opened(disk, sync_groups=True)
            disk.faults.append(Fault(operation, countdown=countdown))
            for _ in range(2):
                try:
                    held = store.mirror(CARD, bundled(copies))
                except OSError:
                    continue
            assert held.applied == 5
            assert rows_of(disk, DATA, WHEEL) == [copy.row for copy in copies]


def test_what_is_not_here_is_reported_as_missing() -> None:
    store = opened(SimulatedDisk())
    assert read(store, WHEEL, 3, 100) == ([], list(range(3, 101)))
    store.mirror(CARD, bundled(written_elsewhere()))
    assert read(store, WHEEL, 4, 9) == ([4, 5], [])
    assert read(store, WHEEL, 6, 7) == ([], [6, 7])


def test_an_answer_is_bounded() -> None:
    store = opened(SimulatedDisk())
    copies = written_elsewhere()
    store.mirror(CARD, bundled(copies))
    assert read(store, WHEEL, 1, 5) == ([1, 2, 3, 4], [])
    assert read(store, WHEEL, 1, 5, max_bytes=2 * len(copies[0].content)) == ([1, 2], [])
    assert read(store, WHEEL, 1, 5, max_bytes=1) == ([1], []), "one frame always"


def test_reading_ends_between_two_files_once_its_time_is_over() -> None:
    """Its frames are of slots 0, 1, 0, 2, 0."""
    store = opened(SimulatedDisk())
    store.mirror(CARD, bundled(written_elsewhere()))

    def found(first_seq: int, files: int) -> list[int]:
        read_files = iter(range(1, 9))
        frames, absent, unreadable = store.outgoing.read(
            WHEEL,
            first_seq,
            5,
            max_bytes=9_999,
            max_frames=9,
            floor=0,
            now_ms=0,
            is_over=lambda: next(read_files) >= files,
        )
        assert not absent | unreadable
        return list(map(int, frames.seqs))

    assert found(1, files=1) == [1]
    assert found(1, files=2) == [1, 2, 3]
    assert found(1, files=3) == [1, 2, 3, 4, 5]
    assert found(4, files=1) == [4]


def test_finished_slots_are_swept_and_served_as_rows() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    copies = written_elsewhere()
    store.mirror(CARD, bundled(copies))
    open_own(store)
    write(store, 0, 1)
    assert list(store.sweep(BASE_SLOT + 1)) == [BASE_SLOT, BASE_SLOT]
    assert list(store.sweep(BASE_SLOT + 1)) == []
    frames, _, _ = store.outgoing.read(WHEEL, 1, 3, max_bytes=9999, max_frames=9, floor=0, now_ms=0)
    assert frames == bundled(
        [copies[0]._replace(content=b""), copies[1], copies[2]._replace(content=b"")]
    )
    assert list(slots_of(disk, DATA, OWN)) == [BASE_SLOT + 1]
    rows = DialView(disk, DATA).rows()
    assert {int(row["slot"]): int(row["frames"]) for row in rows} == {
        BASE_SLOT + 1: 2,
        BASE_SLOT + 2: 1,
    }


def test_frames_without_content_are_taken_below_the_own_floor_alone() -> None:
    disk = SimulatedDisk()
    store = opened(disk, floor=BASE_SLOT)
    copies = written_elsewhere()
    bare = copies[3]._replace(content=b"")
    assert store.mirror(CARD, bundled([*copies[:3], bare, copies[4]])).applied == 3
    assert list(store.sweep(BASE_SLOT)) == [], "no peer's word finishes anything"
    assert store.mirror(CARD, bundled(copies[3:])).applied == 5
    for seq, ahead in ((1, 0), (4, 2)):
        content = disk.content(
            layout.slot_path(layout.wheel_folder(DATA, WHEEL), BASE_SLOT + ahead)
        )
        assert copies[seq - 1].content in content
    assert list(store.sweep(BASE_SLOT + 1)) == [BASE_SLOT]
    assert read(store, WHEEL, 1, 3) == ([1, 2, 3], [])
    assert store.held(WHEEL).missing == NO_SEQS


def test_a_page_of_zeros_in_a_holders_index_finishes_nothing_anywhere() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    copies = written_elsewhere()
    store.mirror(CARD, bundled(copies))
    store.checkpoint(ignored)
    index = layout.index_path(layout.wheel_folder(DATA, WHEEL), 0)
    rows = disk.content(index)
    disk.set_content(index, rows[:16] + bytes(32) + rows[48:])
    seqs = SeqSet([(2, 3)])
    assert read(store, WHEEL, 1, 5) == ([1], []), "nobody is told that the next is absent"
    assert asked(store, 2, 5) == (NO_SEQS, seqs)
    assert store.held(WHEEL).missing == SeqSet.of([2])
    assert finish(store.reading_again(WHEEL, seqs)) == seqs
    assert read(store, WHEEL, 2, 5) == ([2, 3, 4, 5], [])
    assert disk.content(index) == rows
    disk.set_content(index, rows[:16] + bytes(32) + rows[48:])
    store = restarted(disk)
    assert store.held(WHEEL).missing == NO_SEQS, "its frames proved where they belong"
    assert disk.content(index) == rows


def asked(store: Store, first_seq: int, last_seq: int) -> tuple[SeqSet, SeqSet]:
    """What another node is told to be absent, and what it is told nothing of."""
    found = store.outgoing.read(
        WHEEL, first_seq, last_seq, max_bytes=9_999, max_frames=9, floor=0, now_ms=0
    )
    return found.absent, found.unreadable


def test_a_frame_without_row_is_absent_once_the_slot_files_were_searched_for_it() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    copies = written_elsewhere()
    store.mirror(CARD, bundled(copies))
    store.checkpoint(ignored)
    folder = layout.wheel_folder(DATA, WHEEL)
    index, path = layout.index_path(folder, 0), layout.slot_path(folder, BASE_SLOT + 1)
    disk.set_content(index, disk.content(index)[:16] + bytes(16) + disk.content(index)[32:])
    disk.set_content(path, bytes(len(disk.content(path))))
    two = SeqSet.of([2])
    assert asked(store, 2, 5) == (NO_SEQS, two)
    disk.failing_reads = ".slot", errno.EIO
    assert finish(store.reading_again(WHEEL, two)) == NO_SEQS
    assert asked(store, 2, 5) == (NO_SEQS, two)
    disk.failing_reads = None
    assert finish(store.reading_again(WHEEL, two)) == NO_SEQS
    assert asked(store, 2, 5) == (two, NO_SEQS)
    assert asked(restarted(disk), 2, 5) == (two, NO_SEQS)


def test_rows_that_a_failed_write_left_are_synced_before_they_count() -> None:
    disk = SimulatedDisk()
    store = opened(disk, sync_groups=True)
    copies = bundled(written_elsewhere())
    store.mirror(CARD, copies.part(0, 1))
    index = layout.index_path(layout.wheel_folder(DATA, WHEEL), 0)
    written_bytes = 16 * (len(copies) - 1)
    disk.faults.append(Fault("write", path_part="index", written_bytes=written_bytes))
    with suppress(OSError):
        store.mirror(CARD, copies)
    assert store.mirror(CARD, copies).applied == len(copies)
    assert disk.is_durable(index, 0, 16 * len(copies))


def test_with_groups_synced_what_is_found_again_is_synced_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Media seed 7200001: a node reported frames that a crash of its machine could still lose."""
    disk, synced = SimulatedDisk(), list[object]()
    store = opened(disk, sync_groups=True)
    store.mirror(CARD, bundled(written_elsewhere()))
    monkeypatch.setattr(MirrorWheel, "sync", lambda copy: synced.append(copy.wheel))
    finish(store.reading_again(WHEEL, SeqSet.of([2])))
    assert synced == [WHEEL]


@pytest.mark.parametrize("restarts", [False, True])
def test_a_row_that_is_lost_again_before_it_can_be_read_is_written_again(*, restarts: bool) -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    store.mirror(CARD, bundled(written_elsewhere()))
    store.checkpoint(ignored)
    index, two = layout.index_path(layout.wheel_folder(DATA, WHEEL), 0), SeqSet.of([2])

    def lose_row() -> None:
        disk.set_content(index, disk.content(index)[:16] + bytes(16) + disk.content(index)[32:])

    lose_row()
    assert asked(store, 2, 5) == (NO_SEQS, two)
    disk.failing_reads = "index", errno.EIO
    if restarts:
        store = restarted(disk)
    else:
        assert finish(store.reading_again(WHEEL, two)) == NO_SEQS
    assert disk.content(index)[16:32] != bytes(16), "written, although it cannot be read"
    lose_row()
    disk.failing_reads = None
    assert finish(store.reading_again(WHEEL, two)) == two
    assert disk.content(index)[16:32] != bytes(16), "the copy's reader may still know the row"


def test_lost_frames_are_passed_on_as_holes() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    copies = written_elsewhere()
    holed = [copies[0], FrameCopy(2, HOLE_ROW, b""), *copies[2:]]
    assert store.mirror(CARD, bundled(holed)).missing == SeqSet.of([2])
    assert read(store, WHEEL, 1, 3) == ([1], [2])
    store.forget_lost(FrameSet.of([(WHEEL, 2), (WHEEL, 1)]))
    assert store.held(WHEEL).missing == NO_SEQS
    frames, absent, _ = store.outgoing.read(
        WHEEL, 1, 3, max_bytes=9999, max_frames=9, floor=0, now_ms=0
    )
    assert (frames, absent) == (bundled(holed[:3]), NO_SEQS), "what is here goes on, lost or not"


def test_a_lost_frame_that_is_damaged_goes_on_as_a_hole() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    copies = written_elsewhere()
    store.mirror(CARD, bundled(copies))
    begin = len(copies[0].content)  # of frame 3, in the same file
    disk.flip_bit(layout.slot_path(layout.wheel_folder(DATA, WHEEL), BASE_SLOT), 8 * begin + 800)
    assert read(store, WHEEL, 1, 5) == ([1, 2], [3])
    store.forget_lost(FrameSet.of([(WHEEL, 3)]))
    frames, absent, _ = store.outgoing.read(
        WHEEL, 1, 5, max_bytes=9999, max_frames=9, floor=0, now_ms=0
    )
    assert (frames, absent) == (bundled([*copies[:2], FrameCopy(3, HOLE_ROW, b"")]), NO_SEQS)
    assert read(store, WHEEL, 4, 5) == ([4, 5], [])


def test_many_lost_frames_are_gone_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    holes = [FrameCopy(seq, HOLE_ROW, b"") for seq in range(1, 301)]
    store.mirror(CARD, bundled(holes[:200]))
    store.forget_lost(FrameSet([FrameRange(WHEEL, 1, 150)]))
    assert store.held(WHEEL).missing == SeqSet.of(range(151, 201))
    looked: list[object] = []
    contains = FrameSet.__contains__

    def watched(frames: FrameSet, frame: object) -> bool:
        looked.append(frame)
        return contains(frames, frame)

    monkeypatch.setattr(FrameSet, "__contains__", watched)
    for _ in range(3):
        assert len(store.held(WHEEL).missing) == 50
    assert looked == []
    # What changes is seen: holes that come, frames that are lost.
    assert store.mirror(CARD, bundled(holes[200:])).missing == SeqSet.of(range(151, 301))
    store.forget_lost(FrameSet([FrameRange(WHEEL, 200, 400)]))
    assert store.held(WHEEL).missing == SeqSet.of(range(151, 200))


def test_a_million_lost_frames_in_a_row_are_a_few_numbers() -> None:
    """Each has a row in the index, which is read a segment at a time."""
    million = 1_000_000
    disk = SimulatedDisk()
    store = opened(disk)
    copies = written_elsewhere()
    store.mirror(CARD, bundled(copies[:1]))
    store.checkpoint(ignored)
    folder = layout.wheel_folder(DATA, WHEEL)
    rows = copies[0].row + HOLE_ROW * million
    for segment in range(-(-len(rows) // SEGMENT_BYTES)):
        begin = segment * SEGMENT_BYTES
        disk.set_content(layout.index_path(folder, segment), rows[begin : begin + SEGMENT_BYTES])
    for boot_id in ("boot-1", "boot-1", "boot-2"):
        store = restarted(disk, boot_id)
        assert store.held(WHEEL).missing == SeqSet([(2, million + 1)])
        store.checkpoint(ignored)
        assert checkpoint_of(disk, folder) == Checkpoint(million + 1, SeqSet([(2, million + 1)]))
        assert len(disk.content(layout.checkpoint_path(folder))) < 100
    asked, first_seq = 0, 2
    while first_seq <= million + 1:
        frames, absent, _ = store.outgoing.read(
            WHEEL, first_seq, million + 9, max_bytes=9999, max_frames=512, floor=0, now_ms=0
        )
        assert len(frames) == 0
        assert absent.spans == ((first_seq, absent.last),)
        first_seq, asked = absent.last + 1, asked + 1
    assert asked <= million // ROWS_PER_SEGMENT + 2
    for ahead in range(3):
        assert list(store.sweep(BASE_SLOT + ahead)) == ([BASE_SLOT] if ahead == 1 else [])
    held = store.repair(
        CARD, bundled([copies[1]._replace(seq=million)])
    )  # which is another frame's
    assert held.missing == SeqSet([(2, million + 1)])
    store.forget_lost(FrameSet([FrameRange(WHEEL, 2, million + 1)]))
    assert store.held(WHEEL).missing == NO_SEQS
    frames, absent, _ = store.outgoing.read(
        WHEEL, 2, million, max_bytes=9999, max_frames=512, floor=0, now_ms=0
    )
    assert (len(frames), absent) == (512, NO_SEQS)


def deleted(store: Store) -> list[object]:
    return list(store.delete_wheel(WHEEL))


def test_a_deleted_copy_is_gone() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    store.mirror(CARD, bundled(written_elsewhere()))
    deleted(store)
    assert store.held_wheels() == {}
    assert list_wheels(disk, DATA) == []
    store.checkpoint(ignored)
    deleted(store)
    assert not [path for path in disk.paths() if str(WHEEL) in str(path)]


def test_a_deletion_that_failed_is_done_again() -> None:
    for countdown in range(4):
        disk = SimulatedDisk()
        store = opened(disk)
        store.mirror(CARD, bundled(written_elsewhere()))
        now_ms = [0]
        store.undeletable = Undeletable(partial(now_ms.__getitem__, 0))
        disk.faults.append(Fault("delete", countdown=countdown))
        with pytest.raises(OSError, match=r"Input/output|cannot be deleted yet"):
            deleted(store)
        now_ms[0] = FIRST_PAUSE_MS
        deleted(store)
        assert not [path for path in disk.paths() if str(WHEEL) in str(path)]


def while_syncing(disk: SimulatedDisk, action: Callable[[], object]) -> list[object]:
    """Runs a call on a thread while a checkpoint's first sync fails; returns its result."""
    done: list[object] = []

    def act(_: Path) -> None:
        disk.on_sync = None
        thread = threading.Thread(target=lambda: done.append(action()), daemon=True)
        thread.start()
        thread.join(20)
        disk.faults.append(Fault("sync"))

    disk.on_sync = act
    return done


@pytest.mark.parametrize("action", ["close", "close and cut", "repair", "delete", "leave"])
def test_nothing_waits_for_the_syncs_of_a_checkpoint(action: str) -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    copies = written_elsewhere()
    store.mirror(CARD, bundled(copies))
    open_own(store)
    disk.flip_bit(layout.slot_path(layout.wheel_folder(DATA, WHEEL), BASE_SLOT + 1), 300)
    actions: dict[str, Callable[[], object]] = {
        "close": lambda: store.close_wheel(WHEEL, 5),
        "close and cut": lambda: store.close_wheel(WHEEL, 2),
        "repair": lambda: store.repair(CARD, bundled(copies[1:2])),
        "delete": lambda: deleted(store),
        "leave": store.leave_wheel,
    }
    done = while_syncing(disk, actions[action])
    with suppress(OSError):
        store.checkpoint(ignored)
    assert len(done) == 1, "it waits"
    store.checkpoint(ignored)
    assert disk.exists(layout.wheel_folder(DATA, WHEEL)) == (action != "delete")
    if action == "close and cut":
        assert rows_of(disk, DATA, WHEEL) == [copy.row for copy in copies[:2]]


def test_a_wheel_that_is_left_while_its_sync_fails_is_written_again() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    open_own(store)
    write(store, 0, 1)
    done = while_syncing(disk, store.leave_wheel)
    with pytest.raises(WheelBroken):
        store.checkpoint(ignored)
    assert len(done) == 1
    store.checkpoint(ignored)
    disk.lose_unsynced()
    assert read(restarted(disk, "boot-2"), OWN, 1, 2) == ([1, 2], [])


def test_what_cannot_be_written_again_after_a_failed_sync_is_reported_as_damaged() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    store.mirror(CARD, bundled(written_elsewhere()))
    disk.faults.append(Fault("sync", path_part=".slot"))
    with pytest.raises(OSError, match="Input/output"):
        store.checkpoint(ignored)
    disk.flip_bit(layout.slot_path(layout.wheel_folder(DATA, WHEEL), BASE_SLOT + 1), 300)
    reported: list[tuple[object, ...]] = []
    store.checkpoint(lambda *frame: reported.append(frame))
    assert reported == [(WHEEL, SeqSet.of([2]))]
    assert store.held(WHEEL).missing == SeqSet.of([2])
    assert restarted(disk).held(WHEEL).missing == SeqSet.of([2])


def test_a_checkpoint_of_synced_groups_syncs_nothing() -> None:
    disk = SimulatedDisk()
    store = opened(disk, sync_groups=True)
    store.mirror(CARD, bundled(written_elsewhere()))
    open_own(store)
    write(store, 0)
    synced: list[Path] = []
    disk.on_sync = synced.append
    store.checkpoint(ignored)
    assert synced == []
    for wheel, last_seq in ((WHEEL, 5), (OWN, 1)):
        assert checkpoint_of(disk, layout.wheel_folder(DATA, wheel)).seq == last_seq


def test_a_checkpoint_of_one_goes_on_where_that_of_another_fails() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    store.mirror(CARD, bundled(written_elsewhere()))
    open_own(store)
    write(store, 0)
    disk.faults.append(Fault("sync", path_part=str(WHEEL)))
    with pytest.raises(OSError, match="Input/output"):
        store.checkpoint(ignored)
    assert disk.exists(layout.checkpoint_path(layout.wheel_folder(DATA, OWN)))
    store.checkpoint(ignored)
    disk.faults.append(Fault("sync", path_part=str(OWN)))
    write(store, 0)
    with pytest.raises(WheelBroken):
        store.checkpoint(ignored)
    assert left(store).applied == 2


def test_of_a_frame_that_only_cannot_be_read_nobody_is_told_that_it_is_absent() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    copies = written_elsewhere()
    store.mirror(CARD, bundled(copies))
    due_ms = (BASE_SLOT + 1) * 1000
    bad = [Fault("open", path_part=f"{BASE_SLOT + 1}.slot") for _ in range(9)]

    def found(first_seq: int, now_ms: int) -> tuple[list[int], list[int], list[int]]:
        disk.faults[:] = [replace(fault) for fault in bad]
        frames, absent, unreadable = store.outgoing.read(
            WHEEL, first_seq, 5, max_bytes=9_999, max_frames=9, floor=0, now_ms=now_ms
        )
        disk.faults.clear()
        return frames.seqs.tolist(), list(absent), list(unreadable)

    assert found(1, due_ms) == ([1], [], [2])
    assert found(2, due_ms) == ([], [], [2])
    assert found(2, due_ms + UNREADABLE_WAIT_MS) == ([], [2], [])
    assert store.held(WHEEL).missing == SeqSet.of([2]), "others are asked for it meanwhile"
    assert finish(store.reading_again(WHEEL, SeqSet.of([2]))) == SeqSet.of([2])
    assert store.held(WHEEL).missing == NO_SEQS
    assert read(store, WHEEL, 1, 4) == ([1, 2, 3, 4], [])


def test_of_a_row_that_cannot_be_read_nobody_is_told_that_its_frame_is_absent() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    store.mirror(CARD, bundled(written_elsewhere()))
    disk.set_content(layout.slot_path(layout.wheel_folder(DATA, WHEEL), BASE_SLOT), b"")

    def found(first_seq: int, now_ms: int) -> tuple[list[int], list[int]]:
        disk.failing_reads = "index.", errno.EIO
        _, absent, unreadable = store.outgoing.read(
            WHEEL, first_seq, 5, max_bytes=9_999, max_frames=9, floor=0, now_ms=now_ms
        )
        disk.failing_reads = None
        return list(absent), list(unreadable)

    first_ms = (BASE_SLOT + 9_999) * 1000
    assert found(1, first_ms) == ([], [1, 2, 3, 4, 5])
    over_ms = first_ms + UNREADABLE_WAIT_MS
    assert found(2, over_ms - 1) == ([], [2, 3, 4, 5]), "all of them at once"
    assert found(1, over_ms) == ([], [1, 2, 3, 4, 5]), "nobody has looked in the slot files"
    disk.failing_reads = "index.", errno.EIO
    finish(store.reading_again(WHEEL, SeqSet([(1, 5)])))
    assert [found(seq, over_ms)[0] for seq in (1, 3, 5)] == [[1], [3], [5]]
    assert [found(seq, over_ms) for seq in (2, 4)] == [([], [2, 4]), ([], [4])], "they lie there"


def test_slot_files_that_cannot_be_searched_are_waited_for_until_a_minute_after_them() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    store.mirror(CARD, bundled(written_elsewhere()))
    index = layout.index_path(layout.wheel_folder(DATA, WHEEL), 0)
    rows = disk.content(index)
    disk.set_content(index, bytes(16) + rows[16:])
    assert asked(store, 1, 5) == (NO_SEQS, SeqSet.of([1]))
    disk.failing_reads = ".slot", errno.EIO
    assert finish(store.reading_again(WHEEL, SeqSet.of([1]))) == NO_SEQS

    def absent(now_ms: int) -> tuple[SeqSet, SeqSet]:
        _, absent, unreadable = store.outgoing.read(
            WHEEL, 1, 1, max_bytes=9_999, max_frames=9, floor=0, now_ms=now_ms
        )
        return absent, unreadable

    over_ms = last_slot_of(disk) * 1000 + UNREADABLE_WAIT_MS
    assert absent(over_ms - 1) == (NO_SEQS, SeqSet.of([1]))
    assert absent(over_ms) == (SeqSet.of([1]), NO_SEQS)
    disk.failing_reads = None
    assert finish(store.reading_again(WHEEL, SeqSet.of([1]))) == SeqSet.of([1])


def last_slot_of(disk: SimulatedDisk) -> int:
    return max(int(path.stem) for path in disk.paths() if path.suffix == ".slot")


def test_a_frame_that_was_written_and_cannot_be_read_is_still_missing() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    copies = bundled(written_elsewhere())
    store.mirror(CARD, copies)
    disk.failing_reads = ".slot", errno.EIO
    held = store.repair(CARD, copies.part(1, 3))
    assert (held.missing, held.not_returned) == (SeqSet.of([2, 3]), SeqSet.of([2, 3]))
    assert finish(store.reading_again(WHEEL, SeqSet.of([2]))) == NO_SEQS
    assert store.held(WHEEL).not_returned == SeqSet.of([3]), "the other one is fetched again"
    disk.failing_reads = None
    assert finish(store.reading_again(WHEEL, SeqSet.of([2, 3]))) == SeqSet.of([2, 3])
    held = store.held(WHEEL)
    assert (held.missing, held.not_returned) == (NO_SEQS, NO_SEQS)


def test_a_frame_that_the_medium_refuses_keeps_no_other_one_missing() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    copies = bundled(written_elsewhere())
    store.mirror(CARD, copies)
    for slot in (0, 2):
        disk.flip_bit(layout.slot_path(layout.wheel_folder(DATA, WHEEL), BASE_SLOT + slot), 70)
    for _ in ("in its place", "with its whole file"):
        disk.faults.append(Fault("write", errno.EIO, f"{BASE_SLOT}.slot"))
    held = store.repair(CARD, copies)
    assert (held.missing, held.not_returned) == (SeqSet.of([1]), SeqSet.of([1]))
    disk.faults.append(Fault("write", errno.ENOSPC, ".slot"))
    with pytest.raises(OSError, match="space"):
        store.repair(CARD, copies)


def test_a_wheel_whose_identity_is_damaged_gets_it_from_where_it_is_registered() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    store.mirror(CARD, bundled(written_elsewhere()))
    path = layout.meta_path(layout.wheel_folder(DATA, WHEEL))
    for is_readable in (True, False):
        if is_readable:
            disk.set_content(path, bytes(99))
        else:
            disk.spoil(path, 0, 1)
        disk.restart()
        store = looked_into(disk)
        assert store.unverified == {WHEEL}, "the node starts, and the wheel waits alone"
        with pytest.raises((MetaDamaged, OSError)):
            finish(store.verifying(WHEEL))
        held = finish(store.verifying(WHEEL, WheelRecord(MEMBERS, 2, BASE_SLOT, closed_at=4)))
        assert (held.applied, held.missing, held.final_seq) == (4, NO_SEQS, 4)
        assert held.card.members == MEMBERS
        assert store.unverified == frozenset()


def test_what_a_wheel_without_identity_has_may_lie_in_the_page_cache_alone() -> None:
    """When it was written is not known: to have been read says nothing of the medium."""
    disk = SimulatedDisk()
    opened(disk).mirror(CARD, bundled(written_elsewhere()))
    disk.set_content(layout.meta_path(layout.wheel_folder(DATA, WHEEL)), bytes(99))
    disk.restart()
    record = WheelRecord(MEMBERS, 2, BASE_SLOT)
    held = finish(looked_into(disk).verifying(WHEEL, record))
    assert (held.applied, held.missing) == (5, NO_SEQS)
    disk.lose_unsynced()
    disk.restart()
    held = finish(looked_into(disk, "boot-2").verifying(WHEEL, record))
    assert held.missing == SeqSet([(1, held.applied)])


def test_a_start_waits_a_minute_for_what_says_where_a_wheel_ends() -> None:
    disk = SimulatedDisk()
    opened(disk).mirror(CARD, bundled(written_elsewhere()))
    disk.set_content(layout.index_path(layout.wheel_folder(DATA, WHEEL), 0), b"")
    disk.restart()
    store = looked_into(disk, "boot-2")
    disk.failing_reads = ".slot", errno.EIO
    for now_ms in (1_000, 61_999):
        with pytest.raises(OSError, match="Input/output"):
            finish(store.verifying(WHEEL, now_ms=now_ms))
    assert store.unverified == {WHEEL}, "what another node may ask of it is not known"
    assert finish(store.verifying(WHEEL, now_ms=62_000)).applied == 0


def test_a_node_refuses_a_wheel_of_a_newer_release() -> None:
    disk = SimulatedDisk()
    opened(disk).mirror(CARD, bundled(written_elsewhere()))
    path = layout.meta_path(layout.wheel_folder(DATA, WHEEL))
    disk.set_content(path, disk.content(path).replace(b'"version": 1', b'"version": 9'))
    disk.restart()
    with pytest.raises(MetaTooNew, match="version 9"):
        looked_into(disk)
