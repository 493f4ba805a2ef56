"""Decides the outcome of a record: by exceptions, attempts, and its time to live.

| the handler | attempts left | outcome |
|---|---|---|
| ended, or said done | any | done |
| raised UnreadableError | any | dead, UNREADABLE |
| raised FunctionKindError: it is not of the kind that is called | any | none |
| raised one of `dead_on`, or from one | any | dead, NOT_RETRIABLE |
| raised one of `retry_on`, or from one, or said retry | yes | retried, after its back-off's delay |
| raised one of `retry_on`, or from one, or said retry | no | dead, ATTEMPTS_EXHAUSTED |
| raised anything else | any | none: the exception is raised, the record stays unsettled |
| said retry after a delay | any | retried, after that delay |
| said dead | any | dead, with the reason given |

The back-off is that of `retry_by` for the exception, or for one that it was raised from; else
`retry`. A retry that would come later than `retry_for` after the record's timestamp is dead,
TIME_EXHAUSTED.

A record whose time to live has passed, or would pass before it came back, has expired: it is
skipped, or dead with EXPIRED. A retry that is too large for the ingress topic, for what ingress
takes or for the topic of retries is dead, MESSAGE_TOO_LARGE; one that is due later than ingress
takes, DELAY_BEYOND_SPAN: sent all the same, it would become delaywheel's dead letter, and leave its
group. If Kafka refuses a retry all the same, it is dead, RETRY_REFUSED; a record that another one
is written for, FORWARD_REFUSED. A letter that is too large
for its topic omits the value, or also the headers, or also the key, and `dw-dead-omitted`
names them: they stay where the letter's origin says. A record with a header whose name is not UTF-8
is dead before it is handled, HEADER_INVALID: no client reads the headers of such a record.

What topics take may be changed at any time. So nothing is lost by what was known earlier:

| an outcome | then |
|---|---|
| is a letter that is too large by what is known | its topic is asked before it is written: it has |
|   | the parts that fit now |
| is a retry that is too large by what is known | it is dead, whole; the topics are asked within |
|   | 5 s, for later ones |
| alone in its transaction, is refused by Kafka | the topics are asked, and it is tried again, |
|   | each of its records in a batch of its own |
| is refused again, and they take what they took | a retry is dead, a letter omits a part more |
| the topic of letters, or of retries, takes less than the source | the partition is held up |
|   | (held_up.py): no letter is shortened by that, and no retry becomes delaywheel's own dead |
|   | letter, but of the 10 s until it is seen. At its start a consumer stops, TOPIC_TOO_SMALL |
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Literal

from delaywheel import ingress
from delaywheel.consumer.leaving import UnreadableError
from delaywheel.consumer.message import (
    ConsumerError,
    ConsumerReason,
    Outcome,
    ReceivedMessage,
    Settlement,
    WriteRefusedError,
)
from delaywheel.consumer.port import FORWARD_ROOM_BYTES, Start
from delaywheel.consumer.records import (
    RecordHeaders,
    Trip,
    causes,
    dead_letter,
    error_text,
    is_of,
    kept,
    retry_record,
    shortened,
)
from delaywheel.consumer.rules.backoff import DEFAULT_DELAYS, Delays, Failure, with_jitter
from delaywheel.consumer.rules.subscription import TopicNames
from delaywheel.consumer.settings import ConsumerSettings
from delaywheel.errors import MessageInvalidError
from delaywheel.functions import FunctionKindError
from delaywheel.ingress import (
    HEADER_BYTES,
    HEADERS_MOST,
    HalfAnswer,
    IngressLimits,
    is_reserved_topic,
)
from delaywheel.levels import Duration, length_ms
from delaywheel.message import Message
from delaywheel.reasons import Reason
from delaywheel.record_headers import HALF_TOPIC, OMISSIONS, RETRY_ROOT, TTL_HEADER, ttl_s_of
from delaywheel.transactional import ANY_PARTITION, Outgoing
from delaywheel.ways.roots import own_root

_LOG = logging.getLogger("delaywheel.consumer")

_BATCH_BYTES = 120
"""What Kafka adds to a record that is alone in its batch, besides what it adds per header."""
_HEADER_BYTES = 10


class DeadLetterReason(StrEnum):
    """Why a record became a dead letter if its handler gave no reason."""

    ATTEMPTS_EXHAUSTED = "ATTEMPTS_EXHAUSTED"
    TIME_EXHAUSTED = "TIME_EXHAUSTED"
    NOT_RETRIABLE = "NOT_RETRIABLE"
    EXPIRED = "EXPIRED"
    MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE"
    RETRY_REFUSED = "RETRY_REFUSED"
    FORWARD_REFUSED = "FORWARD_REFUSED"
    HEADER_INVALID = "HEADER_INVALID"
    DELAY_BEYOND_SPAN = "DELAY_BEYOND_SPAN"
    UNREADABLE = "UNREADABLE"
    WRITE_REFUSED = "WRITE_REFUSED"
    POISON = "POISON"
    HANDLER_TIMEOUT = "HANDLER_TIMEOUT"
    UNDECIDED = "UNDECIDED"


class Policy:
    """Makes settlements, without clock or state."""

    def __init__(self, settings: ConsumerSettings, start: Start) -> None:
        """Takes the settings, and what Kafka says about the topics."""
        self._settings = settings
        self._ingress_topic = start.ingress_topic
        self._most_bytes = start.most_bytes
        self.limits: IngressLimits | None = None
        """What ingress takes; None: the service has not said it."""
        self._retry_partitions: Mapping[str, int] = {}
        self._too_small_for: set[TopicNames] = set()
        self.backoff_failure: str | None = None
        """How a function of the program's that returns delays failed when it was called last."""

    @property
    def unread_topic(self) -> str | None:
        """The ingress topic, if no leader reads it; else None."""
        is_read = self.limits is None or self.limits.is_read
        return None if is_read else self._ingress_topic

    def learn_limits(self, limits: IngressLimits | None) -> None:
        """Takes in what ingress takes now; raises ConsumerError if a level is beyond the span."""
        self.limits = limits
        delays = (self._settings.retry, *(each for _, each in self._settings.retry_by))
        longest_ms = int(max(each.longest_ms for each in delays) * (1 + self._settings.jitter))
        if limits is not None and longest_ms > limits.span_ms:
            raise ConsumerError(
                ConsumerReason.DELAY_BEYOND_SPAN,
                f"{longest_ms / 1000:,.3f} s in retry, and the cluster takes"
                f" {limits.span_ms / 1000:,.0f} s",
            )

    def routed(self, records: Sequence[Outgoing]) -> Sequence[Outgoing]:
        """Returns records so that those for the ingress topic go to partitions that are read."""
        read = () if self.limits is None else self.limits.read
        return [one.to_one_of(read) if one.topic == self._ingress_topic else one for one in records]

    def learn_sizes(self, most_bytes: Mapping[str, int]) -> None:
        """Takes in the largest batches of topics, as `Start` has them."""
        self._most_bytes = {**self._most_bytes, **most_bytes}

    def found_too_small(self) -> set[TopicNames]:
        """Returns the topics for which something was too large since this was asked last."""
        found, self._too_small_for = self._too_small_for, set()
        return found

    def learn_partitions(self, partitions: Mapping[str, int]) -> None:
        """Takes in how many partitions the topics of retries have."""
        self._retry_partitions = partitions

    def meaning(self, error: Exception) -> Literal["retry", "dead"] | None:
        """Returns the outcome that a handler's exception calls for; None if it must be raised."""
        if isinstance(error, FunctionKindError):
            return None
        if isinstance(error, UnreadableError) or self._is_of(error, self._settings.dead_on):
            return "dead"
        return "retry" if self._is_of(error, self._settings.retry_on) else None

    def _is_of(self, error: Exception, classes: tuple[type[Exception], ...]) -> bool:
        """Whether an exception, or one that it was raised from, is of these classes."""

        def chain(error: BaseException) -> Iterable[BaseException]:
            return causes(error, explicit=True) if self._settings.causes else (error,)

        return any(is_of(one, classes, chain) for one in chain(error))

    def failed(self, message: ReceivedMessage, error: Exception, now_ms: int) -> Settlement | None:
        """Returns the settlement by a handler's exception; None if that must be raised."""
        meaning = self.meaning(error)
        if isinstance(error, UnreadableError):
            return self.dead(message, DeadLetterReason.UNREADABLE, error)
        if meaning == "dead":
            return self.dead(message, DeadLetterReason.NOT_RETRIABLE, error)
        return self.retry(message, None, error, now_ms) if meaning == "retry" else None

    def retry(
        self,
        message: ReceivedMessage,
        after: Duration | None,
        error: BaseException | str | None,
        now_ms: int,
    ) -> Settlement:
        """Returns the settlement of a failed record: it comes back, is dead, or has expired."""
        wait_ms = length_ms(after) if after is not None else self._delay_ms(message, error)
        if isinstance(wait_ms, DeadLetterReason):
            return self.dead(message, wait_ms, error)
        if self.limits is not None and wait_ms > self.limits.span_ms:
            why = error or f"a delay of {wait_ms} ms, at most {self.limits.span_ms}"
            return self.dead(message, DeadLetterReason.DELAY_BEYOND_SPAN, why)
        due_ms = now_ms + wait_ms
        limit_ms = self._settings.retry_for_ms
        if limit_ms is not None and 0 <= message.timestamp_ms < due_ms - limit_ms:
            return self.dead(message, DeadLetterReason.TIME_EXHAUSTED, error)
        expiry_ms = self._expires_ms(message)
        if expiry_ms is not None and due_ms >= expiry_ms:
            return self.expired(message, error)
        trip = _failed(message, error)._replace(attempt=message.attempt + 1)
        record = self._coming_back(message, trip, due_ms)
        if record is None:
            return self._too_large(message, error)
        return Settlement(Outcome.RETRIED, record, due_ms, why=trip.last_error or "no error given")

    def _delay_ms(self, message: ReceivedMessage, error: Failure) -> int | DeadLetterReason:
        """Returns the delay before the next attempt, or why there is none."""
        delays = self._delays(error)
        try:
            delay_ms = delays.after(message, error)
        except Exception as raised:  # noqa: BLE001 - it is the program's, and the record's is known
            self.backoff_failure = f"a function of retry: {error_text(raised)}"
            _LOG.exception("%r: a function of retry has failed; the default counts", message)
            delays = DEFAULT_DELAYS
            delay_ms = delays.after(message, error)
        else:
            if delays.is_chosen:
                self.backoff_failure = None
        if delay_ms is not None:
            return with_jitter(delay_ms, message, self._settings.jitter)
        if self._settings.asks_about_halves:
            return DeadLetterReason.UNDECIDED
        if delays.is_chosen:
            return DeadLetterReason.NOT_RETRIABLE
        return DeadLetterReason.ATTEMPTS_EXHAUSTED

    def _delays(self, error: Failure) -> Delays:
        for one in causes(error) if isinstance(error, BaseException) else ():
            for kind, delays in self._settings.retry_by:
                if is_of(one, kind, causes):
                    return delays
        return self._settings.retry

    def park(self, message: ReceivedMessage, due_ms: int) -> Settlement:
        """Returns the settlement that brings a record back for the same attempt."""
        trip = Trip(message.attempt, message.origin, message.first_error, message.last_error)
        record = self._coming_back(message, trip, due_ms)
        if record is None:
            return self._too_large(message)
        return Settlement(Outcome.PARKED, record, due_ms)

    def forward(self, message: ReceivedMessage, headers: RecordHeaders) -> Settlement:
        """Returns the settlement that sends a record to the ingress topic, with other headers."""
        record = Outgoing(self._ingress_topic, message.key, message.value, headers)
        if len(record.headers) > HEADERS_MOST or not self._fits(record):
            return self._too_large(message)
        return Settlement(
            Outcome.FORWARDED, record, answers=self._answer(message, HalfAnswer.COMMITTED)
        )

    def rolled_back(self, message: ReceivedMessage) -> Settlement:
        """Returns the settlement of a letter about a half whose message is dropped."""
        return Settlement(Outcome.DONE, answers=self._answer(message, HalfAnswer.ROLLED_BACK))

    def _answer(self, message: ReceivedMessage, answer: HalfAnswer) -> tuple[Outgoing, ...]:
        """Returns the record that tells the service what was answered, if it wants to know."""
        is_wanted = self.limits is not None and self.limits.takes_answers
        if not is_wanted or not self._settings.asks_about_halves:
            return ()
        id_, due = message.header("dw-id"), message.header("dw-due")
        topic = message.header(HALF_TOPIC)
        if id_ is None or due is None or topic is None:
            return ()
        headers: RecordHeaders = [
            (ingress.ANSWER, answer.encode()),
            (ingress.TOPIC, topic),
            (ingress.ID, id_),
            (ingress.DELIVER_AT, due),
        ]
        # With a key: all answers about a half are in one partition, in order.
        return (Outgoing(self._ingress_topic, id_, None, headers),)

    def _too_large(
        self, message: ReceivedMessage, error: BaseException | str | None = None
    ) -> Settlement:
        self._too_small_for.add(self._settings.topics.names_of(message.place.topic))
        return self.dead(message, DeadLetterReason.MESSAGE_TOO_LARGE, error)

    def _coming_back(self, message: ReceivedMessage, trip: Trip, due_ms: int) -> Outgoing | None:
        names = self._settings.topics.names_of(message.place.topic)
        number = message.place.partition
        keeps = self._settings.keep_partition or self._settings.ordered
        # A partition that the topic of retries lacks would take nothing.
        keeps = keeps and number < self._retry_partitions.get(names.retry, number + 1)
        record = retry_record(
            ingress_topic=self._ingress_topic,
            retry_topic=names.retry,
            trip=trip,
            key=message.key,
            value=message.value,
            headers=message.headers,
            due_ms=due_ms,
            partition=number if keeps else None,
        )
        meant = {self._settings.ttl_header, self.limits and self.limits.ttl_header}
        for name in filter(None, meant - {TTL_HEADER}):
            record = kept(record, name)
        comes_back = self._whole(record) + FORWARD_ROOM_BYTES <= self._most_bytes[names.retry]
        return record if comes_back and self._passes(record) else None

    def _passes(self, record: Outgoing) -> bool:
        """Whether Kafka and ingress take it."""
        if len(record.headers) > HEADERS_MOST or not self._fits(record):
            return False
        passed = record.length_bytes + HEADER_BYTES * len(record.headers)
        return self.limits is None or passed <= self.limits.message_bytes

    def _fits(self, record: Outgoing) -> bool:
        return self._whole(record) <= self._most_bytes[record.topic]

    @staticmethod
    def _whole(record: Outgoing) -> int:
        """Returns what a record that is alone in its batch takes in Kafka, at most."""
        return record.length_bytes + _BATCH_BYTES + _HEADER_BYTES * len(record.headers)

    def written(self, message: ReceivedMessage, record: Message, *, is_delayed: bool) -> Outgoing:
        """Returns what a handler writes, as it goes to Kafka; through delaywheel, if it is delayed.

        Raises MessageInvalidError if ingress does not take it, or its topic is one in which Kafka
        or delaywheel keeps its own records: brokers answer that like a missing right.
        """
        if record.topic == self._ingress_topic or is_reserved_topic(record.topic):
            raise MessageInvalidError(
                Reason.TOPIC_INVALID, f"a program keeps its own records in topic {record.topic}"
            )
        headers: RecordHeaders = list(record.headers)
        if not is_delayed:
            partition = ANY_PARTITION if record.partition is None else record.partition
            return Outgoing(record.topic, record.key, record.value, headers, partition)
        due_ms = record.due_ms
        assert due_ms is not None
        headers += [
            (ingress.TOPIC, record.topic.encode()),
            (ingress.ID, record.id.hex().encode()),
            (ingress.DELIVER_AT, b"%d" % due_ms),
        ]
        if record.partition is not None:
            headers.append((ingress.PARTITION, b"%d" % record.partition))
        if self._settings.trace is not None:
            root = own_root(dict(message.headers), str(message.origin).encode())
            headers.append((RETRY_ROOT, root))
        given = Outgoing(self._ingress_topic, record.key, record.value, headers)
        if not self._passes(given):
            raise MessageInvalidError(
                Reason.MESSAGE_TOO_LARGE,
                f"{given.length_bytes:,} bytes with {len(headers):,} headers, for ingress",
            )
        delay_ms = due_ms - record.made_ns // 1_000_000
        if self.limits is not None and delay_ms > self.limits.span_ms:
            raise MessageInvalidError(
                Reason.DUE_BEYOND_SPAN,
                f"in {delay_ms / 1000:,.3f} s, and the cluster takes"
                f" {self.limits.span_ms / 1000:,.0f} s",
            )
        return given

    def write_failed(self, message: ReceivedMessage, why: str, now_ms: int) -> Settlement:
        """Returns the settlement of a record whose handler has written what Kafka does not take.

        With `ordered` it is dead: later records of its key have been handed out since.
        """
        error = WriteRefusedError(why)
        failed = None if self._settings.ordered else self.failed(message, error, now_ms)
        return failed or self.dead(message, DeadLetterReason.WRITE_REFUSED, error)

    def instead(
        self, message: ReceivedMessage, refused: Settlement, why: str, now_ms: int
    ) -> Settlement:
        """Returns what becomes of a record whose outcome Kafka does not take.

        Raises ConsumerError if nothing is left to try.
        """
        if refused.writes is not None:
            return self.write_failed(message, why, now_ms)
        if refused.answers and self._settings.asks_about_halves:
            # They may be what is refused, and may be left out.
            return refused._replace(answers=())
        if refused.outcome in (Outcome.RETRIED, Outcome.PARKED):
            return self.dead(message, DeadLetterReason.RETRY_REFUSED, why)
        if refused.outcome is Outcome.FORWARDED:
            return self.dead(message, DeadLetterReason.FORWARD_REFUSED, why)
        if refused.whole is not None and refused.record is not None:
            for omitted in OMISSIONS[OMISSIONS.index(refused.omitted) + 1 :]:
                letter = _without(message, refused.whole, omitted)
                if letter.length_bytes < refused.record.length_bytes:
                    return refused._replace(record=letter, omitted=omitted, is_measured=True)
        topic = "Kafka" if refused.record is None else refused.record.topic
        raise ConsumerError(
            ConsumerReason.OUTCOME_REFUSED, f"{message!r}: {topic} takes nothing of it: {why}"
        )

    def dead(
        self, message: ReceivedMessage, reason: str, error: BaseException | str | None = None
    ) -> Settlement:
        """Returns the settlement with a record's dead letter."""
        names = self._settings.topics.names_of(message.place.topic)
        whole = dead_letter(
            dead_topic=names.dead,
            retry_topic=names.retry,
            group=self._settings.group,
            reason=reason,
            trip=_failed(message, error),
            key=message.key,
            value=message.value,
            headers=message.headers,
        )
        said = _failed(message, error).last_error
        why = f"{reason}: {said}" if said else reason
        is_letter = reason != DeadLetterReason.UNREADABLE  # else it may name no half at all
        answers = self._answer(message, HalfAnswer.UNDECIDED) if is_letter else ()
        return self._fitted(
            message, Settlement(Outcome.DEAD, answers=answers, why=why, reason=reason, whole=whole)
        )

    def measured(self, message: ReceivedMessage, settlement: Settlement) -> Settlement:
        """Returns a letter's settlement with what its topic takes: it was asked just now."""
        return self._fitted(message, settlement)._replace(is_measured=True)

    def _fitted(self, message: ReceivedMessage, settlement: Settlement) -> Settlement:
        """Returns a letter's settlement with the parts that fit, by what is known."""
        assert settlement.whole is not None
        for omitted in OMISSIONS:
            letter = _without(message, settlement.whole, omitted)
            if self._fits(letter):
                return settlement._replace(record=letter, omitted=omitted)
        return settlement._replace(record=_without(message, settlement.whole, ()), omitted=())

    def expired(
        self, message: ReceivedMessage, error: BaseException | str | None = None
    ) -> Settlement:
        """Returns the settlement of a record whose time to live is over."""
        name = self._settings.ttl_header
        why = f"{name} of {ttl_s_of(message.headers, name)} s"
        if self._settings.expired == "skip":
            return Settlement(Outcome.EXPIRED, why=why)
        letter = self.dead(message, DeadLetterReason.EXPIRED, error)
        return letter._replace(outcome=Outcome.EXPIRED, why=why, reason="")

    def at_hand_out(self, message: ReceivedMessage, now_ms: int) -> Settlement | None:
        """Returns the settlement of a record before it is handled; None if it is to be handled."""
        if message.are_headers_unread:
            return self.dead(
                message, DeadLetterReason.HEADER_INVALID, "a header's name is not UTF-8"
            )
        meant_for = self._settings.meant_for
        if meant_for is not None and message.header(meant_for[0]) != meant_for[1]:
            return Settlement(Outcome.SKIPPED)
        route = self._settings.route
        # What came back was for us when it first came, whatever the patterns are now.
        is_new = message.place.topic == message.origin.topic
        if route is not None and is_new and not route.takes(message.headers):
            return Settlement(Outcome.SKIPPED)
        expiry_ms = self._expires_ms(message)
        if expiry_ms is not None and now_ms >= expiry_ms:
            return self.expired(message)
        return None

    def _expires_ms(self, message: ReceivedMessage) -> int | None:
        """Returns when the time to live ends, counted from the first timestamp; None: never."""
        if not message.headers:
            return None
        ttl_s = ttl_s_of(message.headers, self._settings.ttl_header)
        if ttl_s is None or message.timestamp_ms < 0:
            return None
        return message.timestamp_ms + ttl_s * 1000


def _without(message: ReceivedMessage, whole: Outgoing, omitted: Sequence[str]) -> Outgoing:
    """Returns a letter without these parts, nor those that no client reads."""
    unread = ("headers",) if message.are_headers_unread else ()
    return shortened(whole, len(message.headers), tuple(dict.fromkeys([*omitted, *unread])))


def _failed(message: ReceivedMessage, error: BaseException | str | None) -> Trip:
    """Returns the attempts of a record and their errors, including this one."""
    said = error_text(error) if isinstance(error, BaseException) else error
    first = message.first_error if message.first_error is not None else said
    last = said if said is not None else message.last_error
    return Trip(message.attempt, message.origin, first, last)
