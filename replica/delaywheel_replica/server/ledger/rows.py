"""The unpublished ledger: what was accepted, as columns taken from the commit.

It lies beside the wheels and is independent of forwarding: each group's messages are written as one
block into a file of their wheel, after its frames and without anyone waiting for it, since a row
that is missing here can be read from the frames. A file is sealed now and then; the publisher
publishes sealed files and deletes them (``publisher.py``).

    <data>/ledger/rows/<wheel>/<first seq>.rows        blocks, one behind the other

A block holds the messages of consecutive frames in columns, each ready for ``numpy.frombuffer``:

======================  ==========  ==============================================
head                    40 bytes    magic, checksum over the rest, frames,
                                    messages, length of the topics, first seq,
                                    accepted_at_ms
due_ms                  int64       of each message, by frame and row
ids                     16 bytes    of each message
topic numbers           uint32      of each message, in the block's topics
counts                  uint32      messages of each frame; 0: it holds cancels
topics                  JSON        a list of names
======================  ==========  ==============================================

A file ends where a block is torn, its checksum is wrong, or the medium does not return it: the rest
is read from the frames.
"""

import json
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.storage.folder.disk import Disk, File, is_medium_error
from delaywheel.storage.frames.bundle import WrittenGroup
from delaywheel.storage.frames.columns import Columns
from delaywheel_replica.process.logs import get_logger

_MAGIC: Final = b"DWlc"
_HEAD = struct.Struct("<4sIIIIxxxxQq")  # magic, checksum, frames, rows, topics, first, accepted
_CHECKED_FROM: Final = 8
_ROW_BYTES: Final = 8 + 16 + 4
_FRAME_BYTES: Final = 4
_NO_TOPICS: Final = b"[]"

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """The messages of consecutive frames from ``first_seq`` on; possibly none.

    Attributes:
        counts: Each frame's number of messages.
        due_ms: Each message's due, by frame and row.
        ids: Likewise, 16 bytes each.
        topic_numbers: Likewise, as indexes into `topics`.
    """

    first_seq: int
    accepted_at_ms: int
    topics: Sequence[str]
    counts: NDArray[Any]
    due_ms: NDArray[Any]
    ids: NDArray[Any]
    topic_numbers: NDArray[Any]

    def __len__(self) -> int:
        return len(self.due_ms)

    @property
    def last_seq(self) -> int:
        """The seq of the last frame."""
        return self.first_seq + len(self.counts) - 1

    def seqs(self) -> NDArray[np.int64]:
        """The seq of each message."""
        numbers = np.arange(self.first_seq, self.last_seq + 1, dtype=np.int64)
        return np.repeat(numbers, self.counts)

    def between(self, first_seq: int, last_seq: int) -> "Block":
        """Returns the part that lies in these frames; at least one frame does."""
        if first_seq <= self.first_seq and last_seq >= self.last_seq:
            return self
        begin = max(first_seq - self.first_seq, 0)
        end = min(last_seq, self.last_seq) - self.first_seq + 1
        ends = np.cumsum(self.counts)
        rows = slice(int(ends[begin - 1]) if begin else 0, int(ends[end - 1]))
        return Block(
            self.first_seq + begin,
            self.accepted_at_ms,
            self.topics,
            self.counts[begin:end],
            self.due_ms[rows],
            self.ids[rows],
            self.topic_numbers[rows],
        )


def rows_folder(data: Path, wheel: WheelId | None = None) -> Path:
    """Returns the folder of the unpublished rows."""
    folder = data / "ledger" / "rows"
    return folder if wheel is None else folder / str(wheel)


def block_of(columns: Columns | None, group: WrittenGroup, accepted_at_ms: int) -> Block:
    """Returns the block of a group of consecutive frames; ``columns`` is None for cancels."""
    if columns is None:
        return _without_rows(group.bundle.first_seq, len(group.bundle), accepted_at_ms)
    counts, order = group.counts.astype("<u4"), group.order
    return Block(
        group.bundle.first_seq,
        accepted_at_ms,
        columns.topics,
        counts,
        columns.due_ms[order],
        columns.ids[order],
        columns.topic_numbers[order],
    )


def block_of_frame(seq: int, accepted_at_ms: int, columns: Columns | None) -> Block:
    """Returns the block of one frame read from its wheel; ``columns`` as for `block_of`.

    Nothing else of the frame is kept in memory.
    """
    if columns is None:
        return _without_rows(seq, 1, accepted_at_ms)
    return Block(
        seq,
        accepted_at_ms,
        columns.topics,
        np.array([len(columns)], dtype="<u4"),
        columns.due_ms.copy(),
        columns.ids.copy(),
        columns.topic_numbers.copy(),
    )


