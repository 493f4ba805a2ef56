"""The tables and slot files of a wheel, as those see them that change them.

Fills, mending, copies and deletions are all done by one thread at a time, and each ends with
`forget`: tables are read anew. A section is written where its second's entry ends, and counts once
the entry says so.
"""

from collections.abc import Collection, Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Final

from delaywheel.identity import WheelId
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Disk, is_medium_error
from delaywheel.storage.folder.layout import SECONDS_PER_HOUR
from delaywheel.storage.folder.steps import Steps
from delaywheel.storage.frames.format import DamageReason, FrameDamaged
from delaywheel.storage.seconds.section import Sections, decode_section_head, sections_in
from delaywheel.storage.seconds.table import NOTHING, Entry, HourTable

_SECTIONS_A_STEP: Final = 64


class SecondFiles:
    """The files of one wheel's seconds.

    Attributes:
        wheel: The wheel.
    """

    def __init__(self, disk: Disk, folder: Path, wheel: WheelId) -> None:
        self.wheel = wheel
        self._disk = disk
        self._folder = folder
        # Before anything is written: it tells failures of earlier syncs from its own.
        disk.make_folder(layout.slots_folder(folder))
        self._many_files = disk.many_files(layout.slots_folder(folder))
        self._tables: dict[int, HourTable] = {}
        self._names: dict[int, frozenset[str]] = {}  # of slot files, by hour
        self._unsynced_hours: set[int] = set()
        self._is_refused = False  # what a failed sync was about never gets to the medium by itself

    # --- what a second has

    def hours(self) -> list[int]:
        """Returns the hours that have a table or, as a fill has ended in between, files alone."""
        names = self._disk.list_folder(layout.slots_folder(self._folder))
        hours = (layout.hour_of_name(name.removesuffix(".table")) for name in names)
        return sorted({hour for hour in hours if hour is not None})

    def table(self, slot: int) -> HourTable:
        """Returns the table of a second."""
        hour = slot // SECONDS_PER_HOUR
        if hour not in self._tables:
            self._tables[hour] = HourTable(self._disk, self._folder, hour)
        return self._tables[hour]

    def known_entry(self, slot: int, filled: int) -> Entry | None:
        """Returns the entry of a second; None: it cannot be known.

        That is: it is bad, or refused, or zeros though its file has a section of a fill up to
        ``filled``.
        """
        entry = self.table(slot).entry(slot)
        if entry != NOTHING or not self._has_file(slot):
            return entry
        content = self.content(slot)
        if not content:
            return NOTHING if content is not None else None
        try:
            first = decode_section_head(content, 0, wheel=self.wheel, slot=slot)
        except FrameDamaged:
            return NOTHING  # a fill that was not finished
        return None if first.fill <= filled else NOTHING

    def has_unfinished(self, slot: int, entry: Entry, filled: int) -> bool:
        """Whether a second without an entry has a file of a fill beyond ``filled``."""
        is_without = entry == NOTHING and self._has_file(slot)
        return is_without and self.known_entry(slot, filled) == NOTHING

    def _has_file(self, slot: int) -> bool:
        """Whether a second has a file: a look at each would be most of a fill into new ones."""
        hour = slot // SECONDS_PER_HOUR
        if hour not in self._names:
            names = self._disk.list_folder(layout.hour_folder(self._folder, hour))
            self._names[hour] = frozenset(names)
        return layout.slot_name(slot) in self._names[hour]

    def content(self, slot: int) -> bytes | None:
        """Reads a slot file, empty if there is none; None: the medium refuses it."""
        try:
            return read_slot_file(self._disk, self._folder, slot)
        except FrameDamaged:
            return None

    def is_whole(self, slot: int, entry: Entry) -> bool:
        """Whether all that an entry says of can be read."""
        if not entry.length_bytes:
            return True  # also one that was cut back to nothing, which has a fill
        content = self.content(slot)
        return content is not None and self._entry_before(slot, content, entry, entry.fill) == entry

    def cut_back(self, slot: int, entry: Entry, filled: int) -> Entry | None:
        """Puts back the entry of a second as it was after a fill; None: it cannot be known."""
        content = self.content(slot)
        before = None if content is None else self._entry_before(slot, content, entry, filled)
        if before == NOTHING:  # zeros would be doubted once F is beyond what the file has
            before = NOTHING._replace(fill=max(filled, 1))
        if before is not None:
            self.put(slot, before)
        return before

    def _entry_before(self, slot: int, content: bytes, entry: Entry, filled: int) -> Entry | None:
        """Returns the entry that a second had after a fill, from what the file has; None: bad."""
        found = NOTHING
        try:
            for head in sections_in(content, entry.length_bytes, wheel=self.wheel, slot=slot):
                if head.fill > filled:
                    break
                found = found.following(head)
        except FrameDamaged:
            return None
        return found

    # --- changing it

    def put(self, slot: int, entry: Entry) -> None:
        """Says something else of a second, once `write_entries` is called."""
        self.table(slot).put(slot, entry)

    def append(self, sections: Sections, entries: Mapping[int, Entry]) -> Steps[list[int]]:
        """Writes a section to each of these seconds, behind these entries, and syncs them.

        Returns:
            Seconds of which the medium has refused that; not all of them.
        """
        refused: list[int] = []
        slots = sections.slots
        placed = iter(sections.placed([entries[slot].length_bytes for slot in slots]))
        for hour, of_hour in groupby(slots, key=lambda slot: slot // SECONDS_PER_HOUR):
            folder = self._disk.open_folder(layout.hour_folder(self._folder, hour))
            try:
                for number, slot in enumerate(of_hour):
                    content, head = next(placed)
                    file = folder.open(layout.slot_name(slot))
                    try:
                        file.write_at([content], head.offset)
                        self.put(slot, entries[slot].following(head))
                    except OSError as error:
                        refused.append(slot)
                        if not is_medium_error(error) or len(refused) == len(slots):
                            raise
                    finally:
                        file.close()
                    if number % _SECTIONS_A_STEP == _SECTIONS_A_STEP - 1:
                        yield
            finally:
                folder.close()
        self.sync(slots)
        yield
        return refused

    def write_section(self, slot: int, content: bytes, offset: int) -> None:
        """Writes sections to a place of one file, which is made anew if the medium refuses that."""
        path = layout.slot_path(self._folder, slot)
        for is_last in (False, True):
            file = self._disk.open(path, create=True)
            try:
                file.write_at([content], offset)
            except OSError as error:
                if is_last or offset or not is_medium_error(error):
                    raise
                self._disk.delete(path)
            else:
                return
            finally:
                file.close()

    def sync(self, slots: Collection[int]) -> None:
        """Puts slot files on the medium, with their names."""
        paths = [layout.slot_path(self._folder, slot) for slot in slots]
        self._many_files.sync(paths, were_closed=True)
        for path in {path.parent for path in paths}:
            self._disk.sync_folder(path)
        self._disk.sync_folder(layout.slots_folder(self._folder))
        self._disk.sync_folder(self._folder)

    def write_entries(self) -> None:
        """Writes the entries that were put."""
        for hour, table in self._tables.items():
            self._unsynced_hours.add(hour)
            table.write()

    def forget(self) -> None:
        """Forgets tables that were read, and entries that were put and not written."""
        self._tables.clear()
        self._names.clear()

    def sync_tables(self) -> None:
        """Puts the tables of all hours that were looked at on the medium, with their counts."""
        hours = sorted(self._unsynced_hours)
        tables = [HourTable(self._disk, self._folder, hour) for hour in hours]
        tables = [table for table in tables if self._disk.exists(table.path)]
        paths = [table.path for table in tables]
        if self._is_refused:
            for table in tables:
                table.write_again()
        self._is_refused = True
        self._many_files.sync(paths, were_closed=True)
        for table in tables:
            table.count()
            table.write()
        self._many_files.sync(paths, were_closed=True)
        self._disk.sync_folder(layout.slots_folder(self._folder))
        self._is_refused = False
        self._unsynced_hours.difference_update(hours)

    def delete_tables(self, floor: int) -> None:
        """Deletes the tables of hours all of whose seconds are below the floor."""
        for hour in self.hours():
            if (hour + 1) * SECONDS_PER_HOUR <= floor:
                self._disk.delete(layout.seconds_path(self._folder, hour))
                self._unsynced_hours.discard(hour)


def read_slot_file(disk: Disk, folder: Path, slot: int) -> bytes:
    """Reads a slot file, empty if there is none.

    Raises:
        FrameDamaged: The medium refuses it.
        OSError: Not the medium's.
    """
    try:
        return disk.read_file(layout.slot_path(folder, slot))
    except FileNotFoundError:
        return b""
    except OSError as error:
        if not is_medium_error(error):
            raise
        raise FrameDamaged(DamageReason.UNREADABLE, str(error)) from error


def slots_of(hours: Iterable[int], floor: int) -> Iterable[int]:
    """Yields all seconds of these hours from the floor on."""
    for hour in hours:
        yield from range(max(hour * SECONDS_PER_HOUR, floor), (hour + 1) * SECONDS_PER_HOUR)
