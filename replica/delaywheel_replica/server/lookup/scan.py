"""Finds messages in the slot files: those of one slot, or some by topic, id and due.

Ids are found by an index of the seconds that are asked about (storage/reading/id_index.py). Every
wheel of `limits` is searched, up to the seq there, since a retry may have gone to another wheel
than the first attempt. Used by one thread.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.files.index import OpenIndexes
from delaywheel.storage.folder.disk import Disk
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.format import Frame
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.reading.decoding import FrameBatch, PassedOver
from delaywheel.storage.reading.id_index import IdIndex, Look
from delaywheel.storage.reading.ids import SoughtIds
from delaywheel.storage.reading.passing_over import PassedSecond
from delaywheel.storage.reading.reader import DamagedFrame, WheelReader
from delaywheel_replica.core.protocol.frames import NO_FRAMES, FrameSet
from delaywheel_replica.core.protocol.progress import Position
from delaywheel_replica.core.protocol.reschedules import (
    MARK_HASH_BYTES,
    MessageKey,
    Reschedule,
    known_due_ms,
    mark_begin,
    marked_due,
)
from delaywheel_replica.server.lookup.references import Reference

_REPORTED_AT_MOST: Final = 1 << 10
"""So many frames of a wheel that may be of any second are reported at once."""
_NONE: Final[Mapping[MessageKey, Reschedule]] = {}
_NOWHERE: Final[Mapping[WheelId, int]] = {}


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
        rescheduled_to: The message has this due by now, according to its mark.
        looked: Up to which seq of each wheel there are no other cancels; empty if unknown.
        commits: Where they lie; only a half has any, and `releases`.
    """

    dues_ms: tuple[int, ...] = ()
    copies: list[Position] = field(default_factory=list)
    cancels: list[Position] = field(default_factory=list)
    in_wheel: bool = True
    readable: bool = True
    complete: bool = True
    rescheduled_to: int | None = None
    looked: Mapping[WheelId, int] = field(default_factory=dict)
    commits: list[Position] = field(default_factory=list)
    releases: list[Position] = field(default_factory=list)

    @property
    def is_committed(self) -> bool:
        """Whether it is a half that was committed."""
        return bool(self.commits or self.releases)


class _NameInSecond(NamedTuple):
    """What rows are looked for by."""

    slot: int
    id: bytes
    topic: str


@dataclass(slots=True)
class _RowsOfId:
    """The rows of one topic and id within a second, by kind: where each lies, and its due."""

    by_kind: dict[Kind, list[tuple[Position, int]]] = field(default_factory=dict)

    @property
    def copies(self) -> Sequence[tuple[Position, int]]:
        return self.by_kind.get(Kind.MESSAGES, ())

    @property
    def has_several(self) -> bool:
        """Whether there is more than one message, or a cancel: a mark may be among them."""
        return Kind.CANCELS in self.by_kind or len(self.copies) > 1

    @property
    def dues_ms(self) -> set[int]:
        return {due_ms for _, due_ms in self.copies}

    def add(self, kind: Kind, place: Position, due_ms: int) -> None:
        self.by_kind.setdefault(kind, []).append((place, due_ms))

    def fill(
        self,
        found: Found,
        reference: Reference,
        marked: Mapping[int, int],
        reschedules: Mapping[int, Reschedule],
    ) -> None:
        """Fills in which message a reference means, and where it lies."""
        dues_ms = self.dues_ms
        if reference.due_ms is not None:
            dues_ms &= {reference.due_ms}
        if reference.wheel is not None:
            there = {due_ms for place, due_ms in self.copies if place.wheel == reference.wheel}
            there &= dues_ms
            found.in_wheel = bool(there)
            if len(dues_ms) > 1:
                dues_ms = _by_now(there or dues_ms, dues_ms, marked, reschedules)
        found.dues_ms = tuple(sorted(dues_ms))
        if len(dues_ms) == 1:
            (due_ms,) = dues_ms
            found.copies = self._with(Kind.MESSAGES, due_ms)
            if len(self.by_kind) > 1:
                found.cancels = self._with(Kind.CANCELS, due_ms)
                found.commits = self._with(Kind.COMMITS, due_ms)
                found.releases = self._with(Kind.RELEASES, due_ms)
            found.rescheduled_to = marked.get(due_ms)

    def _with(self, kind: Kind, due_ms: int) -> list[Position]:
        return [place for place, its_ms in self.by_kind.get(kind, ()) if its_ms == due_ms]


