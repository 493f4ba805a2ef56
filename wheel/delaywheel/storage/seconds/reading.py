"""Reads a second of a wheel that another thread or process may be writing, without locks.

What it has up to F lies in its slot file, as far as its entry says; what came later, in frames of
the journal. A fill moves rows from these to those: so F is looked at before, and once more after
all was read; if it is another one, the second is read again. A segment of the journal goes only
after that.

The rules are those of docs/JOURNAL.md, 6 and 12.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from delaywheel.identity import WheelId
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Disk
from delaywheel.storage.frames.format import DamageReason, FrameDamaged
from delaywheel.storage.journal.format import JournalFrame
from delaywheel.storage.journal.tail import JournalTail
from delaywheel.storage.seconds.decoding import decode_sections
from delaywheel.storage.seconds.files import read_slot_file
from delaywheel.storage.seconds.rows import PlacedRows
from delaywheel.storage.seconds.saved import load
from delaywheel.storage.seconds.section import SectionHead, decode_section_head, sections_in
from delaywheel.storage.seconds.table import NOTHING, Entry, HourTable


class WheelBounds(NamedTuple):
    """What is announced of a wheel.

    Attributes:
        filled: F.
        end: The seq through which it is held.
    """

    filled: int
    end: int


class SecondDamaged(Exception):
    """A second cannot be read as a whole.

    Attributes:
        slot: The second.
        reason: Why; UNREADABLE and VERSION: it may be whole, and nobody may be told that it lacks
            anything.
    """

    def __init__(self, slot: int, damage: FrameDamaged) -> None:
        super().__init__(f"second {slot}: {damage}")
        self.slot = slot
        self.reason = damage.reason


class SecondFile(NamedTuple):
    """What fills have put into a second, checked and not decoded.

    Attributes:
        content: Its file; who looks for some bytes looks here before anything is decoded.
        heads: The sections that count.
    """

    content: bytes
    heads: Sequence[SectionHead]

    @property
    def messages(self) -> int:
        """How many messages it has."""
        return sum(head.rows - head.names for head in self.heads)

    def rows(self) -> PlacedRows | None:
        """Decodes it; None: there are no rows."""
        return decode_sections(self.content, self.heads) if self.heads else None


class SecondsReader:
    """Reads the seconds of one wheel. For one thread."""

    def __init__(
        self, disk: Disk, folder: Path, wheel: WheelId, bounds: Callable[[], WheelBounds]
    ) -> None:
        """Opens nothing yet.

        Args:
            folder: The wheel's.
            bounds: What is announced now.
        """
        self.wheel = wheel
        self._disk = disk
        self._folder = folder
        self._bounds = bounds
        self._tail = JournalTail(disk, folder, wheel)
        self._known_filled = -1
        self._passed_over: frozenset[int] = frozenset()

    def rows(self, slot: int) -> list[PlacedRows]:
        """Reads all rows of a second: first what is filled, then what is not.

        In each part, and so in both, the rows of each kind are in the order of seqs.

        Raises:
            SecondDamaged: It cannot be read as a whole.
            FrameDamaged: A frame of the journal cannot be read: the end is to be found anew.
            OSError: Not the medium's.
        """
        while True:
            bounds = self._bounds()
            try:
                filled, behind = self.filled(slot, bounds).rows(), self.behind(slot, bounds)
            except (FrameDamaged, SecondDamaged):
                if self._bounds().filled == bounds.filled:
                    raise
                continue  # what was read has moved meanwhile
            if self._bounds().filled == bounds.filled:
                return [part for part in (filled, behind) if part is not None]

    def filled(self, slot: int, bounds: WheelBounds) -> SecondFile:
        """Reads what fills have put into a second; arguments and errors as `rows`."""
        try:
            return self._filled(slot, bounds.filled)
        except FrameDamaged as damage:
            raise SecondDamaged(slot, damage) from damage

    def _filled(self, slot: int, filled: int) -> SecondFile:
        # What was passed over is saved before F is announced, and is mended at any time.
        if filled != self._known_filled or slot in self._passed_over:
            self._passed_over = frozenset(load(self._disk, self._folder).passed_over)
            self._known_filled = filled
            if slot in self._passed_over:
                raise FrameDamaged(DamageReason.UNREADABLE, "a fill has passed it over")
        entry = HourTable(self._disk, self._folder, slot // layout.SECONDS_PER_HOUR).entry(slot)
        if entry is None:
            raise FrameDamaged(DamageReason.UNREADABLE, "its entry")
        return read_file(self._disk, self._folder, self.wheel, slot, entry, filled)

    def behind(self, slot: int, bounds: WheelBounds) -> PlacedRows | None:
        """Reads rows of frames that are not filled; arguments and errors as `rows`."""
        try:
            frames, buffer = self._frames_with(slot, bounds)
        except FrameDamaged:  # it may lie elsewhere by now
            self._tail.close()
            frames, buffer = self._frames_with(slot, bounds)
        rows = PlacedRows.of_frames(frames, buffer)
        if rows is None:
            return None
        chosen = rows.slots == slot
        return rows.take(chosen) if chosen.any() else None

    def _frames_with(self, slot: int, bounds: WheelBounds) -> tuple[list[JournalFrame], bytes]:
        self._tail.follow(bounds.filled, bounds.end)
        return self._tail.frames_with(slot)

    def close(self) -> None:
        """Closes its files."""
        self._tail.close()


def read_file(
    disk: Disk, folder: Path, wheel: WheelId, slot: int, entry: Entry, filled: int
) -> SecondFile:
    """Reads a slot file as far as its entry says, and checks all of it.

    Raises:
        FrameDamaged: It is not whole.
        OSError: Not the medium's.
    """
    content = read_slot_file(disk, folder, slot)
    if entry == NOTHING:
        with suppress(FrameDamaged):  # of a fill that was not finished
            if decode_section_head(content, 0, wheel=wheel, slot=slot).fill <= filled:
                raise SecondDamaged(slot, FrameDamaged(DamageReason.GONE, "its entry"))
        return SecondFile(b"", [])
    heads = list(sections_in(content, entry.length_bytes, wheel=wheel, slot=slot))
    found = NOTHING
    for head in heads:
        found = found.following(head)
    if found._replace(fill=entry.fill) != entry:  # the last one may have been declared lost
        raise FrameDamaged(DamageReason.LENGTHS, "other sections than its entry says")
    return SecondFile(content, [head for head in heads if head.fill <= filled])
