"""Frames as they lie in slot files, whatever the index says of them.

A frame proves itself: its checksum, wheel, slot and seq show that it belongs where it lies. A slot
file is walked from frame to frame, by the lengths that their headers state; headers alone prove
nothing.

A damaged index row makes a good frame vanish from its second. So when a second is read, the parts
of the file that no row covers are examined: frames found there are read as if their rows were
right.

| a part that no row covers | begins with | is |
|---|---|---|
| between rows, or behind the last | a good frame, not a later one | a frame whose row is wrong |
| between rows | anything else | the place of a frame that is missing here |
| behind the last | a later frame, or a torn one | being written |
| either, further on | the good frame of a hole | a frame whose row is wrong |

A row that is a hole may be of any second, so no second is known to be complete while there is one:

| the frame of a hole | is |
|---|---|
| lies intact in some slot file | found with its second, where it lies |
| lies nowhere | missing, possibly from any second that is read |

To find such frames, all slot files of the wheel are searched. That takes long; it is done once for
each hole, by the reader that needs to know. Files that could not be read are searched again, and so
is a frame that is not there any more when its second is read.
"""

import struct
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.files.pages import PAGE_BYTES
from delaywheel.storage.files.slot_table import UNIT_BYTES
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Disk, File, is_medium_error
from delaywheel.storage.frames.checking import are_foreign
from delaywheel.storage.frames.format import (
    HEADER,
    HEADER_LENGTH_BYTES,
    MAGIC,
    Frame,
    FrameDamaged,
    decode_frame,
    decode_header,
    index_row_of,
)
from delaywheel.storage.frames.rows import INDEX_ROW, Places, leading

# Bytes to read at once: few if the next header lies beyond what was read, twice as many each time
# that small frames lie close together.
_LEAST_PIECE_BYTES = 4 * 1024
_PIECE_BYTES = 256 * 1024

_length_of = struct.Struct("<I").unpack_from
_LENGTH_AT = HEADER.fields["length_bytes"][1]  # type: ignore[index]  # a dtype with fields


def walk_headers(
    file: File, wheel: WheelId, slot: int, begin: int = 0
) -> Iterator[tuple[NDArray[np.int64], NDArray[Any]]]:
    """Yields the frames that lie in a file from a place on: offsets and headers, several at a time.

    Ends at the first place where no frame of this wheel and slot begins, or where one would not
    fit. Only headers are read: nothing proves that a frame, or even its header, is good. Raises
    OSError if the medium does.
    """
    end, piece_bytes = file.size(), _LEAST_PIECE_BYTES
    while begin + HEADER_LENGTH_BYTES <= end:
        piece = file.read_at(min(piece_bytes, end - begin), begin)
        places, after = _chain(piece, end - begin)
        if not places:
            return
        offsets = np.array(places, np.int64)
        headers = np.frombuffer(
            b"".join([piece[place : place + HEADER_LENGTH_BYTES] for place in places]), HEADER
        )
        good = leading(~are_foreign(headers, wheel, slot))
        if good:
            yield offsets[:good] + begin, headers[:good]
        if good < len(headers) or after is None:
            return
        is_dense = len(places) > 1
        piece_bytes = min(2 * piece_bytes, _PIECE_BYTES) if is_dense else _LEAST_PIECE_BYTES
        begin += after


def _chain(piece: bytes, available_bytes: int) -> tuple[list[int], int | None]:
    """Follows headers by their lengths; returns where they lie, and where the next one does.

    None: the last one states an impossible length, and is not among them.
    """
    places: list[int] = []
    at, last = 0, len(piece) - HEADER_LENGTH_BYTES
    while at <= last:
        (length,) = _length_of(piece, at + _LENGTH_AT)
        if length < HEADER_LENGTH_BYTES or length > available_bytes - at:
            return places, None
        places.append(at)
        at += length
    return places, at


