"""The bytes of index rows, as docs/FORMAT.md shows them; no other module knows them.

A row with length 0 has no frame:

==================  ===================================================  =====================
row                 says                                                 lies
==================  ===================================================  =====================
``HOLE_ROW``        its place was lost, or its check value is wrong      on disk, in memory
``GONE_ROW``        its slot is finished, and no longer known            on disk, in memory
``UNREADABLE_ROW``  the medium cannot read it for now                    in memory; on disk, after
                                                                         its segment was moved
all zeros           nothing: a page was lost, so it is read as a hole    on disk, after damage
==================  ===================================================  =====================

No damage makes a ``GONE_ROW``, least of all a page of zeros.

CRCs are linear: a table holds what each byte of a row adds to the check value, so any number of
rows is made, or checked, at once.
"""

import struct
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from delaywheel.storage.frames.kinds import WITHDRAWING, Kind

INDEX_ROW: Final[np.dtype[Any]] = np.dtype(
    [("slot", "<u4"), ("offset", "<u4"), ("length", "<u4"), ("messages", "<u4")]
)
INDEX_ROW_LENGTH_BYTES: Final = 16
Places: TypeAlias = tuple[NDArray[np.int64], NDArray[Any]]
"""Seqs and index rows of frames, ascending by seq."""

SLOT_FILE_LIMIT_BYTES: Final = 1 << 32  # the greatest offset that a row can hold

_INDEX_ROW = struct.Struct("<IIII")
_NAMES_BIT = 1 << 31
_CHECK_SHIFT = 20
_COUNT_MASK = (1 << _CHECK_SHIFT) - 1
_SAYS_BIT = 1 << 19  # with _NAMES_BIT: commits or releases
_AT_ONCE_BIT = 1 << 18  # with both: releases
_CHECK_MASK = 0x7FF
_MARKS: Final = {
    Kind.MESSAGES: 0,
    Kind.CANCELS: _NAMES_BIT,
    Kind.COMMITS: _NAMES_BIT | _SAYS_BIT,
    Kind.RELEASES: _NAMES_BIT | _SAYS_BIT | _AT_ONCE_BIT,
}
MOST_ROWS: Final = {
    Kind.MESSAGES: _COUNT_MASK,
    Kind.CANCELS: _SAYS_BIT - 1,
    Kind.COMMITS: _AT_ONCE_BIT - 1,
    Kind.RELEASES: _AT_ONCE_BIT - 1,
}
"""The most rows of a frame, which its index row can express."""

FEW_FRAMES: Final = 16
"""Up to this many rows are handled one by one: a numpy call costs about what a whole frame costs
without it, for one frame as for a thousand."""

_HOLE_OFFSET = (1 << 32) - 1
_GONE_OFFSET = _HOLE_OFFSET - 1
_UNREADABLE_OFFSET = _HOLE_OFFSET - 2
HOLE_ROW: Final = _INDEX_ROW.pack(0, _HOLE_OFFSET, 0, 0)
GONE_ROW: Final = _INDEX_ROW.pack(0, _GONE_OFFSET, 0, 0)
UNREADABLE_ROW: Final = _INDEX_ROW.pack(0, _UNREADABLE_OFFSET, 0, 0)


def message_counts(rows: NDArray[Any]) -> NDArray[np.int64]:
    """Returns the number of messages of each index row; 0 for frames of other rows."""
    counts = rows["messages"].astype(np.int64)
    return np.where(counts >= _NAMES_BIT, 0, counts & _COUNT_MASK)


def withdrawn_counts(rows: NDArray[Any]) -> NDArray[np.int64]:
    """Returns how many messages fewer are to come because of each row, see `WITHDRAWING`."""
    kinds = kinds_of(rows)
    return _counts(rows, kinds) * _WITHDRAW[kinds]


def row_counts(rows: NDArray[Any]) -> NDArray[np.int64]:
    """Returns the number of rows of any kind of each index row's frame."""
    return _counts(rows, kinds_of(rows))


