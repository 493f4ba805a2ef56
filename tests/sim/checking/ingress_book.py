"""Records what senders know of their records: what each requests, and so what must become of it.

It repeats the rules of docs/INGRESS.md, without the code that reads headers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from delaywheel import ingress
from delaywheel.record_headers import FIRST_DEFERRED, FIRST_DUE, TTL_HEADER
from delaywheel_replica.cleaner.outside.ports import Record
from delaywheel_replica.core.ingress.place import NO_TIMESTAMP, IngressPlace, message_id
from delaywheel_replica.core.ingress.reading import UnfitReason
from delaywheel_replica.core.protocol.control import IngressPartition
from delaywheel_replica.core.protocol.reschedules import MessageKey
from sim.checking.book import TOPICS, Book
from sim.checking.truth import Key
from sim.machine.clocks import EPOCH_MS
from sim.machine.scheduler import US_PER_MS
from sim.plans.plan import IngressDraft

NUMBER = "number"
"""A header that is passed on, and identifies the record."""

LEVELS_MS = {"1s": 1_000, "3s": 3_000, "10s": 10_000}
MOST_BYTES = 1_000
"""The limit for a record, with its headers."""

PARTITIONS = 3
FAR_MS = 1_000_000
"""A due beyond the span."""

CUT_OFF = "behind what was cut off"

FIRST_ANSWER = 1_000_000
"""Numbers of records about halves begin here."""

FIRST_ROLLBACK = 500_000
"""Numbers of records that roll halves back begin here."""

Headers = list[tuple[str, bytes | None]]

_REQUESTS = (ingress.TOPIC, ingress.ID, ingress.DELIVER_AT, ingress.PARTITION, ingress.TIMESTAMP)


@dataclass(frozen=True, slots=True)
class Asked:
    """The request in a record.

    Attributes:
        headers: the headers that make the request, without those that are passed on.
        id: the id given; None: derived from the place.
        due_ms: the due given, or `delay_ms` is.
        delay_ms: delay from the record's timestamp.
        reason: why the request is unfit.
        withdraws: it is a cancel.
        topic: the topic of the message that it cancels.
        partition: the partition where its message has to go; None: any.
        timestamp_ms: the timestamp that its message has to have; None: any.
        passed: headers that are passed on, beside the number.
        has_timestamp: the record has a timestamp.
        padding: bytes to add to the value.
    """

    headers: Headers
    id: bytes | None = None
    due_ms: int | None = None
    delay_ms: int | None = None
    reason: UnfitReason | None = None
    withdraws: bool = False
    topic: str | None = None
    partition: int | None = None
    timestamp_ms: int | None = None
    passed: Headers = field(default_factory=list)
    has_timestamp: bool = True
    padding: int = 0


@dataclass(slots=True, eq=False)
class Sent:
    """One record of a sender.

    Attributes:
        draft: the plan's draft.
        asked: the request.
        topic: the topic where its message has to go.
        key: its Kafka key.
        value: its Kafka value.
        timestamp_ms: its own.
        ttl_header: the header that states a time to live; empty: none.
        place: where it lies; None: not yet in the log.
        due_ms: the resulting due; None: it has none.
        id: the resulting id.
        sent_us: when the brokers took it.
        is_committed: it is committed; None: unknown as yet.
        excuse: why it need not come to its end; None: it has to.
        settled_us: when the offset passed it; -1: not yet.
        is_numbered: a header has its number; otherwise it is known by id and due.
    """

    draft: IngressDraft
    asked: Asked
    topic: str
    key: bytes | None
    value: bytes | None
    timestamp_ms: int
    ttl_header: str = TTL_HEADER
    place: IngressPlace | None = None
    due_ms: int | None = None
    id: bytes = b""
    sent_us: int = -1
    is_committed: bool | None = None
    excuse: str | None = None
    settled_us: int = -1
    is_numbered: bool = True

    @property
    def number(self) -> int:
        """The record's number."""
        return self.draft.number

    @property
    def message(self) -> Key:
        """Its message, or the message that it cancels."""
        return MessageKey(self.id, self.due_ms or 0, self.topic)

    @property
    def passed(self) -> Headers:
        """The headers that arrive."""
        number = [(NUMBER, b"%d" % self.number)] if self.is_numbered else []
        return [*number, *self.asked.passed]

    @property
    def headers(self) -> Headers:
        """All headers that it is sent with."""
        return [*self.asked.headers, *self.passed]

    @property
    def expires_us(self) -> int | None:
        """The time from which it must not be forwarded; None: never."""
        ttls_s = (int(value or b"") for name, value in self.passed if name == self.ttl_header)
        ttl_s = next(ttls_s, None)
        if ttl_s is None or self.due_ms is None:
            return None
        return (self.first_due_ms - EPOCH_MS + ttl_s * 1000) * US_PER_MS

    @property
    def first_due_ms(self) -> int:
        """When its message was due before it was deferred."""
        return int(dict(self.asked.passed).get(FIRST_DUE) or self.due_ms or 0)

    @property
    def first_deferred_ms(self) -> int | None:
        """When its message was deferred at first; None: it was not."""
        since_ms = dict(self.asked.passed).get(FIRST_DEFERRED)
        return None if since_ms is None else int(since_ms)

    @property
    def is_delayed(self) -> bool:
        """Whether it is a message that can be delayed."""
        return self.asked.reason is None and not self.asked.withdraws

    def __str__(self) -> str:
        return f"i{self.number}({self.draft.asks} at {self.place})"


