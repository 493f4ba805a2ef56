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
zeros although its file has a section of a fill up to F; or if the medium refuses its section, and
takes others. That is saved before F is announced, so that no reader takes the second for whole. Its
rows stay in the journal (no segment goes while a second is passed over), and `mend` makes its
sections from there once it can be read again.

A fill ends without a trace if a frame cannot be read, if the end falls meanwhile (what was read may
have been declared lost since), or where there is no room.

The rules are those of docs/JOURNAL.md, 4 to 6.
"""

from collections.abc import Callable, Collection
from itertools import pairwise
from typing import Final

import numpy as np

from delaywheel.storage.folder.steps import Steps
from delaywheel.storage.journal.format import EMPTY, JournalFrame, decode_frame
from delaywheel.storage.journal.journal import Journal
from delaywheel.storage.seconds.files import SecondFiles, slots_of
from delaywheel.storage.seconds.rows import PlacedRows
from delaywheel.storage.seconds.section import encode_sections
from delaywheel.storage.seconds.table import Entry

_READ_BYTES: Final = 8 << 20


class Filler:
    """Fills the seconds of one wheel. One thread at a time."""

    def __init__(
        self, files: SecondFiles, journal: Journal, passed_over: Callable[[dict[int, int]], object]
    ) -> None:
        """Does nothing yet.

        Args:
            passed_over: Saves seconds that were passed over, each with F before that.
        """
        self._files = files
        self._journal = journal
        self._save = passed_over

    def fill(self, record: int, *, floor: int, passed_over: Collection[int]) -> Steps[None]:
        """Carries out the fill with this record, and announces it.

        Args:
            record: The seq of the fill record, or the end of a closed wheel.
            floor: The first second that is not finished.
            passed_over: Seconds that were passed over before.

        Raises:
            FrameDamaged: A frame cannot be read; nothing has changed that is read.
            OSError: The medium among others; nothing has changed that is read.
        """
        falls = self._journal.falls
        self._journal.sync()
        before = self._journal.filled
        new: dict[int, int] = {}  # with all that their pages of tables say nothing of
        try:
            frames, buffer = yield from self._frames(before + 1, record)
            if any(frame.kind == EMPTY for frame in frames):
                self._cut_all_back(before, floor)
            rows = PlacedRows.of_frames(frames, buffer)
            if rows is not None:
                slots = np.unique(rows.slots)
                entries = {}
                for slot in slots[slots >= floor].tolist():
                    if slot not in passed_over:
                        entry = self._entry(slot, before, record)
                        if entry is None:
                            unknown = self._files.table(slot).unknown_beside(slot)
                            new |= dict.fromkeys([slot, *unknown], before)
                        elif entry.fill != record:  # else it is done, before a crash
                            entries[slot] = entry
                refused = yield from self._append(rows, entries, record)
                new |= dict.fromkeys(refused, before)
            if new:
                self._save(new)
            if falls == self._journal.falls:
                self._files.write_entries()
        finally:
            self._files.forget()
        self._journal.fill_through(record, falls=falls)

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
            frames.append(decode_frame(buffer, at, wheel=self._files.wheel, seq=number))
            at += frames[-1].length_bytes
        return frames, buffer

    def _cut_all_back(self, before: int, floor: int) -> None:
        """Cuts back all seconds to the fill ``before``, as a frame was lost that they may have."""
        for slot in slots_of(self._files.hours(), floor):
            entry = self._files.table(slot).entry(slot)
            is_ahead = entry is not None and entry.fill > before
            if entry is not None and (is_ahead or self._files.has_unfinished(slot, entry, before)):
                self._files.cut_back(slot, entry, before)

    def _entry(self, slot: int, before: int, record: int) -> Entry | None:
        """Returns the entry that the fill follows on; None: the second is passed over."""
        entry = self._files.known_entry(slot, before)
        if entry is not None and before < entry.fill != record:
            return self._files.cut_back(slot, entry, before)
        return entry

    def _append(self, rows: PlacedRows, entries: dict[int, Entry], record: int) -> Steps[list[int]]:
        """Appends rows of these seconds; returns those of which the medium has refused that."""
        if not entries:
            return []
        chosen = np.isin(rows.slots, list(entries))
        sections = encode_sections(
            rows if chosen.all() else rows.take(chosen), wheel=self._files.wheel, fill=record
        )
        return (yield from self._files.append(sections, entries))

    def mend(self, passed_over: dict[int, int]) -> Steps[list[int]]:
        """Makes from the journal what seconds lack that were passed over and can be read again.

        Args:
            passed_over: The seconds, each with F before that.

        Returns:
            The seconds that lack nothing any more, once tables are synced.

        Raises:
            FrameDamaged: A frame cannot be read: they are copied from others.
            OSError: The medium among others.
        """
        entries = {}
        for slot, before in passed_over.items():
            entry = self._files.known_entry(slot, before)
            if entry is not None and self._files.is_whole(slot, entry):
                # What it lacks of fills before it was passed over has no rows of it.
                entries[slot] = entry._replace(fill=max(entry.fill, before))
            yield
        filled, has_from = self._journal.filled, self._journal.first_seq
        entries = {s: e for s, e in entries.items() if e.fill >= min(has_from - 1, filled)}
        first = min((entry.fill for entry in entries.values()), default=filled)
        records = self._journal.records(first + 1, filled - 1)
        try:
            for before, record in pairwise(sorted({first, *records, filled})):
                frames, buffer = yield from self._frames(before + 1, record)
                rows = PlacedRows.of_frames(frames, buffer)
                lacking = {s: e for s, e in entries.items() if e.fill <= before}
                if rows is None:
                    continue
                lacking = {s: lacking[s] for s in np.unique(rows.slots).tolist() if s in lacking}
                refused = yield from self._append(rows, lacking, record)
                self._files.write_entries()
                for slot in refused:
                    entries.pop(slot)
                for slot in lacking.keys() - refused:
                    following = self._files.table(slot).entry(slot)
                    assert following is not None
                    entries[slot] = following
        finally:
            self._files.forget()
        return list(entries)
