"""Drives exchanges over grpc.aio: attempts, waits, deadlines. One event loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from time import monotonic
from typing import TYPE_CHECKING, Final, TypeVar

import grpc
from grpc import StatusCode

from delaywheel.client.channel import CHANNEL_OPTIONS
from delaywheel.client.delivery import Delivery
from delaywheel.client.endpoints import Endpoints
from delaywheel.client.exchange import CLOSED, TIME_OVER, Exchange
from delaywheel.client.facts import Facts, facts_question
from delaywheel.client.retry import Failure
from delaywheel.client.settings import Settings
from delaywheel.errors import DelaywheelError
from delaywheel.message import Message, Result, clock_ns
from delaywheel_proto.v1.delaywheel_pb2_grpc import DelayWheelStub

if TYPE_CHECKING:  # exists in the stub file only
    from delaywheel_proto.v1.delaywheel_pb2_grpc import DelayWheelAsyncStub

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
Method = Callable[["DelayWheelAsyncStub"], "grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT]"]


class AioCalls:
    """The channels of one client, opened when first needed, and the exchanges over them."""

    def __init__(self, addresses: Sequence[str], settings: Settings) -> None:
        self._addresses: Final = addresses
        self._settings: Final = settings
        self._endpoints: Final = Endpoints(len(addresses), Random())  # noqa: S311  spreads load
        self._channels: Final[dict[int, grpc.aio.Channel]] = {}
        self._stubs: Final[dict[int, DelayWheelAsyncStub]] = {}
        self._stopped: Final = asyncio.Event()
        self._facts = Facts.assumed()

    async def run(
        self,
        exchange: Exchange[RequestT, ResponseT],
        method: Method[RequestT, ResponseT],
        deadline_s: float,
    ) -> None:
        """Attempts until the exchange is done, the deadline at the latest."""
        while not exchange.done:
            now_s = monotonic()
            turn = self._endpoints.turn(now_s, self._settings.attempt_timeout_s)
            if now_s + turn.wait_s >= deadline_s:
                exchange.give_up(TIME_OVER)
            elif await self._stopped_within(turn.wait_s):
                exchange.give_up(CLOSED)
            else:
                await self._attempt(exchange, method, turn.number, deadline_s)

    async def deliver(self, messages: Sequence[Message], deadline_s: float) -> list[Result]:
        """Sends messages that fit one request; a result each, in order."""
        delivery = Delivery(messages)
        try:
            levels = await self._levels(messages, deadline_s)
        except DelaywheelError as error:
            delivery.refuse(error)
        else:
            delivery.fix_dues(clock_ns() // 1_000_000, levels, self._settings.past_due)
            await self.run(delivery, lambda stub: stub.DelayProduce, deadline_s)
        return delivery.results

    async def limits(self, deadline_s: float) -> Facts:
        """What one request may hold: asked for once, assumed where the service does not say."""
        now_s = monotonic()
        if self._facts.want_limits(now_s):
            attempt_s = self._settings.attempt_s((deadline_s - now_s) / 2, len(self._addresses))
            try:
                await self._ask_facts(now_s + attempt_s)
            except DelaywheelError:  # messages are sent all the same, and say what is wrong
                self._facts = Facts.assumed(now_s)
        return self._facts

    async def stop(self) -> None:
        """Ends waits and calls; what is not done is given up."""
        self._stopped.set()
        for channel in self._channels.values():
            await channel.close()

    async def _stopped_within(self, wait_s: float) -> bool:
        if wait_s > 0 and not self._stopped.is_set():
            try:
                await asyncio.wait_for(self._stopped.wait(), wait_s)
            except TimeoutError:
                return False
        return self._stopped.is_set()

    async def _attempt(
        self,
        exchange: Exchange[RequestT, ResponseT],
        method: Method[RequestT, ResponseT],
        number: int,
        deadline_s: float,
    ) -> None:
        request = exchange.request()
        started_s = monotonic()
        timeout_s = self._settings.attempt_s(deadline_s - started_s, len(self._addresses))
        try:
            response = await method(self._stub(number))(request, timeout=max(0.0, timeout_s))
        except grpc.aio.AioRpcError as error:
            report = exchange.failed(Failure.of_call(error))
        except asyncio.CancelledError:
            if not self._stopped.is_set() or _cancelled_by_caller():
                raise
            # grpc.aio says it like this when `stop` has closed the channel under the call.
            report = exchange.failed(Failure(StatusCode.CANCELLED, CLOSED))
        else:
            report = exchange.answered(response)
        self._endpoints.report(number, started_s=started_s, now_s=monotonic(), report=report)

    def _stub(self, number: int) -> DelayWheelAsyncStub:
        stub = self._stubs.get(number)
        if stub is None:
            address, credentials = self._addresses[number], self._settings.credentials
            channel = self._channels[number] = (
                grpc.aio.insecure_channel(address, CHANNEL_OPTIONS)
                if credentials is None
                else grpc.aio.secure_channel(address, credentials, CHANNEL_OPTIONS)
            )
            stub = self._stubs[number] = DelayWheelStub(channel)
        return stub

    async def _levels(self, messages: Sequence[Message], deadline_s: float) -> dict[str, int]:
        if self._facts.want_levels(messages, monotonic()):
            await self._ask_facts(deadline_s)
        return self._facts.levels

    async def _ask_facts(self, deadline_s: float) -> None:
        question = facts_question(monotonic())
        await self.run(question, lambda stub: stub.DescribeCluster, deadline_s)
        self._facts = question.answer()


def _cancelled_by_caller() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
