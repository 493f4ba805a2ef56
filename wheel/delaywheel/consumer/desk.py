"""Where messages are settled: what their handler's word comes to, by the policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from delaywheel.consumer.block import RecordRun
from delaywheel.consumer.message import DONE, ReceivedMessage, Settlement
from delaywheel.consumer.rules.deserializers import Deserializer, Field
from delaywheel.consumer.rules.policy import Policy
from delaywheel.levels import Duration
from delaywheel.message import ClockNs, Message
from delaywheel.transactional import Outgoing


class Desk(ABC):
    """Settles messages on behalf of a consumer: one of Kafka's, or one in memory."""

    @property
    @abstractmethod
    def deserializers(self) -> Mapping[Field, Deserializer]:
        """What makes objects of keys and values."""

    @property
    @abstractmethod
    def _policy(self) -> Policy:
        """What decides outcomes."""

    @property
    @abstractmethod
    def clock_ns(self) -> ClockNs:
        """The wall clock."""

    @abstractmethod
    def _now_ms(self) -> int:
        """Returns the time in Unix milliseconds."""

    @abstractmethod
    def _settle(self, message: ReceivedMessage, settlement: Settlement) -> bool:
        """Settles a record; False: it is not ours."""

    @abstractmethod
    def produce(self, message: ReceivedMessage, record: Message, *, is_delayed: bool) -> bool:
        """Keeps what a handler writes until its own record is done; False: it is not ours."""

    @abstractmethod
    def leave(self, message: ReceivedMessage) -> None:
        """Settles a record as handled whose block was left, unless it is settled."""

    @abstractmethod
    def all_done(self, runs: Sequence[RecordRun]) -> None:
        """Settles those as handled that are not settled."""

    @abstractmethod
    def hand_back(self, messages: Sequence[ReceivedMessage]) -> None:
        """Takes back records that nobody has begun to handle: they are handed out again, first."""

    @abstractmethod
    def nack(self, message: ReceivedMessage, after_ms: int) -> bool:
        """Takes back a record that its handler gives up: it is handed out again then, first."""

    def done(self, message: ReceivedMessage) -> bool:
        """Settles a record as handled."""
        return self._settle(message, DONE)

    def retry(
        self,
        message: ReceivedMessage,
        after: Duration | None,
        error: BaseException | str | None,
    ) -> bool:
        """Settles a record to come back, or as dead if it came back often enough."""
        return self._settle(message, self._policy.retry(message, after, error, self._now_ms()))

    def dead(
        self, message: ReceivedMessage, reason: str, error: BaseException | str | None
    ) -> bool:
        """Settles a record as a dead letter."""
        return self._settle(message, self._policy.dead(message, reason, error))

    def forward(self, message: ReceivedMessage, record: Outgoing) -> bool:
        """Settles a record by writing another one, for the ingress topic."""
        return self._settle(message, self._policy.forward(message, record))

    def roll_back(self, message: ReceivedMessage) -> bool:
        """Settles a letter about a half whose message is dropped."""
        return self._settle(message, self._policy.rolled_back(message))

    def fail(self, message: ReceivedMessage, error: Exception) -> bool:
        """Settles a record by its handler's exception; False if the exception must be raised."""
        settlement = self._policy.failed(message, error, self._now_ms())
        if settlement is not None:
            self._settle(message, settlement)
        return settlement is not None

    def is_outcome(self, error: Exception) -> bool:
        """Whether a handler's exception means an outcome, by the options."""
        return self._policy.meaning(error) is not None
