"""Reads frames for other nodes: the newest from memory, others from the files, each one checked."""

from collections.abc import Callable, Iterator

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.files.index import ROWS_PER_SEGMENT
from delaywheel.storage.frames.bundle import NO_BUNDLE, FrameBundle
from delaywheel.storage.frames.frame_copy import FrameCopy
from delaywheel.storage.frames.rows import HOLE_ROW
from delaywheel.storage.reading.reader import DamagedFrame, WheelReader
from delaywheel.storage.writing.mirror import MirrorWheel
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.server.store.copies import Copies
from delaywheel_replica.server.store.missing import Lacking
from delaywheel_replica.server.store.recent import Recent

_log = get_logger(__name__)


class FramesToSend:
    """Reads what can be sent of one store's wheels. For the store's thread.

    Attributes:
        own: reads the open wheel; None while there is none.
        recent: the newest frames of the open wheel.
    """

    def __init__(self, copies: Copies, lacking: Lacking, recent_bytes: int) -> None:
        """Begins without an open wheel.

        Args:
            copies: all wheels but the open one.
            lacking: what the copies lack.
            recent_bytes: of the newest frames, which are kept in memory.
        """
        self._copies = copies
        self._lacking = lacking
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
        is_own = self.own is not None and self.own.wheel == wheel
        return None if is_own else self._copies.find(wheel)

    def read(
        self,
        wheel: WheelId,
        first_seq: int,
        last_seq: int,
        *,
        max_bytes: int,
        max_frames: int,
        floor: int,
        is_over: Callable[[], bool] = lambda: False,
    ) -> tuple[FrameBundle, SeqSet]:
        """Returns frames to send: those before the first one of which nothing can be sent.

        Every frame is checked. One below the floor is without content; one committed to be lost,
        and not here, is a hole. One that is found damaged is lacking from then on.

        Args:
            wheel: of which wheel.
            first_seq: the first that is wanted.
            last_seq: the last that is wanted.
            max_bytes: at most so many; but one frame always.
            max_frames: at most so many.
            floor: slots below are finished.
            is_over: is asked after each frame that was read; if it is so, no more are.

        Returns:
            The frames; and the one that ended them, if it is damaged. Where there are none: the
            leading seqs of which nothing is here, be they damaged or above the last one held, in
            one span. Holes are told a segment of the index at a time, what is above the last one
            all at once.
        """
        end_seq = min(last_seq, first_seq + max_frames - 1)
        floor = max(floor, self._copies.floor)
        if self.own is not None and self.own.wheel == wheel:
            recent = self.recent.frames(first_seq, end_seq, floor=floor, max_bytes=max_bytes)
            if len(recent):
                is_over()
                return recent, NO_SEQS
        absent = self._absent(wheel, first_seq, last_seq)
        if absent:
            return NO_BUNDLE, absent
        frames: list[FrameCopy] = []
        length_bytes = 0
        for found in self._reading(wheel, first_seq, end_seq, floor):
            if isinstance(found, DamagedFrame):
                absent = absent.with_span(found.seq, found.seq)
                if frames or is_over():
                    break
                continue
            length_bytes += len(found.content)
            if absent or (frames and length_bytes > max_bytes):
                break
            frames.append(found)
            if is_over():
                break
        else:
            beyond = first_seq + len(absent)
            if not frames and beyond <= end_seq:
                absent = absent.with_span(beyond, last_seq)  # here the wheel ends before
        return FrameBundle.of_copies(frames), absent

    def _absent(self, wheel: WheelId, first_seq: int, last_seq: int) -> SeqSet:
        """Returns the leading seqs that are holes, except lost ones, which are sent as such."""
        copy = self.copy_of(wheel)
        if copy is None:
            return NO_SEQS
        end_seq = copy.end_of_hole(first_seq, min(last_seq, first_seq + ROWS_PER_SEGMENT - 1))
        lost = self._lacking.lost.seqs(wheel).within(first_seq, end_seq)
        return NO_SEQS.with_span(first_seq, lost.first - 1 if lost else end_seq)

    def _reading(
        self, wheel: WheelId, first_seq: int, last_seq: int, floor: int
    ) -> Iterator[FrameCopy | DamagedFrame]:
        """Yields frames in order, as far as the wheel goes here."""
        copy = self.copy_of(wheel)
        source = self.own if copy is None else copy
        if source is None or source.wheel != wheel:
            return
        for found in source.copies(first_seq, last_seq, floor=floor):
            if isinstance(found, FrameCopy):
                yield found
            elif (wheel, found.seq) in self._lacking.lost:
                yield FrameCopy(found.seq, HOLE_ROW, b"")
            else:
                self._note_damaged(wheel, copy, found)
                yield found

    def _note_damaged(self, wheel: WheelId, copy: MirrorWheel | None, frame: DamagedFrame) -> None:
        if copy is not None and frame.seq in copy.lacking:
            return
        _log.error("frame damaged", wheel=str(wheel), seq=frame.seq, cause=frame.detail)
        if copy is not None:
            copy.note_damaged(frame.seq)
