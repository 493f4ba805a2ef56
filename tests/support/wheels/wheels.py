"""Wheels for tests, on any disk."""

from dataclasses import replace
from pathlib import Path

from delaywheel.identity import WheelId
from delaywheel.storage.files.handles import HandleCache
from delaywheel.storage.files.undeletable import Undeletable
from delaywheel.storage.files.wheel_folder import (
    Checkpoint,
    WheelMeta,
    WheelState,
    load_checkpoint,
    load_meta,
    save_meta,
)
from delaywheel.storage.folder.disk import Disk
from delaywheel.storage.frames.format import Frame
from delaywheel.storage.reading.reader import DamagedFrame, WheelReader
from delaywheel.storage.writing.dial import Dial
from delaywheel.storage.writing.mirror import MirrorWheel
from delaywheel.storage.writing.wheel import OriginWheel
from support.wheels.copies import rows_by_seq
from support.wheels.messages import Message, columns_of, messages_of

ACCEPTED_AT_MS = 1_763_699_999_000


def new_wheel(
    disk: Disk,
    data: Path,
    number: int = 1,
    *,
    handles: int = 8,
    dial: Dial | None = None,
    max_frame_messages: int = 100,
    table_rows: int = 2,
) -> OriginWheel:
    meta = WheelMeta(WheelId("node-1", number), {"node-1": "storage"}, 1, 7200)
    cache = HandleCache(disk, handles)
    return OriginWheel.create(
        disk,
        data,
        meta,
        cache,
        dial=dial,
        max_frame_messages=max_frame_messages,
        table_rows=table_rows,
    )


def mark_wheel(
    disk: Disk, data: Path, wheel: WheelId, state: WheelState, *, final_seq: int | None = None
) -> None:
    """Changes a wheel's meta.json."""
    save_meta(disk, data, replace(load_meta(disk, data, wheel), state=state, final_seq=final_seq))


def append(wheel: OriginWheel, messages: list[Message]) -> dict[int, list[Message]]:
    """Appends one group; returns what went into each seq."""
    group = wheel.append(columns_of(messages), accepted_at_ms=ACCEPTED_AT_MS)
    return {seq: [messages[row] for row in rows] for seq, rows in rows_by_seq(group).items()}


def read_all(disk: Disk, data: Path, wheel: WheelId) -> dict[int, list[Message] | DamagedFrame]:
    """All frames, found by their slots."""
    reader = WheelReader(disk, data, wheel)
    last_seq = reader.last_seq()
    frames = [frame for slot in reader.slots() for frame in reader.slot_frames(slot, last_seq)]
    reader.close()
    return {
        frame.seq: messages_of(frame.columns) if isinstance(frame, Frame) else frame
        for frame in frames
    }


def delete_below(wheel: OriginWheel | MirrorWheel, floor: int) -> list[int]:
    """Finishes the slots below the floor and deletes their files; returns those with a file."""
    wheel.raise_floor(floor)
    deleted = wheel.delete_finished(Undeletable())
    return [slot for slot in deleted if slot is not None]


def ignored(*_: object) -> None:
    """A callback that ignores what a test does not examine."""


def checkpoint_of(disk: Disk, folder: Path) -> Checkpoint:
    """The checkpoint of a wheel, which must be readable."""
    checkpoint = load_checkpoint(disk, folder)
    assert checkpoint is not None
    return checkpoint
