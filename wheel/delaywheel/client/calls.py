"""Drives exchanges over a transport: attempts, waits, deadlines. Thread-safe, if that is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random
from threading import Lock
from time import monotonic
from typing import Final, TypeVar

import grpc

from delaywheel.client.description import ClockComparison, Description, Facts
from delaywheel.client.exchange.channel import Security
from delaywheel.client.exchange.endpoints import Endpoints
from delaywheel.client.exchange.exchange import CLOSED, TIME_OVER, Exchange
from delaywheel.client.exchange.question import Question
from delaywheel.client.exchange.retry import AttemptFailure
from delaywheel.client.exchange.route import Attempts, NextAttempt
from delaywheel.client.exchange.settings import ExchangeSettings
from delaywheel.client.transport.port import FirstQuestion, Line, Method, Transport
from delaywheel.errors import DelaywheelError
from delaywheel.message import Message
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_proto.v1.delaywheel_pb2_grpc import DelayWheelStub

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")

_LATE: Final = grpc.StatusCode.DEADLINE_EXCEEDED


def _describe(
    stub: DelayWheelStub,
) -> grpc.UnaryUnaryMultiCallable[pb.DescribeClusterRequest, pb.DescribeClusterResponse]:
    return stub.DescribeCluster


class Calls:
    """The channels of one client, opened when first needed, and the exchanges over them."""

    def __init__(
        self, addresses: Sequence[str], settings: ExchangeSettings, transport: Transport
    ) -> None:
        self._settings: Final = settings
        self._transport: Final = transport
        self._endpoints: Final = Endpoints(addresses, Random())  # noqa: S311  spreads load
        self._security: Final = Security(settings.tls)
        self._lines: Final[dict[str, Line]] = {}
        self._old: Final[set[Line]] = set()  # no call begins on them any more
        self._lock: Final = Lock()  # guards lines, their counts, news
        self._stopped = False
        self._news = transport.news()  # told, and replaced, when waiting may be pointless now
        self._facts = Facts.assumed()
        self.clocks: Final = ClockComparison()

    async def run(
        self,
        exchange: Exchange[RequestT, ResponseT],
        method: Method[RequestT, ResponseT],
        deadline_s: float,
        *,
        describing: bool = False,
    ) -> str:
        """Makes attempts until the exchange is done, or its deadline has passed.

        Returns the address of the last attempt; empty if there was none.
        """
        route = Attempts(self._endpoints, self._settings, deadline_s)
        address = ""
        while not exchange.done:
            news = self._news  # before anything is looked at that it may be about
            if self._stopped:
                exchange.give_up(CLOSED)
                break
            now_s = monotonic()
            step, hopeless = route.step(now_s), route.hopeless(now_s)
            if step is None or hopeless:
                exchange.give_up(hopeless or TIME_OVER)
                break
            await self._look_around(but=step.address if describing else None)
            if step.address is None:
                await news.wait(step.seconds)
            else:
                address = step.address
                await self._attempt(exchange, method, route, step, asks_first=not describing)
        return address

    async def limits(self, deadline_s: float) -> Facts:
        """Returns the limits of one request: asked for once, or assumed if no node answers."""
        now_s = monotonic()
        if self._facts.want_limits(now_s):
            attempt_s = self._settings.attempt_s((deadline_s - now_s) / 2, alone=False)
            try:
                await self._ask_facts(now_s + attempt_s)
            except DelaywheelError:  # messages are sent all the same; their errors show it
                if not self._facts.known:  # from another node meanwhile
                    self._facts = Facts.assumed(now_s)
        return self._facts

    async def levels(self, messages: Sequence[Message], deadline_s: float) -> dict[str, int]:
        """Returns the levels that messages may name: asked for if one names what is not known."""
        if self._facts.want_levels(messages, monotonic()):
            await self._ask_facts(deadline_s)
        return self._facts.levels

    async def stop(self) -> None:
        """Ends waits and calls; gives up unfinished exchanges."""
        with self._lock:
            self._stopped = True
            lines = [*self._lines.values(), *self._old]
        await self._transport.stop()
        for line in lines:
            await line.close()
        self._wake_waiting()

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
        if line is None:
            return
        request = exchange.request()
        started_s = monotonic()
        try:
            answer: ResponseT | AttemptFailure | None = None
            if asks_first and not line.answers:
                answer = await self._unsent(address, line, timeout_s)
            if answer is None:
                left_s = max(0.0, timeout_s - (monotonic() - started_s))
                answer = await self._call(address, line, method, request, left_s)
            if isinstance(answer, AttemptFailure):
                line.answers = not answer.unanswered
                report = exchange.failed(answer)
            else:
                line.answers = True
                report = exchange.answered(answer)
        finally:
            await self._release(line)
        if route.report(address, started_s=started_s, now_s=monotonic(), report=report):
            self._wake_waiting()

    async def _unsent(self, address: str, line: Line, timeout_s: float) -> AttemptFailure | None:
        """Returns why nothing can be sent; None if something listens. Called before a first answer.

        A failed attempt on such a line would have to count as perhaps accepted. The answer also
        names the other nodes: they are asked at once, in case this one hangs later. One asks for
        all who would send meanwhile.
        """
        mine, until_s = FirstQuestion(self._transport.news()), monotonic() + timeout_s
        try:
            while True:
                with self._lock:
                    asked = line.asked = line.asked or mine
                asked_s = monotonic()
                if asked is mine:
                    break
                await asked.news.wait(until_s - asked_s)
                is_late = asked.unsent is not None and asked.unsent.code is _LATE
                if not is_late or monotonic() >= until_s:  # who asked may have had less time
                    return asked.unsent
            request = pb.DescribeClusterRequest()
            answer = await self._call(address, line, _describe, request, until_s - asked_s)
            if isinstance(answer, AttemptFailure):
                mine.unsent = answer.before_sending() if answer.unanswered else None
            else:
                mine.unsent, line.answers = None, True
                await self._learn(address, Description.of(answer, monotonic()), asked_s)
                await self._look_around(but=None)
        finally:  # also if an interrupt comes before it has asked
            if line.asked is mine:
                line.asked = None
                mine.news.tell()
        return mine.unsent

    async def _call(
        self,
        address: str,
        line: Line,
        method: Method[RequestT, ResponseT],
        request: RequestT,
        timeout_s: float,
    ) -> ResponseT | AttemptFailure:
        answer = await line.call(method, request, timeout_s)
        if isinstance(answer, AttemptFailure):
            if self._security.may_explain(answer):
                explain = partial(self._security.explained, address, answer)
                answer = await self._transport.aside(explain)
            self._endpoints.reached(address, connected=not answer.unsent)
        return answer

    async def _look_around(self, but: str | None) -> None:
        """Asks the addresses whose turn it is to describe the cluster; does not wait for them."""
        started_s = monotonic()
        for address in self._endpoints.ask(started_s, but):
            line = await self._take(address)
            if line is None:
                return
            line.ask(
                _describe,
                pb.DescribeClusterRequest(),
                self._settings.attempt_timeout_s,
                partial(self._take_description, address, line, started_s),
            )

    async def _take_description(
        self,
        address: str,
        line: Line,
        started_s: float,
        answer: pb.DescribeClusterResponse | AttemptFailure,
    ) -> None:
        now_s = monotonic()
        await self._release(line)
        if self._stopped:
            return
        if isinstance(answer, AttemptFailure):
            # Refused for good: something answers there, and will not describe the cluster.
            reached = not answer.verdict.retry
            self._endpoints.reached(address, connected=not answer.unsent)
            self._endpoints.not_described(
                address, started_s=started_s, now_s=now_s, reached=reached
            )
        else:
            line.answers = True
            await self._learn(address, Description.of(answer, now_s), started_s)
        self._wake_waiting()

    async def _learn(self, address: str, description: Description, asked_s: float) -> None:
        answered_ms = self._settings.clock() // 1_000_000
        asked_ms = answered_ms - int((monotonic() - asked_s) * 1000)
        self.clocks.compare(description.said.node, description.now_ms, asked_ms, answered_ms)
        self._endpoints.reached(address, connected=True)
        if self._endpoints.described(address, description.said, monotonic()):
            self._facts = description.facts
        known = self._endpoints.addresses
        with self._lock:
            for dropped in self._lines.keys() - known:
                if not self._lines[dropped].calls:
                    self._old.add(self._lines.pop(dropped))
        await self._close_old()

    async def _take(self, address: str) -> Line | None:
        """Returns the line to an address, until `_release`; None if the client is closed."""
        credentials = self._security.credentials()
        with self._lock:
            if self._stopped:
                return None
            line = self._lines.get(address)
            if line is None or line.edition != credentials.edition:
                if line is not None:
                    self._old.add(line)
                line = self._lines[address] = self._transport.open(address, credentials)
            line.calls += 1
        await self._close_old()
        return line

    async def _release(self, line: Line) -> None:
        with self._lock:
            line.calls -= 1
        await self._close_old()

    async def _close_old(self) -> None:
        """Closes the lines that are not to be used any more, and are not."""
        if not self._old:
            return
        with self._lock:
            unused = [line for line in self._old if not line.calls]
            self._old.difference_update(unused)
        for line in unused:
            await line.close()

    def _wake_waiting(self) -> None:
        with self._lock:
            news, self._news = self._news, self._transport.news()
        news.tell()

    async def _ask_facts(self, deadline_s: float) -> None:
        started_s = monotonic()
        question = Question[pb.DescribeClusterRequest, pb.DescribeClusterResponse, Description](
            pb.DescribeClusterRequest(), lambda response: Description.of(response, started_s)
        )
        address = await self.run(question, _describe, deadline_s, describing=True)
        await self._learn(address, question.answer(), started_s)
