"""What a store does for the member machine, one effect after another."""

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.files.index import ROWS_PER_SEGMENT
from delaywheel.storage.files.wheel_folder import (
    WheelExists,
    WheelMissing,
    list_wheels,
    load_checkpoint,
    load_meta,
)
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.node_file import NodeFolderInUse, load_node_state
from delaywheel.storage.folder.node_state import Spare
from delaywheel.storage.folder.steps import finish
from delaywheel.storage.frames.format import Kind
from delaywheel.storage.frames.frame_copy import FrameCopy
from delaywheel.storage.frames.rows import HOLE_ROW
from delaywheel.storage.writing.dial import DialView
from delaywheel.storage.writing.wheel import WheelBroken
from delaywheel_replica.core.node.events import Held
from delaywheel_replica.core.protocol.frames import FrameRange, FrameSet
from delaywheel_replica.core.protocol.messages import WheelCard
from delaywheel_replica.server.store.limits import StoreLimits
from delaywheel_replica.server.store.store import Store
from sim.machine.disk import Crash, Fault, SimulatedDisk
from support.wheels.copies import bundled, copies_of, flipped, rows_of, slots_of, verified
from support.wheels.messages import BASE_SLOT, columns_of, message
from support.wheels.wheels import ACCEPTED_AT_MS, append, ignored, new_wheel

DATA = Path("/data")
SEGMENT_BYTES = ROWS_PER_SEGMENT * len(HOLE_ROW)
OWN = WheelId("b", 1)
MEMBERS = {"a": "storage-a", "b": "storage-b"}
WHEEL = WheelId("node-1", 1)
CARD = WheelCard(WHEEL, MEMBERS, 2, 7200)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with capture_logs():
        yield


def opened(
    disk: SimulatedDisk,
    boot_id: str = "boot-1",
    *,
    sync_groups: bool = False,
    floor: int = 0,
    recent_bytes: int = 0,
) -> Store:
    return verified(looked_into(disk, boot_id, sync_groups, floor, recent_bytes))


def looked_into(
    disk: SimulatedDisk,
    boot_id: str = "boot-1",
    sync_groups: bool = False,
    floor: int = 0,
    recent_bytes: int = 0,
) -> Store:
    """Its wheels are not verified yet."""
    return Store.open(
        disk,
        DATA,
        node="b",
        cluster_id="cluster",
        boot_id=boot_id,
        floor=floor,
        limits=StoreLimits(
            dial_rows=16, open_files=2, sync_groups=sync_groups, recent_bytes=recent_bytes
        ),
        new_storage=lambda: "storage-b",
    )


def restarted(disk: SimulatedDisk, boot_id: str = "boot-1") -> Store:
    disk.restart()
    return opened(disk, boot_id)


def written_elsewhere() -> list[FrameCopy]:
    """Five frames, of slots 0, 1, 0, 2, 0."""
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA)
    for number, ahead in enumerate([0, 1, 0, 2, 0]):
        append(wheel, [message(number, slot=BASE_SLOT + ahead)])
    return copies_of(disk, DATA, wheel.wheel)


def write(store: Store, *aheads: int) -> None:
    messages = [message(at, slot=BASE_SLOT + ahead) for at, ahead in enumerate(aheads)]
    store.append(columns_of(messages), Kind.MESSAGES, ACCEPTED_AT_MS)


def open_own(store: Store) -> None:
    store.save(replace(store.state, open=OWN, last_number=OWN.number))
    store.open_wheel(Spare(OWN, BASE_SLOT, MEMBERS, 2))


def read(
    store: Store, wheel: WheelId, first: int, last: int, *, max_bytes: int = 10_000, floor: int = 0
) -> tuple[list[int], list[int]]:
    frames, absent = store.outgoing.read(
        wheel, first, last, max_bytes=max_bytes, max_frames=4, floor=floor
    )
    return frames.seqs.tolist(), list(absent)


# --- the start