def frame_at(file: File, wheel: WheelId, slot: int, offset: int, end: int) -> Frame:
    """Reads the frame of this wheel and slot that lies in [offset, end), or raises FrameDamaged."""
    header = decode_header(file.read_at(HEADER_LENGTH_BYTES, offset), available_bytes=end - offset)
    return decode_frame(file.read_at(header.length_bytes, offset), wheel=wheel, slot=slot, seq=None)


def with_unlisted(
    disk: Disk,
    path: Path,
    wheel: WheelId,
    slot: int,
    listed: Places,
    up_to_seq: int,
    holes: SeqSet = NO_SEQS,
) -> Places:
    """Returns the frames that the index lists for a slot, corrected by what lies in its file.

    Frames of holes count wherever in the file they lie; those behind `up_to_seq` are ignored.
    """
    try:
        file = disk.open_read(path)
    except OSError:
        return listed  # reading the listed frames shows why
    try:
        found: dict[int, bytes] = {}
        for part in _uncovered(listed[1], file.size()):
            found.update(_frames(file, wheel, slot, part, up_to_seq))
        if missing := holes - SeqSet.of(found):
            found.update(_rows_in(file, wheel, slot, missing))
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
    with suppress(FrameDamaged):
        while begin < end:
            frame = frame_at(file, wheel, slot, begin, end)
            if frame.seq > up_to_seq:
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


def lying_in_files(
    disk: Disk, folder: Path, wheel: WheelId, seqs: SeqSet, slots: Iterable[int]
) -> tuple[dict[int, SeqSet], list[int]]:
    """Returns by slot which of these frames lie intact in the files of some slots, at any place.

    Also returns the slots whose files could not be read.
    """
    found: dict[int, SeqSet] = {}
    unread: list[int] = []
    for slot in slots:
        try:
            lying = SeqSet.of(rows_in_file(disk, folder, wheel, slot, seqs))
        except OSError:
            unread.append(slot)
            continue
        if lying:
            found[slot] = lying
            seqs -= lying
        if not seqs:
            break
    return found, unread


def rows_in_file(
    disk: Disk, folder: Path, wheel: WheelId, slot: int, seqs: SeqSet
) -> dict[int, bytes]:
    """Returns the index rows of those of these frames that lie intact in one slot's file."""
    try:
        file = disk.open_read(layout.slot_path(folder, slot))
    except FileNotFoundError:
        return {}
    with closing(file):
        return dict(_rows_in(file, wheel, slot, seqs))


def _rows_in(file: File, wheel: WheelId, slot: int, seqs: SeqSet) -> Iterator[tuple[int, bytes]]:
    """Walks from frame to frame; where none begins, tries the next possible place.

    What lies within a whole frame is content.
    """
    offset, size = 0, file.size()
    while offset < size:
        last = offset
        for offsets, headers in walk_headers(file, wheel, slot, offset):
            for begin, seq in zip(offsets.tolist(), headers["seq"].tolist(), strict=True):
                if seq in seqs:
                    with suppress(FrameDamaged):
                        yield seq, index_row_of(frame_at(file, wheel, slot, begin, size), begin)
            last = int(offsets[-1])
            offset = last + int(headers["length_bytes"][-1])
        if last < offset < size:  # no frame follows: the last one may state a wrong length
            try:
                frame_at(file, wheel, slot, last, size)
            except FrameDamaged:
                offset = last
        offset = next_magic(file, offset + UNIT_BYTES)


def next_magic(file: File, offset: int, *, must_read: bool = True) -> int:
    """Returns where the next frame may begin; the end of the file if there is no such place.

    Pages that the medium does not return raise OSError, or are passed over unless it `must_read`.
    """
    size = file.size()
    while offset < size:
        length = min(PAGE_BYTES - offset % PAGE_BYTES, size - offset)
        try:
            piece = file.read_at(length, offset)
        except OSError as error:
            if must_read or not is_medium_error(error):
                raise
            piece = b""
        at = piece.find(MAGIC)
        while at >= 0 and (offset + at) % UNIT_BYTES:
            at = piece.find(MAGIC, at + 1)
        if at >= 0:
            return offset + at
        offset += length
    return size
