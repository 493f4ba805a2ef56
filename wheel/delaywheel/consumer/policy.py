"""Decides the outcome of a record: by exceptions, attempts, and its time to live.

| the handler | attempts left | outcome |
|---|---|---|
| ended, or said done | any | done |
| raised one of `dead_on` | any | dead, NOT_RETRIABLE |
| raised one of `retry_on`, or said retry | yes | retried, after the level of this attempt |
| raised one of `retry_on`, or said retry | no | dead, ATTEMPTS_EXHAUSTED |
| raised anything else | any | none: the exception is raised, the record stays unsettled |
| said retry after a delay | any | retried, after that delay |
| said dead | any | dead, with the reason given |

A record whose time to live has passed, or would pass before it came back, has expired: it is
skipped, or dead with EXPIRED. A retry that is too large for the ingress topic is dead,
MESSAGE_TOO_LARGE; one that this topic refuses all the same, RETRY_REFUSED. A letter that is too
large for its topic omits the value, or also the headers, or also the key, and `dw-dead-omitted`
names them: they stay where the letter's origin says. A record with a header whose name is not UTF-8
is dead before it is handled, HEADER_INVALID: no client reads the headers of such a record.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from delaywheel.consumer.message import (
    ConsumerError,
    ConsumerReason,
    Outcome,
    ReceivedMessage,
    Settlement,
)
from delaywheel.consumer.port import Start
from delaywheel.consumer.records import (
    Outgoing,
    Trip,
    dead_letter,
    error_text,
    retry_record,
    shortened,
)
from delaywheel.consumer.settings import Settings
from delaywheel.levels import Duration, length_ms
from delaywheel.record_headers import OMISSIONS, OMITTED_HEADER
from delaywheel.ttl import ttl_s_of

_BATCH_BYTES = 120
"""What Kafka adds to a record that is alone in its batch, besides what it adds per header."""
_HEADER_BYTES = 10


class DeadLetterReason(StrEnum):
    """Why a record became a dead letter if its handler gave no reason."""

    ATTEMPTS_EXHAUSTED = "ATTEMPTS_EXHAUSTED"
    NOT_RETRIABLE = "NOT_RETRIABLE"
    EXPIRED = "EXPIRED"
    MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE"
    RETRY_REFUSED = "RETRY_REFUSED"
    HEADER_INVALID = "HEADER_INVALID"


class Policy:
    """Makes settlements, without clock or state."""

    def __init__(self, settings: Settings, start: Start) -> None:
        """Takes the settings, and what Kafka says about the topics."""
        self._settings = settings
        self._ingress_topic = start.ingress_topic
        self._most_bytes = start.most_bytes

    def meaning(self, error: Exception) -> Literal["retry", "dead"] | None:
        """Returns the outcome that a handler's exception calls for; None if it must be raised."""
        if isinstance(error, self._settings.dead_on):
            return "dead"
        return "retry" if isinstance(error, self._settings.retry_on) else None

    def retry(
        self,
        message: ReceivedMessage,
        after: Duration | None,
        error: BaseException | str | None,
        now_ms: int,
    ) -> Settlement:
        """Returns the settlement of a failed record: it comes back, is dead, or has expired."""
        levels = self._settings.retry_ms
        if after is not None:
            wait_ms = length_ms(after)
        elif message.attempt <= len(levels):
            wait_ms = levels[message.attempt - 1]
        else:
            return self.dead(message, DeadLetterReason.ATTEMPTS_EXHAUSTED, error)
        due_ms = now_ms + wait_ms
        expiry_ms = expires_ms(message)
        if expiry_ms is not None and due_ms >= expiry_ms:
            return self.expired(message, error)
        trip = _failed(message, error)._replace(attempt=message.attempt + 1)
        record = self._coming_back(message, trip, due_ms)
        if record is None:
            return self.dead(message, DeadLetterReason.MESSAGE_TOO_LARGE, error)
        return Settlement(Outcome.RETRIED, record, due_ms)

    def park(self, message: ReceivedMessage, due_ms: int) -> Settlement:
        """Returns the settlement that brings a record back for the same attempt."""
        trip = Trip(message.attempt, message.origin, message.first_error, message.last_error)
        record = self._coming_back(message, trip, due_ms)
        if record is None:
            return self.dead(message, DeadLetterReason.MESSAGE_TOO_LARGE)
        return Settlement(Outcome.PARKED, record, due_ms)

    def _coming_back(self, message: ReceivedMessage, trip: Trip, due_ms: int) -> Outgoing | None:
        keeps = self._settings.keep_partition or self._settings.ordered
        record = retry_record(
            ingress_topic=self._ingress_topic,
            retry_topic=self._settings.names_of(message.place.topic).retry,
            trip=trip,
            key=message.key,
            value=message.value,
            headers=message.headers,
            due_ms=due_ms,
            partition=message.place.partition if keeps else None,
        )
        return record if self._fits(record) else None

    def _fits(self, record: Outgoing) -> bool:
        whole = record.length_bytes + _BATCH_BYTES + _HEADER_BYTES * len(record.headers)
        return whole <= self._most_bytes[record.topic]

    def instead(self, message: ReceivedMessage, refused: Settlement, why: str) -> Settlement:
        """Returns what becomes of a record whose outcome Kafka does not take.

        Raises:
            ConsumerError: Nothing is left to try.
        """
        if refused.outcome in (Outcome.RETRIED, Outcome.PARKED):
            return self.dead(message, DeadLetterReason.RETRY_REFUSED, why)
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
        names = self._settings.names_of(message.place.topic)
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
        return Settlement(Outcome.DEAD, letter)

    def expired(
        self, message: ReceivedMessage, error: BaseException | str | None = None
    ) -> Settlement:
        """Returns the settlement of a record whose time to live is over."""
        if self._settings.expired == "skip":
            return Settlement(Outcome.EXPIRED)
        letter = self.dead(message, DeadLetterReason.EXPIRED, error)
        return Settlement(Outcome.EXPIRED, letter.record)

    def at_hand_out(self, message: ReceivedMessage, now_ms: int) -> Settlement | None:
        """Returns the settlement of a record before it is handled; None if it is to be handled."""
        if message.are_headers_unread:
            return self.dead(
                message, DeadLetterReason.HEADER_INVALID, "a header's name is not UTF-8"
            )
        route = self._settings.route
        # What came back was for us when it first came, whatever the patterns are now.
        is_new = message.place.topic == message.origin.topic
        if route is not None and is_new and not route.takes(message.headers):
            return Settlement(Outcome.SKIPPED)
        expiry_ms = expires_ms(message)
        if expiry_ms is not None and now_ms >= expiry_ms:
            return self.expired(message)
        return None


def expires_ms(message: ReceivedMessage) -> int | None:
    """Returns when the time to live ends, counted from the first timestamp; None: never."""
    ttl_s = ttl_s_of(message.headers)
    if ttl_s is None or message.timestamp_ms < 0:
        return None
    return message.timestamp_ms + ttl_s * 1000


def _failed(message: ReceivedMessage, error: BaseException | str | None) -> Trip:
    """Returns the attempts of a record and their errors, including this one."""
    said = error_text(error) if isinstance(error, BaseException) else error
    first = message.first_error if message.first_error is not None else said
    last = said if said is not None else message.last_error
    return Trip(message.attempt, message.origin, first, last)
