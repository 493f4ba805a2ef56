"""Messages of a request, from either of its two forms, as plain values. Without numpy."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from delaywheel.headers import HEADER_LENGTHS, decode_headers
from delaywheel_proto.v1 import delaywheel_pb2 as pb

OwnHeaders: TypeAlias = tuple[tuple[str, bytes | None], ...]


class SentMessage(NamedTuple):
    """One message of a request."""

    id: bytes
    due_ms: int
    topic: str
    key: bytes | None
    value: bytes | None
    headers: OwnHeaders
    partition: int | None
    timestamp_ms: int | None

    @property
    def length_bytes(self) -> int:
        """The length of key, value and encoded headers, which `max_message_bytes` bounds."""
        names = sum(HEADER_LENGTHS.size + len(name.encode()) for name, _ in self.headers)
        values = sum(len(value or b"") for _, value in self.headers)
        return len(self.key or b"") + len(self.value or b"") + names + values


def rows_of_columns(columns: pb.ColumnBatch) -> Iterator[SentMessage]:
    """Yields the messages of a ColumnBatch, as the SDK sends them."""
    count, blob, position = columns.messages, columns.blob, 0

    def column(raw: bytes, code: str) -> Sequence[int]:
        return struct.unpack(f"<{count}{code}", raw) if raw else (-1,) * count

    def take(length: int) -> bytes | None:
        nonlocal position
        start, position = position, position + max(length, 0)
        return None if length < 0 else blob[start:position]

    dues, topics = column(columns.due_ms, "q"), column(columns.topic_numbers, "I")
    keys, values = column(columns.key_lengths, "i"), column(columns.value_lengths, "i")
    headers = column(columns.headers_lengths, "i")
    partitions, timestamps = column(columns.partitions, "i"), column(columns.timestamps_ms, "q")
    for row in range(count):
        yield SentMessage(
            columns.ids[row * 16 : row * 16 + 16],
            dues[row],
            columns.topics[topics[row]],
            take(keys[row]),
            take(values[row]),
            tuple(decode_headers(take(headers[row]) or b"")),
            None if partitions[row] < 0 else partitions[row],
            None if timestamps[row] < 0 else timestamps[row],
        )
