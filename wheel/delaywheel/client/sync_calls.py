"""Drives exchanges over synchronous gRPC: attempts, waits, deadlines. Thread-safe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from threading import Event, Lock
from time import monotonic
from typing import Final, TypeVar, cast

import grpc

from delaywheel.client.channel import CHANNEL_OPTIONS
from delaywheel.client.delivery import Delivery
from delaywheel.client.endpoints import Endpoints
from delaywheel.client.exchange import CLOSED, TIME_OVER, Exchange
from delaywheel.client.facts import Facts, facts_question
from delaywheel.client.retry import EndedCall, Failure
from delaywheel.client.settings import Settings
from delaywheel.errors import DelaywheelError
from delaywheel.message import Message, Result, clock_ns
from delaywheel_proto.v1.delaywheel_pb2_grpc import DelayWheelStub

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
Method = Callable[[DelayWheelStub], "grpc.UnaryUnaryMultiCallable[RequestT, ResponseT]"]


class Calls:
    """The channels of one client, opened when first needed, and the exchanges over them."""

    def __init__(self, addresses: Sequence[str], settings: Settings) -> None:
        self._addresses: Final = addresses
        self._settings: Final = settings
        self._endpoints: Final = Endpoints(len(addresses), Random())  # noqa: S311  spreads load
        self._channels: Final[dict[int, grpc.Channel]] = {}
        self._stubs: Final[dict[int, DelayWheelStub]] = {}
        self._opening: Final = Lock()
        self._stopped: Final = Event()
        self._facts = Facts.assumed()

    def run(
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
            elif self._stopped.wait(turn.wait_s):
                exchange.give_up(CLOSED)
            else:
                self._attempt(exchange, method, turn.number, deadline_s)

    def deliver(self, messages: Sequence[Message], deadline_s: float) -> list[Result]:
        """Sends messages that fit one request; a result each, in order."""
        delivery = Delivery(messages)
        try:
            levels = self._levels(messages, deadline_s)
        except DelaywheelError as error:
            delivery.refuse(error)
        else:
            delivery.fix_dues(clock_ns() // 1_000_000, levels, self._settings.past_due)
            self.run(delivery, lambda stub: stub.DelayProduce, deadline_s)
        return delivery.results

    def limits(self, deadline_s: float) -> Facts:
        """What one request may hold: asked for once, assumed where the service does not say."""
        now_s = monotonic()
        if self._facts.want_limits(now_s):
            attempt_s = self._settings.attempt_s((deadline_s - now_s) / 2, len(self._addresses))
            try:
                self._ask_facts(now_s + attempt_s)
            except DelaywheelError:  # messages are sent all the same, and say what is wrong
                self._facts = Facts.assumed(now_s)
        return self._facts

    def stop(self) -> None:
        """Ends waits and calls; what is not done is given up."""
        self._stopped.set()
        with self._opening:
            for channel in self._channels.values():
                channel.close()

    def _attempt(
        self,
        exchange: Exchange[RequestT, ResponseT],
        method: Method[RequestT, ResponseT],
        number: int,
        deadline_s: float,
    ) -> None:
        stub = self._stub(number)
        if stub is None:
            exchange.give_up(CLOSED)
            return
        request = exchange.request()
        started_s = monotonic()
        timeout_s = self._settings.attempt_s(deadline_s - started_s, len(self._addresses))
        try:
            response = method(stub)(request, timeout=max(0.0, timeout_s))
        except grpc.RpcError as error:
            # What a stub raises is the call itself, which the types do not say.
            report = exchange.failed(Failure.of_call(cast("EndedCall", error)))
        except ValueError:  # the channel was closed between `_stub` and here; nothing was sent
            if not self._stopped.is_set():
                raise
            exchange.give_up(CLOSED)
            return
        else:
            report = exchange.answered(response)
        self._endpoints.report(number, started_s=started_s, now_s=monotonic(), report=report)

    def _stub(self, number: int) -> DelayWheelStub | None:
        stub = self._stubs.get(number)
        if stub is None:
            with self._opening:
                if self._stopped.is_set():
                    return None
                stub = self._stubs.get(number) or self._open(number)
        return stub

    def _open(self, number: int) -> DelayWheelStub:
        address, credentials = self._addresses[number], self._settings.credentials
        channel = (
            grpc.insecure_channel(address, CHANNEL_OPTIONS)
            if credentials is None
            else grpc.secure_channel(address, credentials, CHANNEL_OPTIONS)
        )
        self._channels[number] = channel
        stub = self._stubs[number] = DelayWheelStub(channel)
        return stub

    def _levels(self, messages: Sequence[Message], deadline_s: float) -> dict[str, int]:
        if self._facts.want_levels(messages, monotonic()):
            self._ask_facts(deadline_s)
        return self._facts.levels

    def _ask_facts(self, deadline_s: float) -> None:
        question = facts_question(monotonic())
        self.run(question, lambda stub: stub.DescribeCluster, deadline_s)
        self._facts = question.answer()
