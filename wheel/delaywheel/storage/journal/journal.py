"""A member's journal of one wheel: which frames it holds, and its only writer.

=================  ================================================================================
the frames
=================  ================================================================================
through `end`      held: whole in the journal, or filled into their seconds (F and below)
behind it, aside   whole, behind one that is not. They join when the end reaches them, and go when
                   something else takes their place
beyond `closed_at` cut
=================  ================================================================================

*What changes it.*

=========================  ========================================================================
event                      then
=========================  ========================================================================
`append`                   frames of end + 1 and up are written behind the end, one write a group.
                           What lies aside is kept, if the frames before it fit exactly into the
                           place that is left, as the bytes of a frame are the same everywhere;
                           else it is cut
`look_again`               a reader has found a frame damaged: its segment is read anew, and the
                           end falls in front of it, never below F
`fill_through`             F has grown: by a fill, or by a copy of the seconds, which may be beyond
                           the end
`sync` fails               what was written since the last one is cut
`put_empty`                frames that no member has any more are replaced by empty ones
`cut`                      a closed wheel has nothing beyond T
`forget`                   whole segments at or below a seq go, the oldest first
=========================  ========================================================================

After a crash whatever follows on F is held. If anything lies behind the end, frames that had been
there may be gone: `behind` says so, and whoever opens the journal saves that before it says how far
it holds the wheel. Until the first `append` nothing of it is changed. A frame that the end of the
process tore lies behind the end as well, but was never counted.

The rules are those of docs/JOURNAL.md, 1 and 6 to 9; tests/sim/journal has the model. It is for any
thread; one that appends waits for no sync, no read, and no deletion.
"""

import threading
from bisect import bisect_right
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from delaywheel.identity import WheelId
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Buffer, Disk
from delaywheel.storage.frames.format import DamageReason, FrameDamaged
from delaywheel.storage.journal.checking import WholeFrames
from delaywheel.storage.journal.format import EMPTY, HEADER_LENGTH_BYTES, bare_frame
from delaywheel.storage.journal.segments import NONE, Segment

SEGMENT_LENGTH_BYTES: Final = 64 << 20
"""A file that is as long is followed by another; the last group in it may end behind that."""


class BehindEnd(Enum):
    """What lies behind the end of a journal that was opened."""

    NOTHING = "nothing"
    TORN = "the first part of one frame"
    FRAMES = "frames, or what may have been some"


