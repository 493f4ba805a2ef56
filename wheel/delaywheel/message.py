"""The types that users create and receive: Message, Handle, Result.

A Message gets its id and due when it is made, so every attempt sends the same message: the service
detects duplicates by (topic, id, due). Two things are fixed only at the first attempt, see
`Message.fix_due`: a level becomes a due, and a due that has already passed becomes now.

All arithmetic on time uses integers, and fractions of a millisecond round up: never early.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from threading import Lock
from typing import Any, Final, Literal, NamedTuple, Self, TypedDict

import uuid_utils

from delaywheel.errors import DelaywheelError, MessageInvalidError, RefusedError
from delaywheel.headers import encode_headers
from delaywheel.identity import is_topic_name
from delaywheel.levels import Duration, length_ms
from delaywheel.reasons import Reason
from delaywheel.record_headers import (
    DEAD_PREFIX,
    DEAD_REASON,
    DELIVERED_BY,
    DELIVERED_HEADERS,
    RESERVED_PREFIX,
    is_reserved,
)

Headers = Mapping[str, bytes | None] | Iterable[tuple[str, bytes | None]]
"""A mapping, or pairs if order and duplicates matter; a value of None is Kafka's null."""

PastDue = Literal["deliver", "reject"]
"""What happens to a message whose due has passed when it is first sent."""

