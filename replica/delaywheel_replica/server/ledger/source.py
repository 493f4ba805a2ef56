"""The unpublished rows of one wheel: from local files, and from the wheel beyond them.

After a torn block, a file that a full disk refused, or for a wheel that another node wrote, rows
that are missing locally are read from the frames, still in the order of seqs. One block is in
memory at a time; a group of callers' requests makes one, so its size is bounded as theirs is.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.seqset import SeqSet
from delaywheel.storage.folder.disk import Disk
from delaywheel.storage.frames.format import Frame
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.frames.rows import is_gone, kinds_of
from delaywheel.storage.reading.reader import WheelReader
from delaywheel_replica.server.ledger.place import SCHEMA
from delaywheel_replica.server.ledger.rows import Block, block_of_frame, read_blocks

_ROW_GROUP: Final = 100_000


@dataclass(frozen=True, slots=True)
class UnreadableFrame:
    """A frame, perhaps with messages by its index row, that has no local row and cannot be read."""

    seq: int
    messages: int


class LedgerSource:
    """One pass over the rows of one wheel."""

    def __init__(self, disk: Disk, data: Path, wheel: WheelId, files: Sequence[Path]) -> None:
        self._disk = disk
        self._data = data
        self._wheel = wheel
        self._files = files
        self._ends: dict[Path, int] = {}

    def blocks(self, first_seq: int, last_seq: int) -> Iterator[Block | UnreadableFrame]:
        """Yields all frames from ``first_seq`` to ``last_seq``, in order and once."""
        next_seq = first_seq
        for path in self._files:
            self._ends[path] = 0
            for block in read_blocks(self._disk, path):
                self._ends[path] = block.last_seq
                if block.last_seq < next_seq or block.first_seq > last_seq:
                    continue  # published before, or not yet held by enough members
                yield from self._from_frames(next_seq, block.first_seq - 1)
                part = block.between(next_seq, last_seq)
                yield part
                next_seq = part.last_seq + 1
        yield from self._from_frames(next_seq, last_seq)

    def finished_to(self, first_seq: int, floor: int, lost: SeqSet) -> int:
        """Returns the last frame from ``first_seq`` on that lies below the floor; 0 if none does.

        The floor passed it only after everything up to it was published or given up. A lost frame
        proves nothing: the floor does not wait for its gap.
        """
        with closing(self._reader()) as reader:
            last_seq, found = reader.last_seq(), 0
            for first, rows in reader.rows_of(SeqSet([(first_seq, last_seq)]) - lost):
                has_slot = rows["length"] > 0
                below = np.flatnonzero(is_gone(rows) | (has_slot & (rows["slot"] < floor)))
                if len(below):
                    found = first + int(below[-1])
            return found

    def may_have_messages(self, first_seq: int, last_seq: int) -> bool:
        """Whether some of these frames are not known to have none, by their index rows."""
        with closing(self._reader()) as reader:
            others = 0
            for _, rows in reader.rows_of(SeqSet([(first_seq, last_seq)])):
                others += int(np.count_nonzero(kinds_of(rows) != Kind.MESSAGES))
            return others < last_seq - first_seq + 1

    def files_up_to(self, seq: int) -> list[Path]:
        """Returns the files that were read to the end and have no frame beyond this seq."""
        return [path for path, end in self._ends.items() if end <= seq]

    def _from_frames(self, first_seq: int, last_seq: int) -> Iterator[Block | UnreadableFrame]:
        if first_seq > last_seq:
            return
        with closing(self._reader()) as reader:
            for seq in range(first_seq, last_seq + 1):
                yield _from_frame(reader, seq)

    def _reader(self) -> WheelReader:
        return WheelReader(self._disk, self._data, self._wheel)


def _from_frame(reader: WheelReader, seq: int) -> Block | UnreadableFrame:
    if not reader.has(seq):
        return UnreadableFrame(seq, 0)
    frame = reader.frame(seq)
    if isinstance(frame, Frame):
        columns = frame.columns if frame.kind is Kind.MESSAGES else None
        return block_of_frame(seq, frame.accepted_at_ms, columns)
    if frame.cancels:
        return block_of_frame(seq, 0, None)
    return UnreadableFrame(seq, frame.messages)


class RowGroups:
    """Collects blocks into row groups: only the current one is in memory."""

    def __init__(self, wheel: WheelId) -> None:
        self._wheel = wheel
        self._blocks: list[Block] = []
        self._rows = 0

    def add(self, block: Block) -> Iterator[pa.Table]:
        """Adds a block; yields the groups that are full."""
        self._blocks.append(block)
        self._rows += len(block)
        if self._rows >= _ROW_GROUP:
            yield from self.rest()

    def rest(self) -> Iterator[pa.Table]:
        """Yields the last, incomplete group."""
        if self._rows:
            yield _table(self._wheel, self._blocks)
        self._blocks, self._rows = [], 0


def _table(wheel: WheelId, blocks: Sequence[Block]) -> pa.Table:
    topics: dict[str, int] = {}
    numbers: list[NDArray[Any]] = []
    for block in blocks:
        renumbered = [topics.setdefault(topic, len(topics)) for topic in block.topics]
        numbers.append(np.array(renumbered, dtype=np.int32)[block.topic_numbers])
    ids = np.concatenate([block.ids for block in blocks])
    counts = [len(block) for block in blocks]
    columns = {
        "id": pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(16), len(ids), [None, pa.py_buffer(ids.tobytes())]
        ),
        "due_ms": np.concatenate([block.due_ms for block in blocks]),
        "accepted_at_ms": np.repeat([block.accepted_at_ms for block in blocks], counts),
        "topic": pa.DictionaryArray.from_arrays(np.concatenate(numbers), list(topics)),
        "wheel": pa.DictionaryArray.from_arrays(np.zeros(len(ids), np.int32), [str(wheel)]),
        "seq": np.concatenate([block.seqs() for block in blocks]),
    }
    return pa.table(columns, schema=SCHEMA)
