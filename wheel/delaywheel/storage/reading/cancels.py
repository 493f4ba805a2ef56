"""Looks for cancels of some messages of one second, piece by piece.

A second may hold any number of cancels, and a caller that waits for one looks repeatedly. So a look
continues where it stopped: each call reads a bounded amount, and later ones only what was added.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.frames.columns import ID_LENGTH_BYTES, Columns
from delaywheel.storage.frames.format import Frame
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.frames.rows import INDEX_ROW, kinds_of
from delaywheel.storage.reading.reader import DamagedFrame, WheelReader

BEGIN_BYTES: Final = 8
"""The ids that are sought are identified by this many leading bytes."""
FINDING_FRAMES: Final = 16
"""Finding a second in a wheel costs about as much as reading this many of its frames."""
_NEW_ROWS_AT_MOST: Final = 1 << 14
"""The index rows of up to this many new frames are examined; beyond, the second is found again."""

_NOWHERE: Final[Mapping[WheelId, int]] = {}
_NO_ROWS: Final = np.empty(0, INDEX_ROW)


class CancelRow(NamedTuple):
    """One row of a frame with cancels."""

    wheel: WheelId
    seq: int
    row: int
    id: bytes
    due_ms: int
    topic: str


@dataclass(slots=True)
class Budget:
    """How much may still be read; the frame that exhausts it is read completely.

    Looks that share it, each of another second, read the same rows of an index once.
    """

    frames: int
    length_bytes: int
    _rows: dict[WheelId, tuple[int, int, NDArray[Any]]] = field(default_factory=dict)

    def is_spent(self) -> bool:
        """Whether the budget is used up."""
        return self.frames <= 0 or self.length_bytes <= 0

    def spend(self, frames: int, length_bytes: int) -> None:
        """Counts what was read."""
        self.frames -= frames
        self.length_bytes -= length_bytes

    def rows(self, reader: WheelReader, from_seq: int, up_to_seq: int) -> NDArray[Any]:
        """Returns the index rows of new frames."""
        first, last, rows = self._rows.get(reader.wheel, (up_to_seq + 1, up_to_seq, _NO_ROWS))
        if from_seq < first or up_to_seq != last:
            first, rows = from_seq, reader.rows(from_seq, up_to_seq)
            self._rows[reader.wheel] = first, up_to_seq, rows
        return rows[from_seq - first :]


def begins_of(ids: Iterable[bytes]) -> NDArray[np.uint64]:
    """Returns the first `BEGIN_BYTES` of each of these ids, without duplicates."""
    return np.frombuffer(b"".join(sorted({id_[:BEGIN_BYTES] for id_ in ids})), dtype=np.uint64)


def rows_that_begin(columns: Columns, begins: NDArray[np.uint64]) -> list[int]:
    """Returns the rows whose ids have one of these beginnings."""
    ids = np.ascontiguousarray(columns.ids).reshape(-1, ID_LENGTH_BYTES)
    rows: list[int] = np.flatnonzero(np.isin(ids.view(np.uint64)[:, 0], begins)).tolist()
    return rows


class CancelLook:
    """Finds the rows, among one second's cancels, whose ids have one of some beginnings."""

    def __init__(
        self, slot: int, begins: Iterable[bytes], looked: Mapping[WheelId, int] = _NOWHERE
    ) -> None:
        """Begins where another look has ended, by the first `BEGIN_BYTES` of each id.

        `looked` says up to which seq of each wheel there is no such cancel.
        """
        self.slot = slot
        self.rows: set[CancelRow] = set()
        self._begins = begins_of(begins)
        self._read: dict[WheelId, int] = dict(looked)

    def go_on(
        self,
        readers: Mapping[WheelId, WheelReader],
        limits: Mapping[WheelId, int],
        budget: Budget,
        *,
        lost: Callable[[WheelId], SeqSet] = lambda _: NO_SEQS,
    ) -> bool:
        """Continues reading each wheel up to its limit, within the budget, which is reduced.

        Returns whether everything was read that may hold such a row, but for the frames that no
        node can read any more; False if something is unreadable.
        """
        is_whole = True
        for wheel in sorted(limits):
            reader, up_to_seq, given_up = readers[wheel], limits[wheel], lost(wheel)
            if reader.may_have_holes(up_to_seq, given_up):
                for seq in reader.holes(up_to_seq, given_up):
                    is_whole, up_to_seq = False, min(up_to_seq, seq - 1)
            if self._read.get(wheel, 0) < up_to_seq:
                is_whole &= self._read_on(reader, up_to_seq, budget, given_up)
        return is_whole

    def _read_on(
        self,
        reader: WheelReader,
        up_to_seq: int,
        budget: Budget,
        lost: SeqSet,
    ) -> bool:
        """Continues with one wheel; returns whether it was read up to this seq."""
        wheel, before = reader.wheel, self._read.get(reader.wheel, 0)
        if budget.is_spent():
            return False
        for frame in self._frames(reader, before + 1, up_to_seq, budget, lost):
            if isinstance(frame, DamagedFrame):
                if frame.seq in lost:
                    continue
                # What cannot be placed comes last: frames after it are read again once it can be.
                self._read[wheel] = min(self._read.get(wheel, before), frame.seq - 1)
                return False
            self._add(frame)
            self._read[wheel] = frame.seq
            budget.spend(1, frame.length_bytes)
            if budget.is_spent() and frame.seq < up_to_seq:
                return False
        self._read[wheel] = up_to_seq
        return True

    def _frames(
        self, reader: WheelReader, from_seq: int, up_to_seq: int, budget: Budget, lost: SeqSet
    ) -> Iterator[Frame | DamagedFrame]:
        """Returns the frames of the second that were not read yet, in order."""
        if from_seq > 1 and up_to_seq - from_seq < _NEW_ROWS_AT_MOST:
            rows = budget.rows(reader, from_seq, up_to_seq)
            if rows["length"].all():  # a frame that has lost its row may lie in the second's file
                at = np.flatnonzero((rows["slot"] == self.slot) & (kinds_of(rows) == Kind.CANCELS))
                return reader.frames(self.slot, (from_seq + at, rows[at]))
        budget.spend(FINDING_FRAMES, 0)
        return reader.slot_frames(
            self.slot, up_to_seq, kind=Kind.CANCELS, from_seq=from_seq, lost=lost
        )

    def _add(self, frame: Frame) -> None:
        columns = frame.columns
        ids, dues_ms = columns.ids, columns.due_ms
        self.rows.update(
            CancelRow(
                frame.wheel,
                frame.seq,
                row,
                ids[row].tobytes(),
                int(dues_ms[row]),
                columns.topic(row),
            )
            for row in rows_that_begin(columns, self._begins)
        )
