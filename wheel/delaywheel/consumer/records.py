"""Encodes and decodes records: how retries and dead letters are stated in headers.

A retried record goes to the ingress topic (docs/INGRESS.md) and comes back on the group's retry
topic. What the group has to know about it travels in headers that begin with `dw-retry-`, which
ingress passes on. docs/CONSUMER_REFERENCE.md, "Topics and headers", lists these, and those that
follow the own ones of a dead letter: `dw-dead-…`, as in the service's own.

A record's own headers arrive unchanged. Some names would have a meaning on the way: those that
begin with `dw-`, as the record may have come through delaywheel before, and `ttl`, which would
count from the retry instead of from the record's own timestamp. These travel as
`dw-retry-kept-<name>`, in their place, and get their names back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import lt
from typing import Final, NamedTuple

import uuid_utils

from delaywheel import ingress
from delaywheel.errors import MessageInvalidError
from delaywheel.message import Headers
from delaywheel.reasons import Reason
from delaywheel.record_headers import (
    OMITTED_HEADER,
    RESERVED_PREFIX,
    RETRY_ATTEMPT,
    RETRY_FIRST_ERROR,
    RETRY_KEPT,
    RETRY_LAST_ERROR,
    RETRY_ORIGIN,
    RETRY_ORIGIN_TIMESTAMP,
    TTL_HEADER,
    number_of,
    place_of,
)
from delaywheel.transactional import Outgoing

RecordHeaders = list[tuple[str, bytes | None]]

NO_TIMESTAMP = -1
RECORD_BYTES = 200
"""What a record takes in memory besides its contents, about."""
MOST_WRITTEN_BYTES = 8_000_000
"""The most that a handler writes beside its record, which all goes into one transaction."""
LONGEST_ERROR = 300
"""The most characters of an error that a header carries."""
_NAMED_OF_A_GROUP: Final = 3


class Partition(NamedTuple):
    """One partition of a topic."""

    topic: str
    number: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.number}"


class Passed(NamedTuple):
    """What a group commits for a partition: everything before the offset has ended.

    Attributes:
        topic_id: Kafka's id of the topic that it was of; empty: unknown.
        begun_with: How many partitions the topic had when the group began at its end; 0: it did
            not, or this is not known.
        transaction: The name of the transaction that committed it, which no other has.
        deliveries: How often the record there was handed out and has not ended, as
            `engine/deliveries.py` says; 0: nobody knows of any.
        suspect_until: Up to which offset each record is handed out alone; 0: none is.
    """

    offset: int
    topic_id: str = ""
    begun_with: int = 0
    transaction: str = ""
    deliveries: int = 0
    suspect_until: int = 0


_TRACE: Final = ("traceparent", "tracestate")
"""The headers of W3C's trace context."""


