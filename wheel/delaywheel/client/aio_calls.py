"""Drives exchanges over grpc.aio: attempts, waits, deadlines. One event loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from time import monotonic
from typing import TYPE_CHECKING, Final, TypeVar

import grpc
from grpc import StatusCode

from delaywheel.client.description import Description, Facts, describe_question
from delaywheel.client.exchange.answers import Cancelled, Rescheduled
from delaywheel.client.exchange.batching import split
from delaywheel.client.exchange.channel import CHANNEL_OPTIONS, Credentials, Security
from delaywheel.client.exchange.delivery import Delivery
from delaywheel.client.exchange.endpoints import Endpoints
from delaywheel.client.exchange.exchange import CLOSED, TIME_OVER, Exchange
from delaywheel.client.exchange.retry import AttemptFailure
from delaywheel.client.exchange.route import Attempts, NextAttempt
from delaywheel.client.exchange.settings import ExchangeSettings
from delaywheel.client.named_changes import (
    CANCEL,
    COMMIT,
    RESCHEDULE,
    Doubts,
    HalfCommitted,
    NamedChanges,
    OnSettled,
)
from delaywheel.errors import DelaywheelError
from delaywheel.message import Message, Result, clock_ns
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_proto.v1.delaywheel_pb2_grpc import DelayWheelStub

if TYPE_CHECKING:  # exists in the stub file only
    from delaywheel_proto.v1.delaywheel_pb2_grpc import DelayWheelAsyncStub

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
Method = Callable[["DelayWheelAsyncStub"], "grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT]"]


class _AioLine:
    """A channel, its number of calls, and whether the last one was answered."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self.edition: Final = credentials.edition
        self.channel: Final = (
            grpc.aio.insecure_channel(address, CHANNEL_OPTIONS)
            if credentials.grpc is None
            else grpc.aio.secure_channel(address, credentials.grpc, CHANNEL_OPTIONS)
        )
        self.stub: Final[DelayWheelAsyncStub] = DelayWheelStub(self.channel)
        self.calls = 0
        self.answers = False


