"""The headers of a Kafka record that confluent-kafka has read, if they can be decoded.

For a header whose name is not UTF-8, the client returns a list with a NULL entry and leaves a
pending error that a plain call may overlook: Python's next operation then fails with SystemError,
or crashes on the entry. Producers in other languages can send such names.

A message's time to live is a header, `ttl` unless a setting names another, of whole seconds, at
least 1.

| value of the header | means |
|---|---|
| decimal digits, 19 at most | so many seconds |
| 8 other bytes | a big-endian long of seconds, as the usual clients write numbers |
| anything else, null, or less than 1 | no time to live: the header is the caller's own |

Eight digits are text: as a long they would be some hundred billion years. If several headers have
this name, the last one counts, as in Kafka's own clients. The header is never removed from the
message.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

TTL_HEADER: Final = "ttl"
LONGEST_TTL_VALUE_BYTES: Final = 19

_DIGITS = re.compile(rb"[0-9]{1,19}")

RESERVED_PREFIX: Final = "dw-"
"""Headers with these names are the service's own: they say what became of a message."""

PASSED_PREFIX: Final = "dw-retry-"
"""But these are a sender's, and are passed on as they came: they mean something to the consumers
of a retry topic alone, and whoever may send to that topic may as well write there."""

RETRY_KEPT: Final = "dw-retry-kept-"
"""Before the name of a record's own header that would mean something on the way of a retry."""
RETRY_ATTEMPT: Final = "dw-retry-attempt"
RETRY_ORIGIN: Final = "dw-retry-origin"
RETRY_ORIGIN_TIMESTAMP: Final = "dw-retry-origin-timestamp"
RETRY_FIRST_ERROR: Final = "dw-retry-first-error"
RETRY_LAST_ERROR: Final = "dw-retry-last-error"
"""What a retried record says about itself, to the consumers of its group."""
RETRY_ROOT: Final = "dw-retry-root"
"""Where the way began that a message is on, if it is traced: see `delaywheel.ways.roots`."""

DEAD_PREFIX: Final = "dw-dead-"
"""What a dead letter says about itself."""
DEAD_REASON: Final = "dw-dead-reason"
"""Which every dead letter has."""
OMITTED_HEADER: Final = "dw-dead-omitted"
"""What a dead letter lacks, as its topic takes no more: one of `OMISSIONS`, with commas."""

OMISSIONS: Final = ((), ("value",), ("value", "headers"), ("value", "headers", "key"))
"""What is left out of a dead letter: nothing, or else as little as needed, in this order."""

HALF_GROUP: Final = "dw-half"
"""The group that is asked what became of the local transaction; with it, a message is a half."""
HALF_DELIVER_AT: Final = "dw-half-deliver-at"
"""When the message is due, in Unix milliseconds; its half is due at the end of its hold."""
HALF_TOPIC: Final = "dw-half-topic"
HALF_PARTITION: Final = "dw-half-partition"
HALF_TIMESTAMP: Final = "dw-half-timestamp"
"""In the letter that asks about a half: where the message goes. docs/PROTOCOL.md has the letter."""
COMMITTED: Final = "dw-committed"
"""When a half message was committed, in Unix milliseconds: on one that arrived at its commit, and
so perhaps before its due, the end of its hold."""
FIRST_DUE: Final = "dw-first-due"
"""When a deferred message was due at first, in Unix milliseconds."""
FIRST_DEFERRED: Final = "dw-first-deferred"
"""When it was deferred at first, by its leader's clock: its topic took nothing then."""
OF_DEFERRAL: Final = (FIRST_DUE, FIRST_DEFERRED)
DELIVERED_HEADERS: Final = frozenset(
    {"dw-id", "dw-due", "dw-accepted", "dw-wheel", "dw-forwarded", COMMITTED, *OF_DEFERRAL}
)
"""What a delivered message has of the service's own; a letter has names with `DEAD_PREFIX`, too.
Whoever sends it again by a client that is not delaywheel's leaves these out."""
DELIVERED_BY: Final = "dw-wheel"
"""The one of them that every delivered message has, and a sender's own message has not."""

