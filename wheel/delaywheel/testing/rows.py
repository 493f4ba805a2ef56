"""Messages of a request, from either of its two forms, as plain values. Without numpy."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

from delaywheel import ingress
from delaywheel.headers import HEADER_LENGTHS, HeadersMalformedError, decode_headers
from delaywheel.ingress import HalfAnswer
from delaywheel.reasons import Reason
from delaywheel.record_headers import is_reserved
from delaywheel.testing.refusing import MemoryRefusal
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
    def headers_length_bytes(self) -> int:
        """The length of the encoded headers."""
        names = sum(HEADER_LENGTHS.size + len(name.encode()) for name, _ in self.headers)
        return names + sum(len(value or b"") for _, value in self.headers)

    @property
    def length_bytes(self) -> int:
        """The length of key, value and encoded headers, which `max_message_bytes` bounds."""
        return len(self.key or b"") + len(self.value or b"") + self.headers_length_bytes


def rows_of_columns(columns: pb.ColumnBatch) -> Iterator[SentMessage]:
    """Yields the messages of a ColumnBatch, as the SDK sends them; the caller has checked it."""
    count, blob, position = columns.messages, columns.blob, 0

    def take(length: int) -> bytes | None:
        nonlocal position
        start, position = position, position + max(length, 0)
        return None if length < 0 else blob[start:position]

    dues, topics = _column(columns, "due_ms"), _column(columns, "topic_numbers")
    keys, values = _column(columns, "key_lengths"), _column(columns, "value_lengths")
    headers = _column(columns, "headers_lengths")
    partitions, timestamps = _column(columns, "partitions"), _column(columns, "timestamps_ms")
    for row in range(count):
        key, value, encoded = take(keys[row]), take(values[row]), take(headers[row])
        yield SentMessage(
            columns.ids[row * 16 : row * 16 + 16],
            dues[row],
            columns.topics[topics[row]],
            key,
            value,
            _decoded(encoded or b""),
            None if partitions[row] == -1 else partitions[row],
            None if timestamps[row] == -1 else timestamps[row],
        )


_COLUMNS: Final = {
    **dict.fromkeys(("due_ms", "timestamps_ms"), "q"),
    **dict.fromkeys(("key_lengths", "value_lengths", "headers_lengths", "partitions"), "i"),
    "topic_numbers": "I",
    "check_ids": "B",
}
_OPTIONAL: Final = frozenset({"partitions", "timestamps_ms", "check_ids"})
MALFORMED: Final = (("\0", None),)
"""The headers of a message whose headers cannot be decoded: no name has U+0000."""


def _column(columns: pb.ColumnBatch, name: str) -> Sequence[int]:
    raw = getattr(columns, name)
    return (
        struct.unpack(f"<{columns.messages}{_COLUMNS[name]}", raw)
        if raw
        else [-1] * columns.messages
    )


def _decoded(encoded: bytes) -> OwnHeaders:
    try:
        return tuple(decode_headers(encoded))
    except HeadersMalformedError:
        return MALFORMED


def check_columns(columns: pb.ColumnBatch) -> None:
    """Raises MemoryRefusal unless columns, lengths and blob agree."""
    count = columns.messages
    for name, code in _COLUMNS.items():
        wanted = {count * struct.calcsize(code)} | ({0} if name in _OPTIONAL else set())
        _check(len(getattr(columns, name)) in wanted and count > 0, f"Column {name}")
    lengths = [_column(columns, name) for name in ("key_lengths", "value_lengths")]
    headers, topics = _column(columns, "headers_lengths"), _column(columns, "topic_numbers")
    _check(len(columns.ids) == 16 * count, "Column ids")
    _check(min(map(min, lengths)) >= -1 and min(headers) >= 0, "A length below -1")
    _check(max(topics) < len(columns.topics) <= count, "A topic number without a topic")
    blob = sum(headers) + sum(max(one, 0) for column in lengths for one in column)
    _check(blob == len(columns.blob), f"A blob of {len(columns.blob):,} bytes for {blob:,}")


def _check(is_fine: bool, what: str) -> None:
    if not is_fine:
        raise MemoryRefusal(Reason.REQUEST_MALFORMED, what)


def answer_in(record: Outgoing) -> tuple[str, bytes, int, HalfAnswer] | None:
    """Returns the answer about a half in a record of the ingress topic; None: it has none."""
    headers = dict(record.headers)  # others than ours have any bytes
    if ingress.ANSWER not in headers:
        return None
    ours = ingress.ID, ingress.DELIVER_AT, ingress.TOPIC, ingress.ANSWER
    said = {name: (headers[name] or b"").decode() for name in ours}
    id_, due_ms = bytes.fromhex(said[ingress.ID]), int(said[ingress.DELIVER_AT])
    return said[ingress.TOPIC], id_, due_ms, HalfAnswer(said[ingress.ANSWER])


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
