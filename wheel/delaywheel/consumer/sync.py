"""The consumer for threads: a loop over messages or batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from typing import Final, Self, TypeVar, Unpack

from delaywheel.consumer.batch import Batch
from delaywheel.consumer.book import Counts
from delaywheel.consumer.engine import Engine
from delaywheel.consumer.engine.handler_threads import WAIT_S, HandlerThreads
from delaywheel.consumer.engine.state import EngineState
from delaywheel.consumer.kafka import KafkaBroker
from delaywheel.consumer.message import ReceivedMessage
from delaywheel.consumer.records import Partition
from delaywheel.consumer.rules.middleware import (
    HandlersByTopic,
    check_middleware,
    check_topics,
    wrapped,
)
from delaywheel.consumer.settings import ConsumerSettings, Options, read_settings
from delaywheel.consumer.watching.figures import Figures
from delaywheel.consumer.watching.health import ConsumerHealth
from delaywheel.levels import Duration, length_ms

_T = TypeVar("_T")


class BaseConsumer:
    """The common part of all consumers: their settings, and all that does not wait."""

    def __init__(self, settings: ConsumerSettings) -> None:
        self.settings: Final = settings
        self._engine = self._made_engine(settings)

    def _made_engine(self, settings: ConsumerSettings) -> Engine:
        return Engine(EngineState(settings, KafkaBroker(settings)))

    def pause(self, *partitions: Partition) -> None:
        """Stops handing out and fetching until `resume`; the consumer stays in its group.

        Of these partitions alone, for as long as this consumer has them; without any, of all.
        Raises ValueError for one that is not assigned to it.
        """
        self._engine.pause(partitions, on=True)

    def resume(self, *partitions: Partition) -> None:
        """Resumes after `pause`: these partitions, or all."""
        self._engine.pause(partitions, on=False)

    def stop(self) -> None:
        """Ends the loops and, when the `with` block is left, the consumer.

        Settled records are committed; waiting ones are left to other consumers. Signal handlers may
        call it.
        """
        self._engine.stop()

    @contextmanager
    def _giving_back(self, batch: Batch) -> Iterator[None]:
        """Has a batch handed out again that an interrupt keeps from its handler."""
        try:
            yield
        except BaseException:
            self._engine.desk.hand_back(batch)
            raise

    @property
    def counts(self) -> Counts:
        """The numbers of records by outcome."""
        return self._engine.counts

    @property
    def partitions(self) -> list[Partition]:
        """The partitions that this consumer has now."""
        return self._engine.partitions

    @property
    def oldest_in_hand_s(self) -> float:
        """How long the record has been in hand that holds up its partition longest; 0: none."""
        return self._engine.desk.oldest_in_hand_s

    @property
    def group(self) -> str:
        """The group."""
        return self.settings.group

    @property
    def health(self) -> ConsumerHealth:
        """What keeps this consumer from its work now, by name; `is_well` if nothing does."""
        return self._engine.health

    @property
    def figures(self) -> Figures:
        """This consumer in figures, all of one moment: for metrics."""
        return self._engine.figures()

    @property
    def trouble(self) -> str | None:
        """What keeps records from being read or committed now, in words; None if nothing does."""
        return next(iter(self.health.troubles.values()), None)


class ThreadedConsumer(BaseConsumer):
    """The common part of consumers for threads: a `with` block, and handlers that wait."""

    def __enter__(self) -> Self:
        self._engine.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._engine.stop()
        if error is None:
            self._engine.join()
        else:
            self._engine.join_quietly()

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Waits until settled records are committed; returns whether they are.

        A settled record behind an unsettled one of its partition cannot be committed, and is not
        waited for.
        """
        return self._engine.desk.flush(timeout_s)

    def _received(self, take: Callable[[], _T], timeout_s: float | None) -> _T:
        found = take()
        if found:  # usually, and without a look at the clock
            return found
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = WAIT_S if deadline is None else deadline - time.monotonic()
            if found or left_s <= 0 or self._engine.has_ended:
                return found
            self._engine.check_runs()
            self._engine.desk.wait(min(left_s, WAIT_S))
            found = take()

    def _run(self, handle: Callable[[ReceivedMessage], object], concurrency: int) -> None:
        """Handles each message within `with message`, on so many threads, until `stop`."""
        desk = self._engine.desk
        take = partial(self._received, partial(desk.take_turns, 1), WAIT_S)
        self._engine.run_handlers(HandlerThreads(handle, concurrency, take, desk), concurrency)