def test_every_start_is_counted_and_durable() -> None:
    disk = SimulatedDisk()
    for starts in (1, 2, 3):
        store = opened(disk)
        assert (store.state.starts, store.state.storage) == (starts, "storage-b")
        assert load_node_state(disk, DATA) == store.state
        assert not store.state.all_incomplete
        with pytest.raises(NodeFolderInUse):
            opened(disk)
        store.release()


def test_a_new_boot_makes_incomplete_at_whichever_effect_it_ends() -> None:
    for effects in range(40):
        disk = SimulatedDisk()
        opened(disk).mirror(CARD, bundled(written_elsewhere()))
        disk.restart()
        disk.crash_after(effects)
        try:
            opened(disk, "boot-2")
        except Crash:
            pass
        else:
            return
        finally:
            state = load_node_state(disk_restarted(disk), DATA)
            assert state is not None
            assert state.all_incomplete == (state.boot_id == "boot-2")
        assert opened(disk, "boot-2").state.all_incomplete
    pytest.fail("the start never ends")


def disk_restarted(disk: SimulatedDisk) -> SimulatedDisk:
    disk.restart()
    return disk


def test_with_synced_groups_a_new_boot_loses_nothing() -> None:
    disk = SimulatedDisk()
    opened(disk, sync_groups=True).release()
    assert not opened(disk, "boot-2", sync_groups=True).state.all_incomplete


def test_a_start_that_fails_gives_the_folder_back() -> None:
    disk = SimulatedDisk()
    opened(disk).release()
    disk.faults.append(Fault("write", path_part="node.json"))
    with pytest.raises(OSError, match="Input/output"):
        opened(disk)
    opened(disk)


def test_a_start_looks_into_no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimulatedDisk()
    opened(disk).mirror(CARD, bundled(written_elsewhere()))
    disk.restart()
    with monkeypatch.context() as patch:
        patch.delattr(SimulatedDisk, "open_read")
        store = looked_into(disk, "boot-2")
    assert store.unverified == frozenset({WHEEL})
    assert store.held_wheels() == {}
    open_own(store)
    write(store, 0)
    assert verified(store).held(WHEEL).applied == 5
    assert store.unverified == set()


def test_what_a_crash_took_is_found_though_the_process_ends_before_it_is_looked_for() -> None:
    for effects in range(60):
        disk = SimulatedDisk()
        store = opened(disk)
        store.mirror(CARD, bundled(written_elsewhere()[:2]))
        store.checkpoint(ignored)
        store.mirror(CARD, bundled(written_elsewhere()))
        lose_slot_files(disk, BASE_SLOT + 2)
        disk.restart()
        looked_into(disk, "boot-2").release()
        store = looked_into(disk, "boot-2")
        disk.crash_after(effects)
        with suppress(Crash):
            verified(store)
            assert effects > 3
            break
        assert restarted(disk, "boot-2").held(WHEEL).missing == SeqSet.of([4])


def lose_slot_files(disk: SimulatedDisk, slot: int) -> None:
    disk.set_content(layout.slot_path(layout.wheel_folder(DATA, WHEEL), slot), b"")


def test_a_wheel_that_cannot_be_made_whole_keeps_no_other_from_it() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    store.mirror(CARD, bundled(written_elsewhere()))
    open_own(store)
    write(store, 0)
    disk.restart()
    meta = layout.meta_path(layout.wheel_folder(DATA, WHEEL))
    disk.faults += [Fault("read", path_part=str(meta)), Fault("read", path_part=str(meta))]
    store = looked_into(disk)
    with pytest.raises(OSError, match="Input/output"):
        finish(store.verifying(WHEEL))
    assert finish(store.verifying(OWN)).applied == 1
    assert store.unverified == {WHEEL}
    assert finish(store.verifying(WHEEL)).applied == 5


def test_after_a_start_own_wheels_are_copies() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    open_own(store)
    write(store, 0, 1)
    assert OWN not in store.held_wheels()
    store = restarted(disk)
    assert store.wheel is None
    assert store.state.open == OWN, "the machine says when it is left"
    own = WheelCard(OWN, MEMBERS, 2, 7200)
    assert store.held_wheels() == {OWN: Held(own, 2, BASE_SLOT + 1)}
    with pytest.raises(WheelExists):
        store.open_wheel(Spare(OWN, 0, MEMBERS, 2))


