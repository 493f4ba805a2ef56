"""Frames in a slot file that the index does not list, or lists wrongly.

A damaged index row makes a good frame vanish from its second. But a frame proves itself: its
checksum, wheel, slot and seq show that it belongs where it lies. So when a second is read, the
parts of the file that no row covers are examined: frames found there are read as if their rows were
right.

| a part that no row covers | begins with | is |
|---|---|---|
| between rows, or behind the last | a good frame, not a later one | a frame whose row is wrong |
| between rows | anything else | the place of a frame that is missing here |
| behind the last | a later frame, or a torn one | being written |
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.storage.folder.disk import Disk, File
from delaywheel.storage.frames.format import (
    HEADER_LENGTH_BYTES,
    FrameDamaged,
    decode_frame,
    decode_header,
    index_row_of,
)
from delaywheel.storage.frames.rows import INDEX_ROW, Places


def with_unlisted(
    disk: Disk, path: Path, wheel: WheelId, slot: int, listed: Places, up_to_seq: int
) -> Places:
    """Returns the frames that the index lists for a slot, corrected by what lies in its file.

    Args:
        listed: The frames according to the index, up to `up_to_seq`.
        up_to_seq: Later frames are ignored.
    """
    try:
        file = disk.open_read(path)
    except OSError:
        return listed  # reading the listed frames shows why
    try:
        found: dict[int, bytes] = {}
        for part in _uncovered(listed[1], file.size()):
            found.update(_frames(file, wheel, slot, part, up_to_seq))
    except OSError:
        return listed
    finally:
        file.close()
    return _merged(listed, found) if found else listed


def _uncovered(rows: NDArray[Any], size: int) -> list[tuple[int, int]]:
    """Yields the parts of a file that no row covers."""
    begins = np.sort(rows["offset"].astype(np.int64))
    ends = np.sort(rows["offset"].astype(np.int64) + rows["length"])
    # A part begins wherever as many rows have ended as have begun.
    first = np.concatenate(([0], ends))
    last = np.concatenate((begins, [size]))
    apart = np.flatnonzero(first < last)
    return list(zip(first[apart].tolist(), last[apart].tolist(), strict=True))


def _frames(
    file: File, wheel: WheelId, slot: int, part: tuple[int, int], up_to_seq: int
) -> Iterator[tuple[int, bytes]]:
    """Yields seqs and rows of the consecutive frames in a part."""
    begin, end = part
    while begin < end:
        try:
            header = decode_header(
                file.read_at(HEADER_LENGTH_BYTES, begin), available_bytes=end - begin
            )
            if header.seq > up_to_seq:
                return
            content = file.read_at(header.length_bytes, begin)
            frame = decode_frame(content, wheel=wheel, slot=slot, seq=None)
        except FrameDamaged:
            return
        yield frame.seq, index_row_of(frame, begin)
        begin += frame.length_bytes


def _merged(listed: Places, found: dict[int, bytes]) -> Places:
    """Merges frames that were found with rows; a found frame overrides a row of its seq."""
    seqs, rows = listed
    kept = ~np.isin(seqs, list(found))
    seqs = np.concatenate((seqs[kept], np.array(list(found), np.int64)))
    rows = np.concatenate((rows[kept], np.frombuffer(b"".join(found.values()), INDEX_ROW)))
    order = np.argsort(seqs)
    return seqs[order], rows[order]
