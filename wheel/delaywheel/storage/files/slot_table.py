"""The slot table: a summary of a wheel's index by slot, so that the index need not be scanned.

It is a cache beside the index, which stays the authority; docs/FORMAT.md shows its files. The
wheel's writer makes it from rows that are on the medium, so it may lag behind the index. It says,
for each slot that has frames with seqs up to the head's, how many, and where the last of them ends.

Each entry proves itself and its slot, and names the frame that it counted last. That may lie beyond
the head's seq: a refresh has come that far and has not yet changed the head, or never did. So

=======================  =========================================================================
who                      does
=======================  =========================================================================
a reader                 takes an entry, and the rows beyond both its last frame and the head
a refresh                counts a row once: those up to the entry's last frame it has counted
=======================  =========================================================================

An entry that must not be trusted is *stale*: its check value is wrong, or the head lists its slot
since a frame was cut. The next refresh recounts stale entries from the whole index, as well as
slots whose rows were changed in place; until then readers use the index.

A hole in the index has no slot, so it is in no entry. The head lists the holes that refreshes have
passed: otherwise a frame that lost first its row and then its bytes would never be noticed
(reading/unlisted.py).

A page that reads as zeros, or a file that is too short, looks like entries of seconds without
frames; with the slot file gone as well, such a second would be passed over in silence. So the head
says how many seconds of each hour have frames: of an hour that shows fewer no entry is trusted.

Hence an entry must always be compared with the slot file, and if the two differ, the index decides:
the table saves work, and nothing is ever deleted because of it.
"""

import struct
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Disk
from delaywheel.storage.folder.layout import SECONDS_PER_HOUR

ENTRY: Final[np.dtype[Any]] = np.dtype(
    [
        ("last_seq", "<u8"),  # the last frame that is counted
        ("end", "<u4"),  # of the frame that ends last, in units of 8 bytes
        ("length", "<u4"),  # of all frames, in units of 8 bytes
        ("messages", "<u4"),
        ("cancels", "<u4"),
        ("frames", "<u4"),
        ("check", "<u4"),
    ]
)
ENTRY_LENGTH_BYTES: Final = 32
UNIT_BYTES: Final = 8

_MAGIC = b"DWs3"
_HEAD = struct.Struct("<4sIQqIII")
_CHECKED_FROM = 8
_WORDS = 7  # before the check value
# Multilinear hashing: one odd number for each word, one for the slot. Any will do.
_FACTORS = np.array(
    [
        0x9E3779B97F4A7C15,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0xD6E8FEB86659FD93,
        0xA0761D6478BD642F,
        0xE7037ED1A0B428DB,
        0x8EBC6AF09C88C6E3,
        0x589965CC75374CC3,
    ],
    np.uint64,
)


class TableHead(NamedTuple):
    """How far the table goes."""

    seq: int = 0
    """Every frame up to this is counted."""
    top_slot: int = -1
    """The greatest slot among those frames."""
    hours: Mapping[int, int] = MappingProxyType({})
    """The hours since 1970 in which slots have entries -> how many of these count frames."""
    stale: frozenset[int] = frozenset()
    """Slots whose entries must not be trusted."""
    holes: SeqSet = NO_SEQS
    """The frames up to `seq` whose rows were holes."""


def load_head(disk: Disk, folder: Path) -> TableHead:
    """Returns how far a wheel's table goes: nowhere if it is missing or unreadable."""
    try:
        return _head_of(disk.read_file(layout.table_head_path(folder)))
    except (OSError, ValueError, struct.error):
        return TableHead()


def save_head(disk: Disk, folder: Path, head: TableHead) -> None:
    """Saves the head of the table durably."""
    hours = np.array(sorted(head.hours.items()), "<u4").reshape(-1, 2)
    stale = np.array(sorted(head.stale), "<u4")
    holes = np.array(head.holes.spans, "<u8")
    counts = len(hours), len(stale), len(holes)
    content = _HEAD.pack(_MAGIC, 0, head.seq, head.top_slot, *counts)
    content += hours.tobytes() + stale.tobytes() + holes.tobytes()
    checksum = crc32c(content[_CHECKED_FROM:]).to_bytes(4, "little")
    disk.replace_file(
        layout.table_head_path(folder), content[:4] + checksum + content[_CHECKED_FROM:]
    )


