"""Reads frames for other nodes: the newest from memory, others from the files, each one checked."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.files.index import ROWS_PER_SEGMENT
from delaywheel.storage.frames.bundle import NO_BUNDLE, FrameBundle
from delaywheel.storage.frames.checking import good_frames
from delaywheel.storage.frames.rows import HOLE_ROW, raw_rows
from delaywheel.storage.reading.reader import DamagedFrame, WheelReader
from delaywheel.storage.reading.unreadable_rows import UnreadableRows
from delaywheel.storage.writing.mirror import MirrorWheel
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.server.store.copies import Copies, MissingOfCopies

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

    `own` reads the open wheel, if there is one; `recent` are its newest frames.
    """

    def __init__(self, copies: Copies, missing: MissingOfCopies, recent_bytes: int) -> None:
        self._copies = copies
        self._missing = missing
        self._unreadable_rows = UnreadableRows()
        self.own: WheelReader | None = None
        self.recent = Recent(recent_bytes)

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
        on. A single frame may be longer than `max_bytes`. Holes are reported one index segment at a
        time, seqs beyond the last one held all at once.

        Args:
            is_over: Called after each slot file that was read; if true, no more are read.
            again: They were sent before, and were perhaps refused: what is in memory is checked,
                and read from the files if it was damaged.
        """
        end_seq = min(last_seq, first_seq + max_frames - 1)
        floor = max(floor, self._copies.floor)
        recent = NO_BUNDLE
        if self._is_own(wheel):
            if again:
                self._forget_damaged(wheel, first_seq, end_seq)
            recent = self.recent.frames(first_seq, end_seq, floor=floor, max_bytes=max_bytes)
        if len(recent):
            is_over()  # lets the time slice notice its end, as after a file
            return FoundFrames(recent)
        absent = self._absent(wheel, first_seq, last_seq, now_ms)
        if absent:
            return FoundFrames(NO_BUNDLE, absent)
        frames, damaged = self._leading(
            wheel, first_seq, end_seq, max_bytes=max_bytes, floor=floor, is_over=is_over
        )
        while damaged is not None:
            unreadable = self._perhaps_whole(wheel, now_ms, damaged)
            if unreadable:
                return FoundFrames(frames, absent, NO_SEQS if absent else unreadable)
            absent = absent.with_span(damaged.seq, damaged.seq)
            if len(frames) or damaged.seq == end_seq or is_over():
                return FoundFrames(frames, absent)
            found, damaged = self._leading(
                wheel, damaged.seq + 1, damaged.seq + 1, max_bytes=max_bytes, floor=floor
            )
            if len(found):
                return FoundFrames(frames, absent)
        if not len(frames):  # the wheel ends before here
            absent = absent.with_span(first_seq + len(absent), last_seq)
        return FoundFrames(frames, absent)

    def _leading(
        self,
        wheel: WheelId,
        first_seq: int,
        last_seq: int,
        *,
        max_bytes: int,
        floor: int,
        is_over: Callable[[], bool] = lambda: False,
    ) -> tuple[FrameBundle, DamagedFrame | None]:
        """Returns leading frames of the files, as far as the wheel reaches, and a damaged one."""
        copy = self.copy_of(wheel)
        source = self.own if copy is None else copy.reader
        if source is None or source.wheel != wheel:
            return NO_BUNDLE, None
        floor = floor if copy is None else max(floor, copy.floor)
        lost = self._missing.lost.seqs(wheel)
        frames, damaged = source.bundle(
            first_seq, last_seq, floor=floor, lost=lost, max_bytes=max_bytes, is_over=is_over
        )
        if damaged is None:
            return frames, None
        if damaged.seq in lost:
            hole = FrameBundle.of(np.array([damaged.seq]), raw_rows(HOLE_ROW), b"")
            return FrameBundle.joined([frames, hole]), None
        if copy is None or damaged.seq not in copy.missing:
            _log.error("frame damaged", wheel=str(wheel), seq=damaged.seq, cause=damaged.detail)
            if copy is not None:
                copy.note_damaged(damaged.seq)
        return frames, damaged

    def _forget_damaged(self, wheel: WheelId, first_seq: int, last_seq: int) -> None:
        damaged_seq = self.recent.forget_damaged(wheel, first_seq, last_seq)
        if damaged_seq:
            _log.error("frames damaged in memory", wheel=str(wheel), last_seq=damaged_seq)

    def _absent(self, wheel: WheelId, first_seq: int, last_seq: int, now_ms: int) -> SeqSet:
        """Returns the leading seqs that are missing here; lost frames are sent, as holes."""
        copy = self.copy_of(wheel)
        if copy is None:
            return NO_SEQS
        end_seq = min(last_seq, first_seq + ROWS_PER_SEGMENT - 1)
        end_seq = copy.end_of_hole(first_seq, end_seq, now_ms=now_ms)
        lost = self._missing.lost.seqs(wheel).within(first_seq, end_seq)
        return NO_SEQS.with_span(first_seq, lost.first - 1 if lost else end_seq)

    def _perhaps_whole(self, wheel: WheelId, now_ms: int, frame: DamagedFrame) -> SeqSet:
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


class Recent:
    """The last frames of the open wheel, without gaps, in memory. For one thread.

    Mirrors mostly need these. Reading them back costs more than writing them did: two files a
    frame, and their checksums.
    """

    def __init__(self, max_bytes: int) -> None:
        """Begins empty; 0 bytes: no frames are kept.

        The oldest make room, but the newest group always stays: no mirror has it yet.
        """
        self._max_bytes = max_bytes
        self._bundles: deque[FrameBundle] = deque()
        self._length_bytes = 0

    def add(self, bundle: FrameBundle) -> None:
        """Adds written frames."""
        if not (len(bundle) and self._max_bytes):
            return
        self._bundles.append(bundle)
        self._length_bytes += _size_bytes(bundle)
        while self._length_bytes > self._max_bytes and len(self._bundles) > 1:
            self._forget_oldest()

    def forget_damaged(self, wheel: WheelId, first_seq: int, last_seq: int) -> int:
        """Forgets frames that were damaged in memory, and all before; returns the last, or 0."""
        damaged_seq = 0
        for bundle in self._bundles:
            is_asked = bundle.last_seq >= first_seq and bundle.first_seq <= last_seq
            if is_asked and good_frames(wheel, bundle).frames < len(bundle):
                damaged_seq = bundle.last_seq
        while self._bundles and self._bundles[0].first_seq <= damaged_seq:
            self._forget_oldest()
        return damaged_seq

    def _forget_oldest(self) -> None:
        self._length_bytes -= _size_bytes(self._bundles.popleft())

    def clear(self) -> None:
        """Empties the buffer, for another wheel."""
        self._bundles.clear()
        self._length_bytes = 0

    def frames(self, first_seq: int, last_seq: int, *, floor: int, max_bytes: int) -> FrameBundle:
        """Returns these frames up to the first that is absent or finished (below the floor).

        A single one may be longer than `max_bytes`.
        """
        found: list[FrameBundle] = []
        for bundle in reversed(self._bundles):
            if bundle.first_seq <= last_seq:
                found.append(bundle)
            if bundle.first_seq <= first_seq:
                break
        else:
            return NO_BUNDLE
        parts: list[FrameBundle] = []
        for bundle in reversed(found):
            part = bundle.part(
                max(0, first_seq - bundle.first_seq), last_seq - bundle.first_seq + 1
            )
            room = max_bytes - sum(each.length_bytes for each in parts)
            fitting = int(part.edges.searchsorted(room, side="right")) - 1
            if min(part.rows["slot"].tolist(), default=floor) < floor:
                fitting = min(fitting, int((part.rows["slot"] < floor).argmax()))
            elif not parts:
                fitting = max(fitting, 1)
            parts.append(part.part(0, fitting))
            if fitting < len(part):
                break
        return FrameBundle.joined(parts)


def _size_bytes(bundle: FrameBundle) -> int:
    """Returns what a bundle takes in memory: small frames take as much for rows as for content."""
    return bundle.length_bytes + bundle.rows.nbytes + bundle.seqs.nbytes + bundle.edges.nbytes
