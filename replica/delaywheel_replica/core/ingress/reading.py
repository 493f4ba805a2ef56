"""Parses the request in a record of an ingress topic; docs/INGRESS.md is the contract.

The result depends on the record, its place and the table of levels alone, never on a clock. So a
leader that reads a record again makes the same message of it, with the same id and due. How far
ahead a due may be depends on the clock, and is checked elsewhere.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple, TypeAlias

from delaywheel import ingress
from delaywheel.headers import content_bytes, encode_headers, is_cut_off
from delaywheel.identity import is_topic_name
from delaywheel.ingress import HalfAnswer
from delaywheel.record_headers import (
    DEAD_PREFIX,
    DELIVERED_HEADERS,
    GROUP_NAME,
    HALF_DELIVER_AT,
    HALF_GROUP,
    OF_DEFERRAL,
    is_reserved,
    longest_half_bytes,
)
from delaywheel.ways.values import id_in, number_in
from delaywheel_replica.core.ingress.place import NO_TIMESTAMP, IngressPlace, message_id
from delaywheel_replica.patterns import Pattern, did_you_mean

ABSENT: Final = -1
"""No partition, or no timestamp, was requested."""

_PARTITIONS: Final = 2**31
_TIMES: Final = 2**63
_WHEEL: Final = "dw-wheel"
_SHOWN: Final = 40


class CommittedRecord(NamedTuple):
    """A committed record, as it was read."""

    place: IngressPlace
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]] | None
    """None: the client cannot read them, since a name is not UTF-8."""

    @property
    def length_bytes(self) -> int:
        """The length of key, value and headers."""
        return content_bytes(self.key, self.value, self.headers)


@dataclass(frozen=True, slots=True)
class IngressRules:
    """What a cluster accepts.

    Attributes:
        levels_ms: name of a level -> its delay.
        max_message_bytes: limit for key, value and encoded headers together.
        own_topics: the service's own topics: a message delivered to them could forge its records.
        destinations: ingress topic -> patterns of the topics that it may lead to; absent: all.
        halves: half messages are accepted.
    """

    levels_ms: Mapping[str, int]
    max_message_bytes: int
    own_topics: frozenset[str]
    destinations: Mapping[str, Sequence[Pattern]] = field(default_factory=dict)
    halves: bool = False


class Delayed(NamedTuple):
    """A message to be delivered."""

    id: bytes
    due_ms: int
    topic: str
    partition: int
    """`ABSENT`: the key chooses."""
    timestamp_ms: int
    """`ABSENT`: the time of delivery."""
    key: bytes | None
    value: bytes | None
    headers: bytes
    """Encoded headers that are passed on."""
    has_own_id: bool = False
    """Its sender gave the id, and may send it again."""
    is_half: bool = False
    """It is a half message, whose due is the end of its hold; its headers say so."""
    half_due_ms: int = ABSENT
    """Of a half: when its message is due; `ABSENT`: at its commit."""


class Withdrawn(NamedTuple):
    """A message to be cancelled."""

    id: bytes
    due_ms: int
    topic: str


class HalfCommit(NamedTuple):
    """A half message to be committed."""

    id: bytes
    due_ms: int
    topic: str


class HalfAnswered(NamedTuple):
    """What a group says that it has answered about a half message: to be noted."""

    id: bytes
    due_ms: int
    topic: str
    answer: HalfAnswer


class UnfitReason(StrEnum):
    """Why a record is not delayed, with the names of refused calls (`Reason` in the SDK)."""

    TOPIC_INVALID = "TOPIC_INVALID"
    DUE_MISSING = "DUE_MISSING"
    DUE_AMBIGUOUS = "DUE_AMBIGUOUS"
    DUE_INVALID = "DUE_INVALID"
    DUE_BEYOND_SPAN = "DUE_BEYOND_SPAN"
    DELAY_INVALID = "DELAY_INVALID"
    LEVEL_UNKNOWN = "LEVEL_UNKNOWN"
    ID_INVALID = "ID_INVALID"
    PARTITION_INVALID = "PARTITION_INVALID"
    TIMESTAMP_INVALID = "TIMESTAMP_INVALID"
    HEADER_RESERVED = "HEADER_RESERVED"
    HEADER_INVALID = "HEADER_INVALID"
    MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE"
    DUE_TOO_OLD = "DUE_TOO_OLD"
    SLOT_FULL = "SLOT_FULL"
    WHEEL_LOST = "WHEEL_LOST"
    FORBIDDEN = "FORBIDDEN"
    HALF_INVALID = "HALF_INVALID"
    HALVES_OFF = "HALVES_OFF"
    HALVES_UNAVAILABLE = "HALVES_UNAVAILABLE"


class Unfit(NamedTuple):
    """A record that cannot be delayed, and so becomes a dead letter."""

    reason: UnfitReason
    detail: str


RecordRequest: TypeAlias = Delayed | Withdrawn | HalfCommit | HalfAnswered | Unfit


class _UnfitError(Exception):
    def __init__(self, reason: UnfitReason, detail: str) -> None:
        super().__init__(detail)
        self.unfit = Unfit(reason, detail)


def read(record: CommittedRecord, rules: IngressRules) -> RecordRequest:
    """Returns the request in a record."""
    if record.headers is None:
        return Unfit(UnfitReason.HEADER_INVALID, "A header's name is not UTF-8")
    try:
        asked, passed = _split(record.headers[: 2 * ingress.HEADERS_MOST])
        # Beside them are ours, and a leader that defers a message adds some.
        if len(passed) > ingress.HEADERS_MOST or len(record.headers) > 2 * ingress.HEADERS_MOST:
            detail = f"More than {ingress.HEADERS_MOST:,} headers"
            return Unfit(UnfitReason.MESSAGE_TOO_LARGE, detail)
        for name, meaning in _MEANINGS.items():
            if name in asked:
                return meaning(record, asked, rules)
        return _delayed(record, asked, passed, rules)
    except _UnfitError as error:
        return error.unfit


_Asked = dict[str, bytes | None]


def _withdrawn(record: CommittedRecord, asked: _Asked, rules: IngressRules) -> Withdrawn:
    return Withdrawn(
        _id(asked, ingress.CANCEL), _deliver_at(asked), _destination(record, asked, rules)
    )


def _committed(record: CommittedRecord, asked: _Asked, rules: IngressRules) -> HalfCommit:
    _check_halves(record, rules)
    if ingress.CANCEL in asked:
        detail = f"{ingress.CANCEL} and {ingress.COMMIT}"
        raise _UnfitError(UnfitReason.HALF_INVALID, detail)
    return HalfCommit(_id(asked, ingress.COMMIT), _deliver_at(asked), _topic(asked, rules))


def _answered(record: CommittedRecord, asked: _Asked, rules: IngressRules) -> HalfAnswered:
    _check_topic(record, rules)
    answer = _ANSWERS.get(asked[ingress.ANSWER])
    if answer is None or ingress.ID not in asked:
        detail = f"{_quoted(ingress.ANSWER, asked)}, {_quoted(ingress.ID, asked)}"
        raise _UnfitError(UnfitReason.HALF_INVALID, detail)
    return HalfAnswered(_id(asked, ingress.ID), _deliver_at(asked), _topic(asked, rules), answer)


_ANSWERS: Final[Mapping[bytes | None, HalfAnswer]] = {each.encode(): each for each in HalfAnswer}
_MEANINGS: Final[Mapping[str, Callable[[CommittedRecord, _Asked, IngressRules], RecordRequest]]] = {
    ingress.ANSWER: _answered,
    ingress.COMMIT: _committed,
    ingress.CANCEL: _withdrawn,
}
"""What a record is by one of its headers; else it is a message."""


def _check_halves(record: CommittedRecord, rules: IngressRules) -> None:
    if not rules.halves:
        raise _UnfitError(UnfitReason.HALVES_OFF, "Half messages are off")
    _check_topic(record, rules)


def _check_topic(record: CommittedRecord, rules: IngressRules) -> None:
    topic = record.place.topic
    if topic in rules.destinations:  # which message a commit names is not known here
        detail = f"No half messages through {topic}, which leads to some topics alone"
        raise _UnfitError(UnfitReason.FORBIDDEN, detail)


def _split(
    headers: Sequence[tuple[str, bytes | None]],
) -> tuple[_Asked, list[tuple[str, bytes | None]]]:
    """Splits headers into the last of each reserved name, and those that are passed on."""
    asked: _Asked = {}
    passed: list[tuple[str, bytes | None]] = []
    for name, value in headers:
        if not is_reserved(name):
            passed.append((name, value))
        elif name == _WHEEL:
            for earlier in _OF_A_DELIVERY:
                asked.pop(earlier, None)
        elif name in _ASKED:
            asked[name] = value
        elif name not in DELIVERED_HEADERS and not name.startswith(DEAD_PREFIX):
            meant = did_you_mean(name, sorted(_ASKED))
            raise _UnfitError(UnfitReason.HEADER_RESERVED, f"Unknown header {_shown(name)}{meant}")
    return asked, passed


_ASKED: Final = frozenset(
    {
        *(ingress.TOPIC, *ingress.DUES, ingress.ID, ingress.PARTITION, ingress.TIMESTAMP),
        *(ingress.CANCEL, ingress.COMMIT, ingress.ANSWER, HALF_GROUP, HALF_DELIVER_AT),
        *OF_DEFERRAL,
    }
)
_OF_A_DELIVERY: Final = (ingress.ID, *OF_DEFERRAL)
"""Before the last `_WHEEL` they are of an earlier delivery, and ask for nothing."""


def _delayed(
    record: CommittedRecord,
    asked: _Asked,
    passed: list[tuple[str, bytes | None]],
    rules: IngressRules,
) -> Delayed:
    topic = _destination(record, asked, rules)
    due_ms = _due_ms(record, asked, rules)
    id_ = _new_id(asked) if ingress.ID in asked else None
    partition = _optional(
        asked, ingress.PARTITION, lambda n: 0 <= n < _PARTITIONS, UnfitReason.PARTITION_INVALID
    )
    timestamp_ms = _optional(
        asked, ingress.TIMESTAMP, lambda n: 0 < n < _TIMES, UnfitReason.TIMESTAMP_INVALID
    )
    is_half = not asked.keys().isdisjoint({HALF_GROUP, HALF_DELIVER_AT})
    half_due_ms = ABSENT
    if is_half:
        _check_halves(record, rules)
        ours, half_due_ms = _half(asked, due_ms)
    of_deferral = [
        (name, b"%d" % time_ms)
        for name in OF_DEFERRAL
        if (time_ms := _time_ms(asked, name)) != ABSENT
    ]
    headers = _encoded(passed) + (encode_headers(ours) if is_half else b"")
    length_bytes = len(record.key or b"") + len(record.value or b"") + len(headers)
    most_bytes = rules.max_message_bytes
    if is_half:  # its letter may come back, and has more headers
        most_bytes = longest_half_bytes(most_bytes)
    if length_bytes > most_bytes:
        detail = f"{length_bytes:,} bytes, at most {most_bytes:,}"
        raise _UnfitError(UnfitReason.MESSAGE_TOO_LARGE, detail)
    if of_deferral:  # a leader has deferred it: so long it was when it was accepted
        headers += encode_headers(of_deferral)
    return Delayed(
        id_ or message_id(record.place, record.timestamp_ms),
        due_ms,
        topic,
        partition,
        timestamp_ms,
        record.key,
        record.value,
        headers,
        id_ is not None,
        is_half,
        half_due_ms,
    )


def _half(asked: _Asked, due_ms: int) -> tuple[list[tuple[str, bytes | None]], int]:
    """Returns the headers that make a half, and the due of its message.

    Its sender has to know its id and due: commits, and rows of the barrier, name it by both.
    """
    for name in (ingress.ID, ingress.DELIVER_AT):
        if name not in asked:
            raise _UnfitError(UnfitReason.HALF_INVALID, f"{HALF_GROUP} without {name}")
    group = asked.get(HALF_GROUP) or b""
    if not GROUP_NAME.fullmatch(group):
        raise _UnfitError(UnfitReason.HALF_INVALID, _quoted(HALF_GROUP, asked))
    ours: list[tuple[str, bytes | None]] = [(HALF_GROUP, group)]
    if HALF_DELIVER_AT not in asked:
        return ours, ABSENT
    half_due_ms = number_in(asked[HALF_DELIVER_AT])
    if half_due_ms is None or half_due_ms not in ingress.PLAUSIBLE_MS or half_due_ms == due_ms:
        detail = f"{_quoted(HALF_DELIVER_AT, asked)}: Unix milliseconds, and not {due_ms}"
        raise _UnfitError(UnfitReason.HALF_INVALID, detail)
    return [*ours, (HALF_DELIVER_AT, b"%d" % half_due_ms)], half_due_ms


def _destination(record: CommittedRecord, asked: _Asked, rules: IngressRules) -> str:
    topic = _topic(asked, rules)
    patterns = rules.destinations.get(record.place.topic)
    if patterns is not None and not any(pattern.fits(topic) for pattern in patterns):
        detail = f"{record.place.topic} does not lead to {topic}"
        raise _UnfitError(UnfitReason.FORBIDDEN, detail)
    return topic


def _topic(asked: _Asked, rules: IngressRules) -> str:
    value = asked.get(ingress.TOPIC)
    if value is None:
        raise _UnfitError(UnfitReason.TOPIC_INVALID, f"No {ingress.TOPIC}")
    topic = value.decode(errors="replace")
    if not is_topic_name(topic):
        raise _UnfitError(UnfitReason.TOPIC_INVALID, f"{ingress.TOPIC} {_shown(topic)}")
    if topic in rules.own_topics or ingress.is_reserved_topic(topic):
        raise _UnfitError(UnfitReason.TOPIC_INVALID, f"{topic} belongs to the service or to Kafka")
    return topic


def _due_ms(record: CommittedRecord, asked: _Asked, rules: IngressRules) -> int:
    given = [name for name in ingress.DUES if name in asked]
    if len(given) != 1:
        if given:
            raise _UnfitError(UnfitReason.DUE_AMBIGUOUS, " and ".join(given))
        raise _UnfitError(UnfitReason.DUE_MISSING, f"None of {', '.join(ingress.DUES)}")
    if given == [ingress.DELIVER_AT]:
        return _deliver_at(asked)
    delay_ms = _delay_ms(asked, rules)
    if record.timestamp_ms == NO_TIMESTAMP or record.timestamp_ms < 0:
        raise _UnfitError(UnfitReason.DUE_INVALID, "The record has no timestamp to count from")
    due_ms = record.timestamp_ms + delay_ms
    if not 0 < due_ms < _TIMES:
        raise _UnfitError(UnfitReason.DUE_INVALID, f"A due of {due_ms} ms")
    return due_ms


def _delay_ms(asked: _Asked, rules: IngressRules) -> int:
    if ingress.LEVEL in asked:
        level = (asked[ingress.LEVEL] or b"").decode(errors="replace")
        delay_ms = rules.levels_ms.get(level)
        if delay_ms is None:
            raise _UnfitError(UnfitReason.LEVEL_UNKNOWN, f"No level {_shown(level)}")
        return delay_ms
    delay_ms = number_in(asked[ingress.DELAY_MS])
    if delay_ms is None or delay_ms < 0:
        raise _UnfitError(UnfitReason.DELAY_INVALID, _quoted(ingress.DELAY_MS, asked))
    return delay_ms


def _deliver_at(asked: _Asked) -> int:
    due_ms = number_in(asked.get(ingress.DELIVER_AT))
    if due_ms is None or due_ms not in ingress.PLAUSIBLE_MS:
        raise _UnfitError(
            UnfitReason.DUE_INVALID,
            f"{_quoted(ingress.DELIVER_AT, asked)}: Unix milliseconds have 12 to 14 digits",
        )
    return due_ms


def _id(asked: _Asked, name: str) -> bytes:
    id_ = id_in(asked[name])
    if id_ is None:
        raise _UnfitError(UnfitReason.ID_INVALID, _quoted(name, asked))
    return id_


def _new_id(asked: _Asked) -> bytes:
    id_ = _id(asked, ingress.ID)
    if id_.startswith(ingress.PLACE_ID_PREFIX):
        detail = f"{_quoted(ingress.ID, asked)}: ids that begin so are the service's"
        raise _UnfitError(UnfitReason.ID_INVALID, detail)
    return id_


def _optional(asked: _Asked, name: str, fits: Callable[[int], bool], reason: UnfitReason) -> int:
    if name not in asked:
        return ABSENT
    number = number_in(asked[name])
    if number is None or not fits(number):
        raise _UnfitError(reason, _quoted(name, asked))
    return number


def _time_ms(asked: _Asked, name: str) -> int:
    return _optional(asked, name, lambda n: n in ingress.PLAUSIBLE_MS, UnfitReason.DUE_INVALID)


def _encoded(passed: list[tuple[str, bytes | None]]) -> bytes:
    for name, _ in passed:
        if not name or is_cut_off(name):
            raise _UnfitError(UnfitReason.HEADER_INVALID, f"The name {_shown(name)}")
    try:
        return encode_headers(passed)
    except UnicodeEncodeError as error:
        raise _UnfitError(UnfitReason.HEADER_INVALID, "A name is not UTF-8") from error


def _quoted(name: str, asked: _Asked) -> str:
    return f"{name} {_shown(asked[name])}" if name in asked else f"No {name}"


def _shown(content: str | bytes | None) -> str:
    """Quotes a sender's value, shortened, since it may be long."""
    return "null" if content is None else repr(content[:_SHOWN])
