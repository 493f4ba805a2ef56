"""Wheels on disk for tests of due messages, written from plain Python values."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from delaywheel.headers import encode_headers
from delaywheel.identity import WheelId
from delaywheel.storage.files.handles import HandleCache
from delaywheel.storage.files.wheel_folder import WheelMeta
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.format import MAGIC
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.reading.reader import WheelReader
from delaywheel.storage.writing.wheel import OriginWheel
from delaywheel_replica.core.protocol.reschedules import MessageKey
from delaywheel_replica.server.node.naming import rows_naming
from support.wheels.copies import rows_by_seq

IN_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Sent:
    """One message as its caller sent it."""

    due_ms: int
    id: bytes
    topic: str = "orders"
    key: bytes | None = None
    value: bytes | None = b""
    headers: tuple[tuple[str, bytes | None], ...] = ()
    partition: int = -1
    timestamp_ms: int = -1


@dataclass(frozen=True)
class Written:
    """One frame as it was written; rows of a frame of cancels are (due, id) only."""

    wheel: WheelId
    seq: int
    slot: int
    kind: Kind
    rows: tuple[Sent, ...]
    accepted_at_ms: int


@dataclass
class Wheels:
    """All wheels of a node, written directly."""

    data: Path
    disk: PosixDisk = field(default_factory=PosixDisk)
    max_frame_messages: int = 10_000
    frames: list[Written] = field(default_factory=list)
    _origins: dict[WheelId, OriginWheel] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._handles = HandleCache(self.disk, 32)

    def write(self, wheel: WheelId, rows: Sequence[Sent], *, now_ms: int = 0) -> list[Written]:
        """Appends one group of messages."""
        return self._append(wheel, rows, Kind.MESSAGES, columns_of(rows), now_ms)

    def cancel(
        self,
        wheel: WheelId,
        rows: Sequence[Sent],
        *,
        now_ms: int = 0,
        kind: Kind = Kind.CANCELS,
    ) -> list[Written]:
        """Appends one group of rows of this kind that name these messages."""
        columns = rows_naming([MessageKey(row.id, row.due_ms, row.topic) for row in rows])
        return self._append(wheel, rows, kind, columns, now_ms)

    def last_seqs(self) -> dict[WheelId, int]:
        """How far each wheel goes."""
        return {wheel: origin.last_seq for wheel, origin in self._origins.items()}

    def damage(self, frame: Written) -> None:
        """Makes a frame unreadable, on the medium."""
        self._overwrite(frame, b"XXXX")

    def repair(self, frame: Written) -> None:
        """Repairs a damaged frame."""
        self._overwrite(frame, MAGIC)

    def _overwrite(self, frame: Written, start: bytes) -> None:
        reader = WheelReader(self.disk, self.data, frame.wheel)
        offset = int(reader.rows(frame.seq, frame.seq)["offset"][0])
        reader.close()
        path = layout.slot_path(layout.wheel_folder(self.data, frame.wheel), frame.slot)
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(start)

    def close(self) -> None:
        """Closes all files."""
        for origin in self._origins.values():
            origin.close()

    def _append(
        self, wheel: WheelId, rows: Sequence[Sent], kind: Kind, columns: Columns, now_ms: int
    ) -> list[Written]:
        if wheel not in self._origins:
            meta = WheelMeta(wheel, {wheel.node: "0" * 32}, 1, 7200)
            self._origins[wheel] = OriginWheel.create(
                self.disk,
                self.data,
                meta,
                self._handles,
                max_frame_messages=self.max_frame_messages,
            )
        group = self._origins[wheel].append(columns, kind=kind, accepted_at_ms=now_ms)
        slots = group.bundle.rows["slot"].tolist()
        written = [
            Written(wheel, seq, slot, kind, tuple(rows[row] for row in held), now_ms)
            for slot, (seq, held) in zip(slots, rows_by_seq(group).items(), strict=True)
        ]
        self.frames += written
        return written


@contextmanager
def wheels_in_memory(*, max_frame_messages: int = 10_000) -> Iterator[Wheels]:
    """Wheels in a separate folder that needs no disk."""
    folder = tempfile.mkdtemp(dir=IN_MEMORY if IN_MEMORY.is_dir() else None)
    wheels = Wheels(Path(folder), max_frame_messages=max_frame_messages)
    try:
        yield wheels
    finally:
        wheels.close()
        shutil.rmtree(folder)


def ids_of(ids: Sequence[bytes]) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Ids as a column."""
    return np.frombuffer(b"".join(ids), np.uint8).reshape(len(ids), 16)


def columns_of(rows: Sequence[Sent]) -> Columns:
    """Messages as columns."""
    topics = sorted({row.topic for row in rows})
    headers = [encode_headers(list(row.headers)) if row.headers else b"" for row in rows]
    contents = [
        (row.key or b"") + (row.value or b"") + encoded
        for row, encoded in zip(rows, headers, strict=True)
    ]
    lengths = np.array([len(content) for content in contents], np.int64)
    return Columns(
        due_ms=np.array([row.due_ms for row in rows], np.int64),
        ids=ids_of([row.id for row in rows]),
        topics=tuple(topics),
        topic_numbers=np.array([topics.index(row.topic) for row in rows], np.uint32),
        key_lengths=_lengths([row.key for row in rows]),
        value_lengths=_lengths([row.value for row in rows]),
        headers_lengths=np.array([len(encoded) for encoded in headers], np.int32),
        partitions=np.array([row.partition for row in rows], np.int32),
        timestamps_ms=np.array([row.timestamp_ms for row in rows], np.int64),
        blob=b"".join(contents),
        starts=np.cumsum(lengths) - lengths,
    )


def _lengths(parts: Sequence[bytes | None]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array([-1 if part is None else len(part) for part in parts], np.int32)