@dataclass(slots=True)
class _Looked:
    """What was found of some messages.

    Attributes:
        marks: The ids of cancels that may be marks, by their beginning and due.
        unreadable: Seconds of which a frame could not be read, or may be missing.
    """

    rows: dict[_NameInSecond, _RowsOfId] = field(default_factory=dict)
    marks: dict[tuple[bytes, int], list[bytes]] = field(default_factory=dict)
    unreadable: set[int] = field(default_factory=set)

    def perhaps_moved(self) -> set[MessageKey]:
        """The messages that may have a mark: with a cancel, or another of the id beside them."""
        return {
            MessageKey(id_, due_ms, topic)
            for (_, id_, topic), rows in self.rows.items()
            if rows.has_several
            for due_ms in rows.dues_ms
        }

    def marked_due(self, key: MessageKey) -> int | None:
        """Where a message went to, as its mark says."""
        ids = self.marks.get((mark_begin(key), key.due_ms))
        return None if ids is None else marked_due(key, ids)

    def found(
        self, name: _NameInSecond, reference: Reference, decided: Mapping[int, Reschedule]
    ) -> Found:
        """Returns what was found of a message; `decided` has its reschedules by due."""
        found, rows = Found(), self.rows[name]
        marked = {}
        if self.marks and rows.has_several:
            for due_ms in rows.dues_ms:
                if (given := self.marked_due(reference.at(due_ms))) is not None:
                    marked[due_ms] = given
        rows.fill(found, reference, marked, decided)
        found.readable = found.complete = reference.slot not in self.unreadable
        return found


class ComparedCopy(NamedTuple):
    """A copy of a message: its second and where it lies; and columns and row to compare with."""

    slot: int
    place: Position
    columns: Columns
    row: int