LENGTH_MAX: Final = 2**31 - 1
"""The longest key, value or headers that fit the int32 lengths of Kafka and of our formats."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_ZERO: Final = timedelta(0)
_HANDLE = re.compile(
    r"(?P<wheel>[^:]+):(?P<slot>[0-9]{1,12}):(?P<id>[0-9a-fA-F]{32}):(?P<topic>[^:]+)"
)
_FIXING_DUE = Lock()


def _renew_lock() -> None:
    global _FIXING_DUE  # noqa: PLW0603  another thread may have held it when this process forked
    _FIXING_DUE = Lock()


os.register_at_fork(after_in_child=_renew_lock)

ClockNs = Callable[[], int]
"""Returns Unix nanoseconds."""

# By the addresses of services in memory, in the order in which they were begun; then the last one.
_clocks: Final[dict[str, ClockNs]] = {}
_clock: ClockNs = time.time_ns


def clock_ns() -> int:
    """The wall clock in Unix nanoseconds; within tests that of the service that was begun last."""
    return _clock()


def clock_of(addresses: Iterable[str]) -> ClockNs:
    """Returns the clock by which a client of these addresses counts."""
    return next((_clocks[one] for one in addresses if one in _clocks), clock_ns)


def set_clock(address: str, clock: ClockNs | None) -> None:
    """Has clients of this address count by another clock, for tests; None: by theirs again.

    What has no client, as a `Message` that a program makes, counts by the clock that was set last.
    """
    global _clock  # noqa: PLW0603 - there is one time for a process, as there is one time.time_ns
    _clocks.pop(address, None)
    if clock is not None:
        _clocks[address] = clock
    _clock = next(reversed(_clocks.values()), time.time_ns)


def unix_ms(moment: datetime, reason: Reason = Reason.DUE_INVALID) -> int:
    """Returns an aware datetime as Unix milliseconds, rounded up.

    Raises MessageInvalidError with the given reason if it has no time zone.

    Example:
        >>> unix_ms(datetime(1970, 1, 1, 0, 0, 1, 1, tzinfo=UTC))
        1001
    """
    if not isinstance(moment, datetime):
        raise TypeError(f"a datetime is needed, not {type(moment).__name__}")
    if moment.utcoffset() is None:
        raise MessageInvalidError(
            reason, f"{moment!r} has no time zone; say which, such as datetime.now(UTC)"
        )
    return -((_EPOCH - moment) // _MICROSECOND // 1000)


class MessageOptions(TypedDict, total=False):
    """The options of a message beside topic and value; see `Message`."""

    key: bytes | None
    headers: Headers | None
    delay: Duration | None
    deliver_at: datetime | None
    level: str | None
    id: bytes | uuid.UUID | uuid_utils.UUID | None
    partition: int | None
    timestamp: datetime | None


class Message:
    """One message for Kafka, and when it is to become visible.

    Give exactly one of `delay` (from now: a timedelta, or a text such as `"1h30m"`), `deliver_at`
    (an aware datetime) and `level` (a name that the service knows, such as `"30s"`, from now). Do
    not change a message; send the same object again to retry it.

    Attributes:
        headers: Name and value pairs, as given; of a message that was delivered before, without
            `DELIVERED_HEADERS` and what begins with `dw-dead-`.
        id: 16 bytes; by default a UUIDv7. Give your own only if you can also give the same due
            again: messages are delivered once per (topic, id, due).
        has_own_id: Whether you gave it: then the service looks for an earlier message with this id
            and due, and refuses what it could not deliver (ID_TAKEN, ID_CANCELLED).
        partition: None: chosen from the key, as by Java's default partitioner.
        timestamp_ms: The Kafka record's timestamp; None: the time of forwarding.
        made_ns: When the message was made, by `clock` or else by the wall clock; `delay` and
            `level` count from then.

    Example:
        >>> message = Message("orders", b"reminder", key=b"42", delay="30m")
        >>> len(message.id), message.length_bytes
        (16, 10)

    Raises:
        MessageInvalidError: A value that the service would refuse; `reason` says which.
        TypeError: An argument is of another type, such as text where bytes are needed.
    """

    __slots__ = (
        "_absolute",
        "_clock",
        "_due_fixed",
        "_due_ms",
        "_encoded_headers",
        "_length_bytes",
        "has_own_id",
        "headers",
        "id",
        "key",
        "level",
        "made_ns",
        "partition",
        "timestamp_ms",
        "topic",
        "value",
    )

    def __init__(  # noqa: PLR0913  a message has these parts, each with its name
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Headers | None = None,
        delay: Duration | None = None,
        deliver_at: datetime | None = None,
        level: str | None = None,
        id: bytes | uuid.UUID | uuid_utils.UUID | None = None,
        partition: int | None = None,
        timestamp: datetime | None = None,
        clock: ClockNs | None = None,
    ) -> None:
        self.topic: Final = checked_topic(topic)
        self.value: Final = checked_bytes("value", value)
        self.key: Final = checked_bytes("key", key)
        self.headers: Final[tuple[tuple[str, bytes | None], ...]] = (
            _header_pairs(headers) if headers else ()
        )
        self._encoded_headers = encode_headers(self.headers) if headers else b""
        self._length_bytes = len(key or b"") + len(value or b"") + len(self._encoded_headers)
        if self._length_bytes > LENGTH_MAX:
            raise MessageInvalidError(
                Reason.MESSAGE_TOO_LARGE, f"{self._length_bytes:,} bytes, at most {LENGTH_MAX:,}"
            )
        self.has_own_id: Final = id is not None
        self.id: Final = uuid_utils.uuid7().bytes if id is None else checked_id(id)
        self.partition: Final = None if partition is None else _checked_partition(partition)
        self.timestamp_ms: Final = None if timestamp is None else _timestamp_ms(timestamp)
        self._clock = clock or clock_ns
        self.made_ns = self._clock()
        self.level: Final = level
        self._absolute: Final = deliver_at is not None
        self._due_ms = due_ms_of(self.made_ns, delay, deliver_at, level)
        self._due_fixed = False

    def __repr__(self) -> str:
        """Shows names and lengths but no contents, which may be long and secret."""
        due = f"level={self.level!r}" if self._due_ms is None else f"due_ms={self._due_ms}"
        return f"<Message {self.id.hex()} topic={self.topic!r} {due} {self._length_bytes} bytes>"

    @property
    def due_ms(self) -> int | None:
        """The due in Unix milliseconds; None only while a level has not been resolved."""
        return self._due_ms

    @property
    def length_bytes(self) -> int:
        """The length of key, value and encoded headers."""
        return self._length_bytes

    @property
    def encoded_headers(self) -> bytes:
        """The headers as they are sent."""
        return self._encoded_headers

    def count_by(self, clock: ClockNs) -> None:
        """Counts its delay, or level, by another clock from now on; not for programs."""
        if clock is self._clock or self._absolute or self._due_fixed:
            return
        differ_ns = clock() - self._clock()
        self._clock = clock
        self.made_ns += differ_ns
        if self._due_ms is not None:
            self._due_ms += differ_ns // 1_000_000

    def become_half(self, due_ms: int, headers: Iterable[tuple[str, bytes | None]]) -> None:
        """Gives it another due, and headers that no sender may give; not for programs."""
        encoded = encode_headers(headers)
        self._encoded_headers += encoded
        self._length_bytes += len(encoded)
        self._due_ms = due_ms
        self._due_fixed = False

    def fix_due(self, now_ms: int, levels: Mapping[str, int], past_due: PastDue) -> None:
        """Fixes the due before the first attempt; has no effect afterwards.

        | due | `deliver` | `reject` |
        |---|---|---|
        | a level | made + the level's delay, then as below | the same |
        | past, from `deliver_at` | becomes now | refused, DUE_PASSED |
        | past, from `delay` or `level` | becomes now | becomes now |

        If it raises RefusedError (LEVEL_UNKNOWN or DUE_PASSED), the message is unchanged.
        """
        with _FIXING_DUE:
            if self._due_fixed:
                return
            due_ms = self._due_ms
            if due_ms is None:
                due_ms = self._level_due_ms(levels)
            if due_ms < now_ms:
                if past_due == "reject" and self._absolute:
                    raise RefusedError(
                        Reason.DUE_PASSED,
                        f"its due, {time_text(due_ms)}, is past",
                        failed=self,
                    )
                due_ms = now_ms
            self._due_ms = due_ms
            self._due_fixed = True

    def _level_due_ms(self, levels: Mapping[str, int]) -> int:
        delay_ms = levels.get(self.level or "")
        if delay_ms is None:
            known = ", ".join(levels) or "none"
            raise RefusedError(
                Reason.LEVEL_UNKNOWN, f"level {self.level!r}; the service has {known}", failed=self
            )
        return _ceil_ms(self.made_ns) + delay_ms


def checked_messages(messages: Iterable[Message]) -> list[Message]:
    """Returns messages as a list; raises TypeError if something else is among them."""
    listed = list(messages)
    others = {type(message) for message in listed} - {Message}
    for other in others:
        if not issubclass(other, Message):
            raise TypeError(f"messages must be of class Message, not {other.__name__}")
    return listed


class Handle(NamedTuple):
    """Identifies a pending message, to read or cancel it. Its text is stable.

    Attributes:
        wheel: The wheel that accepted it. The others suffice to find the message; the wheel
            decides if the same id was sent with several dues within one second.
        slot: The second of its due, `due_ms // 1000`.

    Example:
        >>> handle = Handle.parse("a.3:1900000000:0190163d8694739b8d3f8a4d6a1f5d10:orders")
        >>> handle.wheel, handle.slot, handle.topic
        ('a.3', 1900000000, 'orders')
        >>> str(handle)
        'a.3:1900000000:0190163d8694739b8d3f8a4d6a1f5d10:orders'
    """

    wheel: str
    slot: int
    id: bytes
    topic: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses the text of a handle; raises MessageInvalidError for any other."""
        match = _HANDLE.fullmatch(text)
        if match is None or not is_topic_name(match["topic"]):
            raise MessageInvalidError(
                Reason.HANDLE_INVALID,
                f"{text!r} is not <wheel>:<slot>:<id in 32 hex digits>:<topic>",
            )
        return cls(match["wheel"], int(match["slot"]), bytes.fromhex(match["id"]), match["topic"])

    def __str__(self) -> str:
        return f"{self.wheel}:{self.slot}:{self.id.hex()}:{self.topic}"


