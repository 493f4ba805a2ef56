"""Turns requests into columns, and decides which of their messages may be accepted.

Both forms of a request, rows and columns, become a ``RequestBatch``, which checks all values (dues,
sizes, headers, partitions, …) for both alike, by comparing whole columns. Only what is specific to
a form is checked separately: for rows how a due is given, for columns whether they are consistent
(columnar.py).

The cost of a request is bounded by what it may contain: messages, topics (no more than messages),
headers, bytes. No request takes longer than some hundred milliseconds; those that take more than a
few go to a thread (producing.py).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import uuid_utils
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from delaywheel.headers import decode_headers, encode_headers
from delaywheel.identity import is_topic_name
from delaywheel.ingress import PLACE_ID_PREFIX, is_reserved_topic
from delaywheel.reasons import Reason
from delaywheel.record_headers import HALF_GROUP, is_reserved
from delaywheel.storage.frames.columns import ID_LENGTH_BYTES, Columns, content_starts
from delaywheel.storage.frames.header_checks import TooManyHeadersError, check_headers
from delaywheel.transactions.half_rules import half_fault, make_a_half
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.protocol.reschedules import MessageKey
from delaywheel_replica.quantities import about, counted
from delaywheel_replica.rights import EVERYTHING, Right
from delaywheel_replica.server.access.callers import Caller
from delaywheel_replica.server.access.spending import TopicRoom, no_room
from delaywheel_replica.server.intake.columnar import (
    NO_ROWS,
    content_lengths,
    decode_columns,
    rows_to_check,
)
from delaywheel_replica.server.intake.unpacking import (
    ByteRange,
    Outline,
    has_more_fields,
)
from delaywheel_replica.server.node.naming import key_of
from delaywheel_replica.server.node.refusals import Refusal, RequestRefusedError, quoted

MESSAGE_HEADERS: Final = 10_000
REQUEST_HEADERS: Final = 200_000
"""Headers cost by their number, however short they are: per message, per request."""

_TOO_MANY_HEADERS: Final = Refusal(Reason.MESSAGE_TOO_LARGE, f"More than {MESSAGE_HEADERS} headers")
# The fields of a message are counted before it is parsed, if there may be many of them.
_WALKED_ABOVE_BYTES: Final = 1 << 15
# What a message may have besides its content, and besides its headers: nothing valid is so long.
_BESIDE_CONTENT_BYTES: Final = 1 << 16
_OTHER_FIELDS: Final = 64
_NO_MESSAGE: Final = pb.DelayedMessage()
# Dues are clamped to this before they go into a column: far beyond every span, far below overflow.
_FAR_FUTURE_MS: Final = 1 << 52
_NO_ID: Final = bytes(ID_LENGTH_BYTES)


@dataclass(frozen=True, slots=True)
class IntakeRules:
    """What a node accepts."""

    span_seconds: int
    late_window_seconds: int
    # A caller whose clock runs ahead by this much may still use the whole span.
    clock_skew_ms: int
    max_message_bytes: int
    max_request_messages: int
    max_request_bytes: int
    levels_ms: Mapping[str, int]
    # The service's own topics: forwarding into them could forge its records.
    own_topics: frozenset[str]
    # Why no half messages are accepted now; None: they are.
    halves_refusal: Callable[[], Refusal | None] = lambda: Refusal(Reason.HALVES_OFF)


class RequestBatch:
    """The messages of one request, and which of them are refused.

    The first refusal of a message counts.

    Attributes:
        columns: All messages; once some are accepted and others not, without their contents.
        refusals: Row -> why it is refused.
        accepted: Those that were not refused when `accept` was called.
        to_check: The rows whose senders ask for their ids to be checked.
        checked: Those of them for which that was done, unless it refused them.
        halves: The rows that are half messages, each with its group of checkers.
        rows: Of a part of a batch: the row in that of each of its messages.
    """

    def __init__(self, columns: Columns, to_check: NDArray[np.intp] = NO_ROWS) -> None:
        self.columns = columns
        self.to_check = to_check
        self.checked: list[int] = []
        self.halves: dict[int, str] = {}
        self.refusals: dict[int, Refusal] = {}
        self.accepted = columns
        self.rows: NDArray[np.intp] = NO_ROWS
        # The row of each accepted message; None: all rows.
        self._rows: NDArray[np.intp] | None = None

    def __len__(self) -> int:
        return len(self.columns)

    def refuse(self, rows: NDArray[np.intp] | Sequence[int], refusal: Refusal) -> None:
        """Refuses these messages, unless they are refused already."""
        for row in np.asarray(rows).tolist():
            self.refusals.setdefault(row, refusal)

    def unrefused(self, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """Returns those of some rows that are not refused so far."""
        if not self.refusals:
            return rows
        is_good = np.fromiter((row not in self.refusals for row in rows.tolist()), np.bool_)
        return rows[is_good]

    @cached_property
    def lengths_bytes(self) -> NDArray[np.int64]:
        """The length of key, value and headers of each message together."""
        return self.columns.lengths_bytes

    def rows_for(self, number: int) -> NDArray[np.intp]:
        """Returns the rows of the messages for a topic, ascending.

        Rows are sorted once, for all topics: a pass for each topic would take as long as messages
        times topics.
        """
        order, ends = self._by_topic
        return order[ends[number] : ends[number + 1]]

    @cached_property
    def _by_topic(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Rows ordered by topic, and where each topic's begin; the last entry is the length."""
        numbers = self.columns.topic_numbers
        order = np.argsort(numbers, kind="stable")
        return order, np.searchsorted(numbers[order], np.arange(len(self.columns.topics) + 1))

    def accept(self) -> None:
        """Accepts the messages that are not refused so far."""
        if not self.refusals:
            return
        good = np.ones(len(self.columns), dtype=np.bool_)
        good[list(self.refusals)] = False
        self._rows = np.flatnonzero(good)
        self.accepted = self.columns.take(self._rows).compacted()
        self.columns = replace(self.columns, blob=b"")

    def apart(self, names: Collection[str]) -> "list[RequestBatch]":
        """Splits it into what is for other topics, and what is for these; or returns it whole."""
        if not names:
            return [self]
        of_names = np.array([topic in names for topic in self.columns.topics], np.bool_)
        is_of_names = of_names[self.columns.topic_numbers]
        if not len(self.unrefused(np.flatnonzero(~is_of_names))):
            return [self]
        parts = [self._part(np.flatnonzero(chosen)) for chosen in (~is_of_names, is_of_names)]
        self.columns = replace(self.columns, blob=b"")
        return parts

    def _part(self, rows: NDArray[np.intp]) -> "RequestBatch":
        to_check = np.flatnonzero(np.isin(rows, self.to_check))
        part = RequestBatch(self.columns.take(rows).compacted(), to_check)
        part.rows = rows
        for number, row in enumerate(rows.tolist()):
            if row in self.refusals:
                part.refusals[number] = self.refusals[row]
            if row in self.halves:
                part.halves[number] = self.halves[row]
        return part

    def join(self, part: "RequestBatch") -> None:
        """Takes over what became of a part of it."""
        rows = part.rows.tolist()
        self.refusals |= {rows[number]: refusal for number, refusal in part.refusals.items()}
        self.checked += [rows[number] for number in part.checked]

    def accepted_halves(self) -> dict[MessageKey, int]:
        """Returns the halves that were not refused, with the length of key, value and headers."""
        columns, lengths_bytes = self.columns, self.lengths_bytes
        return {
            key_of(columns, row): int(lengths_bytes[row])
            for row in self.halves
            if row not in self.refusals
        }

    def refuse_accepted(self, failed: Mapping[int, Refusal]) -> None:
        """Refuses some of the accepted messages after all.

        Args:
            failed: Row of ``accepted`` -> why.
        """
        for row, refusal in failed.items():
            self.refusals[row if self._rows is None else int(self._rows[row])] = refusal


