"""A record in the hands of its handler, the ways to settle it, and named errors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from delaywheel.consumer.leaving import UnreadableError, leave_one
from delaywheel.consumer.records import (
    Partition,
    Place,
    RecordHeaders,
    Trip,
    Writes,
    error_text,
    with_trace,
)
from delaywheel.consumer.rules.deserializers import Field, FieldContext, may_pass
from delaywheel.errors import DelaywheelError
from delaywheel.functions import check_begun, check_plain
from delaywheel.levels import Duration, length_ms
from delaywheel.message import Headers, Message
from delaywheel.record_headers import last_of
from delaywheel.transactional import MOST_TIMEOUT_ADVICE, Outgoing

if TYPE_CHECKING:
    from delaywheel.consumer.block import RecordBlock
    from delaywheel.consumer.engine.dispatcher import Dispatcher

_LOG = logging.getLogger("delaywheel.consumer")


class State(IntEnum):
    """The state of a record; docs/CONSUMER_REFERENCE.md has the table."""

    WAITING = 0
    IN_HAND = 1
    SETTLED = 2
    COMMITTED = 3
    FORGOTTEN = 4


_STATES = tuple(State)


class Outcome(IntEnum):
    """How a record was settled."""

    DONE = 0
    RETRIED = 1
    DEAD = 2
    SKIPPED = 3
    EXPIRED = 4
    PARKED = 5
    FORWARDED = 6


class ConsumerReason(StrEnum):
    """Why a consumer cannot continue, and in one line what to do; names are stable."""

    advice: str

    def __new__(cls, name: str, advice: str) -> Self:
        """Creates the member for one row of the table below."""
        member = str.__new__(cls, name)
        member._value_ = name
        member.advice = advice
        return member

    TOPIC_MISSING = "TOPIC_MISSING", "create the topic, or correct its name"
    INGRESS_MISSING = (
        "INGRESS_MISSING",
        "start a delaywheel node with ingress on this Kafka, or correct cluster",
    )
    CLUSTER_AMBIGUOUS = (
        "CLUSTER_AMBIGUOUS",
        "several delaywheel clusters use this Kafka: give cluster, the id of one",
    )
    TOPICS_NOT_MADE = "TOPICS_NOT_MADE", "create the retry and dead-letter topics, or permit it"
    ORDER_IMPOSSIBLE = (
        "ORDER_IMPOSSIBLE",
        "make the topics of the group so that ordered can work, or leave ordered out",
    )
    NOT_AUTHORIZED = "NOT_AUTHORIZED", "grant this program what it lacks"
    TOPIC_TOO_SMALL = "TOPIC_TOO_SMALL", "raise max.message.bytes of the smaller topic"
    DELAY_BEYOND_SPAN = (
        "DELAY_BEYOND_SPAN",
        "shorten the longest delay in retry, or raise the cluster's span_seconds",
    )
    TOPIC_COMPACTED = "TOPIC_COMPACTED", "compaction would keep only the last record of each key"
    OUTCOME_REFUSED = "OUTCOME_REFUSED", "see what Kafka says of that topic"
    SETTING_INVALID = "SETTING_INVALID", "correct this setting in kafka"
    TRANSACTION_TIMEOUT_REFUSED = "TRANSACTION_TIMEOUT_REFUSED", MOST_TIMEOUT_ADVICE
    GROUP_DIFFERS = (
        "GROUP_DIFFERS",
        "other members use another partition.assignment.strategy: take a group of its own",
    )
    INSTANCE_TAKEN = (
        "INSTANCE_TAKEN",
        "stop the other consumer, or give each an instance of its own",
    )
    KAFKA_FATAL = "KAFKA_FATAL", "the Kafka client has failed for good: create a new consumer"


class ConsumerError(DelaywheelError):
    """The consumer has stopped; uncommitted records are delivered again.

    `text` says what the reason is about, in Kafka's words if it has any.
    """

    def __init__(self, reason: ConsumerReason, text: str) -> None:
        super().__init__(f"{reason}: {text}: {reason.advice}", outcome_known=True)
        self.reason = reason
        self.text = text


class HandlerTimeoutError(TimeoutError):
    """A handler took longer than `handler_timeout`: the error by which its record has failed."""


class HandlerCancelledError(RuntimeError):
    """A coroutine awaited what was cancelled elsewhere: the error by which its record has failed.

    Nobody has cancelled the handler itself, so it is no interruption: left unsettled, its record
    would hold up its partition, and nobody would hear of it.
    """


class WriteRefusedError(RuntimeError):
    """Kafka does not take what a handler has written: the error by which its record has failed."""


class SettledError(RuntimeError):
    """`done`, `retry` or `dead` was called for a message that was settled before."""

    @classmethod
    def of(cls, message: ReceivedMessage) -> Self:
        """Returns the error to raise for this message."""
        return cls(f"{message!r} was settled before")


class Settlement(NamedTuple):
    """An outcome, and the record that its transaction writes.

    Attributes:
        due_ms: When it comes back, if it does.
        answers: Records with the answer about a half, for the service; they may be left out.
        why: What a line in the log says about it.
        whole: A dead letter with all its parts, of which `record` has what its topic takes.
        omitted: Which parts are left out for want of room, one of `OMISSIONS`.
        is_measured: Whether its topic was asked what it takes after they were left out.
        writes: What the handler of a record that is done has written besides.
    """

    outcome: Outcome
    record: Outgoing | None = None
    due_ms: int = 0
    order: tuple[Outgoing, ...] = ()
    answers: tuple[Outgoing, ...] = ()
    why: str = ""
    reason: str = ""
    whole: Outgoing | None = None
    omitted: tuple[str, ...] = ()
    is_measured: bool = False
    writes: Writes | None = None

    @property
    def topics(self) -> frozenset[str]:
        """The topics that its transaction writes to for it."""
        written = () if self.writes is None else self.writes.records
        own = () if self.record is None else (self.record,)
        return frozenset(one.topic for one in (*written, *own, *self.order, *self.answers))


DONE = Settlement(Outcome.DONE)
"""The settlement of all records that are done, unless their order writes something."""


class ReceivedMessage:
    """A record to be handled, with exactly one outcome: done, retried or dead.

    It is ours until it is settled, or until Kafka gives its partition to another consumer:
    `is_ours` and `on_lost` tell long handlers of that.

    Use it as a context manager, `with` or `async with`: left normally, it is done; left by an
    exception, it is retried or dead, depending on the consumer's options (`retry`, `retry_on`,
    `dead_on`). Or call `done`, `retry` or `dead`. A message that is never settled is delivered
    again once this consumer ends, and holds up the commits of its partition until then.

    Attributes:
        headers: As the record had them when it was first read.
        attempt: 1 the first time.
        origin: Where it was first read, with its timestamp in Unix milliseconds.
        place: Where it was read now: on the retry topic, if it is a retry.
        first_error: How the first attempt failed; None at the first.
        last_error: How the last attempt failed; None at the first.

    Example:
        By hand::

            if not stock.reserve(message.value):
                message.retry(after="1m", error="out of stock")
    """

    __slots__ = (
        "_objects",
        "_on_lost",
        "are_headers_unread",
        "attempt",
        "block",
        "first_error",
        "has_returned",
        "headers",
        "index",
        "is_given_back",
        "is_taken_back",
        "key",
        "last_error",
        "origin",
        "place",
        "value",
    )

    def __init__(
        self,
        block: RecordBlock,
        index: int,
        place: Place,
        key: bytes | None,
        value: bytes | None,
        headers: RecordHeaders,
    ) -> None:
        self.block = block
        self.index = index
        self._on_lost: Callable[[], None] | None = None
        self._objects: dict[Field, object] | None = None
        self.place = self.origin = place
        self.key = key
        self.value = value
        self.headers = headers
        self.are_headers_unread = False
        self.attempt = 1
        self.first_error: str | None = None
        self.last_error: str | None = None
        # Set when it took its handler too long, and when that handler has ended all the same.
        self.is_taken_back = False
        self.has_returned = False
        # Set when it is handed out again, as another object.
        self.is_given_back = False

    def take_trip(self, trip: Trip, headers: RecordHeaders) -> None:
        """Takes in that it has come back: its earlier attempts, and its own headers."""
        self.attempt, self.origin, self.first_error, self.last_error = trip
        self.headers = headers

    def __repr__(self) -> str:
        """Shows places and lengths, but no contents."""
        return f"<{self.origin} attempt={self.attempt} {self.length_bytes} bytes>"

    @property
    def desk(self) -> Dispatcher:
        """Where it is settled."""
        return self.block.desk

    @property
    def state(self) -> State:
        """Its state now."""
        return State.FORGOTTEN if self.is_given_back else _STATES[self.block.states[self.index]]

    @property
    def handed_s(self) -> float:
        """When it was handed out, on the monotonic clock."""
        return self.block.handed_s[self.index]

    @property
    def length_bytes(self) -> int:
        """The length of key, value and headers, as they were read."""
        return self.block.length_bytes(self.index, self.index + 1)

    @property
    def topic(self) -> str:
        """The topic of origin, even if the record was read from the retry topic."""
        return self.origin.topic

    @property
    def at(self) -> Partition:
        """The partition that it was read from now."""
        return self.block.at

    @property
    def context(self) -> dict[str, object]:
        """What log lines of its handler should say: for `structlog.contextvars.bound_contextvars`.

        Of the key its first 64 bytes, as text that a terminal can show.
        """
        key = (
            None if self.key is None else printable(self.key[:64].decode(errors="backslashreplace"))
        )
        return {
            "topic": self.topic,
            "partition": self.origin.partition,
            "offset": self.origin.offset,
            "key": key,
            "attempt": self.attempt,
        }

    @property
    def data(self) -> Any:
        """The value as `value_deserializer` reads it, once, when it is first asked for.

        The bytes themselves if there is no such function; None for a null value. Raises
        UnreadableError if it cannot be read, and another error if it cannot be read now: the schema
        registry does not answer.
        """
        return self.value if self.value is None else self._read("value", self.value)

    @property
    def key_data(self) -> Any:
        """The key as `key_deserializer` reads it; otherwise like `data`."""
        return self.key if self.key is None else self._read("key", self.key)

    def _read(self, field: Field, content: bytes) -> object:
        deserializer = self.desk.deserializers.get(field)
        if deserializer is None:
            return content
        if self._objects is None:
            self._objects = {}
        if field not in self._objects:
            try:
                read = deserializer(content, FieldContext(self.topic, field, self.headers))
            except Exception as error:
                if may_pass(error):
                    raise
                raise UnreadableError(f"the {field}: {error_text(error)}", self) from error
            check_begun(deserializer, read)
            self._objects[field] = read
        return self._objects[field]

    @property
    def timestamp_ms(self) -> int:
        """The timestamp of the record when it was first read."""
        return self.origin.timestamp_ms

    @property
    def is_ours(self) -> bool:
        """Whether its outcome still counts; False: it is delivered again, here or elsewhere."""
        return self.state is not State.FORGOTTEN and not self.is_taken_back

    def on_lost(self, call: Callable[[], None] | None) -> None:
        """Sets what is called, on another thread, when the record is no longer ours.

        Only for a record that is not settled by then; at once if it is not ours now. What it
        raises is logged.
        """
        if call is not None:
            check_plain("on_lost", call)
        self._on_lost = call
        if not self.is_ours:
            self.tell_lost()

    def tell_lost(self) -> None:
        """Calls what `on_lost` has set, once."""
        call, self._on_lost = self._on_lost, None
        if call is not None:
            try:
                check_begun(call, call())
            except Exception:  # noqa: BLE001 - it is the caller's
                _LOG.exception("what %r was to call when it was lost", self)

    @property
    def is_settled(self) -> bool:
        """Whether it has an outcome; False if it was taken from this consumer before that."""
        state = self.state
        return state is State.SETTLED or state is State.COMMITTED

    def header(self, name: str) -> bytes | None:
        """Returns the last value of a header; None if it is absent or null."""
        return last_of(self.headers, name)

    def produce(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
        after: Duration | None = None,
    ) -> bool:
        """Writes a record to Kafka in the transaction that has this one's outcome, if it is done.

        Nothing is sent before that: if this record is retried, dead or delivered again instead,
        nothing was written. It takes no time, and may be called on any thread or loop. What Kafka
        refuses fails this record, with `WriteRefusedError`: it is retried, or dead.

        Args:
            topic: An existing topic.
            headers: Without a `traceparent` among them this message's is added, with its
                `tracestate`: what is written belongs to the same trace.
            partition: None: chosen from the key, as Java's clients do.
            after: The record appears so much later, by delaywheel; None: at once.

        Returns:
            False: This message is no longer ours, and nothing will be written.

        Raises:
            SettledError: It was settled before.
            MessageInvalidError: Kafka or delaywheel would refuse it, or it is more than one
                transaction takes.
        """
        record = Message(
            topic,
            value,
            key=key,
            headers=with_trace(headers, self.headers),
            partition=partition,
            delay=timedelta(0) if after is None else after,
            clock=self.desk.clock_ns,
        )
        return self.desk.produce(self, record, is_delayed=after is not None)

    def done(self) -> bool:
        """Settles the record as handled; raises SettledError if it was settled before.

        Returns:
            False: It no longer belongs to this consumer (after a rebalance, or a failed
            transaction) and is delivered again, or its handler took longer than `handler_timeout`
            and it has failed by that. The same for `retry` and `dead`.
        """
        return self.desk.done(self)

    def nack(self, after: Duration | None = None) -> bool:
        """Puts the record back: it is handed out again, before all others, as the same attempt.

        Nothing is written to Kafka, and the commits of its partition wait for it. To have it later
        without that, or as a further attempt, call `retry`. This object is not ours any more: the
        next delivery is another one. False, and SettledError, as of `done`.

        Args:
            after: How much later, give or take 0.1 s; None: at once. With `run`, and with
                `ordered`, later records of its key wait until then.
        """
        return self.desk.nack(self, 0 if after is None else length_ms(after))

    def retry(
        self, after: Duration | None = None, *, error: BaseException | str | None = None
    ) -> bool:
        """Settles the record to come back; `error` is reported in headers. False as of `done`.

        Args:
            after: The delay, from now. None: the level of this attempt; after the last one, the
                record is dead. With a delay given, it comes back however often it came.
        """
        return self.desk.retry(self, after, error)

    def dead(self, reason: str, *, error: BaseException | str | None = None) -> bool:
        """Settles the record as a dead letter with this reason; raises SettledError like `done`."""
        return self.desk.dead(self, reason, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return leave_one(self, error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return leave_one(self, error)

    def overrules(self, error: Exception) -> bool:
        """Whether its outcome stands, and an exception that came later is only logged."""
        if not self.desk.is_outcome(error):
            return False
        _LOG.warning("%r was settled before this was raised", self, exc_info=error)
        return True


def printable(text: str) -> str:
    """Returns a text in which each character shows itself, in one line."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )
