"""A RetryConsumer of the service in memory: its messages, options and outcomes, without Kafka.

The policy is the consumer's own, and a retry is the record that it would send to the ingress
topic. There is no group and no transaction: one consumer takes every record, once.
"""

from __future__ import annotations

import uuid
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Final, Protocol, Unpack

from delaywheel import ingress
from delaywheel.consumer.message import Outcome, ReceivedMessage, SettledError, Settlement, State
from delaywheel.consumer.policy import Policy
from delaywheel.consumer.port import Start
from delaywheel.consumer.records import Incoming, Outgoing, Place, Trip, unpack_retry
from delaywheel.consumer.settings import Options, read_settings
from delaywheel.levels import Duration
from delaywheel.record_headers import is_reserved
from delaywheel.testing.rows import SentMessage
from delaywheel.testing.store import DeliveredRecord

_INGRESS: Final = ingress.ingress_topic("memory")
_MOST_BYTES: Final = 1_048_588


class Source(Protocol):
    """The service, as far as a consumer needs it."""

    @property
    def now_ms(self) -> int:
        """The time in Unix milliseconds."""
        ...

    def delivered(self, topic: str | None = None) -> list[DeliveredRecord]:
        """Returns what appeared."""
        ...

    def accept(self, sent: SentMessage) -> None:
        """Takes a message."""
        ...


class MemoryConsumer:
    """Iterates over what has appeared and was not handled; ends where a real one would wait.

    Attributes:
        counts: How many records were settled, by outcome.
        dead_letters: The letters, as they would be in the group's topic for them.
    """

    def __init__(
        self, source: Source, topics: str | Iterable[str], group: str, **options: Unpack[Options]
    ) -> None:
        self._source: Final = source
        self._settings: Final = read_settings(topics, group, "memory", options)
        if self._settings.ordered:
            raise ValueError("ordered: the consumer in memory keeps no order of a key")
        most_bytes = defaultdict(lambda: _MOST_BYTES, {_INGRESS: _MOST_BYTES})
        self._policy: Final = Policy(self._settings, Start(_INGRESS, most_bytes))
        self._next = 0
        self.counts: Final[Counter[Outcome]] = Counter()
        self.dead_letters: Final[list[Outgoing]] = []

    def __iter__(self) -> Iterator[ReceivedMessage]:
        while self._next < len(appeared := self._source.delivered()):
            record = appeared[self._next]
            self._next += 1
            if record.topic not in self._settings.read_topics:
                continue
            message = self._message(record)
            settlement = self._policy.at_hand_out(message, self._source.now_ms)
            if settlement is not None:
                self._settle(message, settlement)
                continue
            message.state = State.IN_HAND
            yield message

    def done(self, message: ReceivedMessage) -> bool:
        """See `ReceivedMessage.done`."""
        return self._settle(message, Settlement(Outcome.DONE))

    def retry(
        self,
        message: ReceivedMessage,
        after: Duration | None,
        error: BaseException | str | None,
    ) -> bool:
        """See `ReceivedMessage.retry`."""
        now_ms = self._source.now_ms
        return self._settle(message, self._policy.retry(message, after, error, now_ms))

    def dead(
        self, message: ReceivedMessage, reason: str, error: BaseException | str | None
    ) -> bool:
        """See `ReceivedMessage.dead`."""
        return self._settle(message, self._policy.dead(message, reason, error))

    def fail(self, message: ReceivedMessage, error: Exception) -> bool:
        """See `ReceivedMessage.fail`."""
        settlement = self._policy.failed(message, error, self._source.now_ms)
        if settlement is not None:
            self._settle(message, settlement)
        return settlement is not None

    def is_outcome(self, error: Exception) -> bool:
        """Whether a handler's exception means an outcome, by the options."""
        return self._policy.meaning(error) is not None

    def _message(self, record: DeliveredRecord) -> ReceivedMessage:
        place = Place(record.topic, record.partition or 0, record.offset, record.timestamp_ms)
        incoming = Incoming(place, record.key, record.value, list(record.headers))
        is_retry = record.topic not in {names.source for names in self._settings.topics}
        trip, headers = unpack_retry(incoming) if is_retry else (Trip(1, place), record.headers)
        return ReceivedMessage(self, incoming, trip, list(headers))

    def _settle(self, message: ReceivedMessage, settlement: Settlement) -> bool:
        if message.is_settled:
            raise SettledError(f"{message!r} was settled before")
        message.state, message.settlement = State.COMMITTED, settlement
        self.counts[settlement.outcome] += 1
        if settlement.outcome is Outcome.RETRIED and settlement.record is not None:
            self._source.accept(_delayed(settlement.record))
        elif settlement.record is not None:
            self.dead_letters.append(settlement.record)
        return True


def _delayed(record: Outgoing) -> SentMessage:
    """Returns the message that a record of the ingress topic is."""
    orders = {name: value for name, value in record.headers if value is not None}
    partition = orders.get(ingress.PARTITION)
    return SentMessage(
        uuid.uuid4().bytes,
        int(orders[ingress.DELIVER_AT]),
        orders[ingress.TOPIC].decode(),
        record.key,
        record.value,
        tuple((name, value) for name, value in record.headers if not is_reserved(name)),
        None if partition is None else int(partition),
        None,
    )