class Journal:
    """The journal of one wheel.

    Attributes:
        end: The seq through which it holds the wheel.
        filled: F, the seq through which frames are filled into their seconds.
        falls: How often the end has fallen.
        behind: What lay behind the end when it was opened.
    """

    def __init__(self, disk: Disk, folder: Path, wheel: WheelId, *, filled: int = 0) -> None:
        """Opens a journal, or a new one, and finds its end."""
        self._disk = disk
        self._folder = folder
        self._wheel = wheel
        self.filled = self.end = filled
        self.falls = 0
        self._lock = threading.RLock()  # of everything but reading and syncing files
        self._unsynced: dict[Segment, int] = {}  # the last seq that was written to each
        self._has_new_names = False
        self._is_tidy = False
        names = disk.list_folder(layout.journal_folder(folder))
        seqs = sorted(seq for name in names if (seq := layout.journal_segment(name)) is not None)
        self._segments = [Segment(disk, folder, wheel, seq) for seq in seqs]
        damages = [
            segment.look(before)
            for segment, before in zip(self._segments, [*seqs[1:], NONE], strict=False)
        ]
        self._follow()
        self.behind = self._behind(damages[-1] if damages else None)
        # An earlier process may have left them to the kernel.
        lasts = {segment: segment.runs[-1].last_seq for segment in self._segments if segment.runs}
        self._unsynced = {segment: last for segment, last in lasts.items() if last > filled}
        self._synced = filled
        self._has_new_names = bool(lasts)

    def _behind(self, damage: FrameDamaged | None) -> BehindEnd:
        has_more = [segment.end < segment.length_bytes for segment in self._segments]
        if self.greatest > self.end or any(has_more[:-1]):
            return BehindEnd.FRAMES
        if not has_more or not has_more[-1]:
            return BehindEnd.NOTHING
        is_torn = damage is not None and damage.reason is DamageReason.SHORT
        return BehindEnd.TORN if is_torn else BehindEnd.FRAMES

    @property
    def greatest(self) -> int:
        """The greatest seq that is whole here, whatever is missing in front of it."""
        return max([self.end, *(s.runs[-1].last_seq for s in self._segments if s.runs)])

    @property
    def first_seq(self) -> int:
        """The first seq that `read` may find; beyond the end if there is none."""
        return next((s.runs[0].first_seq for s in self._segments if s.runs), self.end + 1)

    @property
    def length_bytes(self) -> int:
        """The length of all its files."""
        return sum(segment.length_bytes for segment in self._segments)

    def has(self, seq: int) -> bool:
        """Whether `read` finds a frame, held or aside."""
        return self._segment_of(seq) is not None

    # --- growing

    def records(self, first_seq: int, last_seq: int) -> list[int]:
        """Returns the seqs of fill records between two."""
        with self._lock:
            seqs = [seq for segment in self._segments for seq in segment.records]
        return [seq for seq in seqs if first_seq <= seq <= last_seq]

    def append(self, content: Buffer, edges: list[int]) -> None:
        """Appends frames that were checked, of which the first has the seq ``end + 1``.

        Args:
            content: Their bytes.
            edges: Where each begins in it, and where the last one ends.

        Raises:
            OSError: What was written of them is not held.
        """
        with self._lock:
            self._append(content, edges)

    def _append(self, content: Buffer, edges: list[int]) -> None:
        self._tidy()
        first_seq = self.end + 1
        while (done := self.end + 1 - first_seq) < len(edges) - 1:
            place = self._place()
            part = edges[done : done + place.frames + 1]
            if not place.fits(part):
                self._cut(place.segment, place.at)
                continue
            self._unsynced[place.segment] = self.end + len(part) - 1
            place.segment.write(content, part, self.end + 1, place.at)
            self._follow()

    def put_empty(self, last_seq: int) -> None:
        """Puts empty frames in place of those behind the end that no member has any more."""
        with self._lock:
            self._put_empty(last_seq)

    def _put_empty(self, last_seq: int) -> None:
        self._tidy()
        while self.end < last_seq:
            place = self._place()
            frames = min(place.frames, last_seq - self.end)
            edges = [number * HEADER_LENGTH_BYTES for number in range(frames + 1)]
            if place.room is not None and frames == place.frames:
                edges[-1] = max(edges[-1], place.room)
            parts = [
                bare_frame(
                    EMPTY, wheel=self._wheel, seq=seq, accepted_at_ms=0, length_bytes=end - begin
                )
                for seq, (begin, end) in enumerate(pairwise(edges), self.end + 1)
            ]
            self._append(b"".join(parts), edges)

    def fill_through(self, filled: int, *, falls: int | None = None) -> None:
        """Notes that all frames up to a seq are filled into their seconds, held here or not.

        Args:
            falls: How often the end had fallen when they were read; None: it does not matter.

        Raises:
            FrameDamaged: It has fallen since, and they may have been declared lost.
        """
        with self._lock:
            if falls not in {None, self.falls}:
                raise FrameDamaged(DamageReason.GONE, "the end has fallen")
            self.filled = filled
            self.end = max(self.end, filled)
            self._follow()

    def _follow(self) -> None:
        """Moves the end over whole frames that follow on it."""
        last = self._segments[-1:]
        if last and last[0].runs and last[0].runs[-1].last_seq == self.end:
            return
        for segment in self._segments:
            for run in segment.runs:
                if run.first_seq > self.end + 1:
                    return
                self.end = max(self.end, run.last_seq)

    def _place(self) -> "_Place":
        """Returns where the next frame goes; begins a segment if need be."""
        seq = self.end + 1
        number = self._number_of(seq)
        segment = self._segments[number] if number >= 0 else None
        later = self._begin_behind(number)
        if segment is None or not (seq == segment.first_seq or segment.has(self.end)):
            if segment is not None and segment.runs and segment.runs[-1].last_seq >= seq:
                segment.cut(segment.end_before(seq))  # nothing says where between they begin
            return _Place(self._begin(seq, number + 1), 0, later - seq, None)
        at = 0 if seq == segment.first_seq else segment.place_behind(self.end)
        run = next((run for run in segment.runs if run.begin >= at), None)
        if run is not None:
            return _Place(segment, at, run.first_seq - seq, run.begin - at)
        if at >= SEGMENT_LENGTH_BYTES:
            return _Place(self._begin(seq, number + 1), 0, later - seq, None)
        return _Place(segment, at, later - seq, None)

    def _begin(self, seq: int, number: int) -> Segment:
        segment = Segment(self._disk, self._folder, self._wheel, seq)
        self._has_new_names = True
        self._segments.insert(number, segment)
        return segment

    # --- falling and forgetting

    def look_again(self, seq: int) -> None:
        """Finds the end anew, as a frame was read that is not whole any more."""
        with self._lock:
            number, before = self._number_of(seq), self.end
            if number >= 0:
                self._segments[number].look(self._begin_behind(number))
            self.end = self.filled
            self._follow()
            self.falls += self.end < before

    def cut(self, closed_at: int) -> None:
        """Cuts what lies behind the end of a closed wheel."""
        with self._lock:
            self._tidy()
            for segment in self._segments:
                if segment.runs and segment.runs[-1].last_seq > closed_at:
                    self._cut(segment, segment.end_before(closed_at + 1))
                    break
            self.end = min(self.end, closed_at)

    def _cut(self, segment: Segment, at: int) -> None:
        """Cuts a segment where a frame ends, and all segments behind it."""
        number = self._segments.index(segment)
        while len(self._segments) > number + 1:
            self._delete(self._segments[-1])
        segment.cut(at)

    def _tidy(self) -> None:
        """Cuts what is no frame at the ends of segments: what is written there may be shorter."""
        if self._is_tidy:
            return
        for segment in list(self._segments):
            if not segment.runs:
                self._delete(segment)
            elif segment.end < segment.length_bytes:
                segment.cut(segment.end)
        self._is_tidy = True

    def forget(self, seq: int) -> None:
        """Deletes segments that have no frame behind a seq, the oldest first.

        Raises:
            OSError: One cannot be deleted; it is forgotten all the same.
        """
        while True:
            with self._lock:
                is_needed = len(self._segments) < 2 or self._segments[1].first_seq > seq + 1
                if is_needed or self._segments[0] in self._unsynced:
                    return
                segment = self._segments.pop(0)
            segment.close()
            self._disk.delete(segment.path)

    def _delete(self, segment: Segment) -> None:
        self._unsynced.pop(segment, None)
        self._segments.remove(segment)
        segment.close()
        self._disk.delete(segment.path)

    # --- reading and syncing

    def read(self, seq: int, most_bytes: int) -> tuple[bytes, WholeFrames]:
        """Reads whole frames, and checks them: from one that is held or aside on, one at least.

        Raises:
            FrameDamaged: It is not there, or not whole any more: `look_again`.
            OSError: The medium, among others.
        """
        with self._lock:
            segment = self._segment_of(seq)
            if segment is None:
                raise FrameDamaged(DamageReason.GONE, f"seq {seq}")
            at, end = segment.place(seq)
        return segment.read(seq, at, end, most_bytes)

    def sync(self) -> int:
        """Returns the seq through which all that is held in the journal is on the medium.

        Raises:
            OSError: What the medium has of what was written since the last sync is not known: the
                end has fallen to that.
        """
        with self._lock:
            end, falls = self.end, self.falls
            unsynced, has_new_names = dict(self._unsynced), self._has_new_names
            self._has_new_names = False
        try:
            for segment in unsynced:
                segment.sync()
            if has_new_names:
                self._disk.sync_folder(layout.journal_folder(self._folder))
                self._disk.sync_folder(self._folder)
        except OSError:
            self._fall()
            raise
        with self._lock:
            if falls != self.falls:
                return min(end, self.end)
            self._synced = max(self._synced, end)
            for segment, last_seq in unsynced.items():
                if self._unsynced.get(segment) == last_seq:
                    del self._unsynced[segment]
        return end

    def _fall(self) -> None:
        """Cuts what is not known to be on the medium: it can be read, and may never get there."""
        with self._lock:
            self._has_new_names = True
            last_seq = max(self._synced, self.filled)
            for segment in self._segments:
                if segment.runs and segment.runs[-1].last_seq > last_seq:
                    self._cut(segment, segment.end_before(last_seq + 1))
                    break
            self.falls += self.end > last_seq
            self.end = min(self.end, last_seq)

    def close(self) -> None:
        """Closes all files."""
        for segment in self._segments:
            segment.close()

    def _segment_of(self, seq: int) -> Segment | None:
        number = self._number_of(seq)
        return self._segments[number] if number >= 0 and self._segments[number].has(seq) else None

    def _number_of(self, seq: int) -> int:
        """Returns which segment has a seq, if any has; -1: none."""
        return bisect_right(self._segments, seq, key=lambda each: each.first_seq) - 1

    def _begin_behind(self, number: int) -> int:
        """Returns the seq for which the next segment was begun."""
        behind = self._segments[number + 1 : number + 2]
        return behind[0].first_seq if behind else NONE


class _Place(NamedTuple):
    """Where the next frame goes.

    Attributes:
        frames: How many frames are missing there, before others that are whole.
        room: How many bytes there are for these; None: nothing lies behind in the file.
    """

    segment: Segment
    at: int
    frames: int
    room: int | None

    def fits(self, edges: list[int]) -> bool:
        """Whether frames between these edges, all or the first of the missing ones, fit."""
        if self.room is None:
            return True
        frames, length = len(edges) - 1, edges[-1] - edges[0]
        if frames == self.frames:
            return length == self.room
        return length + (self.frames - frames) * HEADER_LENGTH_BYTES <= self.room
