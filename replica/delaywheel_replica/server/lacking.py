"""What copies lack, but for frames that are committed to be lost."""

from typing import NamedTuple

from delaywheel.identity import WheelId
from delaywheel.mirror import MirrorWheel
from delaywheel_replica.core.frames import NO_FRAMES, FrameSet


class _Found(NamedTuple):
    damaged: frozenset[int]
    lost: FrameSet
    lacking: tuple[int, ...]


class Lacking:
    """For one thread. A copy is gone through anew only when it, or what is lost, has changed.

    A copy of a wheel that lost many frames has as many holes, and is asked after each write.
    """

    def __init__(self) -> None:
        """Nothing is lost, as far as is known."""
        self.lost = NO_FRAMES
        self._found: dict[WheelId, _Found] = {}

    def lose(self, frames: FrameSet) -> None:
        """These are committed to be lost: they are not lacking any more."""
        self.lost |= frames

    def forget(self, wheel: WheelId) -> None:
        """There is nothing of this wheel any more."""
        self.lost -= self.lost.of_wheel(wheel)
        self._found.pop(wheel, None)

    def of(self, copy: MirrorWheel) -> tuple[int, ...]:
        """What a copy lacks, ascending."""
        found = self._found.get(copy.wheel)
        if found is None or found.damaged is not copy.damaged or found.lost is not self.lost:
            lacking = tuple(seq for seq in copy.lacking if (copy.wheel, seq) not in self.lost)
            found = self._found[copy.wheel] = _Found(copy.damaged, self.lost, lacking)
        return found.lacking