class Place(NamedTuple):
    """The place of a record in Kafka, and its timestamp in Unix milliseconds."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"


class Incoming(NamedTuple):
    """A record as it was read; its headers are None if the client cannot read their names."""

    place: Place
    key: bytes | None
    value: bytes | None
    headers: RecordHeaders | None


class FetchedRecords(NamedTuple):
    """Records of one partition that were read together: columns of equal length.

    Offsets ascend. A record without timestamp has `NO_TIMESTAMP`, one without headers None;
    `unread` are the indexes of records whose headers the client cannot read.
    """

    at: Partition
    offsets: list[int]
    timestamps_ms: list[int]
    keys: list[bytes | None]
    values: list[bytes | None]
    headers: list[RecordHeaders | None]
    unread: frozenset[int] = frozenset()

    @property
    def is_ascending(self) -> bool:
        """Whether each offset is greater than the one before."""
        return all(map(lt, self.offsets, islice(self.offsets, 1, None)))


def fetched_of(records: Iterable[Incoming]) -> list[FetchedRecords]:
    """Returns single records in columns: those of a partition that follow each other together."""
    found: list[FetchedRecords] = []
    for place, key, value, headers in records:
        at = Partition(place.topic, place.partition)
        if not found or found[-1].at != at:
            found.append(FetchedRecords(at, [], [], [], [], []))
        last = found[-1]
        if headers is None:
            found[-1] = last._replace(unread=last.unread | {len(last.offsets)})
        last.offsets.append(place.offset)
        last.timestamps_ms.append(place.timestamp_ms)
        last.keys.append(key)
        last.values.append(value)
        last.headers.append(headers)
    return found


@dataclass(slots=True)
class Writes:
    """The records that a handler writes beside the outcome of its own.

    `length_bytes` is about what they take in memory.
    """

    records: list[Outgoing] = field(default_factory=list)
    length_bytes: int = 0

    def add(self, record: Outgoing) -> int:
        """Takes one more; returns what that takes in memory, about.

        Raises MessageInvalidError if these are too many for one transaction.
        """
        length_bytes = record.length_bytes + RECORD_BYTES
        if self.length_bytes + length_bytes > MOST_WRITTEN_BYTES:
            raise MessageInvalidError(
                Reason.MESSAGE_TOO_LARGE,
                f"{self.length_bytes + length_bytes:,} bytes for one record, at most"
                f" {MOST_WRITTEN_BYTES:,}",
            )
        self.records.append(record)
        self.length_bytes += length_bytes
        return length_bytes


class Trip(NamedTuple):
    """The known data of a record's earlier attempts.

    `attempt` is the number of the coming one, from 1; `origin` where the record was first read.
    """

    attempt: int
    origin: Place
    first_error: str | None = None
    last_error: str | None = None


def unpack_retry(record: Incoming) -> tuple[Trip, RecordHeaders]:
    """Parses a record of the retry topic: its attempts, and its own headers.

    A record that another program put there is treated as any other, at its first attempt.
    """
    ours: dict[str, bytes] = {}
    own: RecordHeaders = []
    for name, value in record.headers or ():
        if name.startswith(RETRY_KEPT):
            own.append((name[len(RETRY_KEPT) :], value))
        elif not name.startswith(RESERVED_PREFIX):
            own.append((name, value))
        elif value is not None:
            ours[name] = value
    place = place_of(ours.get(RETRY_ORIGIN))
    attempt = number_of(ours.get(RETRY_ATTEMPT), 31)
    timestamp_ms = number_of(ours.get(RETRY_ORIGIN_TIMESTAMP), least=NO_TIMESTAMP)
    if place is None or timestamp_ms is None or not attempt:
        return Trip(1, record.place), own
    origin = Place(*place, timestamp_ms)
    return Trip(attempt, origin, _text(ours, RETRY_FIRST_ERROR), _text(ours, RETRY_LAST_ERROR)), own


def retry_record(
    *,
    ingress_topic: str,
    retry_topic: str,
    trip: Trip,
    key: bytes | None,
    value: bytes | None,
    headers: RecordHeaders,
    due_ms: int,
    partition: int | None,
) -> Outgoing:
    """Returns the record for the ingress topic that brings a record back, else unchanged.

    `trip` is that of the attempt it comes back for; without a `partition` to come back on, one is
    chosen from the key.
    """
    packed: RecordHeaders = [
        (f"{RETRY_KEPT}{name}" if _cannot_travel(name) else name, content)
        for name, content in headers
    ]
    packed += (
        (RETRY_ATTEMPT, b"%d" % trip.attempt),
        (RETRY_ORIGIN, str(trip.origin).encode()),
        (RETRY_ORIGIN_TIMESTAMP, b"%d" % trip.origin.timestamp_ms),
    )
    for name, error in ((RETRY_FIRST_ERROR, trip.first_error), (RETRY_LAST_ERROR, trip.last_error)):
        if error is not None:
            packed.append((name, encode_error(error)))
    packed.append((ingress.TOPIC, retry_topic.encode()))
    # An id of its own: what follows from its place nobody would know before it is read there.
    packed.append((ingress.ID, uuid_utils.uuid7().bytes.hex().encode()))
    packed.append((ingress.DELIVER_AT, b"%d" % due_ms))
    if partition is not None:
        packed.append((ingress.PARTITION, b"%d" % partition))
    return Outgoing(ingress_topic, key, value, packed)


def with_trace(given: Headers | None, read: RecordHeaders) -> Headers | None:
    """Returns headers of what a handler writes, with the trace of the record that it has read."""
    trace = [each for each in read if each[0] in _TRACE]
    if not trace:
        return given
    pairs = list(given.items() if isinstance(given, Mapping) else given or ())
    has_own = any(isinstance(pair, tuple) and pair[:1] == _TRACE[:1] for pair in pairs)
    return pairs if has_own else [*pairs, *trace]


def kept(record: Outgoing, name: str) -> Outgoing:
    """Returns a retry on whose way a further header means nothing, and gets its name back."""
    headers = [(f"{RETRY_KEPT}{each}" if each == name else each, it) for each, it in record.headers]
    return record._replace(headers=headers)


def dead_letter(
    *,
    dead_topic: str,
    retry_topic: str,
    group: str,
    reason: str,
    trip: Trip,
    key: bytes | None,
    value: bytes | None,
    headers: RecordHeaders,
) -> Outgoing:
    """Returns a record's dead letter; `trip` includes the attempt that failed."""
    ours: RecordHeaders = [
        *headers,
        ("dw-dead-reason", encode_error(reason)),
        ("dw-dead-topic", retry_topic.encode()),
        ("dw-dead-group", group.encode()),
        ("dw-dead-attempts", b"%d" % trip.attempt),
        ("dw-dead-origin", str(trip.origin).encode()),
        ("dw-dead-origin-timestamp", b"%d" % trip.origin.timestamp_ms),
    ]
    if trip.first_error is not None:
        ours.append(("dw-dead-first-error", encode_error(trip.first_error)))
    if trip.last_error is not None:
        ours.append(("dw-dead-detail", encode_error(trip.last_error)))
    return Outgoing(dead_topic, key, value, ours)