def kinds_of(rows: NDArray[Any]) -> NDArray[np.uint8]:
    """Returns the `Kind` of the frame of each index row; MESSAGES for those without a frame."""
    words = rows["messages"]
    kinds = np.where(words >= _NAMES_BIT, np.uint8(Kind.CANCELS), np.uint8(Kind.MESSAGES))
    says = (words & (_NAMES_BIT | _SAYS_BIT)) == _NAMES_BIT | _SAYS_BIT
    if np.count_nonzero(says):
        at_once = (words[says] & _AT_ONCE_BIT) > 0
        kinds[says] = np.where(at_once, np.uint8(Kind.RELEASES), np.uint8(Kind.COMMITS))
    return kinds


def are_cancels(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Marks index rows of frames of cancels."""
    return (rows["messages"] & (_NAMES_BIT | _SAYS_BIT)) == _NAMES_BIT  # type: ignore[no-any-return]  # numpy's stubs


def are_releases(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Marks index rows of frames of releases."""
    marks = _MARKS[Kind.RELEASES]
    return (rows["messages"] & marks) == marks  # type: ignore[no-any-return]  # numpy's stubs


def _counts(rows: NDArray[Any], kinds: NDArray[np.uint8]) -> NDArray[np.int64]:
    return rows["messages"].astype(np.int64) & _COUNT_MASKS[kinds]


def index_rows(
    slots: NDArray[np.int64],
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    counts: NDArray[np.int64],
    *,
    kind: Kind,
) -> NDArray[Any]:
    """Returns the rows of frames at these offsets of their slot files."""
    rows = np.empty(len(slots), INDEX_ROW)
    rows["slot"] = slots
    rows["offset"] = offsets
    rows["length"] = lengths
    rows["messages"] = counts | _MARKS[kind]
    rows["messages"] |= _checks(_bytes_of(rows)).astype(np.uint32) << _CHECK_SHIFT
    return rows


def index_row(slot: int, offset: int, length: int, count: int, *, kind: Kind) -> bytes:
    """Returns the row of one frame."""
    marked = count | _MARKS[kind]
    check = crc32c(_INDEX_ROW.pack(slot, offset, length, marked)) >> 21
    return _INDEX_ROW.pack(slot, offset, length, marked | check << _CHECK_SHIFT)


class IndexRow(NamedTuple):
    """One row; without a frame, it is all zeros except for its offset."""

    slot: int
    offset: int
    length_bytes: int
    rows: int
    kind: Kind


def each_row(rows: NDArray[Any]) -> list[IndexRow]:
    """Yields rows one by one, unchecked."""
    return [
        IndexRow(slot, offset, length_bytes, *_rows_of(word))
        for slot, offset, length_bytes, word in rows.tolist()
    ]


def _rows_of(word: int) -> tuple[int, Kind]:
    if word < _NAMES_BIT:
        return word & _COUNT_MASK, Kind.MESSAGES
    if not word & _SAYS_BIT:
        return word & (_SAYS_BIT - 1), Kind.CANCELS
    kind = Kind.RELEASES if word & _AT_ONCE_BIT else Kind.COMMITS
    return word & (_AT_ONCE_BIT - 1), kind


def place_in(raw: bytes) -> tuple[int, int]:
    """Returns slot and offset of one row, unchecked."""
    slot, offset, _, _ = _INDEX_ROW.unpack(raw)
    return slot, offset


def decode_row(raw: bytes) -> IndexRow | None:
    """Decodes one row; None if `flawed_rows` would mark it."""
    slot, offset, length_bytes, messages = _INDEX_ROW.unpack(raw)
    row = IndexRow(slot, offset, length_bytes, *_rows_of(messages))
    if not (length_bytes or messages or slot) and offset >= _UNREADABLE_OFFSET:
        return row
    unmarked = messages & (_NAMES_BIT | _COUNT_MASK)
    check = crc32c(_INDEX_ROW.pack(slot, offset, length_bytes, unmarked)) >> 21
    if not length_bytes or check != messages >> _CHECK_SHIFT & _CHECK_MASK:
        return None
    return row


def raw_rows(content: bytes) -> NDArray[Any]:
    """Returns the unchecked index rows in these bytes (see `checked_rows`), without a torn tail."""
    return np.frombuffer(content, INDEX_ROW, len(content) // INDEX_ROW_LENGTH_BYTES)


def checked_rows(rows: NDArray[Any]) -> NDArray[Any]:
    """Returns these rows with flawed ones replaced by holes."""
    flawed = flawed_rows(rows)
    if np.count_nonzero(flawed):  # for few rows, a fifth of what `any` takes
        rows = rows.copy()
        rows[flawed] = np.frombuffer(HOLE_ROW, INDEX_ROW)
    return rows


def is_hole(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Marks holes, and rows that the medium cannot read: the place of their frames is unknown."""
    offsets = rows["offset"]
    is_marked = (offsets == _HOLE_OFFSET) | (offsets == _UNREADABLE_OFFSET)
    return _have_none(rows) & is_marked  # type: ignore[no-any-return]  # numpy's stubs


def is_unreadable(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Marks rows that the medium cannot read."""
    return _have_none(rows) & (rows["offset"] == _UNREADABLE_OFFSET)  # type: ignore[no-any-return]


def is_gone(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Marks rows of finished slots that are not known any more."""
    return _have_none(rows) & (rows["offset"] == _GONE_OFFSET)  # type: ignore[no-any-return]


def leading(marks: NDArray[np.bool_]) -> int:
    """Returns how many are marked before the first one that is not."""
    return len(marks) if marks.all() else int(marks.argmin())


def filled_with(row: bytes, count: int) -> NDArray[Any]:
    """Returns this row many times."""
    return np.full(count, np.frombuffer(row, INDEX_ROW)[0], INDEX_ROW)


def flawed_rows(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Marks rows with a wrong check value, and rows that cannot refer to a frame."""
    if len(rows) <= FEW_FRAMES:
        return np.array([decode_row(raw) is None for raw in rows.view("V16").tolist()], np.bool_)
    has_none = _have_none(rows) & (rows["offset"] >= _UNREADABLE_OFFSET)
    if not has_none.any():
        return _are_wrong(rows)
    flawed = ~has_none
    flawed[flawed] = _are_wrong(rows[flawed])
    return flawed


def _have_none(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Marks rows that are zero except for their offsets."""
    return (rows["length"] == 0) & (rows["messages"] == 0) & (rows["slot"] == 0)  # type: ignore[no-any-return]


def _are_wrong(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Marks rows that refer to impossible frames."""
    raw = _bytes_of(rows).copy()
    raw[:, 14] &= 0x0F
    raw[:, 15] &= 0x80
    wrong = _checks(raw) != (rows["messages"] >> _CHECK_SHIFT) & _CHECK_MASK
    return wrong | (rows["length"] == 0)  # type: ignore[no-any-return]  # numpy's stubs


def _bytes_of(rows: NDArray[Any]) -> NDArray[np.uint8]:
    return rows.view(np.uint8).reshape(len(rows), INDEX_ROW_LENGTH_BYTES)


def _checks(raw: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """Returns the check value of each row, given as bytes without it."""
    pairs = np.ascontiguousarray(raw.view("<u2").T)
    found = np.full(len(raw), _CHECK_OF_ZEROS, np.uint16)
    for place, pair in enumerate(pairs):
        found ^= _PAIR_TABLES[place].take(pair)
    return found


def _pair_tables() -> NDArray[np.uint16]:
    """Returns what each pair of bytes adds to the check value, as CRCs are linear."""
    tables = np.zeros((INDEX_ROW_LENGTH_BYTES, 256), np.uint16)
    for place in range(INDEX_ROW_LENGTH_BYTES):
        for value in range(256):
            row = bytearray(INDEX_ROW_LENGTH_BYTES)
            row[place] = value
            tables[place, value] = (crc32c(row) >> 21) ^ _CHECK_OF_ZEROS
    low, high = tables[::2, None, :], tables[1::2, :, None]
    return (low ^ high).reshape(INDEX_ROW_LENGTH_BYTES // 2, 1 << 16)


_COUNT_MASKS: Final = np.array([0, *(MOST_ROWS[kind] for kind in Kind)], np.int64)
_WITHDRAW: Final = np.array([0, *(kind in WITHDRAWING for kind in Kind)], np.int64)
_CHECK_OF_ZEROS: Final = crc32c(bytes(INDEX_ROW_LENGTH_BYTES)) >> 21
_PAIR_TABLES: Final = _pair_tables()