class IngressBook:
    """All records of a run.

    Attributes:
        by_number: as they were sent.
        by_place: topic's id and place -> the record there, including aborted records.
        by_message: message -> the records that are this message.
        cut_off: partitions that have lost their ends: later records may stay unread.
    """

    def __init__(self) -> None:
        self.by_number: dict[int, Sent] = {}
        self.by_place: dict[tuple[str, IngressPlace], Sent] = {}
        self.by_message: defaultdict[Key, list[Sent]] = defaultdict(list)
        self.cancels: defaultdict[Key, list[Sent]] = defaultdict(list)
        self.cut_off: set[IngressPartition] = set()

    def enter(self, draft: IngressDraft, now_ms: int, messages: Book) -> Sent | None:
        """Adds a record that is sent now; None: the record it refers to was never sent."""
        asked = asked_by(draft, now_ms, self, messages)
        if asked is None:
            return None
        length_bytes = draft.length_bytes + asked.padding
        value = None if length_bytes < 0 else b"i" * length_bytes
        sent = Sent(
            draft=draft,
            asked=asked,
            topic=asked.topic or TOPICS[draft.number % len(TOPICS)],
            key=b"%d" % draft.number if draft.number % 5 else None,
            value=value,
            ttl_header=messages.ttl_header,
            timestamp_ms=now_ms if asked.has_timestamp else NO_TIMESTAMP,
            due_ms=asked.due_ms,
            id=asked.id or b"",
        )
        if asked.delay_ms is not None:
            sent.due_ms = now_ms + asked.delay_ms
        self.by_number[draft.number] = sent
        return sent

    def answer(
        self,
        record: Record,
        topic_id: str,
        place: IngressPlace,
        own: Headers | None,
        now_us: int,
    ) -> Sent:
        """Adds a record about a half message, or of a message that is deferred.

        Args:
            record: What was sent.
            topic_id: Of the topic where it lies.
            place: Where it lies.
            own: The headers that arrive; None: those that make no request.
            now_us: When the brokers took it.
        """
        asks = {name: value or b"" for name, value in record.headers if name in _REQUESTS}
        rest = [(name, value) for name, value in record.headers if name not in _REQUESTS]
        given = asks.get(ingress.ID)
        asked = Asked(
            record.headers,
            id=None if given is None else bytes.fromhex(given.decode()),
            due_ms=int(asks[ingress.DELIVER_AT]),
            passed=rest if own is None else own,
        )
        number = FIRST_ANSWER + len(self.by_number)
        sent = self.by_number[number] = Sent(
            draft=IngressDraft(number, "answer"),
            asked=asked,
            topic=asks[ingress.TOPIC].decode(),
            key=record.key,
            value=record.value,
            timestamp_ms=record.timestamp_ms,
            due_ms=asked.due_ms,
            is_numbered=False,
        )
        self.taken(sent, topic_id, place, now_us)
        return sent

    def taken(self, sent: Sent, topic_id: str, place: IngressPlace, now_us: int) -> None:
        """Notes that the brokers have taken a record."""
        sent.place, sent.sent_us = place, now_us
        sent.id = sent.asked.id or message_id(place, sent.timestamp_ms)
        self.by_place[topic_id, place] = sent
        if (place.topic, place.partition) in self.cut_off:
            sent.excuse = CUT_OFF
        if sent.asked.withdraws and sent.asked.reason is None:
            self.cancels[sent.message].append(sent)
        elif sent.is_delayed:
            self.by_message[sent.message].append(sent)

    def committed(self) -> Iterator[Sent]:
        """The committed records."""
        return (sent for sent in self.by_number.values() if sent.is_committed)


def id_of(number: int) -> bytes:
    """The id that a record gives itself."""
    return b"ingress." + number.to_bytes(8, "big")


