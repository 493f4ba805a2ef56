"""Checks frames against what their origin wrote: a whole bundle at once, or a few one by one.

=============  ====================================================================================
checked        for each frame
=============  ====================================================================================
its row        its check value; without a frame, whether it is a hole or gone
its header     magic, version, kind; wheel, slot and seq; the same numbers as in its row
its lengths    that they add up to the frame's length, as a reader computes it
its checksum   over everything after it
=============  ====================================================================================

The content of a frame whose checksum is right is what its origin wrote: only readers check that
names of topics can be decoded and that the lengths of messages add up (`format.decode_frame`).
"""

from typing import Any, NamedTuple

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.storage.folder.disk import Buffer
from delaywheel.storage.frames.bundle import FrameBundle
from delaywheel.storage.frames.format import (
    ALL_FLAGS,
    CHECKED_FROM,
    HEADER,
    HEADER_LENGTH_BYTES,
    MAGIC_NUMBER,
    NAME_ROW_BYTES,
    NEWEST_READ,
    OLDEST_READ,
    DamageReason,
    Frame,
    FrameDamaged,
    FrameHeader,
    decode_frame,
    decode_header,
    index_row_of,
    row_length_bytes,
)
from delaywheel.storage.frames.kinds import FIRST_VERSIONS, Kind
from delaywheel.storage.frames.rows import (
    FEW_FRAMES,
    INDEX_ROW_LENGTH_BYTES,
    SLOT_FILE_LIMIT_BYTES,
    IndexRow,
    decode_row,
    flawed_rows,
    kinds_of,
    leading,
    row_counts,
)

