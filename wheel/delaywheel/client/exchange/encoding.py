"""Encodes messages as a ColumnBatch and decodes its answer, without numpy.

One comprehension a column: a message costs some list operations and one copy of its bytes.
"""

import sys
from array import array
from collections.abc import Iterator, Sequence

from delaywheel.client.exchange.retry import AttemptFailure
from delaywheel.message import Handle, Message
from delaywheel_proto.v1 import delaywheel_pb2 as pb


class AnswerInvalidError(Exception):
    """The answer violates the protocol."""


def encode_request(messages: Sequence[Message]) -> pb.DelayProduceRequest:
    """Encodes messages as the columns of one request; their dues must be fixed."""
    numbers: dict[str, int] = {}
    topic_numbers = [numbers.setdefault(message.topic, len(numbers)) for message in messages]
    columns = pb.ColumnBatch(
        messages=len(messages),
        ids=b"".join([message.id for message in messages]),
        due_ms=_column("q", [_fixed_due_ms(message) for message in messages]),
        topics=numbers,
        topic_numbers=_column("I", topic_numbers),
        key_lengths=_column(
            "i", [-1 if message.key is None else len(message.key) for message in messages]
        ),
        value_lengths=_column(
            "i", [-1 if message.value is None else len(message.value) for message in messages]
        ),
        headers_lengths=_column("i", [len(message.encoded_headers) for message in messages]),
        partitions=_optional_column("i", [message.partition for message in messages]),
        timestamps_ms=_optional_column("q", [message.timestamp_ms for message in messages]),
        blob=b"".join(_contents(messages)),
        check_ids=_marks([message.has_own_id for message in messages]),
    )
    return pb.DelayProduceRequest(columns=columns)


def decode_answer(
    messages: Sequence[Message], response: pb.DelayProduceResponse
) -> list[Handle | AttemptFailure]:
    """Returns the outcome of each message of a request, in order.

    Raises:
        AnswerInvalidError: The response does not fit the request.
    """
    columns = response.columns
    if any(row >= len(messages) for row in columns.id_checked):
        raise AnswerInvalidError(f"checked ids beyond the {len(messages)} that were sent")
    failures: dict[int, AttemptFailure] = {}
    for refused in columns.errors:
        if refused.row >= len(messages):
            raise AnswerInvalidError(f"an error for row {refused.row} of {len(messages)}")
        failures[refused.row] = AttemptFailure.of_error(refused.error)
    wheel = columns.wheel
    if not wheel and len(failures) < len(messages):
        raise AnswerInvalidError("messages were accepted but no wheel is named")
    if not failures:
        return [_handle(wheel, message) for message in messages]
    return [failures.get(row) or _handle(wheel, message) for row, message in enumerate(messages)]


def _handle(wheel: str, message: Message) -> Handle:
    return Handle(wheel, _fixed_due_ms(message) // 1000, message.id, message.topic)


def _fixed_due_ms(message: Message) -> int:
    due_ms = message.due_ms
    assert due_ms is not None, "a level is looked up before its message is encoded"
    return due_ms


def _contents(messages: Sequence[Message]) -> Iterator[bytes]:
    for message in messages:
        if message.key:
            yield message.key
        if message.value:
            yield message.value
        if message.encoded_headers:
            yield message.encoded_headers


def _optional_column(typecode: str, numbers: Sequence[int | None]) -> bytes:
    """Returns a column in which -1 means absent; empty if no message has a value."""
    if numbers.count(None) == len(numbers):
        return b""
    return _column(typecode, [-1 if number is None else number for number in numbers])


def _marks(are_set: Sequence[bool]) -> bytes:
    """Returns a column of ones and zeros; empty if no message is marked."""
    return bytes(are_set) if True in are_set else b""


def _column(typecode: str, numbers: Sequence[int]) -> bytes:
    packed = array(typecode, numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