OTHER_TTL_HEADER = "lives-s"

Ask = Callable[[IngressDraft, int], Asked]
ASKS: dict[str, Ask] = {}
"""Requests that stand alone; for those that refer to another record, see `asked_by`."""

OF_OTHERS = ("again", "cancel", "cancel_message")


def asked_by(
    draft: IngressDraft, now_ms: int, records: IngressBook, messages: Book
) -> Asked | None:
    """Returns the request of a draft; None: the record it refers to is missing."""
    if draft.asks not in OF_OTHERS:
        asked = ASKS[draft.asks](draft, now_ms)
        return replace(asked, headers=_with_topic(draft, asked.headers))
    if draft.asks == "cancel_message":
        entry = messages.entries.get(draft.of or 0)
        if entry is None:
            return None
        entry.cancel_tried = True
        key = entry.key
    else:
        of = records.by_number.get(draft.of or 0)
        if of is None or of.asked.id is None or of.due_ms is None:
            return None
        key = MessageKey(of.asked.id, of.due_ms, of.topic)
    due = ingress.DELIVER_AT, b"%d" % key.due_ms
    if draft.asks == "again":
        headers: Headers = _with_topic(draft, [due, (ingress.ID, key.id)])
        return Asked(headers, key.id, key.due_ms)
    topic = ingress.TOPIC, key.topic.encode()
    named: Headers = [(ingress.CANCEL, key.id.hex().encode()), due, topic]
    return Asked(named, key.id, key.due_ms, withdraws=True, topic=key.topic)


def _with_topic(draft: IngressDraft, headers: Headers) -> Headers:
    """A header of its own says otherwise, and an empty one that there is to be none."""
    given = [value for name, value in headers if name == ingress.TOPIC]
    if given:
        return [header for header in headers if header != (ingress.TOPIC, b"")]
    return [(ingress.TOPIC, TOPICS[draft.number % len(TOPICS)].encode()), *headers]


def _ask(function: Ask) -> Ask:
    ASKS[function.__name__] = function
    return function


@_ask
def delay(draft: IngressDraft, now_ms: int) -> Asked:
    """A delay as text."""
    del now_ms
    return Asked([_delay_of(draft)], delay_ms=max(0, draft.delay_ms))


@_ask
def delay_long(draft: IngressDraft, now_ms: int) -> Asked:
    """The same as a long of 8 bytes, and a header that is passed on."""
    del now_ms
    ms = max(0, draft.delay_ms)
    passed: Headers = [("dw-retry-attempt", b"2"), ("empty", b""), ("null", None)]
    return Asked([(ingress.DELAY_MS, ms.to_bytes(8, "big"))], delay_ms=ms, passed=passed)


@_ask
def deliver_at(draft: IngressDraft, now_ms: int) -> Asked:
    """A due as text."""
    due_ms = now_ms + draft.delay_ms
    return Asked([(ingress.DELIVER_AT, b"%d" % due_ms)], due_ms=due_ms)


@_ask
def with_id(draft: IngressDraft, now_ms: int) -> Asked:
    """A due and an id, as a producer gives them that may send twice."""
    asked = deliver_at(draft, now_ms)
    id_ = id_of(draft.number)
    return replace(asked, headers=[*asked.headers, (ingress.ID, id_.hex().encode())], id=id_)


@_ask
def level(draft: IngressDraft, now_ms: int) -> Asked:
    """A level, the next one below the delay."""
    del now_ms
    fitting = [name for name, ms in LEVELS_MS.items() if ms <= draft.delay_ms]
    name = fitting[-1] if fitting else "1s"
    return Asked([(ingress.LEVEL, name.encode())], delay_ms=LEVELS_MS[name])


@_ask
def last_counts(draft: IngressDraft, now_ms: int) -> Asked:
    """Headers that occur twice."""
    asked = delay(draft, now_ms)
    return replace(asked, headers=[(ingress.DELAY_MS, b"999999"), *asked.headers])


@_ask
def placed(draft: IngressDraft, now_ms: int) -> Asked:
    """A partition, and a timestamp."""
    at_ms, partition = now_ms - 60_000, draft.number % 2
    asked = delay(draft, now_ms)
    headers = [(ingress.PARTITION, b"%d" % partition), (ingress.TIMESTAMP, b"%d" % at_ms)]
    return replace(
        asked, headers=[*asked.headers, *headers], partition=partition, timestamp_ms=at_ms
    )


