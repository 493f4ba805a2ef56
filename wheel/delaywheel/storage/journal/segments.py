"""The files of a journal: which frames are whole in each, and where.

A segment is a file that is named after the first seq for which it was begun. Its frames lie one
behind another; behind what is damaged, whole frames make a further run. What is known of a segment
is read from its bytes when it is opened, and again when a frame in it turns out to be damaged.

Where a frame lies is noted for one in 64 KiB, as in Kafka's offset index; from there to the others
frames are walked.
"""

import threading
from bisect import bisect_right, insort
from pathlib import Path
from typing import Final, NamedTuple

from delaywheel.identity import WheelId
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Buffer, Disk, is_medium_error
from delaywheel.storage.frames.format import DamageReason, FrameDamaged
from delaywheel.storage.journal.checking import WholeFrames, whole_frames
from delaywheel.storage.journal.format import FILL, MAGIC, decode_head, has_body, kind_at, length_at

_NOTED_EVERY_BYTES: Final = 64 << 10
_PAGE_LENGTH_BYTES: Final = 4096  # what a medium refuses to return
_BEHIND_ALL: Final = 1 << 63
NONE: Final = 1 << 62  # above all seqs


class FrameRun(NamedTuple):
    """Whole frames in a row.

    Attributes:
        begin: Where the first one begins in its file.
        end: Where the last one ends.
    """

    first_seq: int
    last_seq: int
    begin: int
    end: int


