"""One wheel as a member stores it: its journal, its seconds, and what it has saved of them.

=====================================  ============================================================
which thread                           does what
=====================================  ============================================================
the one that answers                   `append`, `record_fill`, `take`, `acknowledged`, `close_at`;
                                       `journal.put_empty`, `journal.look_again`: all that changes
                                       the journal
another, one thing at a time           `fill`, `mend`, `checkpoint`, the floor, deletions, copies
                                       that come: all that changes seconds
any                                    `journal.sync`, `journal.read`, `reader`, `note_damaged`;
                                       for others that copy: `pinned`, `files.hours`, `entries`
=====================================  ============================================================

A start reads what was saved and the journal; nothing else. Fills that count and were not carried
out follow, as ever.

The rules are those of docs/JOURNAL.md; the model is tests/sim/journal.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from delaywheel.identity import WheelId
from delaywheel.storage.files.slot_files import delete_slots_below
from delaywheel.storage.files.undeletable import Undeletable
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Disk
from delaywheel.storage.folder.layout import SECONDS_PER_HOUR
from delaywheel.storage.folder.steps import Steps
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.journal.checking import WholeFrames, whole_frames
from delaywheel.storage.journal.encode import EncodedFrames, encode_frames
from delaywheel.storage.journal.format import FILL, HEADER_LENGTH_BYTES, bare_frame
from delaywheel.storage.journal.journal import Journal
from delaywheel.storage.seconds import saved
from delaywheel.storage.seconds.files import SecondFiles
from delaywheel.storage.seconds.filling import Filler
from delaywheel.storage.seconds.reading import SecondsReader, WheelBounds
from delaywheel.storage.seconds.saved import SavedSeconds
from delaywheel.storage.seconds.table import Entry, HourTable

FILL_BYTES: Final = 64 << 20
"""The origin of a wheel records a fill when so much is not filled, at the latest."""


class JournalWheel:
    """A wheel.

    Attributes:
        wheel: Its name.
        journal: Its frames that are not forgotten.
        files: Its seconds; see copying.py for what comes from other members, or goes there.
        floor: Seconds below are finished.
        damaged: Seconds that a fill has passed over, or that were found damaged; each with F before
            that.
        unrecorded_bytes: What was appended here and no fill was recorded of.
    """

    def __init__(self, disk: Disk, folder: Path, wheel: WheelId) -> None:
        """Opens a wheel, or a new one, in an existing folder.

        Raises:
            SavedDamaged: It is not known what the folder holds.
            OSError: The medium among others.
        """
        known = _loaded(disk, folder)
        self.wheel = wheel
        self.floor = known.floor
        self.damaged = dict(known.passed_over)
        self.unrecorded_bytes = 0
        self._disk = disk
        self._folder = folder
        self._saved = known
        self._acknowledged = 0
        self._closed_at: int | None = None
        self._pins: list[object] = []
        self.journal = Journal(disk, folder, wheel, filled=known.filled)
        self.files = SecondFiles(disk, folder, wheel)
        self._filler = Filler(self.files, self.journal, self._save_passed_over)

    @property
    def end(self) -> int:
        """The seq through which it is held."""
        return self.journal.end

    @property
    def bounds(self) -> WheelBounds:
        """What readers may be told."""
        return WheelBounds(self.journal.filled, self.journal.end)

    def reader(self) -> SecondsReader:
        """Returns a reader of its seconds, for one thread."""
        return SecondsReader(self._disk, self._folder, self.wheel, lambda: self.bounds)

    # --- the thread that answers

    def append(
        self,
        columns: Columns,
        *,
        kind: Kind,
        accepted_at_ms: int,
        max_frame_messages: int,
        max_frame_bytes: int,
    ) -> EncodedFrames:
        """Writes one group of at least one row, as the wheel's origin.

        Raises:
            ValueError: No frame can hold it; nothing was written.
            OSError: What was written of it is not held.
        """
        group = encode_frames(
            columns,
            kind=kind,
            wheel=self.wheel,
            first_seq=self.end + 1,
            accepted_at_ms=accepted_at_ms,
            max_frame_messages=max_frame_messages,
            max_frame_bytes=max_frame_bytes,
        )
        self.journal.append(group.content, group.edges)
        self.unrecorded_bytes += len(group.content)
        return group

    def record_fill(self, accepted_at_ms: int) -> bytes:
        """Writes a fill record, as the wheel's origin; returns the frame."""
        frame = bare_frame(
            FILL,
            wheel=self.wheel,
            seq=self.end + 1,
            accepted_at_ms=accepted_at_ms,
            length_bytes=HEADER_LENGTH_BYTES,
        )
        self.journal.append(frame, [0, len(frame)])
        self.unrecorded_bytes = 0
        return frame

    def take(self, content: bytes) -> WholeFrames:
        """Appends frames from another member; returns those that follow on the end, and are held.

        Raises:
            OSError: What was written of them is not held.
        """
        found = whole_frames(content, wheel=self.wheel, first_seq=self.end + 1)
        if len(found):
            self.journal.append(content, found.edges)
        return found

    def acknowledged(self, seq: int) -> None:
        """Notes a high watermark: fills whose record it covers count."""
        self._acknowledged = max(self._acknowledged, seq)

    def close_at(self, closed_at: int) -> None:
        """Notes the end of the wheel: what lies beyond is cut, and it counts as a record."""
        self._closed_at = closed_at
        self.journal.cut(closed_at)

    # --- the thread behind

    def next_fill(self) -> int | None:
        """Returns the record of the next fill that counts and can be carried out."""
        closed_at, filled = self._closed_at, self.journal.filled
        known = self._acknowledged if closed_at is None else closed_at
        for seq in self.journal.records(filled + 1, min(known, self.end)):
            return seq
        is_last = closed_at is not None and filled < closed_at <= self.end
        return closed_at if is_last else None

    def fill(self, record: int) -> Steps[None]:
        """Carries out the next fill.

        Raises:
            FrameDamaged: A frame cannot be read: `look_again`. Nothing is filled.
            OSError: The medium, or no room among others. Nothing is filled.
        """
        yield from self._filler.fill(record, floor=self.floor, passed_over=self.damaged)

    def note_damaged(self, slot: int) -> None:
        """Notes that a second was found damaged, with all that its table has lost with it."""
        table = HourTable(self._disk, self._folder, slot // SECONDS_PER_HOUR)
        found = [each for each in {slot, *table.unknown_beside(slot)} if each not in self.damaged]
        self._save_passed_over(dict.fromkeys(found, self.journal.filled))

    def _save_passed_over(self, slots: dict[int, int]) -> None:
        new = {slot: before for slot, before in slots.items() if slot >= self.floor}
        if new:
            self.damaged |= new
            self._save(self._saved.filled)

    def _save(self, filled: int) -> None:
        known = SavedSeconds(filled, self.floor, dict(self.damaged))
        if known != self._saved:
            saved.save(self._disk, self._folder, known)
            self._saved = known

    def mend(self) -> Steps[bool]:
        """Makes damaged seconds whole from the journal; returns whether none is left.

        Raises:
            FrameDamaged: That cannot be read: they are copied from others.
            OSError: The medium among others.
        """
        mended = yield from self._filler.mend(self.damaged)
        self._are_whole(mended)
        return not self.damaged

    def _are_whole(self, slots: Sequence[int]) -> None:
        if slots:
            self.files.sync_tables()
            for slot in slots:
                self.damaged.pop(slot, None)
            self._save(self._saved.filled)

    def checkpoint(self, before_forgetting: Callable[[int, int], object]) -> None:
        """Saves F, and forgets frames up to it, unless they are needed.

        Args:
            before_forgetting: Is given the first and the last seq of frames that may go: the
                ledger notes those that it has not published.
        """
        filled = self.journal.filled
        self.files.sync_tables()
        self._save(filled)
        if not self.damaged and not self._pins and self.journal.first_seq <= filled:
            before_forgetting(self.journal.first_seq, filled)
            self.journal.forget(filled)

    def raise_floor(self, floor: int) -> None:
        """Raises the floor, which is saved before anything is deleted."""
        if floor > self.floor:
            self.floor = floor
            self.damaged = {slot: at for slot, at in self.damaged.items() if slot >= floor}
            self._save(self._saved.filled)

    def delete_finished(self, undeletable: Undeletable) -> Iterator[int]:
        """Deletes files of seconds below the floor, one by one; yields each second."""
        yield from delete_slots_below(self._disk, self._folder, self._saved.floor, undeletable)
        self.files.delete_tables(self._saved.floor)

    # --- copies; the same thread

    @contextmanager
    def pinned(self) -> Iterator[int]:
        """Keeps the frames behind G, which is returned, while another member copies files."""
        pin = object()
        self._pins.append(pin)
        try:
            yield self._saved.filled
        finally:
            self._pins.remove(pin)

    def entries(self, hour: int) -> list[tuple[int, Entry | None]]:
        """Returns what the table of an hour says of the seconds that another may copy."""
        table = HourTable(self._disk, self._folder, hour)  # not one that a fill is changing
        return [(slot, None if slot in self.damaged else entry) for slot, entry in table.entries()]

    def wanted(
        self, theirs: Sequence[tuple[int, Entry | None]], filled: int
    ) -> list[tuple[int, Entry | None]]:
        """Returns what this member lacks of another's seconds, by its own floor.

        Args:
            theirs: What the other's table of an hour says; None: it has the second damaged.
            filled: What it had filled when the copy began.
        """
        found = []
        for slot, entry in theirs:
            mine = HourTable(self._disk, self._folder, slot // SECONDS_PER_HOUR).entry(slot)
            through = filled if entry is None else entry.fill
            is_behind = slot in self.damaged or mine is None or mine.fill < through
            if slot >= self.floor and is_behind:
                found.append((slot, entry))
        return found

    def was_copied(self, slots: Sequence[int]) -> None:
        """Notes that copies of these seconds are finished."""
        self._are_whole(slots)

    def copied_through(self, filled: int, damaged: Sequence[int], *, floor: int) -> bool:
        """Ends a copy of all seconds: they have all that the sender had filled when it began.

        Args:
            filled: G.
            damaged: Seconds of those that are wanted that the sender had damaged.
            floor: The sender's at the end of the copy.

        Returns:
            Whether it is ended: what the sender has deleted must be finished here as well, and
            nothing may be filled beyond the wheel's end.
        """
        if floor > self.floor or filled > (self._closed_at or filled):
            return False
        if filled > self.journal.filled:
            self.files.sync_tables()
            self.damaged |= dict.fromkeys(damaged, 0)
            self._save(filled)
            self.journal.fill_through(filled)
        return True

    def close(self) -> None:
        """Closes all files."""
        self.journal.close()


def _loaded(disk: Disk, folder: Path) -> SavedSeconds:
    try:
        return saved.load(disk, folder)
    except FileNotFoundError as error:
        if disk.exists(layout.slots_folder(folder)) or disk.exists(layout.journal_folder(folder)):
            raise saved.SavedDamaged(f"{folder} has lost its checkpoint") from error
    new = SavedSeconds()
    saved.save(disk, folder, new)
    return new
