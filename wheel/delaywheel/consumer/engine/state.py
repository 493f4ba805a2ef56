"""What the parts of one consumer's engine share."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from delaywheel.consumer.book import Book
from delaywheel.consumer.message import ConsumerError, ConsumerReason, ReceivedMessage
from delaywheel.consumer.order import KeyOrder
from delaywheel.consumer.port import (
    Broker,
    IngressToCome,
    KafkaUnavailable,
    RightMissing,
    insist,
)
from delaywheel.consumer.records import Partition
from delaywheel.consumer.rules.policy import Policy
from delaywheel.consumer.settings import ConsumerSettings
from delaywheel.consumer.watching.events import EventCalls
from delaywheel.consumer.watching.health import ConsumerHealth, ConsumerTrouble
from delaywheel.message import ClockNs

_LOG = logging.getLogger("delaywheel.consumer")

_T = TypeVar("_T")


class EngineState:
    """The state of one consumer's engine.

    Attributes:
        changed: Guards the book and the order, and is notified when callers' threads may go on.
        ours: The partitions that the group has assigned.
        membership: The proof of membership under which they were assigned.
        must_recover: Whether a transaction failed, and its producer must be replaced.
        is_draining: Whether partitions are being given up: settling is reported at once.
        gives_up_all: Whether these are all partitions: nothing is handed out.
        clock_s: The monotonic clock, by which handlers have their time.
        give_up_s: When to stop insisting, on the monotonic clock; None: when the end is asked for.
        refused_since_s: Since when a right is missing, on the monotonic clock; None: none is.
        refusals: How often Kafka has refused something for want of a right.
        is_commit_refused: Whether the last transaction was refused for want of a right.
        suspects: Of how many partitions records are handed out one by one.
        are_counts_forbidden: Whether the trace's counts are left out of transactions, as a right is
            missing.
        unseen: The topics that these credentials may not even describe now.
        policy: What decides outcomes; it is there once Kafka has answered.
    """

    policy: Policy

    def __init__(
        self,
        settings: ConsumerSettings,
        broker: Broker,
        *,
        clock_ns: ClockNs = time.time_ns,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.broker = broker
        self.clock_ns = clock_ns
        self.clock_s = clock_s
        self.book = Book(max_held=settings.max_held, max_held_bytes=settings.max_held_bytes)
        self.order = KeyOrder(lost_after_ms=settings.lost_after_ms) if settings.ordered else None
        self.changed = threading.Condition()
        self.health = ConsumerHealth()
        self.events = EventCalls(
            settings.events,
            settings.trace,
            settings.group,
            is_check=settings.asks_about_halves,
        )
        self.ours: Sequence[Partition] = ()
        self.membership: bytes | None = None
        self.must_recover = False
        self.is_draining = False
        self.gives_up_all = False
        self.is_stopping = False
        self.thread_id: int | None = None
        self.has_ended = False
        self.is_paused_by_caller = False
        self.give_up_s: float | None = None
        self.refused_since_s: float | None = None
        self.refusals = 0
        self.is_commit_refused = False
        self.suspects = 0
        self.are_counts_forbidden = False
        self.unseen: frozenset[str] = frozenset()
        self.error: BaseException | None = None
        self.listeners: list[Callable[[], None]] = []

    def clock_ms(self) -> int:
        """Returns the wall clock's time in Unix milliseconds."""
        return self.clock_ns() // 1_000_000

    @property
    def retry_topics(self) -> frozenset[str]:
        """The topics of retries."""
        return self.settings.topics.retry_topics

    @property
    def may_hand_out(self) -> bool:
        """Whether records may be handed out now."""
        return not (
            self.gives_up_all
            or self.is_stopping
            or self.is_paused_by_caller
            # Until it is known what became of them, others may have these partitions.
            or self.must_recover
            # What is handled would be handled again elsewhere, if the group goes on without us.
            or self.is_commit_refused
        )

    @property
    def is_own_thread(self) -> bool:
        """Whether the engine's thread is here: in something of the program that it has called."""
        return threading.get_ident() == self.thread_id

    def check_may_wait(self, what: str) -> None:
        """Raises RuntimeError on the engine's thread, which would wait for itself."""
        if self.is_own_thread:
            raise RuntimeError(
                f"{what}: not in an event or on_lost, which the consumer's own thread calls:"
                " nothing is fetched or committed before that returns"
            )

    def notify(self) -> None:
        """Wakes who waits for records; the caller has the lock."""
        self.changed.notify_all()
        for listener in self.listeners:
            listener()

    def note_trouble(self, trouble: ConsumerTrouble, text: str | None) -> None:
        """Notes a trouble, or its end, and logs its beginning."""
        if text is not None and trouble not in self.health.troubles:
            _LOG.error("%s: %s", trouble, text)
        self.health.note(trouble, text)

    @property
    def seen_topics(self) -> Sequence[str]:
        """The topics that are read, without those that these credentials may not describe."""
        return [one for one in self.settings.topics.read_topics if one not in self.unseen]

    def refused(self, text: str) -> None:
        """Takes in that a right is missing; raises ConsumerError unless it is waited for."""
        now_s, wait_ms = time.monotonic(), self.settings.wait_for_rights_ms
        if self.refused_since_s is None:
            self.refused_since_s = now_s
        if wait_ms is None or now_s - self.refused_since_s > wait_ms / 1000:
            raise ConsumerError(ConsumerReason.NOT_AUTHORIZED, text)
        self.refusals += 1
        self.note_trouble(ConsumerTrouble.NOT_AUTHORIZED, text)

    def ask(self, ask: Callable[[], _T]) -> _T:
        """Asks Kafka; raises RightMissing, a KafkaUnavailable, for a right that is waited for."""
        try:
            return ask()
        except ConsumerError as error:
            if error.reason is not ConsumerReason.NOT_AUTHORIZED:
                raise
            self.refused(error.text)
            raise RightMissing(error.text) from error

    def note_away(self, what: str, away: KafkaUnavailable | None) -> None:
        """Notes that Kafka does not answer this, or that it does."""
        if isinstance(away, RightMissing):
            return
        is_to_come = isinstance(away, IngressToCome)
        self.note_trouble(ConsumerTrouble.NO_INGRESS, str(away) if is_to_come else None)
        text = None if away is None or is_to_come else f"{what}: {away}"
        self.note_trouble(ConsumerTrouble.KAFKA_AWAY, text)

    def insist(self, what: str, ask: Callable[[], _T]) -> _T | None:
        """Asks until Kafka answers; None if the end came meanwhile."""

        def note(trouble: KafkaUnavailable | None) -> None:
            self.note_away(what, trouble)

        def gives_up() -> bool:
            if self.give_up_s is not None:
                return time.monotonic() >= self.give_up_s
            return self.is_stopping

        return insist(partial(self.ask, ask), note, gives_up)

    def raise_error(self) -> None:
        """Raises what ended the thread, if anything did: ConsumerError, or else RuntimeError."""
        if self.error is not None:
            if isinstance(self.error, ConsumerError):
                raise self.error
            raise RuntimeError("the consumer's thread has ended") from self.error


def tell_lost(messages: Sequence[ReceivedMessage]) -> None:
    """Tells handlers that their records are no longer ours; to be called without the lock."""
    for message in messages:
        message.tell_lost()
