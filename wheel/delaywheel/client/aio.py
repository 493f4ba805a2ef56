"""The client for asyncio."""

import asyncio
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final, Self, Unpack

from delaywheel.client.aio_sender import AioSender
from delaywheel.client.calls import Calls
from delaywheel.client.changing.named_changes import rolled_back
from delaywheel.client.changing.references import half_named, half_reference, new_due
from delaywheel.client.exchange.answers import (
    Cancelled,
    Rescheduled,
    RescheduleResult,
    StoredMessage,
)
from delaywheel.client.exchange.channel import Tls
from delaywheel.client.exchange.pending import PendingResult
from delaywheel.client.exchange.question import Id, message_ref
from delaywheel.client.exchange.settings import DEFAULT_QUEUE, ExchangeSettings, Queue
from delaywheel.client.lifetime import ForkGuard
from delaywheel.client.operations import Operations
from delaywheel.client.profiles import reached
from delaywheel.client.searching import FilterOptions, FoundMessages, ManyCancelled
from delaywheel.client.transport.loop import LoopTransport
from delaywheel.errors import ClientClosedError, DelaywheelError, TimedOutError
from delaywheel.identity import parse_addresses
from delaywheel.levels import Duration
from delaywheel.message import (
    Handle,
    Message,
    MessageOptions,
    PastDue,
    Result,
    checked_messages,
    clock_of,
)
from delaywheel.transactions.half import (
    DEFAULT_HOLD,
    HALF_TIMEOUT_S,
    AsyncHalf,
    AsyncHalves,
    CommitOutcome,
    RollbackOutcome,
    half_message,
    half_of,
)

if TYPE_CHECKING:  # a program that does not trace imports nothing of it
    from delaywheel.trace.reports import EventReports
    from delaywheel.ways.spans import Spans


