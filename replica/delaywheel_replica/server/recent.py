"""The newest frames of the open wheel, as they were written: what mirrors are sent is mostly these.

Reading them again costs more than writing them did: two files a frame, and their checksums.
"""

from collections.abc import Iterable, Iterator

from delaywheel.framecopy import FrameCopy
from delaywheel.wheel import FramePlace


class Recent:
    """Some frames of one wheel, the last ones without gap. For one thread."""

    def __init__(self, max_bytes: int) -> None:
        """There are none.

        Args:
            max_bytes: of all of them; the oldest make room.
        """
        self._max_bytes = max_bytes
        self._frames: dict[int, tuple[int, FrameCopy]] = {}
        self._length_bytes = 0

    def add(self, places: Iterable[FramePlace]) -> None:
        """These were written."""
        for place in places:
            frame = place.frame
            row = frame.index_row(place.offset)
            copy = FrameCopy(frame.seq, row, bytes(frame.buffer))
            self._frames[frame.seq] = frame.slot, copy
            self._length_bytes += frame.length_bytes
        while self._length_bytes > self._max_bytes:
            _, oldest = self._frames.pop(next(iter(self._frames)))
            self._length_bytes -= len(oldest.content)

    def clear(self) -> None:
        """The wheel is another one."""
        self._frames.clear()
        self._length_bytes = 0

    def copies(self, first_seq: int, last_seq: int, *, floor: int) -> Iterator[FrameCopy]:
        """The leading ones of these frames, up to the first that is not here, or is finished."""
        for seq in range(first_seq, last_seq + 1):
            slot, copy = self._frames.get(seq, (-1, None))
            if copy is None or slot < floor:
                return
            yield copy
