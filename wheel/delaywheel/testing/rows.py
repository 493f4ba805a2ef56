"""Messages of a request, from either of its two forms, as plain values. Without numpy."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from delaywheel import ingress
from delaywheel.headers import HEADER_LENGTHS, decode_headers
from delaywheel.ingress import HalfAnswer
from delaywheel.record_headers import is_reserved
from delaywheel.transactional import Outgoing
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


def answer_in(record: Outgoing) -> tuple[bytes, int, HalfAnswer] | None:
    """Returns the answer about a half in a record of the ingress topic; None: it has none."""
    said = {name: (value or b"").decode() for name, value in record.headers}
    if ingress.ANSWER not in said:
        return None
    due_ms = int(said[ingress.DELIVER_AT])
    return bytes.fromhex(said[ingress.ID]), due_ms, HalfAnswer(said[ingress.ANSWER])


def delayed(record: Outgoing) -> SentMessage:
    """Returns the message that a record of the ingress topic is."""
    orders = {name: value for name, value in record.headers if value is not None}
    partition, timestamp = orders.get(ingress.PARTITION), orders.get(ingress.TIMESTAMP)
    own_id = orders.get(ingress.ID)
    return SentMessage(
        uuid.uuid4().bytes if own_id is None else bytes.fromhex(own_id.decode()),
        int(orders[ingress.DELIVER_AT]),
        orders[ingress.TOPIC].decode(),
        record.key,
        record.value,
        tuple((name, value) for name, value in record.headers if not is_reserved(name)),
        None if partition is None else int(partition),
        None if timestamp is None else int(timestamp),
    )


def written(record: Outgoing, now_ms: int) -> SentMessage:
    """Returns a record that a program writes to its topic, as one that appears there now."""
    return SentMessage(
        bytes(16),
        now_ms,
        record.topic,
        record.key,
        record.value,
        tuple(record.headers),
        None if record.partition < 0 else record.partition,
        record.timestamp_ms or None,
    )
