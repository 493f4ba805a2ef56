"""A RetryConsumer of the service in memory: its messages, options and outcomes, without Kafka.

The policy and the order of keys are the consumer's own, and a retry is the record that it would
send to the ingress topic. There is no group and no transaction: one consumer takes every record,
once. With `ordered`, a record that comes back is known by its place of origin, as with Kafka.
"""

from __future__ import annotations

import uuid
from collections import Counter, defaultdict, deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Self, overload

from delaywheel import ingress
from delaywheel.consumer.aio import await_handler, handler_tasks
from delaywheel.consumer.batch import Batch
from delaywheel.consumer.block import RecordBlock, RecordRun, with_writes, write
from delaywheel.consumer.book import Counts
from delaywheel.consumer.desk import Desk
from delaywheel.consumer.message import (
    DONE,
    Outcome,
    ReceivedMessage,
    SettledError,
    Settlement,
    State,
)
from delaywheel.consumer.order import KeyOrder
from delaywheel.consumer.port import Start
from delaywheel.consumer.records import Incoming, Partition, Place, fetched_of
from delaywheel.consumer.rules.breaker import Circuit
from delaywheel.consumer.rules.deserializers import Deserializer, Field
from delaywheel.consumer.rules.later import Later
from delaywheel.consumer.rules.middleware import (
    HandlersByTopic,
    check_middleware,
    check_topics,
    wrapped,
    wrapped_awaited,
)
from delaywheel.consumer.rules.policy import Policy
from delaywheel.consumer.rules.turns import KeyTurns
from delaywheel.consumer.settings import ConsumerSettings
from delaywheel.functions import is_coroutine_function
from delaywheel.ingress import HalfAnswer
from delaywheel.levels import Duration
from delaywheel.message import Message
from delaywheel.record_headers import is_reserved
from delaywheel.testing.rows import SentMessage
from delaywheel.testing.store import DeliveredRecord
from delaywheel.transactional import Outgoing

if TYPE_CHECKING:
    from delaywheel.testing.service import MemoryService

_INGRESS: Final = ingress.ingress_topic("memory")
_MOST_BYTES: Final = 1_048_588