# --- the open wheel


def test_the_open_wheel_is_written_read_and_left() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    assert (store.last_seq, store.top_slot) == (0, -1)
    open_own(store)
    write(store, 3, 1)
    assert (store.last_seq, store.top_slot) == (2, BASE_SLOT + 3)
    assert read(store, OWN, 1, 5) == ([1, 2], [])
    assert store.card(OWN).members == MEMBERS
    held = left(store)
    assert (held.applied, held.top_slot, held.missing) == (2, BASE_SLOT + 3, NO_SEQS)
    assert store.wheel is None
    with pytest.raises(WheelMissing):
        store.leave_wheel()
    assert store.held(OWN) == held
    assert read(store, OWN, 1, 5) == ([1, 2], [])


def test_a_broken_wheel_shows_what_counts() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    open_own(store)
    disk.faults.append(Fault("write", path_part=".slot", countdown=1, written_bytes=9))
    with pytest.raises(WheelBroken):
        write(store, 0, 2)
    assert (store.last_seq, store.top_slot) == (1, BASE_SLOT)
    with pytest.raises(WheelBroken):
        write(store, 0)
    held = left(store)
    assert (held.applied, held.top_slot) == (1, BASE_SLOT)
    assert list(slots_of(disk, DATA, OWN)) == [BASE_SLOT], "the tail is cut"


def left(store: Store) -> Held:
    held = store.leave_wheel()
    assert held is not None
    return held


@pytest.mark.parametrize("countdown", range(3))
def test_a_wheel_is_left_unverified_where_the_medium_refuses(countdown: int) -> None:
    disk = SimulatedDisk()
    store = opened(disk, sync_groups=True)
    open_own(store)
    write(store, 0)
    counted = DialView(disk, DATA).rows(0, None).tolist()
    disk.faults.append(Fault("sync", countdown=countdown))
    assert store.leave_wheel() is None
    assert store.unverified == {OWN}
    store.open_wheel(Spare(WheelId("b", 2), BASE_SLOT, MEMBERS, 2))
    assert finish(store.verifying(OWN)).applied == 1
    assert store.unverified == set()
    assert DialView(disk, DATA).rows(0, None).tolist() == counted, "and counted once"


def test_a_wheel_whose_index_cannot_be_opened_lacks_all_its_frames_for_so_long() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    open_own(store)
    write(store, 0, 1)
    disk.faults += [Fault("open", path_part="index") for _ in range(99)]
    held = left(store)
    assert (held.applied, list(held.missing)) == (2, [1, 2])
    frames = bundled(copies_of_own())
    with pytest.raises(OSError, match="Input/output"):
        store.repair(held.card, frames)
    disk.faults.clear()
    assert store.repair(held.card, frames) == Held(held.card, 2, BASE_SLOT + 1)
    assert read(store, OWN, 1, 2) == ([1, 2], [])


def copies_of_own() -> list[FrameCopy]:
    """What another member holds of the wheel into which the same was written."""
    disk = SimulatedDisk()
    store = opened(disk)
    open_own(store)
    write(store, 0, 1)
    return copies_of(disk, DATA, OWN)


def test_a_damaged_frame_of_the_open_wheel_is_reported() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    open_own(store)
    write(store, 0, 1)
    disk.flip_bit(layout.slot_path(layout.wheel_folder(DATA, OWN), BASE_SLOT + 1), 700)
    assert read(store, OWN, 1, 2) == ([1], [2])
    assert read(store, OWN, 2, 2) == ([], [2])