def _without_rows(first_seq: int, frames: int, accepted_at_ms: int) -> Block:
    nothing = np.empty(0, dtype="<i8")
    counts = np.zeros(frames, dtype="<u4")
    ids = np.empty((0, 16), dtype="u1")
    return Block(first_seq, accepted_at_ms, (), counts, nothing, ids, nothing)


def encode_block(block: Block) -> bytearray:
    """Returns the bytes of a block."""
    topics = json.dumps(list(block.topics)).encode() if len(block) else _NO_TOPICS
    head = _HEAD.pack(
        _MAGIC,
        0,
        len(block.counts),
        len(block),
        len(topics),
        block.first_seq,
        block.accepted_at_ms,
    )
    body = bytearray().join(
        (
            head,
            block.due_ms.astype("<i8", copy=False).tobytes(),
            block.ids.tobytes(),
            block.topic_numbers.astype("<u4", copy=False).tobytes(),
            block.counts.tobytes(),
            topics,
        )
    )
    body[4:8] = crc32c(memoryview(body)[_CHECKED_FROM:]).to_bytes(4, "little")
    return body


def read_blocks(disk: Disk, path: Path) -> Iterator[Block]:
    """Yields a file's blocks up to the first damaged one, with one in memory at a time."""
    try:
        with closing(disk.open_read(path)) as file:
            size, at = file.size(), 0
            while at + _HEAD.size <= size:
                content = _whole_block(file, at, size)
                if content is None:
                    return
                yield _decode(content)
                at += len(content)
    except OSError as error:
        if not (is_medium_error(error) or isinstance(error, FileNotFoundError)):
            raise
        _log.warning("ledger rows cannot be read", path=str(path), error=str(error))


def _whole_block(file: File, at: int, size: int) -> bytes | None:
    magic, checksum, frames, rows, topics, _, _ = _HEAD.unpack(file.read_at(_HEAD.size, at))
    length = _HEAD.size + rows * _ROW_BYTES + frames * _FRAME_BYTES + topics
    if magic != _MAGIC or at + length > size:
        return None
    content = file.read_at(length, at)
    return content if crc32c(memoryview(content)[_CHECKED_FROM:]) == checksum else None


def _decode(content: bytes) -> Block:
    _, _, frames, rows, _, first_seq, accepted_at_ms = _HEAD.unpack_from(content)
    at = _HEAD.size
    due_ms = np.frombuffer(content, "<i8", rows, at)
    at += due_ms.nbytes
    ids = np.frombuffer(content, "u1", rows * 16, at).reshape(rows, 16)
    at += ids.nbytes
    topic_numbers = np.frombuffer(content, "<u4", rows, at)
    at += topic_numbers.nbytes
    counts = np.frombuffer(content, "<u4", frames, at)
    topics = json.loads(content[at + counts.nbytes :])
    return Block(first_seq, accepted_at_ms, topics, counts, due_ms, ids, topic_numbers)


@dataclass(slots=True)
class _Open:
    wheel: WheelId
    path: Path
    file: File
    length_bytes: int = 0


class Ledger:
    """Writes the blocks. ``enter`` is for the writer's thread, ``seal`` for the publisher's."""

    def __init__(
        self,
        disk: Disk,
        data: Path,
        *,
        on_entered: Callable[[Columns | None, WrittenGroup], object] = lambda *_: None,
        max_file_bytes: int = 64 << 20,
    ) -> None:
        """Writes nothing yet; `on_entered` gets each group, whatever becomes of its rows."""
        self._disk = disk
        self._data = data
        self._on_entered = on_entered
        self._max_file_bytes = max_file_bytes
        self._lock = threading.Lock()
        self._open: _Open | None = None
        self._sealed: list[tuple[WheelId, Path]] = []
        # Set after the medium refused a block: its rows are then read from the frames.
        self.failure: str | None = None

    def enter(
        self,
        wheel: WheelId,
        columns: Columns | None,
        group: WrittenGroup,
        accepted_at_ms: int,
    ) -> None:
        """Enters the frames of a group."""
        self._on_entered(columns, group)
        content = encode_block(block_of(columns, group, accepted_at_ms))
        with self._lock:
            try:
                file = self._file_for(wheel, group.bundle.first_seq)
                file.file.write_at((content,), file.length_bytes)
            except OSError as error:
                self.failure = str(error)
                self._seal_open()
            else:
                self.failure = None
                file.length_bytes += len(content)

    def seal(self) -> list[tuple[WheelId, Path]]:
        """Closes the open file; returns all files closed since the last call, in order.

        No block is added to any of them.
        """
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
            self._sealed.append((opened.wheel, opened.path))