class MemoryConsumer(Desk):
    """Iterates over what has appeared and was not handled; ends where a real one would wait.

    It has the loops of both consumers, `for` and `async for` (and `run`).

    Attributes:
        dead_letters: The letters, as they would be in the group's topic for them.
        produced: What handlers have written beside the outcomes of their records, without what
            the service delivers later.
    """

    def __init__(self, service: MemoryService, settings: ConsumerSettings) -> None:
        self._service: Final = service
        self._settings: Final = settings
        self._policy.learn_limits(service.ingress_limits)
        self._order: Final = KeyOrder(lost_after_ms=self._settings.lost_after_ms)
        self._lanes: Final = set[Partition]()
        self._existing: Final = set[str]()
        self._next = 0
        # Whose turn has come since an earlier record of their key was settled.
        self._freed: Final = deque[ReceivedMessage]()
        self._later: Final = Later()
        breaker = settings.breaker
        self._circuit: Final = None if breaker is None else Circuit(breaker)
        self._outcomes: Final[Counter[Outcome]] = Counter()
        self._produced = 0
        self.dead_letters: Final[list[Outgoing]] = []
        self.produced: Final[list[Outgoing]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Has nothing to end."""

    def __iter__(self) -> Iterator[ReceivedMessage]:
        while self._may_take() and (message := self._waiting()) is not None:
            if self._is_for_a_handler(message):
                _set(message, State.IN_HAND)
                if self._circuit is not None:
                    self._circuit.taken(message, self._now_ms() / 1000)
                yield message

    def _may_take(self) -> bool:
        return self._circuit is None or self._circuit.most(1, self._now_ms() / 1000) > 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Has nothing to end."""

    async def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        for message in self:
            yield message

    @overload
    def run(  # type: ignore[overload-overlap] # a coroutine is an object, too
        self,
        handle: Callable[[ReceivedMessage], Coroutine[Any, Any, object]],
        *,
        concurrency: int = ...,
    ) -> Awaitable[None]: ...

    @overload
    def run(self, handle: HandlersByTopic, *, concurrency: int = ...) -> Awaitable[None] | None: ...

    @overload
    def run(
        self, handle: Callable[[ReceivedMessage], object], *, concurrency: int = ...
    ) -> None: ...

    def run(
        self,
        handle: Callable[[ReceivedMessage], Any] | HandlersByTopic,
        *,
        concurrency: int = 1,
    ) -> Awaitable[None] | None:
        """Handles what has appeared, each within `with`, or up to `concurrency` coroutines at once.

        Returns:
            What is to be awaited, if the handler is a coroutine function, as with
            `AsyncRetryConsumer`. None: all was handled, one after another.

        Raises:
            ValueError: `concurrency` is below 1, or a topic is without handler.
            TypeError: The middleware is not awaited, and the handler is, or the reverse.
            BaseException: What a handler raised that means neither retry nor dead.
        """
        if concurrency < 1:
            raise ValueError(f"concurrency={concurrency}: at least 1")
        check_topics(handle, self._settings.topics.given)
        first = next(iter(handle.values())) if isinstance(handle, Mapping) else handle
        middleware, is_awaited = self._settings.middleware, is_coroutine_function(first)
        check_middleware(middleware, is_awaited=is_awaited)
        if is_awaited:
            return self._run(wrapped_awaited(handle, middleware), concurrency)
        handle = wrapped(handle, middleware)
        for message in self:
            with message:
                handle(message)
        return None

    async def _run(
        self, handle: Callable[[ReceivedMessage], Awaitable[object]], concurrency: int
    ) -> None:

        async def one(message: ReceivedMessage) -> None:
            async with message:
                await await_handler(handle, message)

        turns = KeyTurns()
        while some := self._take_turns(turns, concurrency):
            async with handler_tasks() as handlers:
                for message in some:
                    handlers.create_task(one(message))
            following = [turns.end(message) for message in some]
            self._freed.extendleft(one for one in reversed(following) if one is not None)

    def _take_turns(self, turns: KeyTurns, most: int) -> list[ReceivedMessage]:
        taken: list[ReceivedMessage] = []
        for message in self:
            if turns.begin(message):
                taken.append(message)
            else:
                _set(message, State.WAITING)
            if len(taken) == most:
                break
        return taken

    def batches(self, most: int = 100, *, wait: Duration = "100ms") -> Iterator[Batch]:
        """Yields batches of messages, as far as they have appeared: `wait` has no effect."""
        del wait
        messages = iter(self)
        while batch := Batch(islice(messages, most)):
            batch.drop_unreadable()
            if batch:
                yield batch

    @property
    def deserializers(self) -> Mapping[Field, Deserializer]:
        """See `Desk`."""
        return self._settings.deserializers

    @cached_property
    def _policy(self) -> Policy:
        return Policy(self._settings, Start(_INGRESS, defaultdict(lambda: _MOST_BYTES)))

    def _now_ms(self) -> int:
        return self._service.now_ms

    def run_batches(
        self, handle: Callable[[Batch], Any], most: int = 100, *, wait: Duration = "100ms"
    ) -> Awaitable[None] | None:
        """Handles each batch within its block; otherwise like `batches`, and returns as `run`.

        Raises:
            TypeError: The middleware is not awaited, and the handler is, or the reverse.
        """
        middleware, is_awaited = self._settings.middleware, is_coroutine_function(handle)
        check_middleware(middleware, is_awaited=is_awaited)
        if is_awaited:
            return self._run_batches(wrapped_awaited(handle, middleware), most, wait)
        handle = wrapped(handle, middleware)
        for batch in self.batches(most, wait=wait):
            with batch:
                handle(batch)
        return None

    async def _run_batches(
        self, handle: Callable[[Batch], Awaitable[object]], most: int, wait: Duration
    ) -> None:
        for batch in self.batches(most, wait=wait):
            async with batch:
                await handle(batch)

    @property
    def counts(self) -> Counts:
        """The numbers of records by outcome."""
        counted = {outcome.name.lower(): n for outcome, n in self._outcomes.items()}
        return Counts(**counted, produced=self._produced)

    def _waiting(self) -> ReceivedMessage | None:
        """Returns the next record to look at; None: no further one has appeared."""
        self._freed.extendleft(reversed(self._later.take_due(self._now_ms())))
        if self._freed:
            return self._freed.popleft()
        appeared = self._service.delivered()
        while self._next < len(appeared):
            record = appeared[self._next]
            self._next += 1
            self._exist(record.topic)
            if self._settings.topics.knows(record.topic):
                return self._message(record)
        return None

    def _exist(self, topic: str) -> None:
        """Takes in that there is a topic: a pattern may match it."""
        topics = self._settings.topics
        if not topics.has_patterns or topic in self._existing:
            return
        self._existing.add(topic)
        found, _ = topics.matches(self._existing)
        topics.become([*(one for one in topics if one.source in topics.named), *found])

    def _is_for_a_handler(self, message: ReceivedMessage) -> bool:
        """Whether a record is to be handed out now; if not, it is settled or held back."""
        now_ms = self._now_ms()
        behind = self._order.admit(message, now_ms)
        if behind is not None:
            if behind.until_ms is not None:
                self._settle(message, self._policy.park(message, behind.until_ms))
            return False
        settlement = self._policy.at_hand_out(message, now_ms)
        if settlement is not None:
            self._settle(message, settlement)
        return settlement is None

    def produce(self, message: ReceivedMessage, record: Message, *, is_delayed: bool) -> bool:
        """See `ReceivedMessage.produce`."""
        written = self._policy.written(record, is_delayed=is_delayed)
        return write(message, written) > 0

    def leave(self, message: ReceivedMessage) -> None:
        """See `Desk`."""
        if not message.is_settled:
            self._settle(message, DONE)

    def all_done(self, runs: Sequence[RecordRun]) -> None:
        """See `Desk`."""
        for run in runs:
            for message in run.messages():
                if not message.is_settled:
                    self._settle(message, DONE)

    def hand_back(self, messages: Sequence[ReceivedMessage]) -> None:
        """See `Desk`."""
        waiting = [one for one in messages if one.state is State.IN_HAND]
        for message in waiting:
            _set(message, State.WAITING)
            message.block.writes.pop(message.index, None)
        self._freed.extendleft(reversed(waiting))

    def nack(self, message: ReceivedMessage, after_ms: int) -> bool:
        """See `ReceivedMessage.nack`."""
        if message.is_settled:
            raise SettledError.of(message)
        if not message.is_ours:
            return False
        again = message.block.take_back(message.index)
        self._order.replaced(message, again)
        if after_ms:
            self._later.add(message, again, self._now_ms() + after_ms)
        else:
            self._freed.appendleft(again)
        return True

    def _message(self, record: DeliveredRecord) -> ReceivedMessage:
        place = Place(record.topic, record.partition or 0, record.offset, record.timestamp_ms)
        headers = [*record.headers, *record.added]
        [fetched] = fetched_of([Incoming(place, record.key, record.value, headers)])
        is_retry = record.topic in self._settings.topics.retry_topics
        message = RecordBlock(self, fetched, is_retry=is_retry).message(0)
        self._open_lane(Partition(message.origin.topic, message.origin.partition))
        return message

    def _open_lane(self, lane: Partition) -> None:
        """Has the order of a partition's keys kept from its first record on, if that is wanted."""
        topics = {names.source: names.order for names in self._settings.topics}
        if self._settings.ordered and lane not in self._lanes and lane.topic in topics:
            self._lanes.add(lane)
            self._order.assign(lane, topics[lane.topic], ())

    def _settle(self, message: ReceivedMessage, settlement: Settlement) -> bool:
        if message.is_settled:
            raise SettledError.of(message)
        if not message.is_ours:
            return False
        if self._circuit is not None:
            self._circuit.ended(message, settlement, self._now_ms() / 1000)
        _, freed = self._order.settled(message, settlement)
        self._freed.extendleft(reversed(freed))
        _set(message, State.COMMITTED)
        self._outcomes[settlement.outcome] += 1
        self._write(with_writes(message.block, message.index, settlement))
        for answer in map(_answer_in, settlement.answers):
            if answer is not None:
                self._service.answered(*answer)
        is_sent = settlement.outcome in (Outcome.RETRIED, Outcome.PARKED, Outcome.FORWARDED)
        if is_sent and settlement.record is not None:
            self._service.accept(_delayed(settlement.record))
        elif settlement.record is not None:
            self.dead_letters.append(settlement.record)
        return True

    def _write(self, settlement: Settlement) -> None:
        """Writes what the handler has, if its record is done."""
        if settlement.outcome is not Outcome.DONE or settlement.writes is None:
            return
        self._produced += len(settlement.writes.records)
        for record in settlement.writes.records:
            if record.topic == _INGRESS:
                self._service.accept(_delayed(record))
            else:
                self.produced.append(record)


def _set(message: ReceivedMessage, state: State) -> None:
    message.block.states[message.index] = state


def _answer_in(record: Outgoing) -> tuple[bytes, int, HalfAnswer] | None:
    """Returns the answer about a half in a record; None: it has none."""
    said = {name: (value or b"").decode() for name, value in record.headers}
    if ingress.ANSWER not in said:
        return None
    due_ms = int(said[ingress.DELIVER_AT])
    return bytes.fromhex(said[ingress.ID]), due_ms, HalfAnswer(said[ingress.ANSWER])


def _delayed(record: Outgoing) -> SentMessage:
    """Returns the message that a record of the ingress topic is."""
    orders = {name: value for name, value in record.headers if value is not None}
    partition, timestamp = orders.get(ingress.PARTITION), orders.get(ingress.TIMESTAMP)
    own_id = orders.get(ingress.ID)
    return SentMessage(
        uuid.uuid4().bytes if own_id is None else bytes.fromhex(own_id.decode()),
        int(orders[ingress.DELIVER_AT]),
        orders[ingress.TOPIC].decode(),
        record.key,
        record.value,
        tuple((name, value) for name, value in record.headers if not is_reserved(name)),
        None if partition is None else int(partition),
        None if timestamp is None else int(timestamp),
    )
