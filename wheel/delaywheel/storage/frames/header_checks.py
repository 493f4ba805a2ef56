"""Checks and searches the headers of many messages at once, without decoding them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from delaywheel.headers import HEADER_LENGTHS, is_cut_off
from delaywheel.record_headers import PASSED_PREFIX, RESERVED_PREFIX, is_reserved
from delaywheel.storage.frames.columns import Columns

_RESERVED = np.frombuffer(RESERVED_PREFIX.encode(), dtype=np.uint8)
_PASSED = np.frombuffer(PASSED_PREFIX.encode(), dtype=np.uint8)
# A numpy pass over some messages costs as much as a plain loop over this many headers.
_VECTORISED_MESSAGES = 256


class TooManyHeadersError(ValueError):
    """The messages together have too many headers to check."""


@dataclass(frozen=True, slots=True)
class HeaderFaults:
    """The messages whose headers must be refused, by their first fault.

    Attributes:
        too_many: Messages with more headers than one message may have.
        malformed: Messages whose headers cannot be decoded, or have a name that would be cut off.
        reserved: Messages with a header whose name is the service's own (``is_reserved``).
    """

    too_many: NDArray[np.intp]
    malformed: NDArray[np.intp]
    reserved: NDArray[np.intp]


def _names_in(buffer: bytes) -> Iterator[bytes | None]:
    """Yields the names of headers, skipping values; yields None last if the bytes are malformed."""
    position, end = 0, len(buffer)
    unpack, beside = HEADER_LENGTHS.unpack_from, HEADER_LENGTHS.size
    while position < end:
        if end - position < beside:
            yield None
            return
        name_length, value_length = unpack(buffer, position)
        name_at = position + beside
        value_at = name_at + name_length
        position = value_at + value_length if value_length > 0 else value_at
        if not name_length or value_length < -1 or position > end:
            yield None
            return
        yield buffer[name_at:value_at]


def rows_that_may_have(
    columns: Columns, name: str, most_bytes: int
) -> NDArray[np.bool_] | np.bool_:
    """Marks messages that may have this header with such a short value; may mark others too.

    The bytes of all messages are searched at once (a megabyte takes about a millisecond). Single
    messages are examined only if what such a header ends with occurs somewhere. The longest value
    is below 256 bytes; null values never match. Returns a flag for each message, or one for all.
    """
    assert 0 <= most_bytes < 256
    encoded = name.encode()
    # The upper bytes of the value's length, which come right before the name.
    end_of_it = b"\0\0\0" + encoded
    least_bytes = HEADER_LENGTHS.size + len(encoded)
    has_room = columns.headers_lengths >= least_bytes
    blob = columns.blob
    content = bytes(blob) if isinstance(blob, memoryview) else blob
    if not has_room.any() or end_of_it not in content:
        return np.False_
    begin = re.escape(len(encoded).to_bytes(4, "little"))
    looks_like = re.compile(begin + b"[\0-%b]" % re.escape(bytes([most_bytes])) + end_of_it)
    rows = np.flatnonzero(has_room)
    ends = (columns.starts + columns.lengths_bytes)[rows]
    firsts = ends - columns.headers_lengths[rows]
    places = zip(rows.tolist(), firsts.tolist(), ends.tolist(), strict=True)
    for row, first, end in places:
        has_room[row] = looks_like.search(content, first, end) is not None
    return has_room


def check_headers(columns: Columns, *, most: int, most_of_all: int) -> HeaderFaults:
    """Finds messages whose headers must be refused; the number of headers checked is bounded.

    Raises TooManyHeadersError if all messages together have more. Key, value and headers lie within
    the blob.
    """
    walk = _Walk(columns, most, most_of_all)
    while len(walk.rows) > _VECTORISED_MESSAGES:
        walk.step()
    walk.finish_one_by_one()
    return walk.faults()


class _Walk:
    """Walks the headers of all messages at once: each step takes one header of every message.

    ``rows`` are the messages not yet walked to their end, with their ``at`` and ``end``.
    """

    def __init__(self, columns: Columns, most: int, most_of_all: int) -> None:
        messages = len(columns)
        self._most = most
        self._left = most_of_all
        self._steps = 0
        self.too_many = np.zeros(messages, dtype=np.bool_)
        self.malformed = np.zeros(messages, dtype=np.bool_)
        self.reserved = np.zeros(messages, dtype=np.bool_)
        self._blob = memoryview(columns.blob)
        self._bytes = np.frombuffer(columns.blob, dtype=np.uint8)
        self.rows = np.flatnonzero(columns.headers_lengths)
        content = columns.starts + columns.lengths_bytes
        self._end = content[self.rows]
        self._at = self._end - columns.headers_lengths[self.rows]

    def faults(self) -> HeaderFaults:
        malformed = self.malformed & ~self.too_many
        return HeaderFaults(
            np.flatnonzero(self.too_many),
            np.flatnonzero(malformed),
            np.flatnonzero(self.reserved & ~self.too_many & ~malformed),
        )

    def step(self) -> None:
        if self._steps == self._most:
            self.too_many[self.rows] = True
            self._forget(np.zeros(len(self.rows), dtype=np.bool_))
            return
        self._steps += 1
        self._count(len(self.rows))
        self._keep(self._end - self._at >= HEADER_LENGTHS.size)
        lengths = self._bytes[self._at[:, None] + np.arange(HEADER_LENGTHS.size)]
        name_lengths = lengths[:, :4].copy().view("<u4")[:, 0].astype(np.int64)
        value_lengths = lengths[:, 4:].copy().view("<i4")[:, 0].astype(np.int64)
        names_at = self._at + HEADER_LENGTHS.size
        next_at = names_at + name_lengths + np.maximum(value_lengths, 0)
        fits = (name_lengths > 0) & (value_lengths >= -1) & (next_at <= self._end)
        self._keep(fits)
        self._check_names(names_at[fits], name_lengths[fits])
        self._at = next_at[fits]
        self._forget(self._at < self._end)

    def finish_one_by_one(self) -> None:
        places = zip(self.rows.tolist(), self._at.tolist(), self._end.tolist(), strict=True)
        # Messages of one request mostly share the same names: each name is checked once.
        plain: set[bytes] = set()
        for row, at, end in places:
            headers = self._steps
            for name in _names_in(bytes(self._blob[at:end])):
                if name is None:
                    self.malformed[row] = True
                    break
                headers += 1
                if headers > self._most:
                    self.too_many[row] = True
                    break
                if name not in plain:
                    self._judge(row, name, plain)
            self._count(headers - self._steps)

    def _judge(self, row: int, name: bytes, plain: set[bytes]) -> None:
        try:
            text = name.decode()
        except UnicodeDecodeError:
            self.malformed[row] = True
            return
        if is_cut_off(text):
            self.malformed[row] = True
        elif is_reserved(text):
            self.reserved[row] = True
        else:
            plain.add(name)

    def _count(self, headers: int) -> None:
        self._left -= headers
        if self._left < 0:
            raise TooManyHeadersError

    def _keep(self, good: NDArray[np.bool_]) -> None:
        """Keeps these rows in the walk and marks the others as malformed."""
        self.malformed[self.rows[~good]] = True
        self._forget(good)

    def _forget(self, others_than: NDArray[np.bool_]) -> None:
        self.rows = self.rows[others_than]
        self._at = self._at[others_than]
        self._end = self._end[others_than]

    def _check_names(self, names_at: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """Marks names that are reserved, not UTF-8, or cut off; nearly all are plain ASCII."""
        total = int(lengths.sum())
        within = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        names = self._bytes[np.repeat(names_at, lengths) + within]
        owners = np.repeat(np.arange(len(lengths)), lengths)
        self.malformed[self.rows[owners[names == 0]]] = True
        for name in np.unique(owners[names >= 0x80]).tolist():
            at = int(names_at[name])
            try:
                bytes(self._blob[at : at + int(lengths[name])]).decode()
            except UnicodeDecodeError:
                self.malformed[self.rows[name]] = True
        ours = self._beginning(_RESERVED, names_at, lengths)
        passed = ours[self._beginning(_PASSED, names_at[ours], lengths[ours])]
        self.reserved[self.rows[np.setdiff1d(ours, passed)]] = True

    def _beginning(
        self, prefix: NDArray[np.uint8], names_at: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> NDArray[np.intp]:
        """Returns the places of the names that begin so."""
        long_enough = np.flatnonzero(lengths >= len(prefix))
        firsts = self._bytes[names_at[long_enough][:, None] + np.arange(len(prefix))]
        begun: NDArray[np.intp] = long_enough[(firsts == prefix).all(axis=1)]
        return begun