def test_what_was_written_last_is_sent_as_it_was_written() -> None:
    disk = SimulatedDisk()
    store = opened(disk, recent_bytes=10_000)
    open_own(store)
    write(store, 0, 1)
    write(store, 1, 2, 3)
    on_disk = copies_of(disk, DATA, OWN)
    disk.flip_bit(layout.slot_path(layout.wheel_folder(DATA, OWN), BASE_SLOT + 2), 700)
    frames, absent = store.outgoing.read(OWN, 1, 5, max_bytes=9_999, max_frames=9, floor=0)
    assert (frames, absent) == (bundled(on_disk), NO_SEQS)
    assert read(store, OWN, 4, 9) == ([4, 5], [])
    # What is finished is sent without content, as from the disk.
    frames, _ = store.outgoing.read(OWN, 1, 3, max_bytes=9_999, max_frames=9, floor=BASE_SLOT + 1)
    assert frames == bundled([on_disk[0]._replace(content=b""), *on_disk[1:3]])
    # Of a wheel that was left nothing is kept.
    store.leave_wheel()
    assert read(store, OWN, 1, 5) == ([1, 2, 3], [4])


def test_what_was_written_before_is_read_again() -> None:
    disk = SimulatedDisk()
    store = opened(disk, recent_bytes=300)
    open_own(store)
    for ahead in range(4):
        write(store, ahead)
    on_disk = copies_of(disk, DATA, OWN)
    assert len(on_disk[0].content) < 300 < 4 * len(on_disk[0].content)
    frames, absent = store.outgoing.read(OWN, 1, 4, max_bytes=9_999, max_frames=9, floor=0)
    assert (frames, absent) == (bundled(on_disk), NO_SEQS)


# --- copies


def test_a_copy_is_made_with_its_first_frames() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    held = store.mirror(CARD, bundled(written_elsewhere()[:2]))
    assert held == Held(CARD, 2, BASE_SLOT + 1) == store.held(WHEEL)
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


def test_a_wrong_frame_ends_the_list_and_what_came_before_counts() -> None:
    store = opened(SimulatedDisk())
    assert store.mirror(CARD, bundled(flipped(written_elsewhere(), 3, 70))).applied == 3


def test_what_the_medium_took_counts_after_a_refusal() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    copies = written_elsewhere()
    disk.faults.append(Fault("write", path_part=".slot", countdown=2))
    with pytest.raises(OSError, match="Input/output"):
        store.mirror(CARD, bundled(copies))
    assert store.held(WHEEL).applied == 2
    assert store.mirror(CARD, bundled(copies)).applied == 5


def test_damage_is_missing_until_it_is_repaired_also_after_restarts() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    copies = written_elsewhere()
    store.mirror(CARD, bundled(copies))
    disk.flip_bit(layout.slot_path(layout.wheel_folder(DATA, WHEEL), BASE_SLOT + 1), 300)
    assert read(store, WHEEL, 1, 5) == ([1], [2])
    assert read(store, WHEEL, 2, 5) == ([], [2])
    assert store.held(WHEEL).missing == SeqSet.of([2])
    store.checkpoint(ignored)
    store = restarted(disk)
    assert store.held(WHEEL).missing == SeqSet.of([2])
    assert store.repair(CARD, bundled(copies[1:2])).missing == NO_SEQS
    assert restarted(disk).held(WHEEL).missing == NO_SEQS


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


def test_finished_slots_are_swept_and_served_as_rows() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    copies = written_elsewhere()
    store.mirror(CARD, bundled(copies))
    open_own(store)
    write(store, 0, 1)
    assert list(store.sweep(BASE_SLOT + 1)) == [BASE_SLOT, BASE_SLOT]
    assert list(store.sweep(BASE_SLOT + 1)) == []
    frames, _ = store.outgoing.read(WHEEL, 1, 3, max_bytes=9999, max_frames=9, floor=0)
    assert frames == bundled(
        [copies[0]._replace(content=b""), copies[1], copies[2]._replace(content=b"")]
    )
    assert list(slots_of(disk, DATA, OWN)) == [BASE_SLOT + 1]
    rows = DialView(disk, DATA).rows()
    assert {int(row["slot"]): int(row["frames"]) for row in rows} == {
        BASE_SLOT + 1: 2,
        BASE_SLOT + 2: 1,
    }


