"""Parses a request just far enough to bound and dispatch it.

Two bytes on the wire can become an object of a hundred bytes. So a request is not given to protobuf
as a whole: it is walked field by field here, no further than the accepted maximum, and each of its
messages, or columns, is then parsed separately.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.quantities import counted
from delaywheel_replica.server.node.refusals import Refusal, RequestRefusedError

ByteRange: TypeAlias = tuple[int, int]
"""Where something begins and ends in the bytes of a request."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_LENGTHS: Final = {_FIXED64: 8, _FIXED32: 4}
_VARINT_LONGEST: Final = 10
# Besides the fields that repeat with the messages: those of columns, and some that a newer client
# may send.
_OTHER_FIELDS: Final = 64
_FEW_FIELDS: Final = 256


def _tag(message: type[pb.DelayProduceRequest | pb.ColumnBatch], name: str, wire_type: int) -> int:
    return int(message.DESCRIPTOR.fields_by_name[name].number) << 3 | wire_type


_MESSAGES_TAG: Final = _tag(pb.DelayProduceRequest, "messages", _BYTES)
_COLUMNS_TAG: Final = _tag(pb.DelayProduceRequest, "columns", _BYTES)
_COUNT_TAG: Final = _tag(pb.ColumnBatch, "messages", _VARINT)
_TOPICS_TAG: Final = _tag(pb.ColumnBatch, "topics", _BYTES)
_COLUMN_NAMES: Final = {
    each.number << 3 | _BYTES: each.name
    for each in pb.ColumnBatch.DESCRIPTOR.fields
    if not each.is_repeated
}


@dataclass(slots=True)
class Outline:
    """What a request contains, and where.

    Attributes:
        messages: Their number; for a refused request, as far as they were counted.
        refusal: Why the request is refused as it is; None: so far it is not.
        rows: For a request of messages: the bounds of each message.
        columns: For a request of columns: name -> bounds; None: it is one of messages.
        topics: The dictionary of these columns.
    """

    messages: int = 0
    refusal: Refusal | None = None
    rows: list[ByteRange] = field(default_factory=list)
    columns: dict[str, ByteRange] | None = None
    topics: list[ByteRange] = field(default_factory=list)


def outline_of(request: bytes, *, max_messages: int) -> Outline:
    """Parses a request's outline; refuses with REQUEST_MALFORMED or TOO_MANY_MESSAGES."""
    outline = Outline()
    try:
        _walk_through(outline, request, max_messages)
    except RequestRefusedError as error:
        outline.refusal = error.refusal
    return outline


def _walk_through(outline: Outline, request: bytes, max_messages: int) -> None:
    batch: ByteRange | None = None
    for tag, begin, end in fields_of(request, (0, len(request)), max_messages + _OTHER_FIELDS):
        if tag == _MESSAGES_TAG:
            outline.rows.append((begin, end))
            outline.messages += 1
            _refuse_too_many(outline.messages, max_messages)
        elif tag == _COLUMNS_TAG:
            if batch is not None:
                raise RequestRefusedError(Reason.REQUEST_MALFORMED, "Columns are given twice")
            batch = begin, end
    if (batch is None) == (not outline.rows):
        raise RequestRefusedError(Reason.REQUEST_MALFORMED, "Give either messages or columns")
    if batch is not None:
        _add_columns(outline, request, batch, max_messages)


def _add_columns(outline: Outline, request: bytes, batch: ByteRange, max_messages: int) -> None:
    outline.columns = {}
    for tag, begin, end in fields_of(request, batch, max_messages + _OTHER_FIELDS):
        if tag == _TOPICS_TAG:
            outline.topics.append((begin, end))
        elif tag == _COUNT_TAG:
            outline.messages = begin & 0xFFFFFFFF
            _refuse_too_many(outline.messages, max_messages)
        elif tag in _COLUMN_NAMES:
            outline.columns[_COLUMN_NAMES[tag]] = begin, end
    if len(outline.topics) > outline.messages:
        raise RequestRefusedError(
            Reason.REQUEST_MALFORMED,
            f"{counted(len(outline.topics), 'topic')} for {counted(outline.messages, 'message')}",
        )


def _refuse_too_many(messages: int, max_messages: int) -> None:
    if messages > max_messages:
        raise RequestRefusedError(
            Reason.TOO_MANY_MESSAGES, f"More than {counted(max_messages, 'message')}"
        )


def fields_of(content: bytes, span: ByteRange, most: int) -> Iterator[tuple[int, int, int]]:
    """Yields the fields of a protobuf message: tag, begin and end, or a varint's value.

    Raises:
        RequestRefusedError: REQUEST_MALFORMED: it is malformed, or has more than `most` fields.
    """
    try:
        yield from _walk(content, span, most)
    except _TooManyFieldsError:
        raise _malformed(f"more than {most} fields") from None


class _TooManyFieldsError(Exception):
    """A message has more fields than wanted."""


def _walk(  # noqa: C901 - a call for each field would cost more than the field
    content: bytes, span: ByteRange, most: int
) -> Iterator[tuple[int, int, int]]:
    at, end = span
    for _ in range(most):
        if at >= end:
            break
        tag = content[at]
        at += 1
        if tag >= 0x80:
            tag, at = _varint(content, at - 1, end)
        wire_type = tag & 7
        if wire_type == _BYTES:
            # Nearly all lengths are below 128.
            if at < end and content[at] < 0x80:
                begin = at + 1
                at = begin + content[at]
            else:
                length, begin = _varint(content, at, end)
                at = begin + length
            if at > end:
                raise _malformed("a field ends behind its message")
            yield tag, begin, at
        elif wire_type == _VARINT:
            value, at = _varint(content, at, end)
            yield tag, value, at
        elif wire_type in _FIXED_LENGTHS:
            at += _FIXED_LENGTHS[wire_type]
            if at > end:
                raise _malformed("a field ends behind its message")
        else:
            raise _malformed(f"a field of type {wire_type}")
    if at < end:
        raise _TooManyFieldsError


def has_more_fields(content: bytes, span: ByteRange, most: int) -> bool:
    """Whether a protobuf message has more than `most` fields.

    Raises:
        RequestRefusedError: REQUEST_MALFORMED: it is malformed.
    """
    try:
        for _ in _walk(content, span, most):
            pass
    except _TooManyFieldsError:
        return True
    return False


def is_short(request: bytes) -> bool:
    """Whether a request has so few fields that parsing its outline takes no time."""
    if len(request) <= _FEW_FIELDS:
        return True
    try:
        batches = 0
        for tag, begin, end in _walk(request, (0, len(request)), _FEW_FIELDS):
            if tag == _COLUMNS_TAG:
                batches += 1
                if batches > 1 or has_more_fields(request, (begin, end), _FEW_FIELDS):
                    return False
    except (RequestRefusedError, _TooManyFieldsError):
        return False
    return True


def _varint(content: bytes, at: int, end: int) -> tuple[int, int]:
    """Reads a varint; returns it with its end."""
    value = 0
    for place in range(min(_VARINT_LONGEST, end - at)):
        byte = content[at + place]
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at + place + 1
    raise _malformed("a number that does not end")


def _malformed(detail: str) -> RequestRefusedError:
    return RequestRefusedError(Reason.REQUEST_MALFORMED, f"Not a request: {detail}")