class AsyncClient:
    """`Client` for asyncio: the same arguments, methods, results and errors, awaited.

    Use it in the one event loop in which it was entered; grpc.aio allows one loop a process.
    Cancelling a call leaves open whether its message was accepted.

    Example:
        ::

            async with AsyncClient("delay-1:7420,delay-2:7420") as client:
                handle = await client.produce("orders", b"…", delay="30m")
                await client.cancel(handle)
    """

    def __init__(  # noqa: PLR0913 - what a program may say of its client
        self,
        addresses: str | Sequence[str] | None = None,
        *,
        timeout: float = 30.0,
        attempt_timeout: float = 5.0,
        past_due: PastDue = "deliver",
        queue: Queue = DEFAULT_QUEUE,
        tls: Tls | None = None,
        profile: str | None = None,
        trace: "EventReports | None" = None,
        spans: "Spans | None" = None,
    ) -> None:
        addresses, tls, trace = reached(addresses, tls, profile, trace)
        parsed = parse_addresses(addresses)
        clock = self._clock = clock_of(parsed)
        settings = ExchangeSettings(
            past_due, timeout, attempt_timeout, queue, tls, clock, trace, spans
        )
        self._fork_guard: Final = ForkGuard()
        self._deadline_s: Final = settings.deadline_s
        transport = LoopTransport()
        self._calls: Final = Calls(parsed, settings, transport)
        self._operations: Final = Operations(self._calls, settings, transport)
        self._sender: Final = AioSender(queue, timeout, self._operations.deliver_all)
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def produce(
        self,
        topic: str,
        value: bytes | None,
        *,
        timeout: float | None = None,
        **options: Unpack[MessageOptions],
    ) -> Handle:
        """Sends one message and waits until it is acknowledged; see `Client.produce`."""
        self._check_open()
        message = Message(topic, value, clock=self._clock, **options)
        [result] = await self._operations.deliver([message], self._deadline_s(timeout))
        return result.unwrap()

    async def begin(
        self,
        topic: str,
        value: bytes | None,
        *,
        group: str,
        hold: Duration = DEFAULT_HOLD,
        timeout: float | None = None,
        **options: Unpack[MessageOptions],
    ) -> AsyncHalf:
        """Sends a half message; see `Client.begin`.

        Example:
            ::

                async with await client.begin("orders", text, group="shop") as half:
                    await asyncio.to_thread(order, half)  # the local transaction
                    await half.commit()
        """
        self._check_open()
        half = half_message(topic, value, group, hold, options, self._clock)
        deadline_s = self._operations.begun_by_s(hold, timeout)
        pending = await self._sender.put(half, deadline_s)
        return self._half(half, await pending.handle_by(deadline_s))

    async def begin_many(
        self,
        messages: Iterable[Message],
        *,
        group: str,
        hold: Duration = DEFAULT_HOLD,
        timeout: float | None = None,
    ) -> AsyncHalves:
        """Sends half messages that go with one local transaction; see `Client.begin_many`."""
        self._check_open()
        many = [
            half_of(message, group, hold, self._clock) for message in checked_messages(messages)
        ]
        by_s = self._operations.begun_by_s(hold, timeout)
        begun = await self._operations.begin_many(many, by_s, self._half)
        return AsyncHalves(begun, self._commit_halves)

    def _half(self, message: Message, handle: Handle) -> AsyncHalf:
        return AsyncHalf(message, handle, self._commit_half, self._cancel_half)

    async def _commit_half(self, half: AsyncHalf) -> CommitOutcome:
        self._check_open()
        reference = half_reference(half, half.handle)
        return (
            await self._operations.commits.change(reference, self._deadline_s(HALF_TIMEOUT_S))
        ).outcome

    async def _commit_halves(
        self, halves: Sequence[AsyncHalf]
    ) -> list[CommitOutcome | DelaywheelError]:
        self._check_open()
        return await self._operations.commit_many([(half, half.handle) for half in halves])

    async def _cancel_half(self, half: AsyncHalf) -> RollbackOutcome:
        self._check_open()
        named, deadline_s = half_named(half, half.handle), self._deadline_s(HALF_TIMEOUT_S)
        return rolled_back(await self._operations.rollbacks.change(named, deadline_s))

    async def produce_many(
        self,
        messages: Iterable[Message],
        *,
        timeout: float | None = None,
    ) -> list[Result]:
        """Sends many messages and waits for all; see `Client.produce_many`."""
        self._check_open()
        many, deadline_s = checked_messages(messages), self._deadline_s(timeout)
        return await self._operations.deliver_many(many, deadline_s)

    async def produce_async(
        self,
        topic: str,
        value: bytes | None,
        **options: Unpack[MessageOptions],
    ) -> PendingResult:
        """Queues one message, to be sent in the background; see `Client.produce_async`.

        Awaiting it waits for room in the queue; await what it returns to get the handle.
        """
        self._check_loop()
        message = Message(topic, value, clock=self._clock, **options)
        return await self._sender.put(message, self._deadline_s(None))

    async def cancel(
        self,
        handle: Handle | str | None = None,
        *,
        topic: str | None = None,
        id: Id | None = None,
        due: datetime | None = None,
        timeout: float | None = None,
    ) -> Cancelled:
        """Cancels a pending message; see `Client.cancel`.

        Cancels that are awaited at the same time are sent together. More than 8,192 of them are
        refused at once, once the first has not been answered for a second (BACKPRESSURE).
        """
        self._check_open()
        message = message_ref(handle, topic, id, due)
        return await self._operations.cancels.change(message, self._deadline_s(timeout))

    async def get(
        self,
        handle: Handle | str | None = None,
        *,
        topic: str | None = None,
        id: Id | None = None,
        due: datetime | None = None,
        find_place: bool = False,
        timeout: float | None = None,
    ) -> StoredMessage | None:
        """Returns a message as it is stored; see `Client.get`."""
        self._check_open()
        message = message_ref(handle, topic, id, due)
        return await self._operations.get(message, timeout, find_place=find_place)

    async def reschedule(
        self,
        handle: Handle | str | None = None,
        *,
        to: datetime | None = None,
        delay: Duration | None = None,
        topic: str | None = None,
        id: Id | None = None,
        due: datetime | None = None,
        timeout: float | None = None,
    ) -> Rescheduled:
        """Gives a pending message another due; see `Client.reschedule`.

        Reschedules that are awaited at the same time are sent together, as many as cancels.
        """
        self._check_open()
        new = new_due(message_ref(handle, topic, id, due), to, delay, self._clock)
        return await self._operations.reschedules.change(new, self._deadline_s(timeout))

    async def reschedule_many(
        self,
        dues: Iterable[tuple[Handle | str, datetime | Duration]],
        *,
        timeout: float | None = None,
    ) -> list[RescheduleResult]:
        """Gives many pending messages other dues; see `Client.reschedule_many`."""
        self._check_open()
        return await self._operations.reschedule_many(dues, timeout)

    async def search(
        self,
        topic: str | None = None,
        *,
        limit: int = 100,
        timeout: float | None = None,
        **options: Unpack[FilterOptions],
    ) -> FoundMessages:
        """Finds pending messages that meet all conditions; see `Client.search`."""
        self._check_open()
        return await self._operations.search(topic, limit, timeout, options)

    async def cancel_many(
        self,
        topic: str | None = None,
        *,
        handles: Iterable[Handle | str] | None = None,
        limit: int = 1_000,
        dry_run: bool = False,
        timeout: float | None = None,
        **options: Unpack[FilterOptions],
    ) -> ManyCancelled:
        """Cancels pending messages that meet all conditions; see `Client.cancel_many`."""
        self._check_open()
        return await self._operations.cancel_many(
            topic, handles, limit, timeout, options, dry_run=dry_run
        )

    async def flush(self, timeout: float | None = None) -> None:
        """Waits until everything that `produce_async` has taken so far has its result.

        Raises TimedOutError if a message has none yet; it is still under way.
        """
        self._check_loop()
        if not await self._sender.flush(self._deadline_s(timeout)):
            raise TimedOutError("some messages are still under way", outcome_known=False)

    async def close(self, timeout: float | None = None) -> None:
        """Accepts no further messages, waits for those of `produce_async`, and closes."""
        self._closed = True
        if not self._fork_guard.is_same_process():
            return
        self._check_loop()
        await self._sender.close()
        await self._sender.flush(self._deadline_s(timeout))
        await self._calls.stop()
        await self._sender.join()
        await self._operations.flush_trace()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _check_open(self) -> None:
        self._check_loop()
        if self._closed:
            raise ClientClosedError

    def _check_loop(self) -> None:
        self._fork_guard.check()
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise RuntimeError(
                "this AsyncClient is used on another event loop than before: its connections belong"
                " to that one; make a client in each loop (each asyncio.run has its own)"
            )
