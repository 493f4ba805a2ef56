"""The newest frames of the open wheel, in memory, since mirrors mostly need these.

Reading them back costs more than writing them did: two files a frame, and their checksums.
"""

from collections import deque

from delaywheel.storage.frames.bundle import NO_BUNDLE, FrameBundle


class Recent:
    """The last frames of one wheel, without gaps. For one thread."""

    def __init__(self, max_bytes: int) -> None:
        """Begins empty.

        Args:
            max_bytes: The most bytes of all frames; the oldest make room.
        """
        self._max_bytes = max_bytes
        self._bundles: deque[FrameBundle] = deque()
        self._length_bytes = 0

    def add(self, bundle: FrameBundle) -> None:
        """Adds written frames."""
        if not len(bundle):
            return
        self._bundles.append(bundle)
        self._length_bytes += bundle.length_bytes
        while self._length_bytes > self._max_bytes:
            self._length_bytes -= self._bundles.popleft().length_bytes

    def clear(self) -> None:
        """Empties the buffer, for another wheel."""
        self._bundles.clear()
        self._length_bytes = 0

    def frames(self, first_seq: int, last_seq: int, *, floor: int, max_bytes: int) -> FrameBundle:
        """Returns these frames up to the first that is absent or finished.

        Args:
            first_seq: The first seq wanted.
            last_seq: The last seq wanted.
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