class AioCalls:
    """The channels of one client, opened when first needed, and the exchanges over them."""

    def __init__(self, addresses: Sequence[str], settings: ExchangeSettings) -> None:
        self._settings: Final = settings
        self._endpoints: Final = Endpoints(addresses, Random())  # noqa: S311  spreads load
        self._security: Final = Security(settings.tls)
        self._lines: Final[dict[str, _AioLine]] = {}
        self._old: Final[set[_AioLine]] = set()  # opened before the TLS files changed, still in use
        self._looking: Final[set[asyncio.Task[None]]] = set()
        self._stopped = False
        self._news = asyncio.Event()  # set, and replaced, when waiting may have become pointless
        self._facts = Facts.assumed()

    async def run(
        self,
        exchange: Exchange[RequestT, ResponseT],
        method: Method[RequestT, ResponseT],
        deadline_s: float,
        *,
        describing: bool = False,
    ) -> str:
        """Makes attempts until the exchange is done or its deadline has passed.

        Returns:
            The address of the last attempt; empty if there was none.
        """
        route = Attempts(self._endpoints, self._settings, deadline_s)
        address = ""
        while not exchange.done:
            now_s = monotonic()
            step, hopeless = route.step(now_s), route.hopeless(now_s)
            if self._stopped:
                exchange.give_up(CLOSED)
                break
            if step is None or hopeless:
                exchange.give_up(hopeless or TIME_OVER)
                break
            self._look_around(but=step.address if describing else None)
            if step.address is None:
                await self._news_within(step.seconds)
            else:
                address = step.address
                await self._attempt(exchange, method, route, step, asks_first=not describing)
        return address

    async def deliver(self, messages: Sequence[Message], deadline_s: float) -> list[Result]:
        """Sends messages that fit one request; returns one result each, in order."""
        delivery = Delivery(messages)
        try:
            levels = await self._levels(messages, deadline_s)
        except DelaywheelError as error:
            delivery.refuse(error)
        else:
            delivery.fix_dues(clock_ns() // 1_000_000, levels, self._settings.past_due)
            await self.run(delivery, lambda stub: stub.DelayProduce, deadline_s)
        return delivery.results

    async def deliver_all(self, messages: Sequence[Message], deadline_s: float) -> list[Result]:
        """Sends any number of messages, one request after another."""
        results: list[Result] = []
        for request in await self.split(messages, deadline_s):
            results += await self.deliver(request, deadline_s)
        return results

    async def split(
        self, messages: Sequence[Message], deadline_s: float
    ) -> list[Sequence[Message]]:
        """Splits messages into requests within the service's limits."""
        if len(messages) == 1:
            return [messages]
        limits = await self.limits(deadline_s)
        return list(split(messages, max_messages=limits.max_messages, max_bytes=limits.max_bytes))

    async def cancel(
        self,
        messages: Sequence[pb.MessageRef],
        deadline_s: float,
        on_settled: OnSettled[Cancelled] | None = None,
        doubts: Doubts | None = None,
    ) -> list[Cancelled | DelaywheelError]:
        """Cancels messages that fit one call; returns what became of each, in order."""
        changes = NamedChanges(CANCEL, messages, on_settled, doubts)
        await self.run(changes, lambda stub: stub.Cancel, deadline_s)
        return changes.results

    async def commit(
        self,
        halves: Sequence[pb.HalfRef],
        deadline_s: float,
        on_settled: OnSettled[HalfCommitted] | None = None,
        doubts: Doubts | None = None,
    ) -> list[HalfCommitted | DelaywheelError]:
        """Commits halves that fit one call; returns what became of each, in order."""
        changes = NamedChanges(COMMIT, halves, on_settled, doubts)
        await self.run(changes, lambda stub: stub.Commit, deadline_s)
        return changes.results

    async def reschedule(
        self,
        messages: Sequence[pb.NewDue],
        deadline_s: float,
        on_settled: OnSettled[Rescheduled] | None = None,
        doubts: Doubts | None = None,
    ) -> list[Rescheduled | DelaywheelError]:
        """Gives messages that fit one call other dues; returns what became of each, in order."""
        changes = NamedChanges(RESCHEDULE, messages, on_settled, doubts)
        await self.run(changes, lambda stub: stub.Reschedule, deadline_s)
        return changes.results

    async def limits(self, deadline_s: float) -> Facts:
        """Returns the limits of one request: from a node, or assumed if none answers."""
        now_s = monotonic()
        if self._facts.want_limits(now_s):
            attempt_s = self._settings.attempt_s((deadline_s - now_s) / 2, alone=False)
            try:
                await self._ask_facts(now_s + attempt_s)
            except DelaywheelError:  # messages are sent all the same; their errors show it
                if not self._facts.known:  # from another node meanwhile
                    self._facts = Facts.assumed(now_s)
        return self._facts

    async def stop(self) -> None:
        """Ends waits and calls; unfinished exchanges are given up."""
        self._stopped = True
        for looking in self._looking:
            looking.cancel()
        await asyncio.gather(*self._looking, return_exceptions=True)
        for line in (*self._lines.values(), *self._old):
            await line.channel.close()
        self._wake_waiting()

    async def _news_within(self, wait_s: float) -> None:
        try:
            async with asyncio.timeout(wait_s):
                await self._news.wait()
        except TimeoutError:
            pass

    async def _attempt(
        self,
        exchange: Exchange[RequestT, ResponseT],
        method: Method[RequestT, ResponseT],
        route: Attempts,
        step: NextAttempt,
        *,
        asks_first: bool,
    ) -> None:
        address, timeout_s = step
        assert address is not None, "a wait is no attempt"
        line = await self._take(address)
        request = exchange.request()
        started_s = monotonic()
        try:
            unsent = await self._unsent(address, line, timeout_s) if asks_first else None
            if unsent is None:
                left_s = max(0.0, timeout_s - (monotonic() - started_s))
                response = await method(line.stub)(request, timeout=left_s)
        except grpc.aio.AioRpcError as error:
            failure = await self._failure_of(address, error)
            self._endpoints.reached(address, connected=not failure.unsent)
            line.answers = not failure.unanswered
            report = exchange.failed(failure)
        except asyncio.CancelledError:
            if not self._stopped or _cancelled_by_caller():
                raise
            # grpc.aio raises this when `stop` has closed the channel under the call.
            report = exchange.failed(AttemptFailure(StatusCode.CANCELLED, CLOSED))
        else:
            line.answers = unsent is None
            report = exchange.answered(response) if unsent is None else exchange.failed(unsent)
        finally:
            await self._release(line)
        if route.report(address, started_s=started_s, now_s=monotonic(), report=report):
            self._wake_waiting()

    async def _unsent(
        self, address: str, line: _AioLine, timeout_s: float
    ) -> AttemptFailure | None:
        """See `sync_calls`."""
        if line.answers:
            return None
        try:
            response = await line.stub.DescribeCluster(
                pb.DescribeClusterRequest(), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            failure = await self._failure_of(address, error)
            self._endpoints.reached(address, connected=not failure.unsent)
            return failure.before_sending() if failure.unanswered else None
        await self._learn(address, Description.of(response, monotonic()))
        self._look_around(but=None)
        return None

    async def _failure_of(self, address: str, error: grpc.aio.AioRpcError) -> AttemptFailure:
        failure = AttemptFailure.of_call(error)
        if self._security.may_explain(failure):
            return await asyncio.to_thread(self._security.explained, address, failure)
        return failure

    def _look_around(self, but: str | None) -> None:
        """Asks the addresses whose turn it is to describe the cluster; does not wait for them."""
        now_s = monotonic()
        for address in self._endpoints.ask(now_s, but):
            looking = asyncio.create_task(self._look(address, now_s), name="delaywheel-look")
            self._looking.add(looking)
            looking.add_done_callback(self._looking.discard)

    async def _look(self, address: str, started_s: float) -> None:
        line = await self._take(address)
        try:
            response = await line.stub.DescribeCluster(
                pb.DescribeClusterRequest(), timeout=self._settings.attempt_timeout_s
            )
        except grpc.aio.AioRpcError as error:
            now_s, failure = monotonic(), AttemptFailure.of_call(error)
            reached = not failure.verdict.retry
            self._endpoints.reached(address, connected=not failure.unsent)
            self._endpoints.not_described(
                address, started_s=started_s, now_s=now_s, reached=reached
            )
        else:
            line.answers = True
            await self._learn(address, Description.of(response, monotonic()))
        finally:
            await self._release(line)
        self._wake_waiting()

    async def _learn(self, address: str, description: Description) -> None:
        self._endpoints.reached(address, connected=True)
        if self._endpoints.described(address, description.said, monotonic()):
            self._facts = description.facts
        known = self._endpoints.addresses
        idle = [name for name, line in self._lines.items() if name not in known and not line.calls]
        for line in [self._lines.pop(name) for name in idle]:
            await line.channel.close()

    async def _take(self, address: str) -> _AioLine:
        """Returns the line to an address, until `_release`."""
        credentials = self._security.credentials()
        line = self._lines.get(address)
        if line is None or line.edition != credentials.edition:
            old, line = line, _AioLine(address, credentials)
            self._lines[address] = line
            if old is not None:
                self._old.add(old)
                await self._close_if_old(old)
        line.calls += 1
        return line

    async def _release(self, line: _AioLine) -> None:
        line.calls -= 1
        await self._close_if_old(line)

    async def _close_if_old(self, line: _AioLine) -> None:
        if line in self._old and not line.calls:
            self._old.discard(line)
            await line.channel.close()

    def _wake_waiting(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _levels(self, messages: Sequence[Message], deadline_s: float) -> dict[str, int]:
        if self._facts.want_levels(messages, monotonic()):
            await self._ask_facts(deadline_s)
        return self._facts.levels

    async def _ask_facts(self, deadline_s: float) -> None:
        question = describe_question(monotonic())
        address = await self.run(
            question, lambda stub: stub.DescribeCluster, deadline_s, describing=True
        )
        await self._learn(address, question.answer())


def _cancelled_by_caller() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