def decode_outlined(
    request: bytes, outline: Outline, rules: IntakeRules, *, now_ms: int
) -> RequestBatch:
    """Decodes and validates a DelayProduceRequest whose outline was parsed before.

    What Kafka knows of the topics is not checked here.

    Raises:
        RequestRefusedError: The request as a whole: REQUEST_MALFORMED, TOO_MANY_MESSAGES,
            REQUEST_TOO_LARGE.
    """
    if outline.refusal is not None:
        raise RequestRefusedError.of(outline.refusal)
    if len(request) > rules.max_request_bytes:
        raise RequestRefusedError(
            Reason.REQUEST_TOO_LARGE, f"{len(request):,} bytes, at most {rules.max_request_bytes:,}"
        )
    if outline.columns is not None:
        batch = RequestBatch(decode_columns(request, outline), rows_to_check(request, outline))
    else:
        batch = _decode_rows(request, outline.rows, rules, now_ms=now_ms)
    _check(batch, rules, now_ms=now_ms)
    return batch


# --- common to both forms


def _check(batch: RequestBatch, rules: IntakeRules, *, now_ms: int) -> None:
    """Refuses messages; looks for rows only where a column's extremes say that there are any."""
    columns, lengths_bytes = batch.columns, batch.lengths_bytes
    _check_dues(batch, columns.due_ms, rules, now_ms=now_ms)
    _check_topic_names(batch, rules.own_topics)
    begins = columns.ids[:, : len(PLACE_ID_PREFIX)]
    if (of_places := (begins == np.frombuffer(PLACE_ID_PREFIX, np.uint8)).all(axis=1)).any():
        batch.refuse(np.flatnonzero(of_places), _ID_OF_A_PLACE)
    if int(lengths_bytes.max()) > rules.max_message_bytes:
        for row in np.flatnonzero(lengths_bytes > rules.max_message_bytes).tolist():
            batch.refuse([row], _too_large(int(lengths_bytes[row]), rules))
    if columns.headers_lengths.any():
        _check_headers(batch, rules, now_ms=now_ms)
    if int(columns.partitions.min()) < -1:
        batch.refuse(np.flatnonzero(columns.partitions < -1), Refusal(Reason.PARTITION_INVALID))
    timestamps_ms = columns.timestamps_ms
    # 0 is a legal timestamp that the Kafka client cannot express: for it, 0 means "now".
    if int(timestamps_ms.min()) < -1 or not timestamps_ms.all():
        no_timestamp = (timestamps_ms < -1) | (timestamps_ms == 0)
        batch.refuse(np.flatnonzero(no_timestamp), Refusal(Reason.TIMESTAMP_INVALID))


