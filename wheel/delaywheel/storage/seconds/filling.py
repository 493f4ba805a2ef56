"""A fill: rows of the journal's frames are appended to the slot files of their seconds.

The order, and what has happened if the process or the machine ends behind a step:

======================================  ===========================================================
step                                    until then
======================================  ===========================================================
1. the journal is synced through the    nothing is filled that a crash may take back
   fill's record
2. sections are written, each where     no entry says of them: they are written again, the same
   its entry ends
3. they are synced, with their names    as above
4. entries are written                  a part of the seconds has this fill: it is skipped when the
                                        fill is carried out again
5. F is announced                       `fill_through`; nobody reads these sections before
6. later: tables are synced, counted,   a crash of the machine finds F as it was saved, with entries
   and F is saved                       that may be ahead of it: they have this fill, or are cut
                                        back if the fill has other bounds now
======================================  ===========================================================

A second is **passed over** if what its entry says cannot be known: the entry is bad, refused, or
zeros although its file has a section of a fill up to F. Its rows stay in the journal (no segment
goes while a second is passed over). A fill ends without a trace if a frame cannot be read: the end
falls, and what was to be filled is fetched again.

The rules are those of docs/JOURNAL.md, 4 to 6.
"""

from collections.abc import Collection
from itertools import groupby
from pathlib import Path
from typing import Final

import numpy as np

from delaywheel.identity import WheelId
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Disk, Folder, is_medium_error
from delaywheel.storage.folder.layout import SECONDS_PER_HOUR
from delaywheel.storage.folder.steps import Steps
from delaywheel.storage.frames.format import FrameDamaged
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.journal.format import EMPTY, JournalFrame, decode_frame
from delaywheel.storage.journal.journal import Journal
from delaywheel.storage.seconds.rows import FilledRows
from delaywheel.storage.seconds.section import (
    SectionHead,
    Sections,
    decode_rows,
    decode_section_head,
    encode_sections,
)
from delaywheel.storage.seconds.table import NOTHING, Entry, HourTable

_READ_BYTES: Final = 8 << 20
_SECTIONS_A_STEP: Final = 64


