"""Examines frames that are to be given up, some of which may be readable after all.

They may be millions in a row, and a transaction waits for this: it examines a bounded number, and
the others are given up in later ones.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.files.index import ROWS_PER_SEGMENT
from delaywheel.storage.folder.disk import Disk
from delaywheel.storage.frames.format import DamageReason
from delaywheel.storage.frames.rows import is_gone, is_hole, is_unreadable
from delaywheel.storage.reading.reader import UNREADABLE_WAIT_MS, DamagedFrame, WheelReader
from delaywheel.storage.reading.unreadable_rows import UnreadableRows
from delaywheel_replica.core.protocol.frames import FrameSet

ROWS_AT_ONCE: Final = 4 * ROWS_PER_SEGMENT
FRAMES_AT_ONCE: Final = 2_048
"""Of those whose rows say where they should be: each of them is read."""


class LostFrames(NamedTuple):
    """A range of frames that no node can read; messages in it that were not done are lost."""

    wheel: WheelId
    seq: int
    last_seq: int
    reason: str
    slot: int = 0
    """Of the first; 0 where it is not known either."""
    last_slot: int = 0
    messages: int = 0
    """The number in all of them, according to the index."""

    @property
    def frames(self) -> int:
        """The number of frames."""
        return self.last_seq - self.seq + 1


@dataclass(frozen=True, slots=True)
class Looked:
    """The result of examining frames.

    Attributes:
        lost: By wheel and seq; those in a row that have a place one by one.
        kept: Frames that can be read, may be whole and are waited for, or were not examined.
    """

    lost: list[LostFrames]
    kept: FrameSet


def look_at(
    disk: Disk,
    data: Path,
    frames: FrameSet,
    now_ms: int,
    unreadable_rows: UnreadableRows,
    *,
    floor: int,
) -> Looked:
    """Examines frames that are to be given up, by the leader's clock.

    Finished ones are not lost: their files are deleted. If their rows could not be read for a
    while, nodes said that they are missing them: `unreadable_rows`, brought up to date here.
    """
    looking = _Looking(disk, data, now_ms, unreadable_rows, floor)
    kept = {wheel: looking.look(wheel, seqs) for wheel, seqs in frames.items()}
    return Looked(sorted(looking.lost), FrameSet.of_wheels(kept))


def joined(lost: Iterable[LostFrames]) -> Iterator[LostFrames]:
    """Merges adjacent frames with the same reason."""
    before: LostFrames | None = None
    for each in lost:
        follows = before and (before.wheel, before.last_seq + 1, before.reason)
        if before is not None and (each.wheel, each.seq, each.reason) == follows:
            before = before._replace(
                last_seq=each.last_seq,
                last_slot=each.last_slot,
                messages=before.messages + each.messages,
            )
            continue
        if before is not None:
            yield before
        before = each
    if before is not None:
        yield before


class _Looking:
    def __init__(
        self, disk: Disk, data: Path, now_ms: int, unreadable_rows: UnreadableRows, floor: int
    ) -> None:
        self._disk = disk
        self._data = data
        self._now_ms = now_ms
        self._floor = floor
        self._unreadable_rows = unreadable_rows
        self._rows_left = ROWS_AT_ONCE
        self._frames_left = FRAMES_AT_ONCE
        self.lost: list[LostFrames] = []

    def look(self, wheel: WheelId, seqs: SeqSet) -> SeqSet:
        reader = WheelReader(self._disk, self._data, wheel)
        try:
            last_seq = reader.last_seq()
            kept = NO_SEQS
            for first, last in seqs.within(1, last_seq).spans:
                end = min(last, first + self._rows_left - 1)
                self._rows_left -= end - first + 1
                kept |= NO_SEQS.with_span(end + 1, last)
                kept |= self._look(reader, first, reader.rows(first, end))
        finally:
            reader.close()
        if seqs:
            self._without_place(wheel, seqs.within(last_seq + 1, seqs.last), DamageReason.GONE)
        return kept

    def _look(self, reader: WheelReader, first_seq: int, rows: NDArray[np.void]) -> SeqSet:
        holes, has_place = is_hole(rows), rows["length"] > 0
        looked_at = NO_SEQS.with_span(first_seq, first_seq + len(rows) - 1)
        unread = SeqSet.where(first_seq, is_unreadable(rows))
        kept = self._unreadable_rows.waited_for(reader.wheel, looked_at, unread, self._now_ms)
        also_kept, holes_lost = self._search(reader, SeqSet.where(first_seq, holes) - kept)
        kept |= also_kept | SeqSet.where(first_seq, is_gone(rows))
        self._without_place(reader.wheel, holes_lost, DamageReason.HOLE)
        numbers = np.flatnonzero(has_place & (rows["slot"] >= self._floor))
        chosen = numbers[: self._frames_left]
        self._frames_left -= len(chosen)
        slots = rows["slot"][chosen]
        damaged: list[int] = []
        for slot in np.unique(slots).tolist():
            of_slot = chosen[slots == slot]
            for frame in reader.frames(slot, (of_slot + first_seq, rows[of_slot])):
                if isinstance(frame, DamagedFrame) and not frame.is_waited_for(self._now_ms):
                    damaged.append(frame.seq)
                    self._damaged(reader.wheel, frame)
        return kept | (SeqSet.where(first_seq, has_place) - SeqSet.of(damaged))

    def _search(self, reader: WheelReader, holes: SeqSet) -> tuple[SeqSet, SeqSet]:
        """Returns holes to keep, and those to give up.

        Kept are frames in slot files; and all, while a slot file that may hold one cannot be read.
        """
        if not holes:
            return holes, holes
        nowhere, unread_slot = reader.lying_nowhere(holes)
        if self._now_ms < unread_slot * 1000 + UNREADABLE_WAIT_MS:
            return holes, NO_SEQS
        return holes - nowhere, nowhere

    def _without_place(self, wheel: WheelId, seqs: SeqSet, reason: DamageReason) -> None:
        self.lost += [LostFrames(wheel, first, last, reason.name) for first, last in seqs.spans]

    def _damaged(self, wheel: WheelId, frame: DamagedFrame) -> None:
        seq, slot = frame.seq, frame.slot
        self.lost.append(LostFrames(wheel, seq, seq, frame.reason.name, slot, slot, frame.messages))