LONGEST_GROUP_BYTES: Final = 200
"""The longest value of `HALF_GROUP`."""
GROUP_NAME: Final = re.compile(rb"[a-zA-Z0-9._-]{1,%d}" % LONGEST_GROUP_BYTES)
"""Its values."""
LONGEST_HOLD_MS: Final = 10_000
"""No half is due later: until then seconds with releases are in memory."""
LETTER_ROOM_BYTES: Final = 4_096
"""What a letter about a half has beside the message, when it is put off for its next attempt."""


def longest_half_bytes(message_bytes: int) -> int:
    """Returns how long a half message may be where other messages may have so many bytes.

    Its letter comes back through the ingress topic, as a message like any other.
    """
    return max(message_bytes - LETTER_ROOM_BYTES, message_bytes // 2)


def is_reserved(name: str) -> bool:
    """Whether no sender may give a message a header with this name.

    What a `RetryConsumer` has sent back may be exported, and produced elsewhere with its headers.
    """
    return name.startswith(RESERVED_PREFIX) and not name.startswith(PASSED_PREFIX)


_NUMBER: Final = re.compile(rb"-?[0-9]{1,19}")
_PLACE: Final = re.compile(rb"([a-zA-Z0-9._-]{1,249})/([0-9]{1,10})/([0-9]{1,19})")


def number_of(value: bytes | None, bits: int = 63, *, least: int = 0) -> int | None:
    """Returns a number that a header holds in digits; None if it is absent, or does not fit."""
    if value is None or not _NUMBER.fullmatch(value):
        return None
    number = int(value)
    return number if least <= number < 1 << bits else None


def place_of(value: bytes | None) -> tuple[str, int, int] | None:
    """Returns topic, partition and offset of a record that a header names; None: of none."""
    match = _PLACE.fullmatch(value or b"")
    if match is None:
        return None
    partition, offset = number_of(match[2], 31), number_of(match[3])
    return None if partition is None or offset is None else (match[1].decode(), partition, offset)


def last_of(headers: Iterable[tuple[str, bytes | None]], wanted: str) -> bytes | None:
    """Returns the last value under a name, which counts; None: it is null, or there is none."""
    found = None
    for name, value in headers:
        if name == wanted:
            found = value
    return found


def read_ttl_s(value: bytes | None) -> int | None:
    """Returns the seconds that a `ttl` header states; None if it is invalid."""
    if value is None:
        return None
    if _DIGITS.fullmatch(value):
        ttl_s = int(value)
    elif len(value) == 8:
        ttl_s = int.from_bytes(value, "big", signed=True)
    else:
        return None
    return ttl_s if ttl_s >= 1 else None


def ttl_s_of(
    headers: Iterable[tuple[str, bytes | None]], ttl_header: str | None = TTL_HEADER
) -> int | None:
    """Returns how many seconds a message with these headers lives; None: forever."""
    return read_ttl_s(last_of(headers, ttl_header)) if ttl_header else None


class HasHeaders(Protocol):
    """A message of confluent-kafka."""

    def headers(self) -> Any:
        """Returns pairs of name and value, or None."""


def headers_of(message: HasHeaders) -> list[tuple[str, bytes | None]] | None:
    """Returns the headers of a record, in order; None if they cannot be decoded.

    Call it once for a message that may have such a name: a second call to the client returns the
    broken list without the error.
    """
    try:
        (headers,) = map(type(message).headers, (message,))  # `map` looks for the error at once
    except SystemError:
        return None
    found: list[tuple[str, bytes | None]] = headers or []
    return found


def all_headers(
    messages: Sequence[HasHeaders],
) -> tuple[list[list[tuple[str, bytes | None]] | None], list[int]]:
    """Returns the headers of many records of one class, and which of them cannot be decoded.

    The headers of a record are None if it has none, or if they cannot be decoded.
    """
    found: list[list[tuple[str, bytes | None]] | None] = []
    unread: list[int] = []
    reading = map(type(messages[0]).headers, messages) if messages else iter(())
    while len(found) < len(messages):
        try:
            found.extend(reading)
        except SystemError:  # after those that could be read; the next ones follow
            unread.append(len(found))
            found.append(None)
    return found, unread