_ID_OF_A_PLACE: Final = Refusal(
    Reason.ID_INVALID,
    f"Ids that begin with {PLACE_ID_PREFIX.hex()} are of ingress records, by the service itself",
)


def _too_large(length_bytes: int, rules: IntakeRules) -> Refusal:
    return Refusal(
        Reason.MESSAGE_TOO_LARGE,
        f"{length_bytes:,} bytes, at most {rules.max_message_bytes:,} (max_message_bytes)",
    )


def _check_dues(
    batch: RequestBatch, due_ms: NDArray[np.int64], rules: IntakeRules, *, now_ms: int
) -> None:
    oldest_ms = now_ms - rules.late_window_seconds * 1000
    newest_ms = now_ms + rules.span_seconds * 1000 + rules.clock_skew_ms
    if int(due_ms.min()) >= max(oldest_ms, 1) and int(due_ms.max()) <= newest_ms:
        return
    batch.refuse(np.flatnonzero(due_ms < 1), Refusal(Reason.DUE_INVALID))
    batch.refuse(
        np.flatnonzero(due_ms < oldest_ms),
        Refusal(Reason.DUE_TOO_OLD, f"Older than {about(rules.late_window_seconds * 1000)}"),
    )
    batch.refuse(
        np.flatnonzero(due_ms > newest_ms),
        Refusal(
            Reason.DUE_BEYOND_SPAN,
            f"More than {_duration(rules.span_seconds)} ahead, the greatest delay here",
        ),
    )


def _duration(seconds: int) -> str:
    """Formats a duration in the largest unit that divides it."""
    units = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))
    unit_s, name = next(unit for unit in units if seconds % unit[0] == 0)
    return f"{seconds // unit_s:,} {name}"


def _check_headers(batch: RequestBatch, rules: IntakeRules, *, now_ms: int) -> None:
    try:
        found = check_headers(batch.columns, most=MESSAGE_HEADERS, most_of_all=REQUEST_HEADERS)
    except TooManyHeadersError:
        raise _too_many_headers() from None
    batch.refuse(found.too_many, _TOO_MANY_HEADERS)
    batch.refuse(found.malformed, Refusal(Reason.HEADER_INVALID))
    for row in found.reserved.tolist():
        given = _ours_of(batch, row)
        refusal = _judge_half(batch, row, given, rules, now_ms=now_ms)
        if refusal is None:
            batch.halves[row] = (dict(given)[HALF_GROUP] or b"").decode()
        else:
            batch.refuse([row], refusal)