class Segment:
    """One file of a journal.

    Attributes:
        first_seq: The seq that its name says.
        runs: Its whole frames, ascending.
        records: The seqs of those of them that are fill records, ascending.
    """

    def __init__(self, disk: Disk, folder: Path, wheel: WheelId, first_seq: int) -> None:
        """Opens the file, made if it is missing; nothing is known of it before `look`."""
        self.path = layout.journal_path(folder, first_seq)
        self.first_seq = first_seq
        self.runs: list[FrameRun] = []
        self.records: list[int] = []
        self._noted: list[tuple[int, int]] = []  # seq and place
        self._wheel = wheel
        self._file = disk.open(self.path, create=True)
        self._lock = threading.Lock()  # so that nobody reads from a descriptor that is closed
        self._is_closed = False

    @property
    def end(self) -> int:
        """Where its last whole frame ends."""
        return self.runs[-1].end if self.runs else 0

    @property
    def length_bytes(self) -> int:
        """The length of its file."""
        return self._file.size()

    def look(self, before: int = NONE) -> FrameDamaged | None:
        """Finds all whole frames anew; returns what is wrong behind the last one, if anything.

        Args:
            before: The seq for which the next segment was begun: what lies here of that or a later
                one was cut, and a crash of the machine has undone it.
        """
        self.runs, self.records, self._noted = [], [], []
        content = self._content()
        begin: tuple[int, int] | None = 0, self.first_seq
        damage = None
        while begin is not None:
            at, seq = begin
            found = whole_frames(content, wheel=self._wheel, first_seq=seq, begin=at)
            self._note(content, found.edges[: max(before - seq, 0) + 1], seq)
            damage = found.damage
            begin = _next_whole(content, found.edges[-1], self._wheel, seq + len(found))
        return damage

    def _content(self) -> bytes:
        """Reads the file; what the medium refuses to return is zeros."""
        length = self._file.size()
        try:
            return self._file.read_at(length, 0)
        except OSError as error:
            if not is_medium_error(error):
                raise
        pages = range(0, length, _PAGE_LENGTH_BYTES)
        return b"".join(self._page(at, min(_PAGE_LENGTH_BYTES, length - at)) for at in pages)

    def _page(self, at: int, length: int) -> bytes:
        try:
            return self._file.read_at(length, at)
        except OSError as error:
            if not is_medium_error(error):
                raise
        return bytes(length)

    def write(self, content: Buffer, edges: list[int], seq: int, at: int) -> None:
        """Writes whole frames, of which the first has ``seq``, to a place where none lies."""
        begin = edges[0]
        self._file.write_at([memoryview(content)[begin : edges[-1]]], at)
        self._note(content, edges, seq, at - begin)

    def _note(self, content: Buffer, edges: list[int], seq: int, distance: int = 0) -> None:
        """Notes that whole frames lie between these edges of the content.

        Args:
            distance: Of a byte's place in the file from that in the content.
        """
        if len(edges) < 2:
            return
        kinds = [kind_at(content, edge) for edge in edges[:-1]]
        records = [each for each, kind in enumerate(kinds, seq) if kind == FILL]
        self.records = sorted({*self.records, *records}) if records else self.records
        edges = [edge + distance for edge in edges]
        insort(self.runs, FrameRun(seq, seq + len(edges) - 2, edges[0], edges[-1]))
        joined = self.runs[:1]
        for run in self.runs[1:]:
            before = joined[-1]
            if (before.end, before.last_seq + 1) == (run.begin, run.first_seq):
                joined[-1] = before._replace(last_seq=run.last_seq, end=run.end)
            else:
                joined.append(run)
        self.runs = joined
        number = bisect_right(self._noted, (seq, 0))
        last = self._noted[number - 1][1] if number else -_NOTED_EVERY_BYTES
        last = max(last, self._run_of(seq).begin - _NOTED_EVERY_BYTES)
        for each, place in enumerate(edges[:-1], seq):
            if place >= last + _NOTED_EVERY_BYTES:
                insort(self._noted, (each, place))
                last = place

    def has(self, seq: int) -> bool:
        """Whether a frame is noted as whole."""
        return any(run.first_seq <= seq <= run.last_seq for run in self.runs)

    def _run_of(self, seq: int) -> FrameRun:
        return next(run for run in self.runs if run.first_seq <= seq <= run.last_seq)

    def place_behind(self, seq: int) -> int:
        """Returns where a frame that is noted as whole ends."""
        run = self._run_of(seq)
        return run.end if seq == run.last_seq else self._place_of(seq + 1)

    def _place_of(self, seq: int) -> int:
        known, at = self._noted[bisect_right(self._noted, (seq, _BEHIND_ALL)) - 1]
        content = self._file.read_at(_NOTED_EVERY_BYTES, at) if known < seq else b""
        place = 0
        for _ in range(seq - known):
            place += length_at(content, place)
        return at + place

    def place(self, seq: int) -> tuple[int, int]:
        """Returns where a frame that is noted as whole begins, and where its run ends."""
        return self._place_of(seq), self._run_of(seq).end

    def read(self, seq: int, at: int, end: int, most_bytes: int) -> tuple[bytes, WholeFrames]:
        """Reads frames between two places, of which the first has ``seq``, and checks them.

        One at least, however long it is.

        Raises:
            FrameDamaged: The first of them is not whole any more.
            OSError: The medium, among others.
        """
        length = most_bytes
        while True:
            length = min(length, end - at)
            with self._lock:
                if self._is_closed:
                    raise FrameDamaged(DamageReason.GONE, f"seq {seq}")
                content = self._file.read_at(length, at)
            found = whole_frames(content, wheel=self._wheel, first_seq=seq)
            if len(found):
                return content, found
            damage = found.damage or FrameDamaged(DamageReason.GONE)
            if damage.reason is not DamageReason.SHORT or at + length >= end:
                raise damage
            length *= 2  # a frame that is longer than what was asked for

    def end_before(self, seq: int) -> int:
        """Returns where the last whole frame before a seq ends; 0 if there is none."""
        before = [run for run in self.runs if run.first_seq < seq]
        return self.place_behind(min(before[-1].last_seq, seq - 1)) if before else 0

    def cut(self, at: int) -> None:
        """Cuts the file where a frame ends."""
        self._file.truncate(at)
        self.look()

    def sync(self) -> None:
        """Returns when it is on the medium."""
        self._file.sync_data()

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._is_closed = True
            self._file.close()


def _next_whole(content: bytes, at: int, wheel: WheelId, seq: int) -> tuple[int, int] | None:
    """Finds the next whole frame with this seq or a later one: its place and seq."""
    while (at := content.find(MAGIC, at)) >= 0:
        try:
            head = None if at % 8 else decode_head(content, at, wheel=wheel)
        except FrameDamaged:
            head = None
        if head is not None and head.seq >= seq and has_body(head, content, at):
            return at, head.seq
        at += 1
    return None