class Filler:
    """Fills the seconds of one wheel. One thread at a time."""

    def __init__(self, disk: Disk, folder: Path, wheel: WheelId, journal: Journal) -> None:
        self._disk = disk
        self._folder = folder
        self._wheel = wheel
        self._journal = journal
        # Before anything is written: it tells failures of earlier syncs from its own.
        disk.make_folder(layout.slots_folder(folder))
        self._many_files = disk.many_files(layout.slots_folder(folder))
        self._tables: dict[int, HourTable] = {}
        self._entries: dict[int, Entry] = {}  # of the seconds that the fill is appended to

    def fill(self, record: int, *, floor: int, passed_over: dict[int, int]) -> Steps[None]:
        """Carries out the fill with this record, and announces it.

        Args:
            record: The seq of the fill record, or the end of a closed wheel.
            floor: The first second that is not finished.
            passed_over: Seconds that were passed over, each with F before that; more may come.

        Raises:
            FrameDamaged: A frame cannot be read; nothing has changed that is read.
            OSError: The medium among others; nothing has changed that is read.
        """
        self._journal.sync()
        before = self._journal.filled
        try:
            frames, buffer = yield from self._frames(before + 1, record)
            if any(frame.kind == EMPTY for frame in frames):
                self._cut_all_back(before, floor)
            rows = FilledRows.of_frames(frames, buffer)
            if rows is not None:
                rows = self._to_fill(rows, before, record, floor, passed_over)
            if rows is not None:
                sections = encode_sections(rows, wheel=self._wheel, fill=record)
                yield from self._write(sections, record)
            for table in self._tables.values():
                table.write()
        finally:
            self._tables.clear()
        self._journal.fill_through(record)

    def _frames(self, first_seq: int, last_seq: int) -> Steps[tuple[list[JournalFrame], bytes]]:
        """Reads all frames between two seqs, and their bytes."""
        parts: list[bytes] = []
        seq = first_seq
        while seq <= last_seq:
            content, found = self._journal.read(seq, _READ_BYTES)
            count = min(len(found), last_seq + 1 - seq)
            parts.append(content[: found.edges[count]])
            seq += count
            yield
        buffer = parts[0] if len(parts) == 1 else b"".join(parts)
        frames: list[JournalFrame] = []
        at = 0
        for number in range(first_seq, last_seq + 1):
            frames.append(decode_frame(buffer, at, wheel=self._wheel, seq=number))
            at += frames[-1].length_bytes
        return frames, buffer

    def _cut_all_back(self, before: int, floor: int) -> None:
        """Cuts back all seconds to the fill ``before``, as a frame was lost that they may have."""
        for name in self._disk.list_folder(layout.slots_folder(self._folder)):
            hour = layout.hour_of_name(name.removesuffix(".table"))
            if hour is None or not name.endswith(".table"):
                continue
            first = hour * SECONDS_PER_HOUR
            for slot in range(max(first, floor), first + SECONDS_PER_HOUR):
                entry = self._table(slot).entry(slot)
                if entry is not None and entry.fill > before:
                    self._cut_back(slot, entry, before)

    def _to_fill(
        self, rows: FilledRows, before: int, record: int, floor: int, passed_over: dict[int, int]
    ) -> FilledRows | None:
        """Returns the rows of seconds that this fill is to be appended to; None: there are none."""
        slots = np.unique(rows.slots)
        slots = slots[slots >= floor]
        self._entries.clear()
        for slot in slots.tolist():
            if slot in passed_over:
                continue
            entry = self._known_entry(slot, before)
            if entry is not None and before < entry.fill < record:
                entry = self._cut_back(slot, entry, before)
            if entry is None:
                passed_over[slot] = before
            elif entry.fill < record:  # else it is done, before a crash
                self._entries[slot] = entry
        if not self._entries:
            return None
        if len(self._entries) == len(slots) and int(rows.slots[0]) >= floor:
            return rows
        return rows.of_slots(np.isin(rows.slots, list(self._entries)))

    def _table(self, slot: int) -> HourTable:
        hour = slot // SECONDS_PER_HOUR
        table = self._tables.get(hour)
        if table is None:
            table = self._tables[hour] = HourTable(self._disk, self._folder, hour)
        return table

    def _known_entry(self, slot: int, before: int) -> Entry | None:
        """Returns the entry of a second; None: it cannot be known."""
        entry = self._table(slot).entry(slot)
        if entry != NOTHING:
            return entry
        content = self._content(slot)
        if not content:
            return NOTHING if content is not None else None
        try:
            first = decode_section_head(content, 0, wheel=self._wheel, slot=slot)
        except FrameDamaged:
            return NOTHING  # a fill that was not finished
        return None if first.fill <= before else NOTHING

    def _content(self, slot: int) -> bytes | None:
        """Reads a slot file, empty if there is none; None: the medium refuses it."""
        try:
            return self._disk.read_file(layout.slot_path(self._folder, slot))
        except FileNotFoundError:
            return b""
        except OSError as error:
            if not is_medium_error(error):
                raise
        return None

    def _cut_back(self, slot: int, entry: Entry, before: int) -> Entry | None:
        """Puts back the entry of a second as it was after the fill ``before``."""
        content = self._content(slot)
        if content is None:
            return None
        found = NOTHING
        try:
            while found.length_bytes < entry.length_bytes:
                head = decode_section_head(
                    content, found.length_bytes, wheel=self._wheel, slot=slot
                )
                if head.fill > before:
                    break
                found = _following(found, decode_rows(content, head), head)
        except FrameDamaged:
            return None
        self._table(slot).put(slot, found)
        return found

    def _write(self, sections: Sections, record: int) -> Steps[None]:
        slots = sections.slots.tolist()
        entries = [self._entries[slot] for slot in slots]
        offsets = np.array([entry.length_bytes for entry in entries], np.int64)
        placed = iter(sections.placed(offsets))
        counts = zip(
            sections.messages.tolist(),
            sections.names.tolist(),
            sections.releases.tolist(),
            strict=True,
        )
        rows = zip(slots, entries, counts, strict=True)
        for hour, of_hour in groupby(rows, key=lambda row: row[0] // SECONDS_PER_HOUR):
            folder = self._disk.open_folder(layout.hour_folder(self._folder, hour))
            try:
                for number, (slot, entry, (messages, names, releases)) in enumerate(of_hour):
                    content, checksum = next(placed)
                    _append(folder, slot, content, entry.length_bytes)
                    self._tables[hour].put(
                        slot,
                        entry.following(
                            fill=record,
                            length=len(content),
                            checksum=checksum,
                            messages=messages,
                            names=names,
                            releases=releases,
                        ),
                    )
                    if number % _SECTIONS_A_STEP == _SECTIONS_A_STEP - 1:
                        yield
            finally:
                folder.close()
        self._sync(slots)
        yield

    def _sync(self, slots: list[int]) -> None:
        paths = [layout.slot_path(self._folder, slot) for slot in slots]
        self._many_files.sync(paths, were_closed=True)
        for path in {path.parent for path in paths}:
            self._disk.sync_folder(path)
        self._disk.sync_folder(layout.slots_folder(self._folder))
        self._disk.sync_folder(self._folder)

    def sync_tables(self, hours: Collection[int]) -> None:
        """Puts the tables of these hours on the medium, with their counts: F may be saved then."""
        tables = [HourTable(self._disk, self._folder, hour) for hour in sorted(hours)]
        tables = [table for table in tables if self._disk.exists(table.path)]
        paths = [table.path for table in tables]
        self._many_files.sync(paths, were_closed=True)
        for table in tables:
            table.count()
            table.write()
        self._many_files.sync(paths, were_closed=True)
        self._disk.sync_folder(layout.slots_folder(self._folder))


def _append(folder: Folder, slot: int, content: bytearray, offset: int) -> None:
    file = folder.open(layout.slot_name(slot))
    try:
        file.write_at([content], offset)
    finally:
        file.close()


def _following(entry: Entry, rows: FilledRows, head: SectionHead) -> Entry:
    """Returns the entry behind a section that was read."""
    return entry.following(
        fill=head.fill,
        length=head.length_bytes,
        checksum=head.checksum,
        messages=head.rows - head.names,
        names=head.names,
        releases=int((rows.kinds == Kind.RELEASES).sum()),
    )