@_ask
def redelivered(draft: IngressDraft, now_ms: int) -> Asked:
    """A message that was delivered once, with the headers of that delivery."""
    before: Headers = [
        ("dw-id", b"00" * 16),
        ("dw-due", b"1"),
        ("dw-accepted", b"1"),
        ("dw-wheel", b"a.1"),
    ]
    asked = delay(draft, now_ms)
    return replace(asked, headers=[*before, *asked.headers])


@_ask
def expiring(draft: IngressDraft, now_ms: int) -> Asked:
    """A time to live, under either name that a cluster may read it from."""
    passed: Headers = [
        (OTHER_TTL_HEADER, b"%d" % (20 - draft.number % 18)),
        (TTL_HEADER, b"%d" % (3 + draft.number % 20)),
    ]
    return replace(delay(draft, now_ms), passed=passed)


def _unfit(reason: UnfitReason, make: Callable[[IngressDraft, int], Headers]) -> Ask:
    return lambda draft, now_ms: Asked(make(draft, now_ms), reason=reason)


def _delay_of(draft: IngressDraft) -> tuple[str, bytes | None]:
    return ingress.DELAY_MS, b"%d" % max(0, draft.delay_ms)


_BAD: dict[str, tuple[UnfitReason, Callable[[IngressDraft, int], Headers]]] = {
    "no_topic": (UnfitReason.TOPIC_INVALID, lambda d, _: [(ingress.TOPIC, b""), _delay_of(d)]),
    "bad_topic": (UnfitReason.TOPIC_INVALID, lambda d, _: [(ingress.TOPIC, b"/"), _delay_of(d)]),
    "own_topic": (
        UnfitReason.TOPIC_INVALID,
        lambda d, _: [(ingress.TOPIC, b"delaywheel-sim-control"), _delay_of(d)],
    ),
    "no_due": (UnfitReason.DUE_MISSING, lambda *_: []),
    "two_dues": (UnfitReason.DUE_AMBIGUOUS, lambda d, _: [_delay_of(d), (ingress.LEVEL, b"1s")]),
    "bad_due": (UnfitReason.DUE_INVALID, lambda *_: [(ingress.DELIVER_AT, b"soon")]),
    "bad_delay": (UnfitReason.DELAY_INVALID, lambda *_: [(ingress.DELAY_MS, b"-1")]),
    "bad_level": (UnfitReason.LEVEL_UNKNOWN, lambda *_: [(ingress.LEVEL, b"2s")]),
    "bad_id": (UnfitReason.ID_INVALID, lambda d, _: [_delay_of(d), (ingress.ID, b"1")]),
    "bad_cancel": (UnfitReason.ID_INVALID, lambda *_: [(ingress.CANCEL, b"1")]),
    "bad_partition": (
        UnfitReason.PARTITION_INVALID,
        lambda d, _: [_delay_of(d), (ingress.PARTITION, b"first")],
    ),
    "bad_timestamp": (
        UnfitReason.TIMESTAMP_INVALID,
        lambda d, _: [_delay_of(d), (ingress.TIMESTAMP, b"0")],
    ),
    "reserved": (UnfitReason.HEADER_RESERVED, lambda d, _: [_delay_of(d), ("dw-new", b"1")]),
    "cut_name": (UnfitReason.HEADER_INVALID, lambda d, _: [_delay_of(d), ("a\0b", b"1")]),
    "no_utf8": (UnfitReason.HEADER_INVALID, lambda d, _: [_delay_of(d), ("\udc80", b"1")]),
}
ASKS.update({name: _unfit(*bad) for name, bad in _BAD.items()})


@_ask
def beyond_span(draft: IngressDraft, now_ms: int) -> Asked:
    """A due too far ahead."""
    headers: Headers = [(ingress.DELIVER_AT, b"%d" % (now_ms + FAR_MS + draft.delay_ms))]
    return Asked(headers, reason=UnfitReason.DUE_BEYOND_SPAN)


@_ask
def too_large(draft: IngressDraft, now_ms: int) -> Asked:
    """Too many bytes."""
    asked = delay(draft, now_ms)
    return replace(asked, reason=UnfitReason.MESSAGE_TOO_LARGE, delay_ms=None, padding=MOST_BYTES)


@_ask
def timeless(draft: IngressDraft, now_ms: int) -> Asked:
    """A delay without a timestamp to count from."""
    asked = delay(draft, now_ms)
    reason = UnfitReason.DUE_INVALID
    return replace(asked, reason=reason, delay_ms=None, has_timestamp=False)


UNFIT = (*_BAD, "beyond_span", "too_large", "timeless")
FIT = ("delay", "delay_long", "deliver_at", "with_id", "level", "last_counts", "placed",
       "redelivered", "expiring")  # fmt: skip