def _ours_of(batch: RequestBatch, row: int) -> list[tuple[str, bytes | None]]:
    """Returns the headers of a message whose names are ours."""
    columns = batch.columns
    end = int(columns.starts[row]) + int(batch.lengths_bytes[row])
    headers = bytes(columns.blob[end - int(columns.headers_lengths[row]) : end])
    return [(name, value) for name, value in decode_headers(headers) if is_reserved(name)]


def _judge_half(
    batch: RequestBatch,
    row: int,
    ours: Sequence[tuple[str, bytes | None]],
    rules: IntakeRules,
    *,
    now_ms: int,
) -> Refusal | None:
    """Why a message with headers of ours is refused; None: they make it a half."""
    if not make_a_half([name for name, _ in ours]):
        return Refusal(Reason.HEADER_RESERVED)
    refusal = rules.halves_refusal()
    if refusal is not None:
        return refusal
    fault = half_fault(
        ours,
        int(batch.columns.due_ms[row]),
        int(batch.lengths_bytes[row]),
        now_ms,
        span_ms=rules.span_seconds * 1000,
        most_bytes=rules.max_message_bytes,
        skew_ms=rules.clock_skew_ms,
    )
    return None if fault is None else Refusal(*fault)


def _too_many_headers() -> RequestRefusedError:
    return RequestRefusedError(Reason.REQUEST_TOO_LARGE, f"More than {REQUEST_HEADERS} headers")


def _check_topic_names(batch: RequestBatch, own_topics: frozenset[str]) -> None:
    columns = batch.columns
    are_names = [is_topic_name(topic) for topic in columns.topics]
    if not all(are_names):
        invalid = np.flatnonzero(~np.array(are_names, np.bool_)[columns.topic_numbers])
        batch.refuse(invalid, Refusal(Reason.TOPIC_INVALID))
    for number, topic in enumerate(columns.topics):
        if topic in own_topics or is_reserved_topic(topic):
            text = f"{topic} belongs to the service or to Kafka"
            batch.refuse(batch.rows_for(number), Refusal(Reason.TOPIC_INVALID, text))


def refuse_forbidden(batch: RequestBatch, caller: Caller) -> Mapping[str, Refusal]:
    """Refuses messages for topics that a caller may not send to; returns these topics.

    Raises:
        RequestRefusedError: TOKEN_UNKNOWN.
    """
    rights = caller.rights
    if rights is EVERYTHING:
        return {}
    refused = {}
    for number, topic in enumerate(batch.columns.topics):
        if is_topic_name(topic) and not rights.may(Right.PRODUCE, topic):
            refused[topic] = caller.refuse_without(Right.PRODUCE, f"in topic {topic}").refusal
            batch.refuse(batch.rows_for(number), refused[topic])
    return refused


def refuse_foreign_halves(batch: RequestBatch, caller: Caller) -> Refusal | None:
    """Refuses half messages that a caller may not send; returns the first refusal.

    Whoever names a group has its checkers asked: by letters that they read, one for each half.

    Raises:
        RequestRefusedError: TOKEN_UNKNOWN.
    """
    rights, refused = caller.rights, dict[str, Refusal]()
    for row, group in batch.halves.items():
        if not rights.may_begin(batch.columns.topic(row), group):
            if group not in refused:
                text = f"for group {group} in the topic of this message"
                refused[group] = caller.refuse_without(Right.HALF, text).refusal
            batch.refuse([row], refused[group])
    return next(iter(refused.values()), None)


def refuse_without_room(batch: RequestBatch, room_in: Callable[[str], TopicRoom | None]) -> None:
    """Refuses messages beyond what may be pending in their topics: the first that fit are taken.

    The last judgement: a message that is refused takes no room of others. What is being written
    meanwhile is not counted yet, so a topic may get that much more.
    """
    for number, topic in enumerate(batch.columns.topics):
        room = room_in(topic)
        if room is None:
            continue
        rows = batch.unrefused(batch.rows_for(number))
        if len(rows) > room.messages:
            batch.refuse(rows[max(0, room.messages) :], no_room(topic, "messages"))
        beyond = np.cumsum(batch.lengths_bytes[rows]) > room.length_bytes
        if beyond.any():
            batch.refuse(rows[beyond], no_room(topic, "bytes"))


