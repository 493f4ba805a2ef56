"""Removes messages from the slot files of every node, as a bad disk or a mistake would."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from delaywheel.identity import WheelId
from delaywheel.storage.files.wheel_folder import load_checkpoint, save_checkpoint
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.frames.format import Frame
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.frames.rows import INDEX_ROW_LENGTH_BYTES
from delaywheel.storage.reading.reader import WheelReader


class Place(NamedTuple):
    """Where a frame lies; on every node it is the same."""

    wheel: str
    seq: int
    accepted_at_ms: int
    slot: int
    offset: int
    length: int


def place_of(data: Path, wheel: str, message_id: bytes) -> Place | None:
    """The first frame of a wheel with this message, in this folder."""
    return next((p for p, ids in _frames(data, wheel) if message_id in ids), None)


def _frames(data: Path, wheel: str) -> Iterator[tuple[Place, list[bytes]]]:
    reader = WheelReader(PosixDisk(), data, WheelId.parse(wheel))
    try:
        for seq in range(1, reader.last_seq() + 1):
            frame = reader.frame(seq)
            if isinstance(frame, Frame) and frame.kind is Kind.MESSAGES:
                slot, offset, length, _ = reader.rows(seq, seq)[0].item()
                place = Place(wheel, seq, frame.accepted_at_ms, slot, offset, length)
                yield place, [bytes(i) for i in frame.columns.ids]
    finally:
        reader.close()


def spoil(folders: Iterable[Path], place: Place) -> None:
    """Overwrites the frame."""
    for path in _slot_files(folders, place):
        with path.open("r+b") as file:
            file.seek(place.offset)
            file.write(bytes(place.length))


def cut_short(folders: Iterable[Path], place: Place) -> None:
    """Cuts the slot file within the frame."""
    for path in _slot_files(folders, place):
        with path.open("r+b") as file:
            file.truncate(place.offset + place.length // 2)


def delete_slot_file(folders: Iterable[Path], place: Place) -> None:
    """Deletes the file of the frame, which must be alone there."""
    for path in _slot_files(folders, place):
        assert path.stat().st_size == place.length
        path.unlink()


def cut_off(folders: Iterable[Path], place: Place) -> None:
    """Cuts the last frame of a wheel, with its row in the index, without a trace.

    A checkpoint made since would be one: it says how many frames there were.
    """
    disk = PosixDisk()
    folders = list(folders)
    for path in _slot_files(folders, place):
        assert path.stat().st_size == place.offset + place.length, "frames lie behind it"
        with path.open("r+b") as file:
            file.truncate(place.offset)
    for folder in folders:
        index = layout.index_path(layout.wheel_folder(folder, WheelId.parse(place.wheel)), 0)
        assert index.stat().st_size == place.seq * INDEX_ROW_LENGTH_BYTES, "it is not the last"
        with index.open("r+b") as file:
            file.truncate((place.seq - 1) * INDEX_ROW_LENGTH_BYTES)
        made = load_checkpoint(disk, index.parent)
        if made is not None and made.seq >= place.seq:
            save_checkpoint(disk, index.parent, made._replace(seq=place.seq - 1))


def _slot_files(folders: Iterable[Path], place: Place) -> list[Path]:
    wheel = WheelId.parse(place.wheel)
    return [layout.slot_path(layout.wheel_folder(f, wheel), place.slot) for f in folders]
