"""Reads a wheel that another process may be writing, without locks.

The index is the authority: a frame exists if its row does, and a frame that cannot be read although
it has a row is reported as damaged, never skipped. The frames of a slot are found without scanning
the index (see places.py). A row that is a hole may be of any slot: callers that need all of a slot
ask for `holes` as well.

Everything is read into memory, in pieces, never mapped: an unreadable sector under a map would end
the process. Returned columns keep their piece alive.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import add
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.files.index import ROWS_PER_SEGMENT, IndexReader, OpenIndexes, find_holes
from delaywheel.storage.files.slot_files import list_slots
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Buffer, Disk, is_medium_error
from delaywheel.storage.frames.bundle import FrameBundle
from delaywheel.storage.frames.checking import check_row, damage_of, good_frames
from delaywheel.storage.frames.format import (
    DamageReason,
    Frame,
    FrameDamaged,
    decode_frame,
    decode_header,
)
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.frames.rows import (
    HOLE_ROW,
    INDEX_ROW,
    Places,
    is_gone,
    is_hole,
    is_unreadable,
    kinds_of,
    leading,
    message_counts,
    row_counts,
)
from delaywheel.storage.reading.decoding import (
    FrameBatch,
    IdBatch,
    PassedOver,
    decode_ids,
    decode_together,
)
from delaywheel.storage.reading.passing_over import PassedSecond, passing_over
from delaywheel.storage.reading.places import SlotPlaces, Stated
from delaywheel.storage.reading.unlisted import lying_in_files

# Frames close together are read at once, up to this many and this many bytes; a larger one is read
# alone. Short gaps between them are read too.
_PIECE_BYTES = 1024 * 1024
_PIECE_FRAMES = 1024
_BETWEEN_BYTES = 16 * 1024
_TOGETHER_BYTES = 4 * 1024 * 1024

_HOLE = np.frombuffer(HOLE_ROW, dtype=INDEX_ROW)[0]

UNREADABLE_WAIT_MS: Final = 61_000
"""From the beginning of a frame's second on, an unreadable frame is waited for this long."""

_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True)
class DamagedFrame:
    """A frame that has a row but cannot be read."""

    seq: int
    slot: int  # 0 for a hole: its slot is unknown
    messages: int  # according to its row
    cancels: int
    reason: DamageReason
    detail: str

    def is_waited_for(self, now_ms: int) -> bool:
        """Whether the frame may be intact, and giving it up has time.

        Such a frame is not lost, and nobody may be told that it is absent. A medium that does not
        return it has a minute after the frame's second; a newer release any time.
        """
        if self.reason is DamageReason.UNREADABLE and self.slot:
            return now_ms < self.slot * 1000 + UNREADABLE_WAIT_MS
        return self.reason in {DamageReason.UNREADABLE, DamageReason.VERSION}

    @property
    def is_without_row(self) -> bool:
        """Whether the row was lost, or cannot be read: so nothing is known of the frame."""
        is_unread = self.reason is DamageReason.UNREADABLE and not self.slot
        return is_unread or self.reason is DamageReason.HOLE

    @property
    def is_finished(self) -> bool:
        """Whether the frame is of a finished slot, according to its row."""
        return self.reason is DamageReason.GONE and not self.slot