def _head_of(content: bytes) -> TableHead:
    magic, checksum, seq, top_slot, hours, stale, holes = _HEAD.unpack_from(content)
    if magic != _MAGIC or crc32c(content[_CHECKED_FROM:]) != checksum:
        raise ValueError("the head of a slot table is damaged")
    numbers = np.frombuffer(content, "<u4", 2 * hours + stale, _HEAD.size)
    spans = np.frombuffer(content, "<u8", 2 * holes, _HEAD.size + numbers.nbytes)
    return TableHead(
        seq,
        top_slot,
        dict(numbers[: 2 * hours].reshape(hours, 2).tolist()),
        frozenset(numbers[2 * hours :].tolist()),
        SeqSet((first, last) for first, last in spans.reshape(holes, 2).tolist()),
    )


def read_entries(
    disk: Disk, folder: Path, head: TableHead, hour: int
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Returns the entries of an hour, zeros if absent, and which of them are damaged.

    All are if fewer count frames than the head says.
    """
    entries = np.zeros(SECONDS_PER_HOUR, ENTRY)
    content = _read(disk, layout.table_path(folder, hour), entries.nbytes)
    there = np.frombuffer(content, ENTRY, len(content) // ENTRY_LENGTH_BYTES)
    entries[: len(there)] = there
    damaged = entries["check"] != checks_of(entries, hour * SECONDS_PER_HOUR)
    if np.count_nonzero((entries["frames"] > 0) | damaged) < head.hours.get(hour, 0):
        damaged[:] = True
    return entries, damaged


def checks_of(entries: NDArray[Any], first_slot: int) -> NDArray[np.uint32]:
    """Returns the check values of entries from ``first_slot`` on; 0 for empty ones."""
    words = entries.view("<u4").reshape(len(entries), ENTRY_LENGTH_BYTES // 4)
    slots = np.arange(first_slot, first_slot + len(entries), dtype=np.uint64)
    sums = (words[:, :_WORDS].astype(np.uint64) * _FACTORS[:_WORDS]).sum(axis=1)
    checks = (sums + slots * _FACTORS[_WORDS] >> np.uint64(32)).astype(np.uint32)
    return np.where(words[:, :_WORDS].any(axis=1), checks, np.uint32(0))


def slots_with_frames(
    disk: Disk, folder: Path, head: TableHead, from_slot: int, to_slot: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns slots in [from_slot, to_slot) that have frames by their entries, and stale slots."""
    counted, stale = [np.empty(0, np.int64)], [np.array(sorted(head.stale), np.int64)]
    first, end = from_slot // SECONDS_PER_HOUR, -(-to_slot // SECONDS_PER_HOUR)
    for hour in sorted(hour for hour in head.hours if first <= hour < end):
        entries, damaged = read_entries(disk, folder, head, hour)
        counted.append(np.flatnonzero(entries["frames"]) + hour * SECONDS_PER_HOUR)
        stale.append(np.flatnonzero(damaged) + hour * SECONDS_PER_HOUR)
    return _between(counted, from_slot, to_slot), _between(stale, from_slot, to_slot)


def _between(parts: Sequence[NDArray[np.int64]], first: int, end: int) -> NDArray[np.int64]:
    slots = np.unique(np.concatenate(parts))
    return slots[(slots >= first) & (slots < end)]


def _read(disk: Disk, path: Path, length: int) -> bytes:
    """Reads these bytes; a gap counts as damage, since zeros would mean "no frames".

    A file that the head lists and that is missing or unreadable counts as wholly damaged.
    """
    try:
        with closing(disk.open_read(path)) as file:
            return file.read_at(length, 0)
    except OSError:
        return b"\xff" * length
