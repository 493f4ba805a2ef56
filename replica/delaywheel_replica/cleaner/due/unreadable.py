"""Frames that cannot be read here: their slots or wheels wait while reads are retried.

| a frame that | waits for it |
|---|---|
| is not admitted yet | its wheel: V rests in front of it |
| is admitted, in a second that is read | that second: w rests in front of it |

A frame is waited for until it can be read, because it was repaired from another member, or until
it is committed as lost.
"""

from collections.abc import Iterable, Mapping
from itertools import islice

from delaywheel.identity import WheelId
from delaywheel.storage.reading.reader import DamagedFrame, WheelReader
from delaywheel_replica.core.protocol.frames import FrameName, FrameRange, FrameSet

REPORTED_RANGES = 100
"""How many are reported at once: the size of the cleaner's status is bounded."""

LOOKED_AT_FRAMES = 100
"""How many are examined again at once."""


class AwaitedFrames:
    """Frames that are waited for together."""

    def __init__(self, frames: Iterable[FrameName]) -> None:
        self._frames = FrameSet.of(frames)

    def __bool__(self) -> bool:
        return bool(self._frames)

    def __contains__(self, frame: FrameName) -> bool:
        return frame in self._frames

    def reported(self) -> Iterable[FrameRange]:
        """The first awaited frames; later ones are reported once these are available."""
        return islice(self._frames.ranges(), REPORTED_RANGES)

    def look_again(
        self, readers: Mapping[WheelId, WheelReader], lost: FrameSet, *, floor: int
    ) -> None:
        """Stops waiting for frames that are lost, readable, or below the floor.

        Of many it looks at the first, and at later ones once these can be read.
        """
        left = self._frames - lost
        looked_at = islice(left, LOOKED_AT_FRAMES)
        found = [
            (wheel, seq)
            for wheel, seq in looked_at
            if _need_not_wait(readers.get(wheel), seq, floor=floor)
        ]
        self._frames = left - FrameSet.of(found)


def _need_not_wait(reader: WheelReader | None, seq: int, *, floor: int) -> bool:
    """Whether a frame is readable, or not needed: its wheel is unregistered, or ends before it.

    Nor is the content of a finished frame, once its row is in place.
    """
    if reader is None or not reader.has(seq):
        return True
    frame = reader.frame(seq)
    if isinstance(frame, DamagedFrame):
        return frame.is_finished or 0 < frame.slot < floor
    return True
