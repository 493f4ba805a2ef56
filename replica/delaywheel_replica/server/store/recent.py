"""The newest frames of the open wheel, in memory, since mirrors mostly need these.

Reading them back costs more than writing them did: two files a frame, and their checksums.
"""

from collections import deque

from delaywheel.identity import WheelId
from delaywheel.storage.frames.bundle import NO_BUNDLE, FrameBundle
from delaywheel.storage.frames.checking import good_frames


class Recent:
    """The last frames of one wheel, without gaps. For one thread."""

    def __init__(self, max_bytes: int) -> None:
        """Begins empty.

        Args:
            max_bytes: The most bytes of all frames and their rows; the oldest make room, but the
                newest group always stays: no mirror has it yet. 0: none is kept.
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
        """Forgets frames that were damaged here, in memory, and all before them.

        Returns:
            The last seq of those that were damaged; 0: none of these frames is.
        """
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
        """Returns these frames up to the first that is absent or finished.

        Args:
            floor: Slots below are finished.
            max_bytes: The most bytes, unless there is a single frame.
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