def test_a_frame_without_content_shows_the_floor() -> None:
    store = opened(SimulatedDisk())
    copies = written_elsewhere()
    finished = [copies[0]._replace(content=b""), *copies[1:]]
    assert store.mirror(CARD, bundled(finished)).missing == NO_SEQS
    assert read(store, WHEEL, 1, 3) == ([1, 2, 3], [])
    assert store.held(WHEEL).missing == NO_SEQS


def test_lost_frames_are_passed_on_as_holes() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    copies = written_elsewhere()
    holed = [copies[0], FrameCopy(2, HOLE_ROW, b""), *copies[2:]]
    assert store.mirror(CARD, bundled(holed)).missing == SeqSet.of([2])
    assert read(store, WHEEL, 1, 3) == ([1], [2])
    store.forget_lost(FrameSet.of([(WHEEL, 2), (WHEEL, 1)]))
    assert store.held(WHEEL).missing == NO_SEQS
    frames, absent = store.outgoing.read(WHEEL, 1, 3, max_bytes=9999, max_frames=9, floor=0)
    assert (frames, absent) == (bundled(holed[:3]), NO_SEQS), "what is here goes on, lost or not"


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
    """Of each there is a row of the index, which is looked at a segment at a time."""
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
        assert load_checkpoint(disk, folder) == (million + 1, SeqSet([(2, million + 1)]))
        assert len(disk.content(layout.checkpoint_path(folder))) < 100
    asked, first_seq = 0, 2
    while first_seq <= million + 1:
        frames, absent = store.outgoing.read(
            WHEEL, first_seq, million + 9, max_bytes=9999, max_frames=512, floor=0
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
    frames, absent = store.outgoing.read(WHEEL, 2, million, max_bytes=9999, max_frames=512, floor=0)
    assert (len(frames), absent) == (512, NO_SEQS)


def test_a_closed_copy_is_cut_and_stays_so() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    copies = written_elsewhere()
    store.mirror(CARD, bundled(copies))
    assert store.close_wheel(WHEEL, 2) == Held(CARD, 2, BASE_SLOT + 1, NO_SEQS, 2)
    assert store.mirror(CARD, bundled(copies)).applied == 2
    assert restarted(disk).held(WHEEL) == Held(CARD, 2, BASE_SLOT + 1, NO_SEQS, 2)
    with pytest.raises(WheelMissing):
        store.close_wheel(WheelId("node-1", 2), 2)


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
        disk.faults.append(Fault("delete", countdown=countdown))
        with pytest.raises(OSError, match="Input/output"):
            deleted(store)
        deleted(store)
        assert not [path for path in disk.paths() if str(WHEEL) in str(path)]


def while_syncing(disk: SimulatedDisk, action: Callable[[], object]) -> list[object]:
    """Has a thread act while a checkpoint syncs its first file, which fails; what it returned."""
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


def lose_unsynced(disk: SimulatedDisk) -> None:
    """The machine crashes, and nothing survives that was not synced."""
    for content in disk._files.values():
        content.now = bytearray(content.durable)
        content.unsynced.clear()


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
    lose_unsynced(disk)
    assert read(restarted(disk, "boot-2"), OWN, 1, 2) == ([1, 2], [])


def test_what_a_failed_sync_dropped_is_written_again_also_by_the_next_process() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    store.mirror(CARD, bundled(written_elsewhere()))
    disk.faults.append(Fault("sync", path_part=".slot"))
    with pytest.raises(OSError, match="Input/output"):
        store.checkpoint(ignored)
    restarted(disk).checkpoint(ignored)
    lose_unsynced(disk)
    store = restarted(disk, "boot-2")
    assert store.held(WHEEL).missing == NO_SEQS
    assert read(store, WHEEL, 1, 4) == ([1, 2, 3, 4], [])


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
        assert load_checkpoint(disk, layout.wheel_folder(DATA, wheel)).seq == last_seq


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
