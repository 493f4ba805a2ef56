"""Which frames copies are missing, except those committed as lost."""

from typing import NamedTuple

from delaywheel.identity import WheelId
from delaywheel.seqset import SeqSet
from delaywheel.storage.writing.mirror import MirrorWheel
from delaywheel_replica.core.protocol.frames import NO_FRAMES, FrameSet


class _Found(NamedTuple):
    of_copy: SeqSet
    lost: FrameSet
    missing: SeqSet


class MissingOfCopies:
    """Caches which frames copies are missing until they or the lost frames change. For one thread.

    A copy of a wheel that lost many frames has as many holes, and is queried after each write.
    """

    def __init__(self) -> None:
        self.lost = NO_FRAMES
        self._found: dict[WheelId, _Found] = {}

    def lose(self, frames: FrameSet) -> None:
        """Adds frames that are committed as lost, and so no longer missing."""
        self.lost |= frames

    def forget(self, wheel: WheelId) -> None:
        """Forgets a deleted wheel."""
        self.lost -= self.lost.of_wheel(wheel)
        self._found.pop(wheel, None)

    def of(self, copy: MirrorWheel) -> SeqSet:
        """Returns the frames that a copy is missing."""
        found, of_copy = self._found.get(copy.wheel), copy.missing
        if found is None or found.of_copy is not of_copy or found.lost is not self.lost:
            missing = of_copy - self.lost.seqs(copy.wheel)
            found = self._found[copy.wheel] = _Found(of_copy, self.lost, missing)
        return found.missing