class RetryConsumer(ThreadedConsumer):
    """Reads topics, with the group's retry topics, as one stream; sends back what fails.

    Each record ends as exactly one of done, retried and dead, committed in one Kafka transaction
    with its offset. Handlers run at least once: what was being handled when a consumer dies is
    handled again.

    Several threads may take messages from one consumer. Once it cannot continue, whatever takes
    messages raises ConsumerError, whose `reason` says why; a ValueError or TypeError is raised at
    once, for an argument.

    Args:
        topics: One topic, or several; what begins with `^` is a regular expression, which the
            beginning of a topic's name matches: see `rules/subscription.py`.
        group: The consumer group. Its name is part of the names of its topics:
            `<topic>-retry-<group>` and `<topic>-dead-<group>`.

    Example:
        With three retries::

            with RetryConsumer("orders", group="billing", bootstrap="localhost:9092",
                               retry=("5s", "30s", "5m")) as consumer:
                for message in consumer:
                    with message:
                        charge(message.value)
    """

    def __init__(
        self,
        topics: str | Iterable[str],
        *,
        group: str,
        bootstrap: str,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(read_settings(topics, group, bootstrap, options))
        check_middleware(self.settings.middleware, is_awaited=False)

    def __iter__(self) -> Iterator[ReceivedMessage]:
        """Yields messages until `stop`."""
        while True:
            message = self.receive(WAIT_S)
            if message is not None:
                yield message
            elif self._engine.has_ended:
                return

    def batches(self, most: int = 100, *, wait: Duration = "100ms") -> Iterator[Batch]:
        """Yields batches of up to `most` messages until `stop`.

        `wait` is how long a batch may take to fill, from its first message on.
        """
        wait_s = length_ms(wait) / 1000
        while True:
            batch = self.receive_batch(most, WAIT_S)
            deadline = time.monotonic() + wait_s
            with self._giving_back(batch):
                while batch and len(batch) < most and not self._engine.has_ended:
                    left_s = deadline - time.monotonic()
                    if left_s <= 0:
                        break
                    batch.take(self.receive_batch(most - len(batch), left_s).runs)
            batch.drop_unreadable()
            if batch:
                yield batch
            elif self._engine.has_ended:
                return

    def run(
        self,
        handle: Callable[[ReceivedMessage], object] | HandlersByTopic,
        *,
        concurrency: int = 1,
    ) -> None:
        """Handles each message within `with message`, on so many threads, until `stop`.

        Records of one key are handled one after another, in their order; those without a key by any
        thread. What a handler has not begun by the end is left to the next owner. `handle` is a
        function, or one for each topic, or pattern, that the consumer was given. What one raises
        that means neither retry nor dead is raised, once handlers that have begun have ended.
        """
        check_topics(handle, self.settings.topics.given)
        self._run(wrapped(handle, self.settings.middleware), concurrency)

    def run_batches(
        self, handle: Callable[[Batch], object], most: int = 100, *, wait: Duration = "100ms"
    ) -> None:
        """Handles each batch within `with batch`, until `stop`; raises what `run` would."""
        handle = wrapped(handle, self.settings.middleware)
        for batch in self.batches(most, wait=wait):
            with batch:
                handle(batch)

    def receive(self, timeout_s: float | None = None) -> ReceivedMessage | None:
        """Returns the next message; None if none came in time, or none will come."""
        return self._received(self._engine.desk.hand_out_one, timeout_s)

    def receive_batch(self, most: int, timeout_s: float | None = None) -> Batch:
        """Returns available messages, as soon as there are any, up to this number."""
        return self._received(lambda: self._engine.desk.hand_out(most), timeout_s)

    def seek(self, partition: Partition, to: int | datetime) -> None:
        """Reads a partition from this offset on, or from a time on, and commits that.

        What is settled of it is committed before; what is in hand is no longer ours. Records that
        are read again are handled again, at their first attempt. An aware datetime means the first
        record with this timestamp or a later one, and the end of the partition if there is none.

        Raises ValueError if the partition is not assigned to this consumer, or `ordered` is set; or
        the offset is negative, or the time has no zone.
        """
        self._engine.seek(partition, to)
