"""The ledger before it is published: what was accepted, from the memory of the commit.

Beside the wheels, and independent of whoever forwards: each group's messages are written as one
block into a file of their wheel, after its callers' frames and before nobody's answer, for a row
that is missing here is in the frames still. A file is sealed now and then; the books publish
sealed files and delete them (``publish.py``).

    <data>/ledger/rows/<wheel>/<first seq>.rows        blocks, one behind the other

A block: head (magic, rows, first seq, last seq, accepted_at_ms, length of the topics, checksum
over all the rest of the block), topics as a JSON list, rows (``LEDGER_ROW``). A file ends where
a block is torn or its checksum is wrong: the rest is read from the frames.
"""

import json
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from delaywheel.columns import Columns
from delaywheel.disk import Disk, File
from delaywheel.identity import WheelId
from delaywheel.wheel import FramePlace

# seq counts from the first seq of the block; topic is a number in the block's list.
LEDGER_ROW: Final[np.dtype[Any]] = np.dtype(
    [("due_ms", "<i8"), ("seq", "<u4"), ("topic", "<u4"), ("id", "u1", 16)]
)

_MAGIC: Final = b"DWlb"
_HEAD = struct.Struct("<4sIIIQQq")  # magic, checksum, rows, topics length, first, last, accepted
_CHECKED_FROM: Final = 8


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """The messages of the frames ``first_seq`` to ``last_seq``; perhaps none."""

    first_seq: int
    last_seq: int
    accepted_at_ms: int
    topics: list[str]
    rows: NDArray[Any]


def rows_folder(data: Path, wheel: WheelId | None = None) -> Path:
    """Where the unpublished rows are."""
    folder = data / "ledger" / "rows"
    return folder if wheel is None else folder / str(wheel)


def block_of(columns: Columns | None, places: Sequence[FramePlace], accepted_at_ms: int) -> Block:
    """The block of a group of consecutive frames; ``columns`` is None when they are cancels."""
    first_seq, last_seq = places[0].seq, places[-1].seq
    if columns is None:
        return Block(first_seq, last_seq, accepted_at_ms, [], np.empty(0, dtype=LEDGER_ROW))
    order = np.concatenate([place.rows for place in places])
    rows = np.empty(len(order), dtype=LEDGER_ROW)
    rows["due_ms"] = columns.due_ms[order]
    rows["seq"] = np.repeat(np.arange(len(places)), [place.messages for place in places])
    rows["topic"] = columns.topic_numbers[order]
    rows["id"] = columns.ids[order]
    return Block(first_seq, last_seq, accepted_at_ms, list(columns.topics), rows)


def encode_block(block: Block) -> bytes:
    """The bytes of a block."""
    topics = json.dumps(block.topics).encode()
    head = _HEAD.pack(
        _MAGIC,
        0,
        len(block.rows),
        len(topics),
        block.first_seq,
        block.last_seq,
        block.accepted_at_ms,
    )
    body = bytearray().join((head, topics, block.rows.tobytes()))
    body[4:8] = crc32c(memoryview(body)[_CHECKED_FROM:]).to_bytes(4, "little")
    return bytes(body)


def read_blocks(disk: Disk, path: Path) -> Iterator[Block]:
    """The whole blocks of a file, up to the first that is not."""
    file = disk.open_read(path)
    try:
        size, at = file.size(), 0
        while at + _HEAD.size <= size:
            head = file.read_at(_HEAD.size, at)
            magic, checksum, rows, topics_length, first, last, accepted = _HEAD.unpack(head)
            length = _HEAD.size + topics_length + rows * LEDGER_ROW.itemsize
            if magic != _MAGIC or at + length > size:
                return
            body = file.read_at(length, at)
            if crc32c(memoryview(body)[_CHECKED_FROM:]) != checksum:
                return
            topics = json.loads(body[_HEAD.size : _HEAD.size + topics_length])
            table = np.frombuffer(body, LEDGER_ROW, rows, _HEAD.size + topics_length)
            yield Block(first, last, accepted, topics, table)
            at += length
    finally:
        file.close()


@dataclass(frozen=True, slots=True)
class SealedRows:
    """A file that takes no more blocks."""

    wheel: WheelId
    path: Path


@dataclass(slots=True)
class _Open:
    wheel: WheelId
    path: Path
    file: File
    length_bytes: int = 0


class Ledger:
    """Writes the blocks. ``enter`` is for the writer's thread, ``seal`` for the books'."""

    def __init__(self, disk: Disk, data: Path, *, max_file_bytes: int = 64 << 20) -> None:
        self._disk = disk
        self._data = data
        self._max_file_bytes = max_file_bytes
        self._lock = threading.Lock()
        self._open: _Open | None = None
        self._sealed: list[SealedRows] = []
        # Set after the medium refused a block: the frames have it, and the books read them.
        self.failure: str | None = None

    def enter(
        self,
        wheel: WheelId,
        columns: Columns | None,
        places: Sequence[FramePlace],
        accepted_at_ms: int,
    ) -> None:
        """Takes note of the frames of a group."""
        content = encode_block(block_of(columns, places, accepted_at_ms))
        with self._lock:
            try:
                file = self._file_for(wheel, places[0].seq)
                file.file.write_at((content,), file.length_bytes)
            except OSError as error:
                self.failure = str(error)
                self._seal_open()
            else:
                self.failure = None
                file.length_bytes += len(content)

    def seal(self) -> list[SealedRows]:
        """Ends the open file; returns all that were sealed since the last time, in order."""
        with self._lock:
            self._seal_open()
            sealed, self._sealed = self._sealed, []
            return sealed

    def _file_for(self, wheel: WheelId, first_seq: int) -> _Open:
        opened = self._open
        if opened is None or opened.wheel != wheel or opened.length_bytes >= self._max_file_bytes:
            self._seal_open()
            path = rows_folder(self._data, wheel) / f"{first_seq}.rows"
            opened = self._open = _Open(wheel, path, self._disk.open(path, create=True))
        return opened

    def _seal_open(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.file.close()
            self._sealed.append(SealedRows(opened.wheel, opened.path))
