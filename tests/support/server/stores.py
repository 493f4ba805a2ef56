"""Stores of node b on simulated disks, and frames for them."""

from dataclasses import replace
from pathlib import Path

from delaywheel.identity import WheelId
from delaywheel.storage.files.index import ROWS_PER_SEGMENT
from delaywheel.storage.folder.node_state import Spare
from delaywheel.storage.frames.bundle import FrameCopy
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.frames.rows import HOLE_ROW
from delaywheel_replica.core.node.events import HeldWheel
from delaywheel_replica.core.protocol.messages import WheelCard
from delaywheel_replica.server.store.store import Store, StoreLimits
from sim.machine.disk import SimulatedDisk
from support.wheels.copies import copies_of, verified
from support.wheels.messages import BASE_SLOT, columns_of, message
from support.wheels.wheels import ACCEPTED_AT_MS, append, new_wheel

DATA = Path("/data")
SEGMENT_BYTES = ROWS_PER_SEGMENT * len(HOLE_ROW)
OWN = WheelId("b", 1)
MEMBERS = {"a": "storage-a", "b": "storage-b"}
WHEEL = WheelId("node-1", 1)
CARD = WheelCard(WHEEL, MEMBERS, 2, 7200)


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
    """A store whose wheels are not verified yet."""
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
    frames, absent, _ = store.outgoing.read(
        wheel, first, last, max_bytes=max_bytes, max_frames=4, floor=floor, now_ms=0
    )
    return frames.seqs.tolist(), list(absent)


def left(store: Store) -> HeldWheel:
    held = store.leave_wheel()
    assert held is not None
    return held
