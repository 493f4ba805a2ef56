"""Reads a second: the sections of its slot file that count, and checks them."""

from pathlib import Path

from crc32c import crc32c

from delaywheel.identity import WheelId
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Disk
from delaywheel.storage.frames.format import DamageReason, FrameDamaged
from delaywheel.storage.seconds.rows import FilledRows
from delaywheel.storage.seconds.section import decode_rows, decode_section_head
from delaywheel.storage.seconds.table import HourTable


def read_second(
    disk: Disk, folder: Path, wheel: WheelId, slot: int, *, filled: int
) -> list[FilledRows]:
    """Reads the rows of a second in all fills up to ``filled``, as announced; one item a section.

    Raises:
        FrameDamaged: The second, or what its table says of it, is not whole: it is to be repaired.
        OSError: The medium, among others.
    """
    entry = HourTable(disk, folder, slot // layout.SECONDS_PER_HOUR).entry(slot)
    if entry is None:
        raise FrameDamaged(DamageReason.LENGTHS, f"the table's entry of {slot}")
    if not entry.length_bytes:
        return []
    try:
        content = disk.read_file(layout.slot_path(folder, slot))
    except FileNotFoundError as error:
        raise FrameDamaged(DamageReason.GONE, f"the file of {slot}") from error
    at, chain, found = 0, 0, []
    while at < entry.length_bytes:
        head = decode_section_head(content, at, wheel=wheel, slot=slot)
        if head.fill <= filled:
            found.append(decode_rows(content, head))
        chain = crc32c(head.checksum.to_bytes(4, "little"), chain)
        at += head.length_bytes
    if (at, chain) != (entry.length_bytes, entry.chain):
        raise FrameDamaged(DamageReason.LENGTHS, f"other sections of {slot} than its entry says")
    return found
