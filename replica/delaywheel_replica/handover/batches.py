"""Encodes and decodes batches, which the cleaner sends on a stream socket.

A batch is a head and its content; all numbers are little-endian.

| bytes | of the head |
|---|---|
| 4 | the length of the content |
| 4 | the number of the batch, which its answer repeats |
| 4 | the kind of its frames: messages, cancels, or commits |
| 4 | how many records |

| bytes a record | of the content, one column after the other |
|---|---|
| 8, 16, 4 | due, id, number of its topic |
| 8, 4 | of messages: timestamp, partition |
| 4, 4, 4 | of messages: lengths of key, value, headers |

The columns are followed by 4 bytes with the total length of the topic names, the names separated by
line feeds, then key, value and headers of each message, without gaps.

Both ends belong to one node, but perhaps to two releases: the cleaner announces `FORMAT` first, and
all malformed input raises one named error.
"""

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from delaywheel.storage.frames.columns import ID_LENGTH_BYTES, Columns, content_starts
from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.core.ingress.reading import Delayed, HalfCommit, Withdrawn
from delaywheel_replica.core.protocol.codec import MalformedError

FORMAT: Final = 2
"""The version of this format and that of answers."""

UNANSWERED_BYTES: Final = 4 << 20
"""Limit for handed-over records without an answer; a single larger record is allowed."""

BATCH_BYTES: Final = 1 << 20
"""Limit for the records of a batch; a single larger record is allowed."""

RECORD_BYTES: Final = 320
"""Cost of a record beside its content: its columns, its topic."""

LONGEST_BYTES: Final = (64 << 20) + RECORD_BYTES
"""No batch is longer: no setting allows longer messages."""

HEAD: Final = struct.Struct("<IIII")

_TOPICS_LENGTH: Final = struct.Struct("<I")
_IDENTITIES: Final = (
    ("due_ms", "<i8", 1),
    ("ids", "u1", ID_LENGTH_BYTES),
    ("topic_numbers", "<u4", 1),
)
_CONTENTS: Final = (
    ("timestamps_ms", "<i8", 1),
    ("partitions", "<i4", 1),
    ("key_lengths", "<i4", 1),
    ("value_lengths", "<i4", 1),
    ("headers_lengths", "<i4", 1),
)

HandedRequest: TypeAlias = Delayed | Withdrawn | HalfCommit


class Head(NamedTuple):
    """The head of a batch."""

    length_bytes: int
    number: int
    kind: Kind
    records: int

    @classmethod
    def parse(cls, head: bytes) -> "Head":
        """Parses the bytes of a head, or raises MalformedError."""
        length_bytes, number, kind, records = HEAD.unpack(head)
        if kind not in {Kind.MESSAGES, Kind.CANCELS, Kind.COMMITS} or not records:
            raise MalformedError(f"a batch of {records} records of kind {kind}")
        if max(length_bytes, records * RECORD_BYTES) > LONGEST_BYTES:
            raise MalformedError(f"a batch of {records} records, {length_bytes} bytes")
        return cls(length_bytes, number, Kind(kind), records)

    @property
    def cost_bytes(self) -> int:
        """Returns the memory that a batch is charged for while it is in flight."""
        return self.length_bytes + self.records * RECORD_BYTES


def kind_of(request: HandedRequest) -> Kind:
    """Returns the kind of the frame that a record becomes."""
    if isinstance(request, Delayed):
        return Kind.MESSAGES
    return Kind.CANCELS if isinstance(request, Withdrawn) else Kind.COMMITS


def length_bytes(request: HandedRequest) -> int:
    """Returns the cost of a record, in bytes."""
    if not isinstance(request, Delayed):
        return RECORD_BYTES
    return RECORD_BYTES + len(request.key or b"") + len(request.value or b"") + len(request.headers)