# --- rows


@dataclass(slots=True)
class _RequestColumns:
    """The columns of a request of rows, while they are being filled."""

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
            starts=content_starts(content_lengths(key_lengths, value_lengths, headers_lengths)),
        )


def _decode_rows(
    request: bytes, spans: Sequence[ByteRange], rules: IntakeRules, *, now_ms: int
) -> RequestBatch:
    rows = _RequestColumns([], [], {}, [], [], [], [], [], [], [])
    refusals: dict[int, Refusal] = {}
    to_check: list[int] = []
    headers = 0
    for row, span in enumerate(spans):
        message = _NO_MESSAGE
        id_, due_ms = _NO_ID, now_ms
        try:
            message = _message_at(request, span, rules)
            headers += len(message.headers)
            id_, due_ms = _id_of(message), _due_of(message, rules, now_ms=now_ms)
        except RequestRefusedError as error:
            if error.refusal.reason is Reason.REQUEST_MALFORMED:
                raise
            refusals[row] = error.refusal
            headers += MESSAGE_HEADERS if error.refusal is _TOO_MANY_HEADERS else 0
        if headers > REQUEST_HEADERS:
            raise _too_many_headers()
        if message.check_id and message.HasField("id"):
            to_check.append(row)
        _add_content(rows, message)
        rows.ids.append(id_)
        rows.due_ms.append(due_ms)
    batch = RequestBatch(rows.as_columns(), np.array(to_check, np.intp))
    batch.refusals = refusals
    return batch


def _message_at(request: bytes, span: ByteRange, rules: IntakeRules) -> pb.DelayedMessage:
    """Returns one message if it is short enough, and has few enough fields, to parse at once."""
    begin, end = span
    if end - begin > _WALKED_ABOVE_BYTES:
        if end - begin > rules.max_message_bytes + _BESIDE_CONTENT_BYTES:
            raise RequestRefusedError.of(_too_large(end - begin, rules))
        most = MESSAGE_HEADERS + _OTHER_FIELDS
        if has_more_fields(request, span, most):
            raise RequestRefusedError.of(_TOO_MANY_HEADERS)
    try:
        message = pb.DelayedMessage.FromString(request[begin:end])
    except DecodeError as error:
        raise RequestRefusedError(
            Reason.REQUEST_MALFORMED, "A message that cannot be decoded"
        ) from error
    if len(message.headers) > MESSAGE_HEADERS:
        raise RequestRefusedError.of(_TOO_MANY_HEADERS)
    return message


def _add_content(rows: _RequestColumns, message: pb.DelayedMessage) -> None:
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
    # -1 would mean "none" in a column: a given negative value is refused as -2.
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
        raise RequestRefusedError(Reason.ID_INVALID, f"An id of {counted(len(message.id), 'byte')}")
    return message.id


def _due_of(message: pb.DelayedMessage, rules: IntakeRules, *, now_ms: int) -> int:
    ways = [way for way in ("deliver_at_ms", "delay_ms", "level") if message.HasField(way)]
    if len(ways) != 1:
        reason = Reason.DUE_AMBIGUOUS if ways else Reason.DUE_MISSING
        raise RequestRefusedError(reason)
    if ways[0] == "deliver_at_ms":
        return min(message.deliver_at_ms, _FAR_FUTURE_MS)
    if message.HasField("id") and not message.HasField("sent_at_ms"):
        raise RequestRefusedError(Reason.SENT_AT_MISSING)
    sent_at_ms = message.sent_at_ms if message.HasField("sent_at_ms") else now_ms
    return max(-1, min(sent_at_ms + _delay_of(message, rules), _FAR_FUTURE_MS))


def _delay_of(message: pb.DelayedMessage, rules: IntakeRules) -> int:
    if message.HasField("level"):
        delay_ms = rules.levels_ms.get(message.level)
        if delay_ms is None:
            raise RequestRefusedError(Reason.LEVEL_UNKNOWN, f"No level {quoted(message.level)}")
        return delay_ms
    if message.delay_ms < 0:
        raise RequestRefusedError(Reason.DELAY_INVALID, f"A delay of {message.delay_ms} ms")
    return message.delay_ms