class Scanner:
    """Reads slots of all wheels of this node. For one thread."""

    def __init__(
        self,
        disk: Disk,
        data: Path,
        *,
        on_damaged: Callable[[WheelId, int, int], None] | None = None,
    ) -> None:
        """Begins with nothing open; below the floor it is normal that `on_damaged` is called."""
        self._disk = disk
        self._data = data
        self._on_damaged = on_damaged
        self._open_indexes = OpenIndexes()
        self._readers: dict[WheelId, WheelReader] = {}
        self.ids = IdIndex(self._reader)

    def find_many(
        self,
        references: Sequence[Reference],
        limits: Mapping[WheelId, int],
        *,
        lost: FrameSet = NO_FRAMES,
        reschedules: Mapping[MessageKey, Reschedule] = _NONE,
    ) -> list[Found]:
        """Finds messages; what is new in their seconds is read once for all of them.

        If a reference names no due, any due within its second fits; if the message was rescheduled
        within that second, the due that it has by now. If the id was sent with several dues of one
        second, the wheel of the reference decides; another attempt of the message may lie
        elsewhere. Lost frames whose second is unknown are taken to be of another one.
        """
        self._follow(limits, lost)
        looked = _Looked()
        names = [_NameInSecond(each.slot, each.id, each.topic) for each in references]
        self._look(looked, names, ())
        self._look(looked, (), looked.perhaps_moved())
        decided: dict[tuple[bytes, str], dict[int, Reschedule]] = {}
        for key, record in reschedules.items():
            decided.setdefault((key.id, key.topic), {})[key.due_ms] = record
        all_found = [
            looked.found(name, each, decided.get((each.id, each.topic), {}))
            for name, each in zip(names, references, strict=True)
        ]
        for found in all_found:
            found.looked = limits if found.readable else _NOWHERE
        return all_found

    def _look(
        self,
        looked: "_Looked",
        asked_for: Iterable[_NameInSecond],
        keys: Collection[MessageKey],
    ) -> None:
        """Adds rows of some topics and ids, and marks of some messages."""
        rows = {each: _RowsOfId() for each in asked_for}
        begins = {mark_begin(key) for key in keys}
        slots = {each.slot for each in rows} | {key.due_ms // 1000 for key in keys}
        if not slots:
            return
        sought = SoughtIds.of((each.id for each in rows), [each.topic for each in rows], begins)
        look = self._look_and_report(slots, sought)
        asked = [(each.slot, of_id) for each, of_id in rows.items()]
        for number, wheel, seq, row, kind, due_ms in look.rows.each():
            slot, of_id = asked[number]
            if due_ms // 1000 == slot:
                of_id.add(kind, Position(wheel, seq, row), due_ms)
        for begun in look.begun:
            if begun.kind is Kind.CANCELS:
                at = begun.id[:MARK_HASH_BYTES], begun.due_ms
                looked.marks.setdefault(at, []).append(begun.id)
        for of_id in rows.values():
            for places in of_id.by_kind.values():
                places.sort()
        looked.rows.update(rows)
        looked.unreadable |= look.damaged.keys()
        if look.missing:
            looked.unreadable |= slots

    def are_absent(
        self, references: Sequence[Reference], limits: Mapping[WheelId, int], lost: FrameSet
    ) -> NDArray[np.bool_]:
        """Which messages have no row, in seconds of which every frame could be read."""
        self._follow(limits, lost)
        ids, topics = [each.id for each in references], [each.topic for each in references]
        slots = np.array([each.slot for each in references], np.int64)
        look = self._look_and_report(set(slots.tolist()), SoughtIds.of(ids, topics))
        is_there = look.rows.due_ms // 1000 == slots[look.rows.numbers]
        are_absent = ~(np.isin(slots, [*look.damaged]) | bool(look.missing))
        are_absent[look.rows.numbers[is_there]] = False
        return are_absent

    def _look_and_report(self, slots: Collection[int], sought: SoughtIds) -> Look:
        """Looks, and reports frames that could not be read, or that may be of any second."""
        look = self.ids.look(slots, sought)
        for slot, frames in look.damaged.items():
            for wheel, seq in sorted(frames):
                self._note_damaged(wheel, seq, slot, None)
        for wheel, seqs in look.missing.items():
            for seq in seqs.least(_REPORTED_AT_MOST):
                self._note_damaged(wheel, seq, max(slots), None)
        return look

    def _follow(self, limits: Mapping[WheelId, int], lost: FrameSet) -> None:
        self.forget_all_but(limits)
        self.ids.follow(limits, lost.seqs)

    def frame(self, slot: int, place: Position) -> Frame | None:
        """Returns a message's frame; None if it is unreadable, gone, or not mirrored here yet.

        If it does not lie where its index row says, it is searched for in its second, as it was
        found: its row may be lost.
        """
        seq, reader = place.seq, self._reader(place.wheel)
        if not reader.has(seq):
            return None
        frame = reader.frame(seq)
        if isinstance(frame, Frame) and frame.slot == slot:
            return frame
        for other in reader.slot_frames(slot, seq, kind=Kind.MESSAGES, from_seq=seq):
            if isinstance(other, Frame):
                return other
            self._note_damaged(place.wheel, other.seq, slot, None)
        return None

    def messages(
        self, places: Iterable[tuple[int, Position]], length_bytes: int
    ) -> list[Columns | None]:
        """Returns messages without the rest of their frames; None as for `frame`.

        Places of one frame in a row cost one read. No more are returned than have this length
        together, but at least one.
        """
        read: list[Columns | None] = []
        for place, frame in self._frames_at(places):
            columns = None
            if frame is not None:
                columns = frame.columns.take(np.array([place.row])).compacted()
                length_bytes -= int(columns.lengths_bytes.sum())
                if read and length_bytes < 0:
                    break
            read.append(columns)
        return read

    def are_same(self, copies: Sequence[ComparedCopy]) -> list[bool | None]:
        """Whether copies have the contents of messages; None: the copy cannot be read, as `frame`.

        Copies of one frame in a row cost one read.
        """
        frames = self._frames_at((copy.slot, copy.place) for copy in copies)
        return [
            None if frame is None else copy.columns.is_same(copy.row, frame.columns, place.row)
            for copy, (place, frame) in zip(copies, frames, strict=True)
        ]

    def _frames_at(
        self, places: Iterable[tuple[int, Position]]
    ) -> Iterator[tuple[Position, Frame | None]]:
        last, frame = None, None
        for slot, place in places:
            if (slot, place.wheel, place.seq) != last:
                last, frame = (slot, place.wheel, place.seq), self.frame(slot, place)
            yield place, frame

    def frames(
        self,
        slot: int,
        limits: Mapping[WheelId, int],
        *,
        kind: Kind,
        after: Position | None = None,
        found: Found | None = None,
        lost: FrameSet = NO_FRAMES,
    ) -> Iterator[Frame]:
        """Yields the readable frames of a slot, in the order of positions.

        Args:
            kind: Only frames with messages, or only those with cancels.
            after: The first frame is the one that contains this position.
            found: Called if one could not be read, or if it is unknown where one belongs.
        """
        for reader, up_to_seq, from_seq in self._to_read(limits, after):
            wheel, given_up = reader.wheel, lost.seqs(reader.wheel)
            reader.holes_anywhere(up_to_seq, given_up)  # notes those that were filled
            for frame in reader.slot_frames(
                slot, up_to_seq, kind=kind, from_seq=from_seq, lost=given_up
            ):
                if isinstance(frame, Frame):
                    yield frame
                else:
                    self._note_damaged(wheel, frame.seq, slot, found)
            self._check_holes(reader, up_to_seq, slot, found, given_up)

    def sieved(
        self,
        slot: int,
        limits: Mapping[WheelId, int],
        may_hold: Callable[[bytes], bool],
        *,
        after: Position | None,
        found: Found,
        lost: FrameSet,
    ) -> Iterator[FrameBatch | PassedOver]:
        """Yields a slot's messages as `frames` does, as far as they may be wanted.

        `may_hold` says whether what is sought may be among the bytes of some frames. Frames that
        may be of any second are not reported: see `note_missing`.
        """
        for reader, up_to_seq, from_seq in self._to_read(limits, after):
            wheel, given_up = reader.wheel, lost.seqs(reader.wheel)
            for batch in reader.sieved_batches(
                slot, up_to_seq, may_hold, from_seq=from_seq, lost=given_up
            ):
                if isinstance(batch, DamagedFrame):
                    self._note_damaged(wheel, batch.seq, slot, found)
                else:
                    yield batch

    def passing_over(
        self,
        slots: NDArray[np.int64],
        limits: Mapping[WheelId, int],
        may_hold: Callable[[bytes], bool],
    ) -> Iterator[PassedSecond | None]:
        """Yields for each slot what it holds if nothing sought can be in it; None: read it."""
        readers = [
            reader.passing_over(slots, up_to_seq, may_hold)
            for reader, up_to_seq, _ in self._to_read(limits, None)
        ]
        for _, *each in zip(slots, *readers, strict=True):
            passed = [of_wheel for of_wheel in each if of_wheel is not None]
            messages = sum(of_wheel.messages for of_wheel in passed)
            length_bytes = sum(of_wheel.length_bytes for of_wheel in passed)
            yield PassedSecond(messages, length_bytes) if len(passed) == len(each) else None

    def note_missing(
        self, limits: Mapping[WheelId, int], slot: int, found: Found, lost: FrameSet
    ) -> None:
        """Reports frames that may be of any second from `slot` on; once for many seconds."""
        for reader, up_to_seq, _ in self._to_read(limits, None):
            self._check_holes(reader, up_to_seq, slot, found, lost.seqs(reader.wheel))

    def slots_beyond(
        self, seqs: Mapping[WheelId, int], limits: Mapping[WheelId, int]
    ) -> NDArray[np.int64]:
        """Returns the seconds of frames that came after these seqs, up to the limits, ascending.

        A wheel that is in one of the two alone adds none.
        """
        found = [np.empty(0, np.int64)]
        for wheel in sorted(seqs.keys() & limits.keys()):
            beyond = NO_SEQS.with_span(seqs[wheel] + 1, limits[wheel])
            for _, rows in self._reader(wheel).rows_of(beyond):
                found.append(np.unique(rows["slot"][rows["length"] > 0]).astype(np.int64))
        return np.unique(np.concatenate(found))

    def _to_read(
        self, limits: Mapping[WheelId, int], after: Position | None
    ) -> Iterator[tuple[WheelReader, int, int]]:
        """Yields the readers of wheels that may have frames after a position: up to, and from."""
        self.forget_all_but(limits)
        for wheel in sorted(limits):
            if after is not None and wheel < after.wheel:
                continue
            from_seq = after.seq if after is not None and wheel == after.wheel else 1
            yield self._reader(wheel), limits[wheel], from_seq

    def _check_holes(
        self, reader: WheelReader, up_to_seq: int, slot: int, found: Found | None, lost: SeqSet
    ) -> None:
        if found is not None:
            for seq in reader.holes_when_read(up_to_seq, lost).least(_REPORTED_AT_MOST):
                self._note_damaged(reader.wheel, seq, slot, found)

    def _note_damaged(self, wheel: WheelId, seq: int, slot: int, found: Found | None) -> None:
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

    def forget_all_but(self, wheels: Iterable[WheelId]) -> None:
        """Closes the files of all other wheels."""
        for wheel in self._readers.keys() - set(wheels):
            self._readers.pop(wheel).close()


def _by_now(
    named: Collection[int],
    dues_ms: Collection[int],
    marked: Mapping[int, int],
    reschedules: Mapping[int, Reschedule],
) -> set[int]:
    """Returns the present dues of messages that were rescheduled within their second.

    A handle names a second, so the old and the new handle of such a message are equal; the present
    message is meant. Marks and decisions say which dues became which.
    """
    went = {due_ms: known_due_ms(reschedules.get(due_ms), marked.get(due_ms)) for due_ms in dues_ms}
    by_now = set(named)
    for _ in went:  # no message went further than there are dues
        by_now = {
            due_ms if (to_ms := went[due_ms]) is None or to_ms not in went else to_ms
            for due_ms in by_now
        }
    # A due that passed before its copy was there is not the due of any message.
    passed = {due_ms for record in reschedules.values() for due_ms in record.passed}
    return by_now - passed or by_now
