"""Reads frames for other nodes: the newest from memory, others from the files, each one checked."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.files.index import ROWS_PER_SEGMENT
from delaywheel.storage.frames.bundle import NO_BUNDLE, FrameBundle
from delaywheel.storage.frames.frame_copy import FrameCopy
from delaywheel.storage.frames.rows import HOLE_ROW
from delaywheel.storage.reading.reader import DamagedFrame, WheelReader
from delaywheel.storage.reading.unreadable_rows import UnreadableRows
from delaywheel.storage.writing.mirror import MirrorWheel
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.server.store.copies import Copies
from delaywheel_replica.server.store.missing import MissingOfCopies
from delaywheel_replica.server.store.recent import Recent

_log = get_logger(__name__)


class FoundFrames(NamedTuple):
    """What was found of a range of frames.

    Attributes:
        frames: The leading frames that can be sent.
        absent: The one that ended them, if it is damaged. If there are none: the leading seqs that
            are missing here, whether damaged or beyond the last one held, in one span.
        unreadable: What ended them, if it may be whole: nobody is told that it is absent.
    """

    frames: FrameBundle
    absent: SeqSet = NO_SEQS
    unreadable: SeqSet = NO_SEQS


class FramesToSend:
    """Reads frames of one store's wheels to be sent. For the store's thread.

    Attributes:
        own: Reads the open wheel; None while there is none.
        recent: The newest frames of the open wheel.
    """

    def __init__(self, copies: Copies, missing: MissingOfCopies, recent_bytes: int) -> None:
        """Begins without an open wheel.

        Args:
            copies: All wheels but the open one.
            missing: What the copies are missing.
            recent_bytes: How many bytes of the newest frames to keep in memory.
        """
        self._copies = copies
        self._missing = missing
        self._unreadable_rows = UnreadableRows()
        self.own: WheelReader | None = None
        self.recent = Recent(recent_bytes)

    def opened(self, own: WheelReader) -> None:
        """Notes that a wheel was opened."""
        self.own = own

    def left(self) -> None:
        """Notes that the open wheel became a copy."""
        if self.own is not None:
            self.own.close()
        self.own = None
        self.recent.clear()

    def copy_of(self, wheel: WheelId) -> MirrorWheel | None:
        """Returns the copy of a wheel; None if there is none, or the wheel is open."""
        return None if self._is_own(wheel) else self._copies.find(wheel)

    def _is_own(self, wheel: WheelId) -> bool:
        return self.own is not None and self.own.wheel == wheel

    def read(  # noqa: PLR0913 - as many as limit what is sent
        self,
        wheel: WheelId,
        first_seq: int,
        last_seq: int,
        *,
        max_bytes: int,
        max_frames: int,
        floor: int,
        now_ms: int,
        is_over: Callable[[], bool] = lambda: False,
        again: bool = False,
    ) -> FoundFrames:
        """Returns frames to send, up to the first one that cannot be sent at all.

        Every frame is checked. A frame below the floor has no content; a frame that is committed as
        lost, and absent here, is a hole. A frame found to be damaged counts as missing from then
        on.

        Args:
            first_seq: The first seq wanted.
            last_seq: The last seq wanted.
            max_bytes: The most bytes, unless there is a single frame.
            max_frames: The most frames.
            floor: Slots below are finished.
            now_ms: The wall clock.
            is_over: Called after each frame that was read; if true, no more are read.
            again: They were sent before, and were perhaps refused: what is in memory is checked,
                and read from the files if it was damaged.

        Returns:
            What was found. Holes are reported one index segment at a time, seqs beyond the last one
            held all at once.
        """
        end_seq = min(last_seq, first_seq + max_frames - 1)
        floor = max(floor, self._copies.floor)
        recent = NO_BUNDLE
        if self._is_own(wheel):
            self._check_recent((first_seq, end_seq) if again else None)
            recent = self.recent.frames(first_seq, end_seq, floor=floor, max_bytes=max_bytes)
        if len(recent):
            is_over()
            return FoundFrames(recent)
        absent = self._absent(wheel, first_seq, last_seq, now_ms)
        if absent:
            return FoundFrames(NO_BUNDLE, absent)
        reading = self._reading(wheel, first_seq, end_seq, floor)
        found, is_all = _gathered(
            reading, max_bytes, partial(self._may_be_whole, wheel, now_ms), is_over
        )
        beyond = first_seq + len(found.absent)
        if is_all and not len(found.frames) and beyond <= end_seq:  # the wheel ends before here
            return found._replace(absent=found.absent.with_span(beyond, last_seq))
        return found

    def _check_recent(self, seqs: tuple[int, int] | None) -> None:
        if seqs is None or self.own is None:
            return
        damaged_seq = self.recent.forget_damaged(self.own.wheel, *seqs)
        if damaged_seq:
            _log.error("frames damaged in memory", wheel=str(self.own.wheel), last_seq=damaged_seq)

    def _absent(self, wheel: WheelId, first_seq: int, last_seq: int, now_ms: int) -> SeqSet:
        """Returns the leading seqs that are holes, except lost frames, which are sent as holes."""
        copy = self.copy_of(wheel)
        if copy is None:
            return NO_SEQS
        end_seq = min(last_seq, first_seq + ROWS_PER_SEGMENT - 1)
        end_seq = copy.end_of_hole(first_seq, end_seq, now_ms=now_ms)
        lost = self._missing.lost.seqs(wheel).within(first_seq, end_seq)
        return NO_SEQS.with_span(first_seq, lost.first - 1 if lost else end_seq)

    def _may_be_whole(self, wheel: WheelId, now_ms: int, frame: DamagedFrame) -> SeqSet:
        """Returns this frame, and those behind it, if nobody may be told that they are absent.

        A lost row says nothing of its frame, before the slot files were searched for it; nor does
        one that cannot be read, before it was waited for.
        """
        alone = NO_SEQS.with_span(frame.seq, frame.seq)
        if not frame.is_without_row:
            return alone if frame.is_waited_for(now_ms) else NO_SEQS
        copy = self.copy_of(wheel)
        if copy is None:  # the open wheel, which is left because of this, and read then
            return alone
        rows = copy.unreadable_rows(frame.seq)
        waited_for = self._unreadable_rows.waited_for(wheel, rows | alone, rows, now_ms)
        if frame.seq in waited_for:
            return waited_for
        unsought = copy.unsought(frame.seq, copy.last_seq, now_ms=now_ms)
        return unsought if frame.seq in unsought else NO_SEQS

    def _reading(
        self, wheel: WheelId, first_seq: int, last_seq: int, floor: int
    ) -> Iterator[FrameCopy | DamagedFrame]:
        """Yields frames in order, as far as the wheel reaches here."""
        copy = self.copy_of(wheel)
        source = self.own if copy is None else copy
        if source is None or source.wheel != wheel:
            return
        for found in source.copies(first_seq, last_seq, floor=floor):
            if isinstance(found, FrameCopy):
                yield found
            elif (wheel, found.seq) in self._missing.lost:
                yield FrameCopy(found.seq, HOLE_ROW, b"")
            else:
                self._note_damaged(wheel, copy, found)
                yield found

    def _note_damaged(self, wheel: WheelId, copy: MirrorWheel | None, frame: DamagedFrame) -> None:
        if copy is not None and frame.seq in copy.missing:
            return
        _log.error("frame damaged", wheel=str(wheel), seq=frame.seq, cause=frame.detail)
        if copy is not None:
            copy.note_damaged(frame.seq)


def _gathered(
    reading: Iterator[FrameCopy | DamagedFrame],
    max_bytes: int,
    may_be_whole: Callable[[DamagedFrame], SeqSet],
    is_over: Callable[[], bool],
) -> tuple[FoundFrames, bool]:
    """Returns leading frames, or leading absent ones; and whether these are all."""
    frames: list[FrameCopy] = []
    absent = unreadable = NO_SEQS
    length_bytes = 0
    is_all = True
    for found in reading:
        is_all = False
        if isinstance(found, DamagedFrame):
            whole = may_be_whole(found)
            if whole:
                unreadable = NO_SEQS if absent else whole
                break
            absent = absent.with_span(found.seq, found.seq)
            if frames or is_over():
                break
        else:
            length_bytes += len(found.content)
            if absent or (frames and length_bytes > max_bytes):
                break
            frames.append(found)
            if is_over():
                break
        is_all = True
    return FoundFrames(FrameBundle.of_copies(frames), absent, unreadable), is_all