class WheelReader:
    """A reader of one wheel, for one thread."""

    def __init__(
        self, disk: Disk, data: Path, wheel: WheelId, *, opened: OpenIndexes | None = None
    ) -> None:
        """Opens nothing yet; what all readers of a thread have open is bounded together."""
        self._disk = disk
        self._folder = layout.wheel_folder(data, wheel)
        self._index = IndexReader(disk, self._folder, opened=opened)
        self._places = SlotPlaces(disk, self._folder, wheel, self._index)
        # Holes that were searched in slot files, those of them that were found there, by slot, and
        # the slots whose files could not be read then.
        self._searched = NO_SEQS
        self._lying: dict[int, SeqSet] = {}
        self._unread: list[int] = []
        self.wheel = wheel

    def last_seq(self) -> int:
        """Returns the last existing frame; 0 if there is none."""
        return self._index.last_seq()

    def has(self, seq: int) -> bool:
        """Whether the frame exists, readable or not."""
        return 1 <= seq <= self.last_seq()

    def rows(self, first_seq: int, last_seq: int) -> NDArray[Any]:
        """Returns the index rows (``INDEX_ROW``) from ``first_seq`` to ``last_seq`` or the end.

        Each is that of a frame, a hole, unreadable, or gone (see index.py).
        """
        return self._index.rows(first_seq, min(last_seq, self.last_seq()))

    def rows_of(self, seqs: SeqSet) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yields the first seq and the rows of some seqs' existing spans, a segment at a time."""
        for first, last in seqs.within(1, self.last_seq()).spans:
            begin = first
            while begin <= last:
                end = min(last, -(-begin // ROWS_PER_SEGMENT) * ROWS_PER_SEGMENT)
                yield begin, self._index.rows(begin, end)
                begin = end + 1

    def frame(self, seq: int) -> Frame | DamagedFrame:
        """Reads one frame, found by its row; raises IndexError for a seq that is not there yet."""
        if not self.has(seq):
            raise IndexError(f"wheel {self.wheel} has no frame {seq}")
        rows = self._index.rows(seq, seq)
        if int(rows["length"][0]) == 0:
            return _damaged(seq, rows[0], FrameDamaged(_why_placeless(rows)))
        return next(self.frames(int(rows["slot"][0]), (np.array([seq]), rows)))

    def bundle(
        self,
        first_seq: int,
        last_seq: int,
        *,
        floor: int,
        lost: SeqSet = NO_SEQS,
        max_bytes: int | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> tuple[FrameBundle, DamagedFrame | None]:
        """Reads existing frames for another copy of the wheel, up to the first damaged one.

        Those of slots below ``floor``, and of deleted index segments, come without content.

        Args:
            lost: Frames that come as holes if their rows say of no place.
            max_bytes: The most bytes, unless there is a single frame; None: any number.
            is_over: Called after each slot file that was read; if true, no more are read.

        Returns:
            The frames, each one checked; and the next one, if it is damaged.
        """
        rows = self.rows(first_seq, last_seq)
        placeless = is_hole(rows)
        if placeless.any():
            is_lost = placeless & lost.marks(first_seq, len(rows))
            rows = np.where(is_lost, _HOLE, rows)
            placeless &= ~is_lost
        lengths = np.where(rows["slot"] < floor, 0, rows["length"])
        end = leading(~placeless)
        if max_bytes is not None:
            ends = lengths.cumsum(dtype=np.int64)
            end = min(end, max(1, int(ends.searchsorted(max_bytes, side="right"))))
        contents, damage = self._contents(rows[:end], lengths[:end].tolist(), is_over)
        frames = FrameBundle.of(
            np.arange(first_seq, first_seq + len(contents)),
            rows[: len(contents)],
            b"".join(contents),
            bare=lengths[: len(contents)] == 0,
        )
        good = good_frames(self.wheel, frames).frames
        if good < len(frames):
            damage = damage_of(self.wheel, frames.part(good, good + 1))
        elif placeless[good : good + 1].any():
            damage = FrameDamaged(_why_placeless(rows[good:]))
        damaged = None if damage is None else _damaged(first_seq + good, rows[good], damage)
        return frames.part(0, good), damaged

    def _contents(
        self, rows: NDArray[Any], lengths: list[int], is_over: Callable[[], bool]
    ) -> tuple[list[Buffer], FrameDamaged | None]:
        """Reads leading frames, one slot file after another, but not those of length 0.

        Also returns why the next one could not be read.
        """
        by_slot: dict[int, list[int]] = {}
        for number, slot in enumerate(rows["slot"].tolist()):
            if lengths[number]:
                by_slot.setdefault(slot, []).append(number)
        offsets = rows["offset"].tolist()
        found: list[Buffer | FrameDamaged | None] = [None if length else b"" for length in lengths]
        for slot, numbers in by_slot.items():
            path = layout.slot_path(self._folder, slot)
            places = [offsets[each] for each in numbers], [lengths[each] for each in numbers]
            for first, last in _pieces(*places):
                part = slice(first, last)
                pieces = _piece(self._disk, path, places[0][part], places[1][part])
                for number, piece in zip(numbers[part], pieces, strict=True):
                    found[number] = piece
            if is_over():
                break
        contents: list[Buffer] = []
        for content in found:
            if content is None or isinstance(content, FrameDamaged):
                return contents, content
            contents.append(content)
        return contents, None

    def frames(self, slot: int, places: Places) -> Iterator[Frame | DamagedFrame]:
        """Yields frames of one slot whose rows, without holes, the caller has already read."""
        return read_frames(self._disk, self._folder, self.wheel, slot, places)

    def batches(self, slot: int, places: Places) -> Iterator[FrameBatch | DamagedFrame]:
        """Yields the same, decoded together; each kind separately, in order of seqs."""
        for batch in read_batches(self._disk, self._folder, self.wheel, slot, places):
            assert not isinstance(batch, PassedOver)
            yield batch

    def id_batches(self, places: Places) -> Iterator[IdBatch | None]:
        """Yields what identifies the rows of frames of any seconds, read and decoded together.

        Ends with None if anything is wrong with a frame.
        """
        seqs, rows = places
        order = np.lexsort((rows["offset"], rows["slot"]))
        seqs, rows = seqs[order], rows[order]
        edges = np.flatnonzero(np.diff(rows["slot"], prepend=-1, append=-1)).tolist()
        pieces = [
            (first + begin, first + end)
            for first, last in pairwise(edges)
            for begin, end in _pieces(
                rows["offset"][first:last].tolist(), rows["length"][first:last].tolist()
            )
        ]
        for group in _groups(pieces, rows):
            yield self._ids_of(group, seqs, rows)

    def _ids_of(
        self, pieces: list[tuple[int, int]], seqs: NDArray[np.int64], rows: NDArray[Any]
    ) -> IdBatch | None:
        first, last = pieces[0][0], pieces[-1][1]
        begins, contents, length_bytes = rows["offset"][first:last].astype(np.int64), [], 0
        for piece, end_piece in pieces:
            part = rows[piece:end_piece]
            begin = int(part["offset"][0])
            end = int((part["offset"].astype(np.int64) + part["length"]).max())
            path = layout.slot_path(self._folder, int(part["slot"][0]))
            try:
                content = _content(self._disk, path, begin, end)
            except FrameDamaged:
                return None
            if len(content) != end - begin or (begin | end) & 7:
                return None
            begins[piece - first : end_piece - first] += length_bytes - begin
            contents.append(content)
            length_bytes += len(content)
        places = seqs[first:last], rows[first:last]
        return decode_ids(b"".join(contents), begins, places, self.wheel)

    def may_have_holes(self, up_to_seq: int, lost: SeqSet) -> bool:
        """Whether `holes` must be called; fast unless there are many holes."""
        holes = self._places.holes(up_to_seq)
        return holes is None or bool(holes - lost and self.holes_anywhere(up_to_seq, lost))

    def holes(self, up_to_seq: int, lost: SeqSet) -> SeqSet:
        """Returns frames without rows that lie in no slot file, and so may belong to any second.

        Those that are lost do not count, nor any behind `up_to_seq`.
        """
        return self.lying_nowhere(self.holes_anywhere(up_to_seq, lost))[0]

    def holes_when_read(self, up_to_seq: int, lost: SeqSet) -> SeqSet:
        """Returns `holes`, and what was a hole when the index was last read, and is not now.

        What was read of a second before this call may lack such a frame.
        """
        before = self._places.holes(up_to_seq)
        still = self.holes_anywhere(up_to_seq, lost)
        filled = NO_SEQS if before is None else before - lost - still
        return self.lying_nowhere(still)[0] | filled

    def holes_anywhere(self, up_to_seq: int, lost: SeqSet) -> SeqSet:
        """Returns frames without rows, also those that lie in a slot file; arguments as `holes`."""
        holes = self._places.holes(up_to_seq)
        if holes is None:
            holes = self._places.scanned_holes(up_to_seq)
        holes -= lost
        still = self._index.still_holes(holes)
        if still != holes:
            # Some were filled. What was read of the index before does not have these rows, and in a
            # slot file they may lie behind a gap, where no walk from its beginning arrives.
            self._places.forget()
            self._search_again(holes - still)
        return still

    def lying_nowhere(self, seqs: SeqSet) -> tuple[SeqSet, int]:
        """Returns which of these frames lie intact in no slot file that can be read.

        Also returns the greatest slot whose file cannot be read; -1: there is none.
        """
        new, old = seqs - self._searched, self._without_lying(seqs & self._searched)
        if old and self._unread:
            self._search(old, self._unread)
        if new:
            self._search(new, list_slots(self._disk, self._folder))
            self._searched |= new
        return self._without_lying(seqs), max(self._unread, default=-1)

    def _search(self, seqs: SeqSet, slots: Iterable[int]) -> None:
        found, self._unread = lying_in_files(self._disk, self._folder, self.wheel, seqs, slots)
        for slot, lying in found.items():
            self._lying[slot] = self._lying.get(slot, NO_SEQS) | lying

    def _without_lying(self, seqs: SeqSet) -> SeqSet:
        for lying in self._lying.values():
            seqs -= lying
        return seqs

    def _search_again(self, seqs: SeqSet) -> None:
        """Forgets where frames were found, if they were searched."""
        self._searched -= seqs
        left = {slot: lying - seqs for slot, lying in self._lying.items()}
        self._lying = {slot: lying for slot, lying in left.items() if lying}

    def _quick(self, slot: int, last_seq: int) -> Places | None:
        return None if slot in self._lying else self._places.quick(slot, last_seq)

    def _scanned(self, slot: int, last_seq: int) -> Places:
        places = self._places.scanned(slot, last_seq)
        if lying := self._lying.get(slot):
            self._search_again(lying - SeqSet.of(places[0].tolist()))
        return places

    def slot_frames(
        self,
        slot: int,
        up_to_seq: int,
        *,
        kind: Kind | None = None,
        from_seq: int = 1,
        lost: SeqSet = NO_SEQS,
    ) -> Iterator[Frame | DamagedFrame]:
        """Yields a slot's frames with seqs from `from_seq` to `up_to_seq`, in order.

        Includes frames that the index omits or lists wrongly (see unlisted.py). For frames that
        were not requested only headers are read. If something is wrong, frames that may be of any
        slot come last (see `holes`), but for those that are lost. No kind stands for every kind.
        """
        asked = _FramesAsked(from_seq, up_to_seq, kind)
        return self._of_slot(slot, asked, lost, self.frames, lambda frame: [frame.seq])

    def slot_batches(
        self, slot: int, up_to_seq: int, *, lost: SeqSet = NO_SEQS
    ) -> Iterator[FrameBatch | DamagedFrame]:
        """Yields the same frames, decoded together; each kind separately, in order of seqs."""
        asked = _FramesAsked(1, up_to_seq, None)
        return self._of_slot(slot, asked, lost, self.batches, lambda batch: batch.seqs.tolist())

    def sieved_batches(
        self,
        slot: int,
        up_to_seq: int,
        may_hold: Callable[[bytes], bool],
        *,
        from_seq: int,
        lost: SeqSet,
    ) -> Iterator[FrameBatch | PassedOver | DamagedFrame]:
        """Yields frames with messages, decoded together if their bytes may hold what is sought.

        `may_hold` is given the bytes of many frames at once, with other bytes among them. Holes
        that are lost are ignored.
        """
        asked = _FramesAsked(from_seq, up_to_seq, Kind.MESSAGES)
        read = partial(read_batches, self._disk, self._folder, self.wheel, may_hold=may_hold)
        return self._of_slot(slot, asked, lost, read, _seqs_of)

    def passing_over(
        self, slots: NDArray[np.int64], up_to_seq: int, may_hold: Callable[[bytes], bool]
    ) -> Iterator[PassedSecond | None]:
        """Yields for each slot what it holds if nothing sought can be in it; None: read it.

        Slots ascend; `may_hold` is that of `sieved_batches`.
        """
        return passing_over(
            self._disk,
            self._folder,
            self.wheel,
            slots,
            self._stated,
            up_to_seq=up_to_seq,
            may_hold=may_hold,
        )

    def _stated(self, slots: NDArray[np.int64]) -> Stated:
        said = self._places.stated(slots, self.last_seq())
        return said._replace(is_known=said.is_known & ~np.isin(slots, [*self._lying]))

    def _of_slot(
        self,
        slot: int,
        asked: "_FramesAsked",
        lost: SeqSet,
        read: Callable[[int, Places], Iterator[_Read]],
        seqs_of: Callable[[Any], list[int]],
    ) -> Iterator[_Read | DamagedFrame]:
        last_seq = self.last_seq()
        places = self._quick(slot, last_seq)
        good: list[int] = []
        if places is not None:
            for found in read(slot, asked.of(places)):
                if isinstance(found, DamagedFrame):
                    break  # its header may be damaged as well: the index knows its kind
                good += seqs_of(found)
                yield found
            else:
                return
        seqs, rows = asked.of(self._scanned(slot, last_seq))
        rest = ~np.isin(seqs, good)
        yield from read(slot, (seqs[rest], rows[rest]))
        # Table and file disagree: a frame may have become a hole.
        up_to_seq = min(asked.up_to_seq, last_seq)
        if self._places.holes(up_to_seq) is None:
            holes = self._places.scanned_holes(up_to_seq)
        else:
            holes = find_holes(self._disk, self._folder, 1, up_to_seq)
        nowhere, _ = self.lying_nowhere(holes - lost)
        for seq in nowhere.within(asked.from_seq, up_to_seq):
            yield _damaged(seq, _HOLE, FrameDamaged(DamageReason.HOLE))

    def slot_places(self, slot: int) -> Places:
        """Returns seqs and rows of a slot's frames, as `slot_frames` finds them, unread."""
        last_seq = self.last_seq()
        return self._quick(slot, last_seq) or self._scanned(slot, last_seq)

    def slots(self, from_slot: int = 0, to_slot: int | None = None) -> list[int]:
        """Yields slots that have a file, ``from_slot`` <= slot < ``to_slot``, from folder names."""
        return list(list_slots(self._disk, self._folder, from_slot, to_slot))

    def indexed_slots(self, from_slot: int, to_slot: int) -> NDArray[np.int64]:
        """Returns slots that index rows refer to, ``from_slot`` <= slot < ``to_slot``, ascending.

        Includes slots without a file: a deleted file takes nothing from what is promised.
        """
        return self._places.slots(from_slot, to_slot, self.last_seq())

    def close(self) -> None:
        """Closes the index; columns already returned stay valid."""
        self._index.close()


def read_frames(
    disk: Disk, folder: Path, wheel: WheelId, slot: int, places: Places
) -> Iterator[Frame | DamagedFrame]:
    """Reads frames of one slot piece by piece, given their seqs and rows."""
    seqs, rows = places
    offsets, lengths = rows["offset"].tolist(), rows["length"].tolist()
    for first, last in _pieces(offsets, lengths):
        part = slice(first, last)
        yield from _read_piece(disk, folder, wheel, slot, (seqs[part], rows[part]))


def read_batches(
    disk: Disk,
    folder: Path,
    wheel: WheelId,
    slot: int,
    places: Places,
    may_hold: Callable[[bytes], bool] | None = None,
) -> Iterator[FrameBatch | PassedOver | DamagedFrame]:
    """Reads as `read_frames`, but decodes adjacent frames together, unless `may_hold` says no."""
    seqs, rows = places
    for first, last in _pieces(rows["offset"].tolist(), rows["length"].tolist()):
        part = seqs[first:last], rows[first:last]
        is_alone = last - first == 1 and may_hold is None
        batches = None if is_alone else _read_together(disk, folder, wheel, slot, part, may_hold)
        if batches is not None:
            yield from batches
            continue
        for frame in _read_piece(disk, folder, wheel, slot, part):
            yield frame if isinstance(frame, DamagedFrame) else FrameBatch.of(frame)


def _read_together(
    disk: Disk,
    folder: Path,
    wheel: WheelId,
    slot: int,
    places: Places,
    may_hold: Callable[[bytes], bool] | None,
) -> list[FrameBatch | PassedOver] | None:
    """Returns a batch of each kind; None if anything is wrong with a frame."""
    seqs, rows = places
    begin = int(rows["offset"].min())
    end = int((rows["offset"].astype(np.int64) + rows["length"]).max())
    try:
        content = _content(disk, layout.slot_path(folder, slot), begin, end)
    except FrameDamaged:
        return None
    kinds = kinds_of(rows)
    batches: list[FrameBatch | PassedOver] = []
    for kind in Kind:
        chosen = kinds == kind
        if chosen.any():
            part = seqs[chosen], rows[chosen]
            batch = decode_together(
                content, begin, part, wheel=wheel, slot=slot, kind=kind, may_hold=may_hold
            )
            if batch is None:
                return None
            batches.append(batch)
    return batches


def _seqs_of(frames: FrameBatch | PassedOver) -> list[int]:
    return frames.seqs if isinstance(frames, PassedOver) else frames.seqs.tolist()


def _pieces(offsets: list[int], lengths: list[int]) -> Iterator[tuple[int, int]]:
    """Yields which frames are read at once: from the first to the last, exclusive."""
    first, end = 0, 0
    for number, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        begin = offsets[first]
        is_near = begin <= offset <= min(begin + _PIECE_BYTES - length, end + _BETWEEN_BYTES)
        if number > first and not (is_near and number - first < _PIECE_FRAMES):
            yield first, number
            first = number
        end = offset + length
    if offsets:
        yield first, len(offsets)


def _groups(pieces: list[tuple[int, int]], rows: NDArray[Any]) -> Iterator[list[tuple[int, int]]]:
    """Yields pieces that are decoded together: as many as have some length, or a single one."""
    group: list[tuple[int, int]] = []
    length_bytes = 0
    for piece in pieces:
        begin, end = piece
        length_bytes += int(rows["length"][begin:end].sum(dtype=np.int64))
        group.append(piece)
        if length_bytes >= _TOGETHER_BYTES:
            yield group
            group, length_bytes = [], 0
    if group:
        yield group


def _read_piece(
    disk: Disk, folder: Path, wheel: WheelId, slot: int, places: Places
) -> Iterator[Frame | DamagedFrame]:
    seqs, rows = places
    # Lists of int: taking a scalar out of a numpy row costs more than decoding a column.
    offsets, lengths = rows["offset"].tolist(), rows["length"].tolist()
    contents = _piece(disk, layout.slot_path(folder, slot), offsets, lengths)
    for seq, offset, row, content in zip(seqs.tolist(), offsets, rows, contents, strict=True):
        try:
            if isinstance(content, FrameDamaged):
                raise content
            frame = decode_frame(content, wheel=wheel, slot=slot, seq=seq)
            check_row(frame, offset, row.tobytes())
        except FrameDamaged as damage:
            yield _damaged(seq, row, damage)
        else:
            yield frame


def _piece(
    disk: Disk, path: Path, offsets: Sequence[int], lengths: Sequence[int]
) -> Iterator[memoryview | FrameDamaged]:
    """Reads adjacent frames of a slot file at once; yields the bytes of each, or what is wrong."""
    begin, end = offsets[0], max(map(add, offsets, lengths))
    try:
        content = memoryview(_content(disk, path, begin, end))
    except FrameDamaged as damage:
        for place in zip(offsets, lengths, strict=True):
            if damage.reason is DamageReason.UNREADABLE and len(offsets) > 1:
                # The error may be that of a single sector, so each frame is read on its own.
                yield from _piece(disk, path, *zip(place, strict=True))
            else:
                yield damage
        return
    for offset, length in zip(offsets, lengths, strict=True):
        part = content[offset - begin : offset - begin + length]
        yield part if len(part) == length else _short(part)


def _short(content: memoryview) -> FrameDamaged:
    try:
        decode_header(content, available_bytes=len(content))
    except FrameDamaged as damage:
        return damage
    return FrameDamaged(DamageReason.SHORT)


def _content(disk: Disk, path: Path, begin: int, end: int) -> bytes:
    """Returns the bytes [begin, end) of a slot file, or what exists of them.

    Raises:
        FrameDamaged: GONE or UNREADABLE.
        OSError: Any error but the medium's: a lack of descriptors or memory is not damage.
    """
    try:
        with closing(disk.open_read(path)) as file:
            return file.read_at(end - begin, begin)
    except FileNotFoundError as error:
        raise FrameDamaged(DamageReason.GONE, str(path)) from error
    except OSError as error:
        if not is_medium_error(error):
            raise
        raise FrameDamaged(DamageReason.UNREADABLE, str(error)) from error


@dataclass(frozen=True, slots=True)
class _FramesAsked:
    from_seq: int
    up_to_seq: int
    kind: Kind | None

    def of(self, places: Places) -> Places:
        seqs, rows = places
        wanted = (seqs >= self.from_seq) & (seqs <= self.up_to_seq)
        if self.kind is not None:
            wanted &= kinds_of(rows) == self.kind
        return seqs[wanted], rows[wanted]


def _why_placeless(rows: NDArray[Any]) -> DamageReason:
    """Returns why the first of these rows says of no place."""
    if is_unreadable(rows[:1]).any():
        return DamageReason.UNREADABLE
    return DamageReason.GONE if is_gone(rows[:1]).any() else DamageReason.HOLE


def _damaged(seq: int, row: NDArray[Any], damage: FrameDamaged) -> DamagedFrame:
    return DamagedFrame(
        seq=seq,
        slot=int(row["slot"]),
        messages=int(message_counts(row)),
        cancels=int(row_counts(row) - message_counts(row)),
        reason=damage.reason,
        detail=str(damage),
    )
