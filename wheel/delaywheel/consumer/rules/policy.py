"""Decides the outcome of a record: by exceptions, attempts, and its time to live.

| the handler | attempts left | outcome |
|---|---|---|
| ended, or said done | any | done |
| raised UnreadableError | any | dead, UNREADABLE |
| raised one of `dead_on` | any | dead, NOT_RETRIABLE |
| raised one of `retry_on`, or said retry | yes | retried, after its back-off's delay |
| raised one of `retry_on`, or said retry | no | dead, ATTEMPTS_EXHAUSTED |
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
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

from delaywheel.consumer.leaving import UnreadableError
from delaywheel.consumer.message import (
    ConsumerError,
    ConsumerReason,
    Outcome,
    ReceivedMessage,
    Settlement,
)
from delaywheel.consumer.port import FORWARD_ROOM_BYTES, Start
from delaywheel.consumer.records import (
    Outgoing,
    Trip,
    causes,
    dead_letter,
    error_text,
    kept,
    retry_record,
    shortened,
)
from delaywheel.consumer.rules.backoff import Delays, Failure, with_jitter
from delaywheel.consumer.settings import ConsumerSettings
from delaywheel.ingress import HEADER_BYTES, HEADERS_MOST, IngressLimits
from delaywheel.levels import Duration, length_ms
from delaywheel.record_headers import OMISSIONS, OMITTED_HEADER
from delaywheel.ttl import TTL_HEADER, ttl_s_of

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
        self._limits: IngressLimits | None = None
        self._retry_partitions: Mapping[str, int] = {}

    def learn_limits(self, limits: IngressLimits | None) -> None:
        """Takes in what ingress takes now.

        Raises:
            ConsumerError: A level is beyond the span.
        """
        self._limits = limits
        delays = (self._settings.retry, *(each for _, each in self._settings.retry_by))
        longest_ms = int(max(each.longest_ms for each in delays) * (1 + self._settings.jitter))
        if limits is not None and longest_ms > limits.span_ms:
            raise ConsumerError(
                ConsumerReason.DELAY_BEYOND_SPAN,
                f"{longest_ms / 1000:,.3f} s in retry, and the cluster takes"
                f" {limits.span_ms / 1000:,.0f} s",
            )

    def learn_sizes(self, most_bytes: Mapping[str, int]) -> None:
        """Takes in the largest batches of further topics, as `Start` has them."""
        self._most_bytes = {**self._most_bytes, **most_bytes}

    def learn_partitions(self, partitions: Mapping[str, int]) -> None:
        """Takes in how many partitions the topics of retries have."""
        self._retry_partitions = partitions

    def meaning(self, error: Exception) -> Literal["retry", "dead"] | None:
        """Returns the outcome that a handler's exception calls for; None if it must be raised."""
        if isinstance(error, (UnreadableError, *self._settings.dead_on)):
            return "dead"
        return "retry" if isinstance(error, self._settings.retry_on) else None

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
        if self._limits is not None and wait_ms > self._limits.span_ms:
            why = error or f"a delay of {wait_ms} ms, at most {self._limits.span_ms}"
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
            return self.dead(message, DeadLetterReason.MESSAGE_TOO_LARGE, error)
        return Settlement(Outcome.RETRIED, record, due_ms, why=trip.last_error or "no error given")

    def _delay_ms(self, message: ReceivedMessage, error: Failure) -> int | DeadLetterReason:
        """Returns the delay before the next attempt, or why there is none."""
        delays = self._delays(error)
        delay_ms = delays.after(message, error)
        if delay_ms is not None:
            return with_jitter(delay_ms, message, self._settings.jitter)
        if self._settings.asks_about_halves:
            return DeadLetterReason.UNDECIDED
        if delays.is_chosen:
            return DeadLetterReason.NOT_RETRIABLE
        return DeadLetterReason.ATTEMPTS_EXHAUSTED

    def _delays(self, error: Failure) -> Delays:
        if self._settings.retry_by and isinstance(error, BaseException):
            return self._delays_by_class(error)
        return self._settings.retry

    def _delays_by_class(self, error: BaseException) -> Delays:
        for one in causes(error):
            for kind, delays in self._settings.retry_by:
                if isinstance(one, kind):
                    return delays
        return self._settings.retry

    def park(self, message: ReceivedMessage, due_ms: int) -> Settlement:
        """Returns the settlement that brings a record back for the same attempt."""
        trip = Trip(message.attempt, message.origin, message.first_error, message.last_error)
        record = self._coming_back(message, trip, due_ms)
        if record is None:
            return self.dead(message, DeadLetterReason.MESSAGE_TOO_LARGE)
        return Settlement(Outcome.PARKED, record, due_ms)

    def forward(self, message: ReceivedMessage, record: Outgoing) -> Settlement:
        """Returns the settlement that writes another record, to the ingress topic."""
        if len(record.headers) > HEADERS_MOST or not self._fits(record):
            return self.dead(message, DeadLetterReason.MESSAGE_TOO_LARGE)
        return Settlement(Outcome.FORWARDED, record)

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
        meant = {self._settings.ttl_header, self._limits and self._limits.ttl_header}
        for name in filter(None, meant - {TTL_HEADER}):
            record = kept(record, name)
        return record if self._comes_back(record, names.retry) else None

    def _comes_back(self, record: Outgoing, retry_topic: str) -> bool:
        """Whether Kafka, ingress and the topic of retries take it."""
        if len(record.headers) > HEADERS_MOST or not self._fits(record):
            return False
        back = record._replace(topic=retry_topic)
        if self._whole(back) + FORWARD_ROOM_BYTES > self._most_bytes[retry_topic]:
            return False
        passed = record.length_bytes + HEADER_BYTES * len(record.headers)
        return self._limits is None or passed <= self._limits.message_bytes

    def _fits(self, record: Outgoing) -> bool:
        return self._whole(record) <= self._most_bytes[record.topic]

    @staticmethod
    def _whole(record: Outgoing) -> int:
        """Returns what a record that is alone in its batch takes in Kafka, at most."""
        return record.length_bytes + _BATCH_BYTES + _HEADER_BYTES * len(record.headers)

    def instead(self, message: ReceivedMessage, refused: Settlement, why: str) -> Settlement:
        """Returns what becomes of a record whose outcome Kafka does not take.

        Raises:
            ConsumerError: Nothing is left to try.
        """
        if refused.outcome in (Outcome.RETRIED, Outcome.PARKED):
            return self.dead(message, DeadLetterReason.RETRY_REFUSED, why)
        if refused.outcome is Outcome.FORWARDED:
            return self.dead(message, DeadLetterReason.FORWARD_REFUSED, why)
        letter = refused.record
        if letter is None or letter.value is None:
            topic = "Kafka" if letter is None else letter.topic
            raise ConsumerError(
                ConsumerReason.OUTCOME_REFUSED, f"{message!r}: {topic} takes nothing of it: {why}"
            )
        headers = [*letter.headers, (OMITTED_HEADER, b"value")]
        return refused._replace(record=letter._replace(value=None, headers=headers))

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
        unread = ("headers",) if message.are_headers_unread else ()
        letters = (
            shortened(whole, len(message.headers), tuple(dict.fromkeys([*omitted, *unread])))
            for omitted in OMISSIONS
        )
        letter = next(filter(self._fits, letters), whole)
        said = _failed(message, error).last_error
        why = f"{reason}: {said}" if said else reason
        return Settlement(Outcome.DEAD, letter, why=why, reason=reason)

    def expired(
        self, message: ReceivedMessage, error: BaseException | str | None = None
    ) -> Settlement:
        """Returns the settlement of a record whose time to live is over."""
        why = f"{self._settings.ttl_header} of {self._ttl_s(message)} s"
        if self._settings.expired == "skip":
            return Settlement(Outcome.EXPIRED, why=why)
        letter = self.dead(message, DeadLetterReason.EXPIRED, error)
        return Settlement(Outcome.EXPIRED, letter.record, why=why)

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

    def _ttl_s(self, message: ReceivedMessage) -> int | None:
        name = self._settings.ttl_header
        return ttl_s_of(message.headers, name)

    def _expires_ms(self, message: ReceivedMessage) -> int | None:
        """Returns when the time to live ends, counted from the first timestamp; None: never."""
        if not message.headers:
            return None
        ttl_s = self._ttl_s(message)
        if ttl_s is None or message.timestamp_ms < 0:
            return None
        return message.timestamp_ms + ttl_s * 1000


def _failed(message: ReceivedMessage, error: BaseException | str | None) -> Trip:
    """Returns the attempts of a record and their errors, including this one."""
    said = error_text(error) if isinstance(error, BaseException) else error
    first = message.first_error if message.first_error is not None else said
    last = said if said is not None else message.last_error
    return Trip(message.attempt, message.origin, first, last)
