"""Decodes sections of one second together into rows.

A numpy call costs as much for two hundred sections as for one: each column is gathered from one
view on all bytes, to whose items it is aligned. Heads are checked before, one by one.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delaywheel.storage.frames.columns import ID_LENGTH_BYTES, Columns
from delaywheel.storage.frames.format import (
    HAS_PARTITIONS,
    HAS_TIMESTAMPS,
    DamageReason,
    FrameDamaged,
    decode_topics,
)
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.seconds.rows import PlacedRows
from delaywheel.storage.seconds.section import HAS_NAMES, HEADER_LENGTH_BYTES, SectionHead


def decode_sections(content: bytes, heads: Sequence[SectionHead]) -> PlacedRows:
    """Decodes the rows of sections that were checked, in order; no byte of content is copied.

    Args:
        content: The second's file, from its beginning.
        heads: Its sections; at least one, all of one second.

    Raises:
        FrameDamaged: What they say does not add up, though their checksums are right.
    """
    sections = _Sections(content, heads)
    numbers = sections.column("<i8", 1)
    accepted_at_ms = sections.column("<i8", 1)
    timestamps = sections.sparse("<i8", HAS_TIMESTAMPS, -1)
    ids = sections.column("<u8", ID_LENGTH_BYTES // 8).view(np.uint8).reshape(-1, ID_LENGTH_BYTES)
    places, topic_numbers = sections.column("<u4", 1), sections.column("<u4", 1)
    lengths = [sections.column("<i4", 1) for _ in range(3)]
    partitions = sections.sparse("<i4", HAS_PARTITIONS, -1)
    due_ms = sections.column("<u2", 1) + np.int64(heads[0].slot * 1000)
    kinds = sections.sparse("u1", HAS_NAMES, int(Kind.MESSAGES))
    topics, topic_numbers = sections.topics(topic_numbers)
    columns = Columns(
        due_ms=due_ms,
        ids=ids,
        topics=topics,
        topic_numbers=topic_numbers,
        key_lengths=lengths[0],
        value_lengths=lengths[1],
        headers_lengths=lengths[2],
        partitions=partitions,
        timestamps_ms=timestamps,
        blob=content,
        starts=sections.starts(lengths),
    )
    return PlacedRows(columns, numbers, accepted_at_ms, places, kinds)


class _Sections:
    """Reads one column after the other."""

    def __init__(self, content: bytes, heads: Sequence[SectionHead]) -> None:
        self._content = content
        self._heads = heads
        self._flags = np.array([head.flags for head in heads])
        self._at = np.array([head.offset + HEADER_LENGTH_BYTES for head in heads])
        self._counts = np.array([head.rows for head in heads])
        self._firsts = np.cumsum(self._counts) - self._counts
        rows = int(self._counts.sum())
        self._within = np.arange(rows) - np.repeat(self._firsts, self._counts)

    def column(self, item: str, items: int) -> NDArray[Any]:
        """Returns the next column, which all of them have, of so many items a row."""
        dtype = np.dtype(item)
        found = self._items(dtype, self._at, items)
        self._at += self._counts * dtype.itemsize * items
        return found

    def sparse(self, item: str, flag: int, default: int) -> NDArray[Any]:
        """Returns the next column, which only those with a flag have."""
        dtype, has = np.dtype(item), (self._flags & flag) != 0
        found = np.full(len(self._within), default, dtype)
        if has.any():
            chosen = np.repeat(has, self._counts)
            found[chosen] = self._items(dtype, np.where(has, self._at, 0), 1)[chosen]
            self._at += has * self._counts * dtype.itemsize
        return found

    def _items(self, dtype: np.dtype[Any], at: NDArray[np.int64], items: int) -> NDArray[Any]:
        view = np.frombuffer(self._content, dtype, len(self._content) // dtype.itemsize)
        first = np.repeat(at // dtype.itemsize, self._counts) + items * self._within
        if items > 1:
            first = (first[:, np.newaxis] + np.arange(items)).reshape(-1)
        found: NDArray[Any] = view.take(first)
        return found

    def topics(self, numbers: NDArray[np.uint32]) -> tuple[tuple[str, ...], NDArray[np.uint32]]:
        """Returns the topics of all, and each row's number among them."""
        known: dict[bytes, int] = {}
        which = []
        for head in self._heads:
            at = head.offset + HEADER_LENGTH_BYTES + head.columns_length_bytes
            names = self._content[at : at + head.topics_length]
            which.append(known.setdefault(names, len(known)))
        parts = [decode_topics(dictionary) for dictionary in known]
        named = np.array([len(part) for part in parts])[which]
        if (numbers >= np.repeat(named, self._counts)).any():
            raise FrameDamaged(DamageReason.LENGTHS, "topics")
        begins = np.cumsum([0, *(len(part) for part in parts[:-1])])[which]
        shifted = numbers + np.repeat(begins, self._counts)
        return tuple(topic for part in parts for topic in part), shifted.astype(np.uint32)

    def starts(self, lengths: Sequence[NDArray[np.int32]]) -> NDArray[np.int64]:
        """Returns where the content of each row begins."""
        of_rows = sum(np.maximum(part, 0).astype(np.int64) for part in lengths)
        ends = np.concatenate(([0], np.cumsum(of_rows)))
        of_sections = ends[self._firsts + self._counts] - ends[self._firsts]
        blobs = [(head.rows and head.blob_length) for head in self._heads]
        if (of_sections != blobs).any():
            raise FrameDamaged(DamageReason.LENGTHS, "blob")
        blobs_at = np.array(
            [
                head.offset + HEADER_LENGTH_BYTES + head.columns_length_bytes + head.topics_length
                for head in self._heads
            ]
        )
        starts: NDArray[np.int64] = ends[:-1] + np.repeat(
            blobs_at - ends[self._firsts], self._counts
        )
        return starts