def shortened(letter: Outgoing, own_headers: int, omitted: Sequence[str]) -> Outgoing:
    """Returns a dead letter without some of its parts, one of `OMISSIONS`, which a header names.

    `own_headers` is how many of its headers are the record's own: they come first.
    """
    if not omitted:
        return letter
    return letter._replace(
        key=None if "key" in omitted else letter.key,
        value=None if "value" in omitted else letter.value,
        headers=[
            *letter.headers[own_headers if "headers" in omitted else 0 :],
            (OMITTED_HEADER, ",".join(omitted).encode()),
        ],
    )


def error_text(error: BaseException) -> str:
    """Returns an exception as text: its class and message; of a group also its first ones."""
    try:
        said = str(error)
    except Exception:  # noqa: BLE001 - the exception is the caller's, and so is its text
        said = "(its text is unavailable)"
    if isinstance(error, BaseExceptionGroup):
        said += f": {'; '.join(map(error_text, error.exceptions[:_NAMED_OF_A_GROUP]))}"
    name = type(error).__name__
    return (f"{name}: {said}" if said else name)[:LONGEST_ERROR]


def causes(error: BaseException, *, explicit: bool = False) -> Iterator[BaseException]:
    """Yields an exception, and those that it was raised from: with `from` only, if `explicit`.

    Where it was raised `from None`, nothing before counts.
    """
    seen: set[int] = set()
    left: BaseException | None = error
    while left is not None and id(left) not in seen:
        yield left
        seen.add(id(left))
        hides = explicit or left.__suppress_context__
        left = left.__cause__ or (None if hides else left.__context__)


def is_of(
    error: BaseException,
    classes: type[BaseException] | tuple[type[BaseException], ...],
    chain: Callable[[BaseException], Iterable[BaseException]],
    within: tuple[BaseException, ...] = (),
) -> bool:
    """Whether an exception is of these classes; of a group: whether all of its exceptions are.

    Of each of these what `chain` yields counts, too; `within` are the groups that it is in.
    """
    if isinstance(error, classes):
        return True
    if not isinstance(error, BaseExceptionGroup) or error in within:
        return False
    return all(
        any(is_of(one, classes, chain, (*within, error)) for one in chain(each))
        for each in error.exceptions
    )


def encode_error(text: str) -> bytes:
    """Encodes any text for a header."""
    return text[:LONGEST_ERROR].encode(errors="replace")


def _cannot_travel(name: str) -> bool:
    """Whether a header cannot travel under its name; ingress passes on no empty one."""
    return not name or name == TTL_HEADER or name.startswith(RESERVED_PREFIX)


def _text(ours: dict[str, bytes], name: str) -> str | None:
    value = ours.get(name)
    return None if value is None else value.decode(errors="replace")
