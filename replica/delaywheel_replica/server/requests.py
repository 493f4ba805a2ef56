"""Turns requests into columns, and says of each message whether it may be accepted.

Both forms of a request, rows and columns, become a ``Batch``; everything that is refused by a
value (dues, sizes, headers, partitions, …) is refused there, for both alike, by comparisons of
whole columns. Only what a form has of its own is looked at here and there: for rows how a due is
said, for columns whether lengths and blob agree, which is a matter of the whole request.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import uuid_utils
from numpy.typing import NDArray

from delaywheel.columns import ID_LENGTH_BYTES, Columns, content_starts
from delaywheel.headers import check_headers, encode_headers
from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.server.refusals import Refusal, RefusedError, quoted

_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")
# Dues are cut to this before they go into a column: far beyond every span, far below overflow.
_FAR_FUTURE_MS: Final = 1 << 52
_NO_ID: Final = bytes(ID_LENGTH_BYTES)
_Scalar = TypeVar("_Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Rules:
    """What a node accepts."""

    span_seconds: int
    late_window_seconds: int
    # A caller whose clock runs ahead by so much may still use the whole span.
    clock_skew_ms: int
    max_message_bytes: int
    max_request_messages: int
    max_request_bytes: int
    levels_ms: Mapping[str, int]
    # The service's own topics: forwarding into them could forge its records.
    own_topics: frozenset[str]


class Batch:
    """The messages of one request, and those of them that are refused.

    The first refusal of a message counts.
    """

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self.refusals: dict[int, Refusal] = {}

    def __len__(self) -> int:
        return len(self.columns)

    def refuse(self, rows: NDArray[np.intp] | Sequence[int], refusal: Refusal) -> None:
        """Refuses these messages, unless they are already."""
        for row in np.asarray(rows).tolist():
            self.refusals.setdefault(row, refusal)

    def accepted(self) -> tuple[Columns, NDArray[np.intp] | None]:
        """What is left, and which row of the request each is; None: all are left."""
        if not self.refusals:
            return self.columns, None
        good = np.ones(len(self.columns), dtype=np.bool_)
        good[list(self.refusals)] = False
        rows = np.flatnonzero(good)
        return self.columns.take(rows).compacted(), rows


def decode(request: pb.DelayProduceRequest, rules: Rules, *, now_ms: int) -> Batch:
    """Decodes and validates a request.

    What Kafka knows of the topics is not looked at here.

    Raises:
        RefusedError: the request as a whole: REQUEST_MALFORMED, TOO_MANY_MESSAGES,
            REQUEST_TOO_LARGE.
    """
    length_bytes = request.ByteSize()
    if length_bytes > rules.max_request_bytes:
        raise RefusedError(
            Reason.REQUEST_TOO_LARGE, f"{length_bytes} bytes, at most {rules.max_request_bytes}"
        )
    in_columns = request.HasField("columns")
    if in_columns == bool(request.messages):
        raise RefusedError(Reason.REQUEST_MALFORMED, "Give either messages or columns")
    messages = request.columns.messages if in_columns else len(request.messages)
    if messages > rules.max_request_messages:
        raise RefusedError(
            Reason.TOO_MANY_MESSAGES, f"{messages} messages, at most {rules.max_request_messages}"
        )
    if in_columns:
        batch = Batch(_decode_columns(request.columns))
    else:
        batch = _decode_rows(request.messages, rules, now_ms=now_ms)
    _check(batch, rules, now_ms=now_ms)
    return batch


# --- what both forms have in common


def _check(batch: Batch, rules: Rules, *, now_ms: int) -> None:
    columns = batch.columns
    _check_dues(batch, columns.due_ms, rules, now_ms=now_ms)
    _check_topic_names(batch, rules.own_topics)
    large = np.flatnonzero(columns.lengths_bytes > rules.max_message_bytes)
    if len(large):
        batch.refuse(
            large,
            Refusal(Reason.MESSAGE_TOO_LARGE, f"More than {rules.max_message_bytes} bytes"),
        )
    malformed, reserved = check_headers(columns)
    batch.refuse(malformed, Refusal(Reason.HEADER_INVALID))
    batch.refuse(reserved, Refusal(Reason.HEADER_RESERVED))
    batch.refuse(np.flatnonzero(columns.partitions < -1), Refusal(Reason.PARTITION_INVALID))
    # 0 is a legal timestamp that the Kafka client cannot express: to it, it means "now".
    no_timestamp = (columns.timestamps_ms < -1) | (columns.timestamps_ms == 0)
    batch.refuse(np.flatnonzero(no_timestamp), Refusal(Reason.TIMESTAMP_INVALID))


def _check_dues(batch: Batch, due_ms: NDArray[np.int64], rules: Rules, *, now_ms: int) -> None:
    oldest_ms = now_ms - rules.late_window_seconds * 1000
    newest_ms = now_ms + rules.span_seconds * 1000 + rules.clock_skew_ms
    if int(due_ms.min()) >= max(oldest_ms, 1) and int(due_ms.max()) <= newest_ms:
        return
    batch.refuse(np.flatnonzero(due_ms < 1), Refusal(Reason.DUE_INVALID))
    batch.refuse(
        np.flatnonzero(due_ms < oldest_ms),
        Refusal(Reason.DUE_TOO_OLD, f"Older than {rules.late_window_seconds} s"),
    )
    batch.refuse(
        np.flatnonzero(due_ms > newest_ms),
        Refusal(Reason.DUE_BEYOND_SPAN, f"More than {rules.span_seconds} s ahead"),
    )


def _check_topic_names(batch: Batch, own_topics: frozenset[str]) -> None:
    columns = batch.columns
    is_name = np.array([is_topic_name(topic) for topic in columns.topics], dtype=np.bool_)
    if not is_name.all():
        invalid = np.flatnonzero(~is_name[columns.topic_numbers])
        batch.refuse(invalid, Refusal(Reason.TOPIC_INVALID))
    for topic in own_topics.intersection(columns.topics):
        ours = np.flatnonzero(columns.topic_numbers == columns.topics.index(topic))
        batch.refuse(ours, Refusal(Reason.TOPIC_INVALID, f"{topic} belongs to the service"))


def is_topic_name(topic: str) -> bool:
    """Whether Kafka could have a topic of this name.

    Nothing is remembered of it: matching costs no more than looking it up, and a caller may name
    topics of any length.
    """
    return topic not in {".", ".."} and _TOPIC.fullmatch(topic) is not None


def _content_lengths(
    key_lengths: NDArray[np.int32],
    value_lengths: NDArray[np.int32],
    headers_lengths: NDArray[np.int32],
) -> NDArray[np.int64]:
    """Bytes of each message in the blob."""
    lengths = np.maximum(key_lengths, 0).astype(np.int64)
    lengths += np.maximum(value_lengths, 0)
    lengths += headers_lengths
    return lengths


# --- columns


def _decode_columns(batch: pb.ColumnBatch) -> Columns:
    messages = batch.messages
    if not messages:
        raise RefusedError(Reason.REQUEST_MALFORMED, "No messages")
    key_lengths = _column(batch.key_lengths, np.int32, messages, "key_lengths")
    value_lengths = _column(batch.value_lengths, np.int32, messages, "value_lengths")
    headers_lengths = _column(batch.headers_lengths, np.int32, messages, "headers_lengths")
    ids = _column(batch.ids, np.uint8, messages * ID_LENGTH_BYTES, "ids")
    if len(batch.topics) > messages:
        raise RefusedError(
            Reason.REQUEST_MALFORMED, f"{len(batch.topics)} topics for {messages} messages"
        )
    topics = tuple(batch.topics)
    topic_numbers = _column(batch.topic_numbers, np.uint32, messages, "topic_numbers")
    blob = batch.blob
    if int(key_lengths.min()) < -1 or int(value_lengths.min()) < -1:
        raise RefusedError(Reason.REQUEST_MALFORMED, "A length below -1")
    if int(headers_lengths.min()) < 0:
        raise RefusedError(Reason.REQUEST_MALFORMED, "A length of headers below 0")
    if int(topic_numbers.max()) >= len(topics):
        raise RefusedError(Reason.REQUEST_MALFORMED, "A topic number without a topic")
    lengths_bytes = _content_lengths(key_lengths, value_lengths, headers_lengths)
    starts = content_starts(lengths_bytes)
    end = int(starts[-1] + lengths_bytes[-1])
    if end != len(blob):
        raise RefusedError(
            Reason.REQUEST_MALFORMED, f"A blob of {len(blob)} bytes for lengths of {end} bytes"
        )
    return Columns(
        due_ms=_column(batch.due_ms, np.int64, messages, "due_ms"),
        ids=ids.reshape(messages, ID_LENGTH_BYTES),
        topics=topics,
        topic_numbers=topic_numbers,
        key_lengths=key_lengths,
        value_lengths=value_lengths,
        headers_lengths=headers_lengths,
        partitions=_optional(batch.partitions, np.int32, messages, "partitions"),
        timestamps_ms=_optional(batch.timestamps_ms, np.int64, messages, "timestamps_ms"),
        blob=blob,
        starts=starts,
    ).compacted()


def _column(packed: bytes, dtype: type[_Scalar], items: int, name: str) -> NDArray[_Scalar]:
    """One packed column as an array, without a copy."""
    expected = items * np.dtype(dtype).itemsize
    if len(packed) != expected:
        raise RefusedError(
            Reason.REQUEST_MALFORMED, f"Column {name} has {len(packed)} bytes, not {expected}"
        )
    return np.frombuffer(packed, dtype=np.dtype(dtype).newbyteorder("<"))


def _optional(packed: bytes, dtype: type[_Scalar], items: int, name: str) -> NDArray[_Scalar]:
    """A column that may be left out: none has one."""
    if not packed:
        return np.full(items, -1, dtype=dtype)
    return _column(packed, dtype, items, name)


# --- rows


@dataclass(slots=True)
class _Rows:
    """The columns of a request of rows, while they are gathered."""

    due_ms: list[int]
    ids: list[bytes]
    topics: dict[str, int]
    topic_numbers: list[int]
    key_lengths: list[int]
    value_lengths: list[int]
    headers_lengths: list[int]
    partitions: list[int]
    timestamps_ms: list[int]
    parts: list[bytes]

    def as_columns(self) -> Columns:
        key_lengths = np.array(self.key_lengths, dtype=np.int32)
        value_lengths = np.array(self.value_lengths, dtype=np.int32)
        headers_lengths = np.array(self.headers_lengths, dtype=np.int32)
        return Columns(
            due_ms=np.array(self.due_ms, dtype=np.int64),
            ids=np.frombuffer(b"".join(self.ids), dtype=np.uint8).reshape(-1, ID_LENGTH_BYTES),
            topics=tuple(self.topics),
            topic_numbers=np.array(self.topic_numbers, dtype=np.uint32),
            key_lengths=key_lengths,
            value_lengths=value_lengths,
            headers_lengths=headers_lengths,
            partitions=np.array(self.partitions, dtype=np.int32),
            timestamps_ms=np.array(self.timestamps_ms, dtype=np.int64),
            blob=b"".join(self.parts),
            starts=content_starts(_content_lengths(key_lengths, value_lengths, headers_lengths)),
        )


def _decode_rows(messages: Sequence[pb.DelayedMessage], rules: Rules, *, now_ms: int) -> Batch:
    rows = _Rows([], [], {}, [], [], [], [], [], [], [])
    refusals: dict[int, Refusal] = {}
    for row, message in enumerate(messages):
        _add_content(rows, message)
        try:
            rows.ids.append(_id_of(message))
            rows.due_ms.append(_due_of(message, rules, now_ms=now_ms))
        except RefusedError as error:
            refusals[row] = error.refusal
            del rows.ids[row:]
            rows.ids.append(_NO_ID)
            rows.due_ms.append(now_ms)
    batch = Batch(rows.as_columns())
    batch.refusals = refusals
    return batch


def _add_content(rows: _Rows, message: pb.DelayedMessage) -> None:
    rows.topic_numbers.append(rows.topics.setdefault(message.topic, len(rows.topics)))
    for lengths, field in ((rows.key_lengths, "key"), (rows.value_lengths, "value")):
        if message.HasField(field):  # type: ignore[arg-type]  # mypy-protobuf wants literals
            content: bytes = getattr(message, field)
            lengths.append(len(content))
            rows.parts.append(content)
        else:
            lengths.append(-1)
    headers = b""
    if message.headers:
        headers = encode_headers(
            (header.name, header.value if header.HasField("value") else None)
            for header in message.headers
        )
        rows.parts.append(headers)
    rows.headers_lengths.append(len(headers))
    # -1 would mean "none" in a column: one that is given but negative is refused as -2.
    rows.partitions.append(_given(message, "partition", message.partition))
    rows.timestamps_ms.append(_given(message, "timestamp_ms", message.timestamp_ms))


def _given(message: pb.DelayedMessage, field: Any, value: int) -> int:
    if not message.HasField(field):
        return -1
    return value if value >= 0 else -2


def _id_of(message: pb.DelayedMessage) -> bytes:
    if not message.HasField("id"):
        return uuid_utils.uuid7().bytes
    if len(message.id) != ID_LENGTH_BYTES:
        raise RefusedError(Reason.ID_INVALID, f"An id of {len(message.id)} bytes")
    return message.id


def _due_of(message: pb.DelayedMessage, rules: Rules, *, now_ms: int) -> int:
    ways = [way for way in ("deliver_at_ms", "delay_ms", "level") if message.HasField(way)]
    if len(ways) != 1:
        reason = Reason.DUE_AMBIGUOUS if ways else Reason.DUE_MISSING
        raise RefusedError(reason)
    if ways[0] == "deliver_at_ms":
        return min(message.deliver_at_ms, _FAR_FUTURE_MS)
    if message.HasField("id") and not message.HasField("sent_at_ms"):
        raise RefusedError(Reason.SENT_AT_MISSING)
    sent_at_ms = message.sent_at_ms if message.HasField("sent_at_ms") else now_ms
    return max(-1, min(sent_at_ms + _delay_of(message, rules), _FAR_FUTURE_MS))


def _delay_of(message: pb.DelayedMessage, rules: Rules) -> int:
    if message.HasField("level"):
        delay_ms = rules.levels_ms.get(message.level)
        if delay_ms is None:
            raise RefusedError(Reason.LEVEL_UNKNOWN, f"No level {quoted(message.level)}")
        return delay_ms
    if message.delay_ms < 0:
        raise RefusedError(Reason.DELAY_INVALID, f"A delay of {message.delay_ms} ms")
    return message.delay_ms