def encode(number: int, requests: Sequence[HandedRequest]) -> list[bytes | memoryview]:
    """Encodes a batch of records, at least one, all of one kind, as parts to send in order."""
    topics: dict[str, int] = {}
    numbers = [topics.setdefault(request.topic, len(topics)) for request in requests]
    names = "\n".join(topics).encode()
    messages = [request for request in requests if isinstance(request, Delayed)]
    contents = [part for each in messages for part in (each.key, each.value, each.headers) if part]
    parts = [
        _column([each.due_ms for each in requests], "<i8"),
        b"".join(request.id for request in requests),
        _column(numbers, "<u4"),
        *_columns_of(messages),
        _TOPICS_LENGTH.pack(len(names)),
        names,
        b"".join(contents),
    ]
    head = HEAD.pack(sum(map(len, parts)), number, kind_of(requests[0]), len(requests))
    return [head, *parts]


def _columns_of(messages: list[Delayed]) -> list[bytes]:
    return [
        _column([message.timestamp_ms for message in messages], "<i8"),
        _column([message.partition for message in messages], "<i4"),
        _column([_length(message.key) for message in messages], "<i4"),
        _column([_length(message.value) for message in messages], "<i4"),
        _column([len(message.headers) for message in messages], "<i4"),
    ]


def decode(head: Head, content: bytes) -> Columns:
    """Decodes a batch without copying contents, or raises MalformedError if it does not add up."""
    is_rows = head.kind is not Kind.MESSAGES
    columns, end = {}, 0
    for name, dtype, each in _IDENTITIES if is_rows else (*_IDENTITIES, *_CONTENTS):
        begin, end = end, end + np.dtype(dtype).itemsize * each * head.records
        if end > len(content):
            raise MalformedError(f"{len(content)} bytes for {head.records} records")
        columns[name] = np.frombuffer(content, dtype, head.records * each, begin)
    due_ms = columns.pop("due_ms")
    ids = columns.pop("ids").reshape(head.records, ID_LENGTH_BYTES)
    topics, blob = _topics_and_blob(content, end)
    if int(columns["topic_numbers"].max()) >= len(topics):
        raise MalformedError("a topic's number without a topic")
    if is_rows:
        if blob:
            raise MalformedError(f"contents of {len(blob)} bytes of rows without any")
        return Columns.of_names(due_ms, ids, topics, columns["topic_numbers"])
    _check_lengths(columns, blob_bytes=len(blob))
    starts = content_starts(_content_lengths(columns))
    return Columns(due_ms=due_ms, ids=ids, topics=topics, blob=blob, starts=starts, **columns)


def _topics_and_blob(content: bytes, begin: int) -> tuple[tuple[str, ...], memoryview]:
    names_begin = begin + _TOPICS_LENGTH.size
    try:
        (length,) = _TOPICS_LENGTH.unpack_from(content, begin)
        names = content[names_begin : names_begin + length].decode("ascii")
    except (struct.error, UnicodeDecodeError) as error:
        raise MalformedError("a batch without topics") from error
    return tuple(names.split("\n")), memoryview(content)[names_begin + length :]


def _content_lengths(columns: dict[str, NDArray[np.int32]]) -> NDArray[np.int64]:
    lengths = np.maximum(columns["key_lengths"], 0).astype(np.int64)
    lengths += np.maximum(columns["value_lengths"], 0)
    lengths += columns["headers_lengths"]
    return lengths


def _check_lengths(columns: dict[str, NDArray[np.int32]], *, blob_bytes: int) -> None:
    least = min(int(columns[name].min()) for name in ("key_lengths", "value_lengths"))
    if least < -1 or int(columns["headers_lengths"].min()) < 0:
        raise MalformedError("a negative length")
    expected = int(_content_lengths(columns).sum())
    if expected != blob_bytes:
        raise MalformedError(f"contents of {blob_bytes} bytes where lengths say {expected}")


def _column(values: list[int], dtype: str) -> bytes:
    return np.array(values, dtype=dtype).tobytes()


def _length(content: bytes | None) -> int:
    return -1 if content is None else len(content)