_MESSAGE_ROW_BYTES = np.array(
    [row_length_bytes(Kind.MESSAGES, flags) for flags in range(ALL_FLAGS + 1)]
)
_FIRST_VERSIONS = np.array([0, *(FIRST_VERSIONS[kind] for kind in Kind)])
_HEADER_WORDS = np.arange(HEADER_LENGTH_BYTES // 8)


class Good(NamedTuple):
    """The good part of a bundle: how many frames, from the first on.

    `accepted_at_ms` is that of the newest of those with bytes; 0: none has bytes.
    """

    frames: int
    accepted_at_ms: int


def good_frames(wheel: WheelId, bundle: FrameBundle) -> Good:
    """Returns how many leading frames are intact."""
    few = len(bundle) <= FEW_FRAMES
    return good_one_by_one(wheel, bundle) if few else good_at_once(wheel, bundle)


def good_one_by_one(wheel: WheelId, bundle: FrameBundle) -> Good:
    """See `good_frames`."""
    raw, edges, accepted_at_ms = bundle.rows.tobytes(), bundle.edges.tolist(), 0
    for number, seq in enumerate(bundle.seqs.tolist()):
        begin = number * INDEX_ROW_LENGTH_BYTES
        row = decode_row(raw[begin : begin + INDEX_ROW_LENGTH_BYTES])
        if row is None:
            return Good(number, accepted_at_ms)
        content = bundle.content[edges[number] : edges[number + 1]]
        if content:
            header = _header_of(wheel, seq, row, content)
            if header is None:
                return Good(number, accepted_at_ms)
            accepted_at_ms = max(accepted_at_ms, header.accepted_at_ms)
    return Good(len(bundle), accepted_at_ms)


def _header_of(wheel: WheelId, seq: int, row: IndexRow, content: memoryview) -> FrameHeader | None:
    """Returns the header of an intact frame; else None."""
    end = row.offset + row.length_bytes
    if (row.offset | row.length_bytes) & 7 or end > SLOT_FILE_LIMIT_BYTES:
        return None
    try:
        header = decode_header(content, available_bytes=row.length_bytes)
    except FrameDamaged:
        return None
    said = (header.kind, header.wheel_hash, header.slot, header.seq, header.messages)
    if (
        said != (row.kind, wheel.hash64, row.slot, seq, row.rows)
        or header.version < FIRST_VERSIONS[row.kind]
        or header.length_bytes != row.length_bytes
        or not _adds_up(header)
        or crc32c(content[CHECKED_FROM:]) != header.checksum
    ):
        return None
    return header


def _adds_up(header: FrameHeader) -> bool:
    """Whether a reader would accept the lengths."""
    columns = header.messages * row_length_bytes(header.kind, header.flags)
    columns += -columns % 8
    end = HEADER_LENGTH_BYTES + columns + header.topics_length + header.blob_length
    return header.columns_length == columns and header.length_bytes == end + -end % 8


def good_at_once(wheel: WheelId, bundle: FrameBundle) -> Good:
    """See `good_frames`."""
    rows, has_content = bundle.rows, bundle.has_content
    good = leading(~flawed_rows(rows) & ~(has_content & _has_unfit_place(rows)))
    filled = has_content[:good].nonzero()[0]
    if not len(filled):
        return Good(good, 0)
    headers = headers_at(bundle.content, bundle.edges[filled])
    wrong = is_misplaced(headers, wheel, rows[filled], bundle.seqs[filled])
    fitting = leading(~wrong & ~has_wrong_sums(headers))
    fitting = _right_checksums(bundle, filled[:fitting], headers)
    if fitting < len(filled):
        good = int(filled[fitting])
    accepted_at_ms = int(headers["accepted_at_ms"][:fitting].max(initial=0))
    return Good(good, accepted_at_ms)


def _has_unfit_place(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Marks rows that refer to impossible places."""
    offsets, lengths = rows["offset"].astype(np.int64), rows["length"].astype(np.int64)
    unfit = ((offsets | lengths) & 7 != 0) | (lengths < HEADER_LENGTH_BYTES)
    return unfit | (offsets + lengths > SLOT_FILE_LIMIT_BYTES)  # type: ignore[no-any-return]


def headers_at(content: Buffer, begins: NDArray[np.int64]) -> NDArray[Any]:
    """Returns the headers (``format.HEADER``) at these places, which are multiples of 8 bytes."""
    words = np.frombuffer(content, "<u8", len(content) // 8)
    found = words[(begins >> 3)[:, np.newaxis] + _HEADER_WORDS].view(HEADER)
    return found[:, 0]  # type: ignore[no-any-return]  # numpy's stubs


def are_foreign(
    headers: NDArray[Any], wheel: WheelId, slots: int | NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Marks headers that are none of this wheel and of these slots, or of a version not read."""
    return (  # type: ignore[no-any-return]  # numpy's stubs
        (headers["magic"] != MAGIC_NUMBER)
        | (headers["version"] < OLDEST_READ)
        | (headers["version"] > NEWEST_READ)
        | (headers["wheel_hash"] != wheel.hash64)
        | (headers["slot"] != slots)
    )


def is_misplaced(
    headers: NDArray[Any], wheel: WheelId, rows: NDArray[Any], seqs: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Marks headers that differ from the frames that rows and seqs describe."""
    kinds = kinds_of(rows)
    return (  # type: ignore[no-any-return]  # numpy's stubs
        (headers["magic"] != MAGIC_NUMBER)
        | (headers["version"] < _FIRST_VERSIONS[kinds])
        | (headers["version"] > NEWEST_READ)
        | (headers["kind"] != kinds)
        | (headers["wheel_hash"] != wheel.hash64)
        | (headers["slot"] != rows["slot"])
        | (headers["seq"] != seqs.astype(np.uint64))
        | (headers["length_bytes"] != rows["length"])
        | (headers["messages"] != row_counts(rows))
    )


def has_wrong_sums(headers: NDArray[Any]) -> NDArray[np.bool_]:
    """Marks headers whose lengths a reader would refuse."""
    has_names = headers["kind"] != int(Kind.MESSAGES)
    row_bytes = np.where(
        has_names, NAME_ROW_BYTES, _MESSAGE_ROW_BYTES[headers["flags"] & ALL_FLAGS]
    )
    columns = headers["messages"] * row_bytes
    columns += -columns % 8
    end = HEADER_LENGTH_BYTES + columns + headers["topics_length"] + headers["blob_length"]
    end += -end % 8
    return (  # type: ignore[no-any-return]  # numpy's stubs
        (headers["columns_length"] != columns) | (end != headers["length_bytes"])
    )


def _right_checksums(bundle: FrameBundle, frames: NDArray[np.intp], headers: NDArray[Any]) -> int:
    """Returns how many leading frames have the right checksum."""
    content = bundle.content
    begins = (bundle.edges[frames] + CHECKED_FROM).tolist()
    ends = bundle.edges[frames + 1].tolist()
    found = [crc32c(content[begin:end]) for begin, end in zip(begins, ends, strict=True)]
    return leading(headers["checksum"][: len(found)] == np.array(found, np.uint32))


def damage_of(wheel: WheelId, frame: FrameBundle) -> FrameDamaged:
    """Returns what is wrong with the only frame of a bundle, which has failed its check."""
    copy = frame.only()
    if flawed_rows(frame.rows).any():
        return FrameDamaged(DamageReason.LENGTHS, "the check value of its index row is wrong")
    try:
        decoded = decode_frame(copy.content, wheel=wheel, slot=copy.slot, seq=copy.seq)
        check_row(decoded, copy.offset, copy.row)
    except FrameDamaged as damage:
        return damage
    return FrameDamaged(DamageReason.LENGTHS, "no frame begins at such an offset")


def check_row(frame: Frame, offset: int, row: bytes) -> None:
    """Compares a frame that was read at this offset with its row; raises FrameDamaged."""
    if index_row_of(frame, offset) != row:
        raise FrameDamaged(DamageReason.LENGTHS, "its index row says otherwise")
