"""A wheel's origin and its copies, for tests."""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from delaywheel.identity import WheelId
from delaywheel.storage.files.handles import HandleCache
from delaywheel.storage.files.wheel_folder import list_wheels
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Disk
from delaywheel.storage.folder.steps import finish
from delaywheel.storage.frames.bundle import FrameBundle, FrameCopy, WrittenGroup
from delaywheel.storage.frames.rows import INDEX_ROW_LENGTH_BYTES
from delaywheel.storage.reading.reader import WheelReader
from delaywheel.storage.recovery.recover import Recovered, recovering
from delaywheel.storage.writing.dial import Dial
from delaywheel.storage.writing.mirror import MirrorWheel
from delaywheel_replica.server.store.store import Store
from sim.machine.disk import SimulatedDisk


def open_copy(
    disk: Disk, data: Path, wheel: WheelId, handles: HandleCache, **options: Any
) -> MirrorWheel:
    """Opens a copy in one step."""
    return finish(MirrorWheel.opening(disk, data, wheel, handles, **options))


def recover_wheel(
    disk: Disk, data: Path, wheel: WheelId, *, os_crashed: bool, floor: int = 0
) -> Recovered:
    """Recovers a wheel in one step, as at a start."""
    steps = recovering(disk, data, wheel, os_crashed=os_crashed, floor=floor, at_start=True)
    return finish(steps)


def count_again(dial: Dial, disk: Disk, data: Path, *, floor: int) -> None:
    """Counts everything in all wheels at or above the floor into an empty dial."""
    for wheel in list_wheels(disk, data):
        finish(dial.adding_wheel(disk, data, wheel, floor=floor))


def verified(store: Store) -> Store:
    """An opened store, with all its wheels recovered."""
    for wheel in sorted(store.unverified):
        finish(store.verifying(wheel))
    return store


def copies_of(
    disk: Disk, data: Path, wheel: WheelId, first_seq: int = 1, *, floor: int = 0
) -> list[FrameCopy]:
    """The frames from a seq on, up to the first that cannot be read."""
    reader = WheelReader(disk, data, wheel)
    frames, _ = reader.bundle(first_seq, reader.last_seq(), floor=floor)
    return list(frames.copies())


def rows_of(disk: SimulatedDisk, data: Path, wheel: WheelId) -> list[bytes]:
    """All rows of an index."""
    reader = WheelReader(disk, data, wheel)
    rows = reader.rows(1, reader.last_seq()).tobytes()
    return [
        rows[at : at + INDEX_ROW_LENGTH_BYTES] for at in range(0, len(rows), INDEX_ROW_LENGTH_BYTES)
    ]


def slots_of(disk: SimulatedDisk, data: Path, wheel: WheelId) -> dict[int, bytes]:
    """The content of all slot files."""
    reader = WheelReader(disk, data, wheel)
    folder = layout.wheel_folder(data, wheel)
    return {slot: disk.content(layout.slot_path(folder, slot)) for slot in reader.slots()}


def flipped(copies: Sequence[FrameCopy], number: int, byte: int) -> list[FrameCopy]:
    """The same frames with one damaged byte in the content of one."""
    content = bytearray(copies[number].content)
    content[byte] ^= 1
    return [
        copy._replace(content=bytes(content)) if at == number else copy
        for at, copy in enumerate(copies)
    ]


def bundled(copies: Sequence[FrameCopy]) -> FrameBundle:
    """Frames given one by one, as a bundle."""
    return FrameBundle.of_copies(copies)


def copy_of(seq: int, content: bytes, *, slot: int = 0, offset: int = 0) -> FrameCopy:
    """A frame of which only seq, place and length are true."""
    return FrameCopy(seq, struct.pack("<IIII", slot, offset, len(content), 1), content)


def rows_by_seq(group: WrittenGroup) -> dict[int, list[int]]:
    """The appended rows that each frame holds."""
    order = iter(group.order.tolist())
    return {
        seq: [next(order) for _ in range(count)]
        for seq, count in zip(group.bundle.seqs.tolist(), group.counts.tolist(), strict=True)
    }
