"""Finds messages in the slot files: those of one slot, or some by their ids and dues.

There is no index of ids: a slot's id column is compared as a whole. Every wheel is searched, since
a retry may have gone to another wheel than the first attempt. Used by one thread.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from delaywheel.identity import WheelId
from delaywheel.storage.files.index import OpenIndexes
from delaywheel.storage.folder.disk import Disk
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.format import Frame, Kind
from delaywheel.storage.reading.cancels import (
    BEGIN_BYTES,
    Budget,
    CancelLook,
    begins_of,
    rows_that_begin,
)
from delaywheel.storage.reading.reader import WheelReader
from delaywheel_replica.core.protocol.frames import NO_FRAMES, FrameSet
from delaywheel_replica.core.protocol.progress import Position
from delaywheel_replica.core.protocol.reschedules import (
    MessageKey,
    Reschedule,
    known_due_ms,
    mark_begin,
    marked_due_ms,
)
from delaywheel_replica.server.lookup.references import Reference

_LOOK_FRAMES: Final = 1 << 12
_LOOK_BYTES: Final = 16 << 20
"""How much is read at once for a caller that waits for cancels of one message."""
_NONE: Final[Mapping[MessageKey, Reschedule]] = {}


@dataclass(slots=True)
class Found:
    """Where a message and its cancels lie.

    Attributes:
        dues_ms: The dues of all messages that may be meant, ascending: one, unless nothing was
            found, or a handle fits several messages. If there are several, nothing else is set.
        copies: In the order of positions; more than one after a retry.
        in_wheel: The wheel that the handle names has a copy, or no wheel is named.
        readable: Every frame of the slot could be read, of every wheel, and no frame is left that
            may be of this slot.
        complete: The same, and the node holds everything acknowledged.
        rescheduled_to_ms: The message has this due by now, according to its mark.
        look: Continues the search for its cancels; None: it was not requested.
    """

    dues_ms: tuple[int, ...] = ()
    copies: list[Position] = field(default_factory=list)
    cancels: list[Position] = field(default_factory=list)
    in_wheel: bool = True
    readable: bool = True
    complete: bool = True
    rescheduled_to_ms: int | None = None
    look: CancelLook | None = None


@dataclass(slots=True)
class _Rows:
    """The rows of one id within a second: where each lies, and its due."""

    copies: list[tuple[Position, int]] = field(default_factory=list)
    cancels: list[tuple[Position, int]] = field(default_factory=list)

    @property
    def dues_ms(self) -> set[int]:
        """The dues of its messages."""
        return {due_ms for _, due_ms in self.copies}

    def of(self, kind: Kind) -> list[tuple[Position, int]]:
        """Its rows in frames of this kind."""
        return self.copies if kind is Kind.MESSAGES else self.cancels

    def fill(
        self,
        found: Found,
        reference: Reference,
        marked: Mapping[int, int],
        reschedules: Mapping[int, Reschedule],
    ) -> None:
        """Fills in which message a reference means, and where it lies."""
        all_dues_ms = self.dues_ms
        if reference.due_ms is not None:
            all_dues_ms &= {reference.due_ms}
        dues_ms = all_dues_ms
        if reference.wheel is not None:
            there = {due for place, due in self.copies if place.wheel == reference.wheel}
            there &= all_dues_ms
            found.in_wheel = bool(there)
            dues_ms = _by_now(there or all_dues_ms, all_dues_ms, marked, reschedules)
        found.dues_ms = tuple(sorted(dues_ms))
        if len(dues_ms) == 1:
            (due_ms,) = dues_ms
            found.copies = [place for place, its_due_ms in self.copies if its_due_ms == due_ms]
            found.cancels = [place for place, its_due_ms in self.cancels if its_due_ms == due_ms]
            found.rescheduled_to_ms = marked.get(due_ms)


class Scanner:
    """Reads slots of all wheels of this node. For one thread."""

    def __init__(
        self,
        disk: Disk,
        data: Path,
        *,
        on_damaged: Callable[[WheelId, int, int], None] | None = None,
    ) -> None:
        """Begins with nothing open.

        Args:
            disk: Where the data folder lies.
            data: The data folder.
            on_damaged: Called with each frame that could not be read: its wheel, seq and slot.
                Below the floor that is normal.
        """
        self._disk = disk
        self._data = data
        self._on_damaged = on_damaged
        self._open_indexes = OpenIndexes()
        self._readers: dict[WheelId, WheelReader] = {}

    def find_many(
        self,
        references: Sequence[Reference],
        limits: Mapping[WheelId, int],
        *,
        lost: FrameSet = NO_FRAMES,
        reschedules: Mapping[MessageKey, Reschedule] = _NONE,
    ) -> list[Found]:
        """Finds messages; each second is read once for all of them.

        If a reference names no due, any due within its second fits; if the message was rescheduled
        within that second, the due that it has by now. If the id was sent with several dues of one
        second, the wheel of the reference decides. That wheel need not have the message any more:
        another attempt may lie elsewhere.

        Args:
            references: Which messages.
            limits: The wheels to search, each up to a seq.
            lost: Frames that no node can read any more. Those whose second is unknown are not
                assumed to be of the second that is read.
            reschedules: Decisions that may not be in frames yet.

        Returns:
            What was found of each, in the same order.
        """
        results = [Found() for _ in references]
        by_slot: dict[int, list[tuple[Reference, Found]]] = {}
        for reference, found in zip(references, results, strict=True):
            by_slot.setdefault(reference.slot, []).append((reference, found))
        for slot, wanted in by_slot.items():
            self._find_in(slot, wanted, limits, lost, reschedules)
        return results

    def _find_in(
        self,
        slot: int,
        wanted: list[tuple[Reference, Found]],
        limits: Mapping[WheelId, int],
        lost: FrameSet,
        reschedules: Mapping[MessageKey, Reschedule],
    ) -> None:
        """Fills in what is found of messages of one second."""
        rows: dict[bytes, _Rows] = {reference.id: _Rows() for reference, _ in wanted}
        begins, second = begins_of(rows), Found()
        # No frame is kept: they may be 4 GiB.
        for frame in self.frames(slot, limits, found=second, lost=lost):
            ids, dues_ms = frame.columns.ids, frame.columns.due_ms
            for row in rows_that_begin(frame.columns, begins):
                of_id = rows.get(ids[row].tobytes())
                if of_id is not None:
                    place = Position(frame.wheel, frame.seq, row)
                    of_id.of(frame.kind).append((place, int(dues_ms[row])))
        marked = self._marked(slot, rows, limits, lost)
        decided: dict[bytes, dict[int, Reschedule]] = {}
        for (id_, due_ms), stands in reschedules.items():
            if id_ in rows:
                decided.setdefault(id_, {})[due_ms] = stands
        for reference, found in wanted:
            id_ = reference.id
            rows[id_].fill(found, reference, marked.get(id_, {}), decided.get(id_, {}))
            found.readable, found.complete = second.readable, second.complete

    def _marked(
        self,
        slot: int,
        rows: Mapping[bytes, "_Rows"],
        limits: Mapping[WheelId, int],
        lost: FrameSet,
    ) -> dict[bytes, dict[int, int]]:
        """Returns where messages of one second went to, as their marks say: due by id and due."""
        keys = [
            (id_, due_ms)
            for id_, of_id in rows.items()
            if (dues_ms := of_id.dues_ms) and (of_id.cancels or len(dues_ms) > 1)
            for due_ms in dues_ms
        ]
        if not keys:
            return {}
        look = CancelLook(slot, map(mark_begin, keys))
        self.look(look, limits, Budget(sys.maxsize, sys.maxsize), lost=lost)
        ids: dict[int, list[bytes]] = {}
        for row in look.rows:
            ids.setdefault(row.due_ms, []).append(row.id)
        marked: dict[bytes, dict[int, int]] = {}
        for id_, due_ms in keys:
            to_ms = marked_due_ms((id_, due_ms), ids.get(due_ms, ()))
            if to_ms is not None:
                marked.setdefault(id_, {})[due_ms] = to_ms
        return marked

    def look_for_cancels(
        self,
        slot: int,
        key: MessageKey,
        limits: Mapping[WheelId, int],
        found: Found,
        *,
        lost: FrameSet = NO_FRAMES,
    ) -> None:
        """Looks for new cancels of a found message, and for the mark of a reschedule.

        Args:
            slot: Its second.
            key: Its id and due.
            limits: The wheels to search, each up to a seq.
            found: Receives the result.
            lost: As in `find`.
        """
        id_, due_ms = key
        if found.look is None:
            found.look = CancelLook(slot, [id_[:BEGIN_BYTES], mark_begin(key)])
        self.look(found.look, limits, Budget(_LOOK_FRAMES, _LOOK_BYTES), lost=lost)
        cancels = {
            Position(row.wheel, row.seq, row.row)
            for row in found.look.rows
            if (row.id, row.due_ms) == key
        }
        found.cancels = sorted({*found.cancels, *cancels}, key=_order)
        marked_ms = marked_due_ms(key, _ids_of(found.look, due_ms))
        if marked_ms is not None:
            found.rescheduled_to_ms = marked_ms

    def look(
        self,
        look: CancelLook,
        limits: Mapping[WheelId, int],
        budget: Budget,
        *,
        lost: FrameSet = NO_FRAMES,
    ) -> bool:
        """Continues a search for cancels; returns whether everything up to the limits was read."""
        self._forget(limits)
        return look.go_on(
            {wheel: self._reader(wheel) for wheel in limits},
            limits,
            budget,
            lost=lost.seqs,
            on_damaged=lambda wheel, seq: self._lacks(wheel, seq, look.slot, None),
        )

    def frame(self, slot: int, place: Position) -> Frame | None:
        """Returns a message's frame; None if it is unreadable, gone, or not mirrored here yet.

        It is searched for in its second, as it was found: its index row may be lost.
        """
        seq, reader = place.seq, self._reader(place.wheel)
        for frame in reader.slot_frames(slot, seq, kind=Kind.MESSAGES, from_seq=seq):
            if isinstance(frame, Frame):
                return frame
            self._lacks(place.wheel, frame.seq, slot, None)
        return None

    def message(self, slot: int, place: Position) -> Columns | None:
        """Returns one message without the rest of its frame; None as for `frame`."""
        frame = self.frame(slot, place)
        return None if frame is None else frame.columns.take(np.array([place.row])).compacted()

    def frames(
        self,
        slot: int,
        limits: Mapping[WheelId, int],
        *,
        kind: Kind | None = None,
        after: Position | None = None,
        found: Found | None = None,
        lost: FrameSet = NO_FRAMES,
    ) -> Iterator[Frame]:
        """Yields the readable frames of a slot, in the order of positions.

        Args:
            slot: The second.
            limits: The wheels to read, each up to a seq.
            kind: Only frames with messages or only those with cancels; None: both.
            after: The first frame is the one that contains this position.
            found: Called if one could not be read, or if it is unknown where one belongs.
            lost: As in `find`.
        """
        self._forget(limits)
        for wheel in sorted(limits):
            from_seq = 1
            if after is not None and wheel <= after.wheel:
                if wheel < after.wheel:
                    continue
                from_seq = after.seq
            reader, given_up = self._reader(wheel), lost.seqs(wheel)
            for frame in reader.slot_frames(
                slot, limits[wheel], kind=kind, from_seq=from_seq, lost=given_up
            ):
                if isinstance(frame, Frame):
                    yield frame
                else:
                    self._lacks(wheel, frame.seq, slot, found)
            if found is not None:
                for seq in reader.holes(limits[wheel], given_up):
                    self._lacks(wheel, seq, slot, found)

    def _lacks(self, wheel: WheelId, seq: int, slot: int, found: Found | None) -> None:
        if found is not None:
            found.readable = found.complete = False
        if self._on_damaged is not None:
            self._on_damaged(wheel, seq, slot)

    def _reader(self, wheel: WheelId) -> WheelReader:
        reader = self._readers.get(wheel)
        if reader is None:
            reader = WheelReader(self._disk, self._data, wheel, opened=self._open_indexes)
            self._readers[wheel] = reader
        return reader

    def _forget(self, wheels: Iterable[WheelId]) -> None:
        for wheel in self._readers.keys() - set(wheels):
            self._readers.pop(wheel).close()


def _by_now(
    named: Collection[int],
    dues_ms: Collection[int],
    marked: Mapping[int, int],
    reschedules: Mapping[int, Reschedule],
) -> set[int]:
    """Returns the present dues of messages that were rescheduled within their second.

    A handle names a second. If a message was rescheduled within that second, its old and its new
    handle are equal; the present message is meant, not the former one.

    Args:
        named: The dues that a handle matches.
        dues_ms: The dues of everything found.
        marked: The dues that messages were rescheduled to, according to their marks.
        reschedules: The dues that they were rescheduled to, according to decisions.
    """
    went = {due_ms: known_due_ms(reschedules.get(due_ms), marked.get(due_ms)) for due_ms in dues_ms}
    by_now = set(named)
    for _ in went:  # no message went further than there are dues
        by_now = {
            due_ms if (to_ms := went[due_ms]) is None or to_ms not in went else to_ms
            for due_ms in by_now
        }
    # A due that passed before its copy was there is not the due of any message.
    passed = {due_ms for stands in reschedules.values() for due_ms in stands.passed}
    return by_now - passed or by_now


def _ids_of(look: CancelLook, due_ms: int) -> list[bytes]:
    return [row.id for row in look.rows if row.due_ms == due_ms]


def _order(place: Position) -> tuple[WheelId, int, int]:
    return place.wheel, place.seq, place.row


def key_of(columns: Columns, row: int) -> bytes:
    """Returns id and due of a message as one key."""
    return message_key(columns.ids[row].tobytes(), int(columns.due_ms[row]))


def message_key(id_: bytes, due_ms: int) -> bytes:
    """Returns the key for an id and a due."""
    return id_ + due_ms.to_bytes(8, "little")
