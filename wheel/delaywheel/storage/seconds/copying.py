"""Copies of seconds, from one member to another: one second that is damaged, or all of a wheel.

A file comes a few sections at a time, and the entry when all are there:

=====================  ============================================================================
`JournalWheel.wanted`  by the receiver: what it lacks of what the sender's tables say
`sections_to_send`     by the sender: whole sections from an offset on, each one checked
`SecondCopy.take`      by the receiver: it checks them, and writes them to their place
`SecondCopy.finish`    by the receiver: they are synced, and then the entry is written, if they are
                       all that the sender's entry says of
=====================  ============================================================================

The first sections of a second are the same bytes everywhere, so what is written over whole ones
changes nothing, and a copy that ends midway leaves no more damage than there was.

What no member has whole is lost: `put_together` puts an empty section there, and the others copy
the second as it is then.

Who is asked, and for which F, is up to the caller; see docs/JOURNAL.md, rules 9 and 10.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from delaywheel.identity import WheelId
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Disk, is_medium_error
from delaywheel.storage.frames.format import DamageReason, FrameDamaged
from delaywheel.storage.seconds.files import SecondFiles
from delaywheel.storage.seconds.section import (
    HEADER_LENGTH_BYTES,
    decode_section_head,
    empty_section,
    section_length_at,
    sections_in,
)
from delaywheel.storage.seconds.table import NOTHING, Entry


def sections_to_send(
    disk: Disk, folder: Path, wheel: WheelId, slot: int, offset: int, end: int, most_bytes: int
) -> bytes:
    """Reads whole sections of a second from an offset on: one at least, however long it is.

    Args:
        end: Where the second's entry ends.
        most_bytes: The most bytes of several.

    Raises:
        FrameDamaged: There is none that is whole.
        OSError: Not the medium's.
    """
    length = min(most_bytes, end - offset)
    try:
        file = disk.open_read(layout.slot_path(folder, slot))
        try:
            content = file.read_at(length, offset)
            if section_length_at(content, 0) > length:  # a fill's: what memory holds anyway
                content = file.read_at(min(section_length_at(content, 0), end - offset), offset)
        finally:
            file.close()
    except FileNotFoundError as error:
        raise FrameDamaged(DamageReason.GONE, f"the file of {slot}") from error
    except OSError as error:
        if not is_medium_error(error):
            raise
        raise FrameDamaged(DamageReason.UNREADABLE, str(error)) from error
    whole = 0
    try:
        for head in sections_in(
            content, offset + len(content), wheel=wheel, slot=slot, begin=offset
        ):
            whole += head.length_bytes
    except FrameDamaged:
        if not whole:
            raise
    if not whole:
        raise FrameDamaged(DamageReason.SHORT, f"{slot} at {offset}")
    return content[:whole]


class SecondCopy:
    """One second on its way from another member.

    Attributes:
        entry: What is to be said of the sections that have come.
    """

    def __init__(self, files: SecondFiles, slot: int) -> None:
        self._files = files
        self._slot = slot
        self.entry = NOTHING

    @property
    def length_bytes(self) -> int:
        """How much of it has come: the offset of what comes next."""
        return self.entry.length_bytes

    def take(self, content: bytes) -> None:
        """Takes the next sections, and writes them to their place.

        Raises:
            FrameDamaged: They are not that; nothing was written.
            OSError: The medium among others.
        """
        begin, entry = self.length_bytes, self.entry
        end, wheel = begin + len(content), self._files.wheel
        for head in sections_in(content, end, wheel=wheel, slot=self._slot, begin=begin):
            entry = entry.following(head)
        self._files.write_section(self._slot, content, begin)
        self.entry = entry

    def finish(self, entry: Entry) -> None:
        """Syncs what has come, and then says of it.

        Args:
            entry: The sender's. That its last fill is greater than the last section's says that
                later ones were declared lost.

        Raises:
            FrameDamaged: Other sections have come than the entry says of; no entry was changed.
            OSError: The medium among others.
        """
        if self.entry._replace(fill=entry.fill) != entry:
            raise FrameDamaged(DamageReason.LENGTHS, f"other sections of {self._slot}")
        if entry.length_bytes:
            self._files.sync([self._slot])
        try:
            self._files.put(self._slot, entry)
            self._files.write_entries()
        finally:
            self._files.forget()


class Lost(NamedTuple):
    """A part of a second that no member has whole.

    Attributes:
        begin: Where it begins in its file.
        end: Where it ends.
    """

    begin: int
    end: int


def put_together(
    files: SecondFiles, slot: int, whole: Mapping[int, bytes], *, end: int, fill: int
) -> list[Lost]:
    """Makes a second of sections that are whole anywhere, and of empty ones between them.

    Args:
        files: Where it is made; the other members copy it from there.
        slot: The second.
        whole: Sections by their offset, from all members.
        end: Where its entry ends, as far as any member knows.
        fill: The last one that is announced everywhere.

    Returns:
        What is lost.
    """
    copy, lost = SecondCopy(files, slot), []
    while (at := copy.length_bytes) < end:
        content = whole.get(at)
        if content is None:
            behind = min((o for o in whole if o >= at + HEADER_LENGTH_BYTES), default=end)
            lost.append(Lost(at, behind))
            content = empty_section(
                wheel=files.wheel, slot=slot, fill=fill, offset=at, length_bytes=behind - at
            )
        copy.take(content)
    copy.finish(copy.entry._replace(fill=fill))
    return lost


def sections_of(disk: Disk, folder: Path, wheel: WheelId, slot: int) -> dict[int, bytes]:
    """Returns all whole sections of a second that can be found in its file, by their offset."""
    try:
        content = disk.read_file(layout.slot_path(folder, slot))
    except OSError as error:
        if not (is_medium_error(error) or isinstance(error, FileNotFoundError)):
            raise
        return {}
    found: dict[int, bytes] = {}
    at = 0
    while at + HEADER_LENGTH_BYTES <= len(content):
        try:
            head = decode_section_head(content, at, wheel=wheel, slot=slot)
        except FrameDamaged:
            at += 8  # where sections begin
        else:
            found[at] = content[at : at + head.length_bytes]
            at += head.length_bytes
    return found
