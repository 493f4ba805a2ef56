"""The table of an hour: an entry for each second, which says how far its slot file counts.

::

    <wheel>/slots/<hour>.table    a page of counts | 3,600 entries of 32 bytes

An entry has the length of the second's file, the last fill, and how many rows of each sort; its
chain follows from that before and from the section's checksum, so a fill reads nothing of the file,
and a reader knows that all sections are the ones that were written. Its check covers the second,
too. An entry of zeros says that the second has no file.

The counts say how many seconds of each page had an entry when F was last saved: if fewer have one,
a page was lost, and its files perhaps with it. Then all seconds of it without an entry are unknown,
until something else is said of one of them, and the count of that page is forgotten.
"""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from crc32c import crc32c

from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Disk, is_medium_error
from delaywheel.storage.folder.layout import SECONDS_PER_HOUR
from delaywheel.storage.seconds.section import SectionHead

_PAGE_LENGTH_BYTES: Final = 4096
ENTRY_LENGTH_BYTES: Final = 32
_PER_PAGE: Final = _PAGE_LENGTH_BYTES // ENTRY_LENGTH_BYTES
_PAGES: Final = -(-SECONDS_PER_HOUR // _PER_PAGE)
_ENTRY = struct.Struct("<QIIIIII")
_NO_ENTRY = bytes(ENTRY_LENGTH_BYTES)
_UNIT_BYTES = 8
_COUNTS = struct.Struct(f"<{_PAGES}I")


class Entry(NamedTuple):
    """What a table says of a second.

    Attributes:
        fill: The seq of the last fill that is in its file.
        length_bytes: How far the file counts.
        names: Rows that are no messages; of these, how many are releases.
        chain: See the module's docstring.
    """

    fill: int
    length_bytes: int
    messages: int
    names: int
    releases: int
    chain: int

    def following(self, head: SectionHead) -> "Entry":
        """Returns the entry behind a further section."""
        return Entry(
            head.fill,
            self.length_bytes + head.length_bytes,
            self.messages + head.rows - head.names,
            self.names + head.names,
            self.releases + head.releases,
            crc32c(struct.pack("<I", head.checksum), self.chain),
        )


NOTHING: Final = Entry(0, 0, 0, 0, 0, 0)


class HourTable:
    """The table of one hour; pages are read when they are asked for. For one thread."""

    def __init__(self, disk: Disk, folder: Path, hour: int) -> None:
        self.path = layout.seconds_path(folder, hour)
        self._disk = disk
        self._first = hour * SECONDS_PER_HOUR
        self._pages: dict[int, bytearray | None] = {}  # None: the medium refuses it
        self._changed: set[int] = set()
        self._doubted: dict[int, bool] = {}

    def _page(self, number: int) -> bytearray | None:
        if number not in self._pages:
            self._pages[number] = self._read(number)
        return self._pages[number]

    def _read(self, number: int) -> bytearray | None:
        page = bytearray(_PAGE_LENGTH_BYTES)
        try:
            file = self._disk.open_read(self.path)
        except FileNotFoundError:
            return page
        try:
            found = file.read_at(_PAGE_LENGTH_BYTES, number * _PAGE_LENGTH_BYTES)
        except OSError as error:
            if not is_medium_error(error):
                raise
            return None
        finally:
            file.close()
        page[: len(found)] = found
        return page

    def _is_doubted(self, number: int) -> bool:
        """Whether a page has fewer entries than it had when F was saved."""
        if number not in self._doubted:
            page = self._page(number)
            is_lost = page is not None and _present(page) < self._counts()[number - 1]
            self._doubted[number] = is_lost
        return self._doubted[number]

    def _counts(self) -> Sequence[int]:
        """Returns how many seconds of each page had an entry when F was saved, as far as known."""
        page = self._page(0)
        if page is not None and page.startswith(_checked(bytes(page[: _COUNTS.size]))):
            return _COUNTS.unpack_from(page)
        return [0] * _PAGES

    def _put_counts(self, counts: Sequence[int]) -> None:
        self._doubted.clear()
        page = bytearray(_checked(_COUNTS.pack(*counts)).ljust(_PAGE_LENGTH_BYTES, b"\0"))
        if page != self._page(0):
            self._pages[0] = page
            self._changed.add(0)

    def entry(self, slot: int) -> Entry | None:
        """Returns what is said of a second; None: that cannot be read, or may have been lost."""
        number, at = self._place(slot)
        page = self._page(number)
        if page is None:
            return None
        raw = bytes(page[at : at + ENTRY_LENGTH_BYTES])
        if raw == _NO_ENTRY:
            return None if self._is_doubted(number) else NOTHING
        fill, units, messages, names, releases, chain, check = _ENTRY.unpack(raw)
        if check != _check(slot, raw):
            return None
        return Entry(fill, units * _UNIT_BYTES, messages, names, releases, chain)

    def put(self, slot: int, entry: Entry) -> None:
        """Says something else of a second; `write` has it written."""
        number, at = self._place(slot)
        page = self._page(number)
        if page is None:  # the medium refuses it; whoever writes it has all its seconds anew
            page = self._pages[number] = bytearray(_PAGE_LENGTH_BYTES)
        if entry == NOTHING or self._is_doubted(number):
            counts = list(self._counts())
            counts[number - 1] = 0
            self._put_counts(counts)
        raw = _ENTRY.pack(entry.fill, entry.length_bytes // _UNIT_BYTES, *entry[2:], 0)
        check = struct.pack("<I", _check(slot, raw))
        page[at : at + ENTRY_LENGTH_BYTES] = _NO_ENTRY if entry == NOTHING else raw[:-4] + check
        self._changed.add(number)

    def write(self) -> None:
        """Writes what was changed."""
        if not self._changed:
            return
        file = self._disk.open(self.path, create=True)
        try:
            for number in sorted(self._changed):
                page = self._page(number)
                assert page is not None
                file.write_at([page], number * _PAGE_LENGTH_BYTES)
        finally:
            file.close()
        self._changed.clear()

    def write_again(self) -> None:
        """Writes all pages that can be read."""
        self._changed |= {number for number in range(_PAGES + 1) if self._page(number) is not None}
        self.write()

    def count(self) -> None:
        """Counts entries anew, which are on the medium; `write` has that written."""
        counts = list(self._counts())
        for number in range(1, _PAGES + 1):
            page = self._page(number)
            if page is not None:
                counts[number - 1] = max(counts[number - 1], _present(page))
        self._put_counts(counts)

    def unknown_beside(self, slot: int) -> list[int]:
        """Returns all seconds of this one's page of which nothing is known."""
        first = slot - (slot - self._first) % _PER_PAGE
        end = min(first + _PER_PAGE, self._first + SECONDS_PER_HOUR)
        return [each for each in range(first, end) if self.entry(each) is None]

    def entries(self) -> list[tuple[int, Entry | None]]:
        """Returns all seconds but those without a file."""
        slots = range(self._first, self._first + SECONDS_PER_HOUR)
        return [(slot, entry) for slot in slots if (entry := self.entry(slot)) != NOTHING]

    def _place(self, slot: int) -> tuple[int, int]:
        """Returns the page of a second's entry, and where in it that lies."""
        number, place = divmod(slot - self._first, _PER_PAGE)
        return number + 1, place * ENTRY_LENGTH_BYTES


def _present(page: bytearray) -> int:
    entries = np.frombuffer(page, "<u8").reshape(-1, ENTRY_LENGTH_BYTES // 8)
    return int(entries.any(axis=1).sum())


def _checked(raw: bytes) -> bytes:
    return raw + struct.pack("<I", crc32c(raw))


def _check(slot: int, raw: bytes) -> int:
    return crc32c(raw[:-4], crc32c(struct.pack("<I", slot)))
