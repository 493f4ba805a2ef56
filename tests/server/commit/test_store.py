"""The store's effects on its own wheels, for the member machine, one after another."""

import errno
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.files.undeletable import FIRST_PAUSE_MS, Undeletable
from delaywheel.storage.files.wheel_folder import (
    WheelExists,
    WheelMissing,
    list_wheels,
)
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.node_file import NodeFolderInUse, load_node_state
from delaywheel.storage.folder.node_state import Spare
from delaywheel.storage.folder.steps import finish
from delaywheel.storage.frames.bundle import FrameCopy
from delaywheel.storage.writing.dial import DialView
from delaywheel.storage.writing.wheel import WheelBroken
from delaywheel_replica.core.node.events import HeldWheel
from delaywheel_replica.core.protocol.messages import WheelCard
from delaywheel_replica.server.store.frames_to_send import FoundFrames
from sim.machine.disk import Crash, Fault, SimulatedDisk
from support.server.stores import (
    CARD,
    DATA,
    MEMBERS,
    OWN,
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
from support.wheels.copies import bundled, copies_of, slots_of, verified
from support.wheels.messages import BASE_SLOT
from support.wheels.wheels import ignored


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with capture_logs():
        yield


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


@pytest.mark.parametrize("before", [False, True])
def test_what_was_acknowledged_without_a_sync_is_doubted_until_it_is_synced(before: bool) -> None:
    disk = SimulatedDisk()
    opened(disk, sync_groups=before).mirror(CARD, bundled(written_elsewhere()))
    disk.restart()
    looked_into(disk, sync_groups=not before)
    disk.restart()
    disk.lose_unsynced()
    assert looked_into(disk, "boot-2", sync_groups=True).state.all_incomplete


def test_all_that_a_synced_start_has_verified_survives_a_new_boot() -> None:
    disk = SimulatedDisk()
    opened(disk).mirror(CARD, bundled(written_elsewhere()))
    disk.restart()
    opened(disk, sync_groups=True)
    disk.restart()
    disk.lose_unsynced()
    store = opened(disk, "boot-2", sync_groups=True)
    assert not store.state.all_incomplete
    assert store.held(WHEEL).applied == 5


def test_a_start_that_cannot_read_a_checkpoint_takes_nothing_for_synced() -> None:
    disk = SimulatedDisk()
    opened(disk).mirror(CARD, bundled(written_elsewhere()))
    disk.restart()
    disk.set_content(layout.checkpoint_path(layout.wheel_folder(DATA, WHEEL)), bytes(20))
    store = looked_into(disk, sync_groups=True)
    assert verified(store).held(WHEEL).applied == 5
    disk.restart()
    disk.lose_unsynced()
    assert read(opened(disk, "boot-2", sync_groups=True), WHEEL, 1, 4) == ([1, 2, 3, 4], [])


def test_a_new_mount_is_a_new_boot() -> None:
    disk = SimulatedDisk()
    for boot_id, is_doubtful in (("boot/1", False), ("boot/1", False), ("boot/2", True)):
        store = opened(disk, boot_id)
        assert store.state.all_incomplete == is_doubtful
        store.mirror(CARD, bundled(written_elsewhere()))
        disk.restart()


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
    assert store.held_wheels() == {OWN: HeldWheel(own, 2, BASE_SLOT + 1)}
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


def test_a_file_that_cannot_be_deleted_keeps_no_other_and_is_tried_again_after_a_pause() -> None:
    disk, now_ms, tries = SimulatedDisk(), [0], list[tuple[int, int]]()
    store = opened(disk)
    store.undeletable = Undeletable(
        lambda: now_ms[0], lambda _, pause_ms: tries.append((now_ms[0], pause_ms))
    )
    store.mirror(CARD, bundled(written_elsewhere()))
    disk.undeletable = {str(layout.slot_path(layout.wheel_folder(DATA, WHEEL), BASE_SLOT))}
    for second in range(400):
        now_ms[0] = second * 1_000
        swept = list(store.sweep(BASE_SLOT + 2 + second))
        assert swept == {0: [BASE_SLOT + 1], 1: [BASE_SLOT + 2]}.get(second, [])
    assert tries == [(0, 10_000), (10_000, 20_000), (30_000, 40_000), (70_000, 80_000),
                     (150_000, 160_000), (310_000, 320_000)]  # fmt: skip
    assert [path.name for path in store.undeletable.paths] == [f"{BASE_SLOT}.slot"]
    with pytest.raises(OSError, match="cannot be deleted yet"):
        list(store.delete_wheel(WHEEL))
    assert list_wheels(disk, DATA) == [WHEEL], "it is known to be there"
    disk.undeletable.clear()
    now_ms[0] = 700_000
    list(store.delete_wheel(WHEEL))
    assert (list_wheels(disk, DATA), store.undeletable.paths) == ([], [])


def test_a_folder_that_cannot_be_listed_keeps_no_other_and_is_tried_again_after_a_pause() -> None:
    disk, now_ms = SimulatedDisk(), [0]
    store = opened(disk)
    store.undeletable = Undeletable(lambda: now_ms[0])
    open_own(store)
    slots = [BASE_SLOT + layout.SECONDS_PER_HOUR * hour for hour in range(3)]
    write(store, *(slot - BASE_SLOT for slot in slots))
    folders = [layout.slot_path(layout.wheel_folder(DATA, OWN), slot).parent for slot in slots]
    refusal = Fault("read", error=errno.EUCLEAN, path_part=str(folders[1]))
    disk.faults += [refusal, replace(refusal)]
    done = slots[2] + layout.SECONDS_PER_HOUR
    for now, swept in ((0, [slots[0], slots[2]]), (FIRST_PAUSE_MS - 1, []), (FIRST_PAUSE_MS, [])):
        now_ms[0] = now
        assert [slot for slot in store.sweep(done) if slot is not None] == swept
        assert store.undeletable.paths == [folders[1]]
    now_ms[0] = 3 * FIRST_PAUSE_MS
    assert list(store.sweep(done)) == [slots[1]]
    assert not store.undeletable.paths


def test_a_file_that_somebody_else_deleted_is_reported_no_more() -> None:
    disk, now_ms = SimulatedDisk(), [0]
    store = opened(disk)
    store.undeletable = Undeletable(lambda: now_ms[0])
    store.mirror(CARD, bundled(written_elsewhere()))
    path = layout.slot_path(layout.wheel_folder(DATA, WHEEL), BASE_SLOT)
    disk.undeletable = {str(path)}
    list(store.sweep(BASE_SLOT + 2))
    disk.undeletable.clear()
    disk.delete(path)
    for now, known in ((FIRST_PAUSE_MS - 1, [path]), (FIRST_PAUSE_MS, [])):
        now_ms[0] = now
        list(store.sweep(BASE_SLOT + 2))
        assert store.undeletable.paths == known


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_of_a_synced_group_that_failed_half_way_nothing_counts(error: int) -> None:
    disk = SimulatedDisk()
    store = opened(disk, sync_groups=True)
    open_own(store)
    disk.faults.append(Fault("write", error, f"{BASE_SLOT + 2}.slot"))
    with pytest.raises(WheelBroken) as broken:
        write(store, 0, 2)
    assert len(broken.value.done.bundle) == 0
    assert store.top_slot == BASE_SLOT


def test_a_sync_that_fails_while_its_wheel_is_left_is_not_missed() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    open_own(store)
    write(store, 0, 1)
    wheel = store.wheel
    assert wheel is not None

    def checkpoint(path: Path) -> None:
        if path.name == "writing":  # deleted when the wheel is closed
            disk.on_delete = None
            disk.faults.append(Fault("sync", path_part=".slot"))
            with suppress(WheelBroken):
                wheel.checkpoint()

    disk.on_delete = checkpoint
    left(store)
    assert wheel.broken is not None
    store.checkpoint(ignored)
    disk.lose_unsynced()
    assert read(restarted(disk, "boot-2"), OWN, 1, 2) == ([1, 2], [])


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
    repaired = store.repair(held.card, frames)
    assert list(repaired.missing) == [1, 2], "in a new file; that cannot be opened, either"
    disk.faults.clear()
    assert store.repair(held.card, frames) == HeldWheel(held.card, 2, BASE_SLOT + 1)
    assert read(store, OWN, 1, 2) == ([1, 2], [])


def copies_of_own() -> list[FrameCopy]:
    """Another member's copy of the wheel, into which the same was written."""
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
    frames, absent, _ = store.outgoing.read(
        OWN, 1, 5, max_bytes=9_999, max_frames=9, floor=0, now_ms=0
    )
    assert (frames, absent) == (bundled(on_disk), NO_SEQS)
    assert read(store, OWN, 4, 9) == ([4, 5], [])
    # What is finished is sent without content, as from the disk.
    frames, _, _ = store.outgoing.read(
        OWN, 1, 3, max_bytes=9_999, max_frames=9, floor=BASE_SLOT + 1, now_ms=0
    )
    assert frames == bundled([on_disk[0]._replace(content=b""), *on_disk[1:3]])
    # Of a wheel that was left nothing is kept.
    store.leave_wheel()
    assert read(store, OWN, 1, 5) == ([1, 2, 3], [4])


def test_the_newest_group_stays_in_memory_however_long_it_is() -> None:
    store = opened(SimulatedDisk(), recent_bytes=300)
    open_own(store)
    write(store, 0)
    write(store, *range(9))
    recent = store.outgoing.recent
    frames = recent.frames(2, 10, floor=0, max_bytes=1 << 20)
    assert frames.seqs.tolist() == list(range(2, 11))
    assert frames.length_bytes > 300
    assert not len(recent.frames(1, 1, floor=0, max_bytes=1 << 20))


def test_what_was_damaged_in_memory_is_sent_from_the_files_once_it_was_refused() -> None:
    disk = SimulatedDisk()
    store = opened(disk, recent_bytes=10_000)
    open_own(store)
    for ahead in range(3):
        write(store, ahead)
    on_disk = bundled(copies_of(disk, DATA, OWN))
    content = store.outgoing.recent.frames(2, 2, floor=0, max_bytes=9_999).content
    assert isinstance(content.obj, bytearray)
    content.obj[100] ^= 1
    read_some = partial(store.outgoing.read, OWN, max_bytes=9_999, max_frames=9, floor=0, now_ms=0)
    assert read_some(1, 3) != FoundFrames(on_disk)
    assert read_some(3, 3, again=True) == FoundFrames(on_disk.part(2, 3))
    assert len(store.outgoing.recent.frames(2, 2, floor=0, max_bytes=9_999)), "nobody refused it"
    assert read_some(1, 3, again=True) == read_some(1, 3) == FoundFrames(on_disk)
    assert len(store.outgoing.recent.frames(3, 3, floor=0, max_bytes=9_999)), "it is whole"


def test_what_was_written_before_is_read_again() -> None:
    disk = SimulatedDisk()
    store = opened(disk, recent_bytes=300)
    open_own(store)
    for ahead in range(4):
        write(store, ahead)
    on_disk = copies_of(disk, DATA, OWN)
    assert len(on_disk[0].content) < 300 < 4 * len(on_disk[0].content)
    frames, absent, _ = store.outgoing.read(
        OWN, 1, 4, max_bytes=9_999, max_frames=9, floor=0, now_ms=0
    )
    assert (frames, absent) == (bundled(on_disk), NO_SEQS)