class Result(NamedTuple):
    """The outcome of one message: either `handle` or `error` is set.

    Attributes:
        id_checked: The message has an id of your own, and the service knew of no earlier message
            with this topic, id and due that was cancelled, or had other contents: this is the
            first, or the same again. False: it has no such id, was not accepted, or the node could
            not look in time, or not everywhere: then `Client.get` says later what there is.
    """

    message: Message
    handle: Handle | None
    error: DelaywheelError | None
    id_checked: bool = False

    def unwrap(self) -> Handle:
        """Returns the handle; raises the error if there is none."""
        if self.handle is not None:
            return self.handle
        assert self.error is not None
        raise self.error


def _ceil_ms(time_ns: int) -> int:
    return -(-time_ns // 1_000_000)


@lru_cache(maxsize=1024)
def checked_topic(topic: str) -> str:
    """Returns a topic's name; raises MessageInvalidError for one that no topic can have."""
    if not isinstance(topic, str):
        raise TypeError(f"topic must be str, not {type(topic).__name__}")
    if not is_topic_name(topic):
        raise MessageInvalidError(
            Reason.TOPIC_INVALID, f"topic {topic!r}: {Reason.TOPIC_INVALID.advice}"
        )
    return topic


def checked_bytes(what: str, content: object) -> bytes | None:
    """Returns bytes or None; for anything else raises a TypeError that says what to do."""
    if content is None or isinstance(content, bytes):
        return content
    kind = type(content).__name__
    hint = "encode the text yourself, such as text.encode()" if kind == "str" else "use bytes(…)"
    raise TypeError(f"{what} must be bytes or None, not {kind}: {hint}")


def _header_pairs(headers: Headers) -> tuple[tuple[str, bytes | None], ...]:
    """Returns headers as pairs, without what the service has put there when it delivered them."""
    pairs = tuple(headers.items() if isinstance(headers, Mapping) else headers)
    reserved: set[str] = set()
    for pair in pairs:
        try:
            name, value = pair
        except (TypeError, ValueError):
            text = f"headers are a mapping, or pairs of name and value, and {pair!r} is no pair"
            raise TypeError(text) from None
        if not isinstance(name, str):
            raise TypeError(f"a header's name must be str, not {type(name).__name__}")
        if is_reserved(name):
            reserved.add(name)
        # Lone surrogates have no UTF-8.
        if not name or "\0" in name or name.encode(errors="ignore").decode() != name:
            raise MessageInvalidError(
                Reason.HEADER_INVALID,
                f"header {name!r}: empty, with U+0000, or not encodable in UTF-8",
            )
        checked_bytes(f"the value of header {name!r}", value)
    if not reserved:
        return pairs
    # They must be of a message that was delivered, or of a letter: no sender's own.
    known = DELIVERED_HEADERS if DELIVERED_BY in reserved else frozenset()
    for name in sorted(reserved - known):
        if DEAD_REASON not in reserved or not name.startswith(DEAD_PREFIX):
            raise MessageInvalidError(
                Reason.HEADER_RESERVED, f"header {name!r}: {RESERVED_PREFIX!r} is the service's own"
            )
    return tuple(pair for pair in pairs if pair[0] not in reserved)


def checked_id(id_: bytes | uuid.UUID | uuid_utils.UUID) -> bytes:
    """Returns the 16 bytes of an id; raises MessageInvalidError for another length."""
    raw: Any = getattr(id_, "bytes", id_)
    if not isinstance(raw, bytes):
        raise TypeError(f"id must be 16 bytes or a UUID, not {type(id_).__name__}")
    if len(raw) != 16:
        raise MessageInvalidError(Reason.ID_INVALID, f"{len(raw)} bytes, not 16")
    return raw


def _checked_partition(partition: int) -> int:
    if not isinstance(partition, int) or isinstance(partition, bool):
        raise TypeError(f"partition must be int, not {type(partition).__name__}")
    if not 0 <= partition < 2**31:
        raise MessageInvalidError(
            Reason.PARTITION_INVALID, f"partition {partition}: not 0 to 2**31 - 1"
        )
    return partition


def _timestamp_ms(timestamp: datetime) -> int:
    timestamp_ms = unix_ms(timestamp, Reason.TIMESTAMP_INVALID)
    if timestamp_ms <= 0:
        raise MessageInvalidError(Reason.TIMESTAMP_INVALID, f"{timestamp} is not after 1970-01-01")
    return timestamp_ms


def due_ms_of(
    made_ns: int, delay: Duration | None, deliver_at: datetime | None, level: str | None
) -> int | None:
    """Returns the due, or None for a level; exactly one of the three must be given."""
    given = (delay is not None) + (deliver_at is not None) + (level is not None)
    if given != 1:
        reason = Reason.DUE_AMBIGUOUS if given else Reason.DUE_MISSING
        raise MessageInvalidError(reason, reason.advice)
    if deliver_at is not None:
        return unix_ms(deliver_at)
    if delay is not None:
        return _ceil_ms(made_ns + _delay_ns(delay))
    if not isinstance(level, str):
        raise TypeError(f"level must be a name such as '30s', not {type(level).__name__}")
    return None


def _delay_ns(delay: Duration) -> int:
    if isinstance(delay, timedelta) and delay >= _ZERO:
        return delay // _MICROSECOND * 1000
    try:
        return length_ms(delay) * 1_000_000
    except ValueError as error:
        raise MessageInvalidError(Reason.DELAY_INVALID, str(error)) from None


def time_text(unix_ms: int) -> str:
    """Returns a time for people, ISO 8601 in UTC; its number if no calendar has it."""
    try:
        moment = datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=unix_ms)
    except OverflowError:
        return f"{unix_ms} ms"
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
