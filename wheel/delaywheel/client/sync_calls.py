"""Drives exchanges over synchronous gRPC: attempts, waits, deadlines. Thread-safe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from threading import Event, Lock
from time import monotonic
from typing import Final, TypeVar, cast

import grpc

from delaywheel.client.description import Description, Facts, describe_question
from delaywheel.client.exchange.answers import Cancelled, Rescheduled
from delaywheel.client.exchange.batching import split
from delaywheel.client.exchange.channel import Credentials, Security, open_channel
from delaywheel.client.exchange.delivery import Delivery
from delaywheel.client.exchange.endpoints import Endpoints
from delaywheel.client.exchange.exchange import CLOSED, TIME_OVER, Exchange
from delaywheel.client.exchange.retry import AttemptFailure, EndedCall
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

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
Method = Callable[[DelayWheelStub], "grpc.UnaryUnaryMultiCallable[RequestT, ResponseT]"]


class _Line:
    """A channel, its number of calls, and whether the last one was answered."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self.edition: Final = credentials.edition
        self.channel: Final = open_channel(address, credentials)
        self.stub: Final = DelayWheelStub(self.channel)
        self.calls = 0
        self.answers = False


class Calls:
    """The channels of one client, opened when first needed, and the exchanges over them."""

    def __init__(self, addresses: Sequence[str], settings: ExchangeSettings) -> None:
        self._settings: Final = settings
        self._endpoints: Final = Endpoints(addresses, Random())  # noqa: S311  spreads load
        self._security: Final = Security(settings.tls)
        self._lines: Final[dict[str, _Line]] = {}
        self._old: Final[set[_Line]] = set()  # opened before the TLS files changed, still in use
        self._lock: Final = Lock()  # guards lines, their counts, news
        self._stopped: Final = Event()
        self._news = Event()  # set, and replaced, when waiting may have become pointless
        self._facts = Facts.assumed()

    def run(
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
            news = self._news
            now_s = monotonic()
            step, hopeless = route.step(now_s), route.hopeless(now_s)
            if step is None or hopeless:
                exchange.give_up(hopeless or TIME_OVER)
                break
            self._look_around(but=step.address if describing else None)
            if step.address is None:
                news.wait(step.seconds)
            else:
                address = step.address
                self._attempt(exchange, method, route, step, asks_first=not describing)
            if self._stopped.is_set() and not exchange.done:
                exchange.give_up(CLOSED)
        return address

    def deliver(self, messages: Sequence[Message], deadline_s: float) -> list[Result]:
        """Sends messages that fit one request; returns one result each, in order."""
        delivery = Delivery(messages)
        try:
            levels = self._levels(messages, deadline_s)
        except DelaywheelError as error:
            delivery.refuse(error)
        else:
            delivery.fix_dues(clock_ns() // 1_000_000, levels, self._settings.past_due)
            self.run(delivery, lambda stub: stub.DelayProduce, deadline_s)
        return delivery.results

    def deliver_all(self, messages: Sequence[Message], deadline_s: float) -> list[Result]:
        """Sends any number of messages, one request after another."""
        results: list[Result] = []
        for request in self.split(messages, deadline_s):
            results += self.deliver(request, deadline_s)
        return results

    def split(self, messages: Sequence[Message], deadline_s: float) -> list[Sequence[Message]]:
        """Splits messages into requests within the service's limits."""
        if len(messages) == 1:
            return [messages]
        limits = self.limits(deadline_s)
        return list(split(messages, max_messages=limits.max_messages, max_bytes=limits.max_bytes))

    def cancel(
        self,
        messages: Sequence[pb.MessageRef],
        deadline_s: float,
        on_settled: OnSettled[Cancelled] | None = None,
        doubts: Doubts | None = None,
    ) -> list[Cancelled | DelaywheelError]:
        """Cancels messages that fit one call; returns what became of each, in order."""
        changes = NamedChanges(CANCEL, messages, on_settled, doubts)
        self.run(changes, lambda stub: stub.Cancel, deadline_s)
        return changes.results

    def commit(
        self,
        halves: Sequence[pb.HalfRef],
        deadline_s: float,
        on_settled: OnSettled[HalfCommitted] | None = None,
        doubts: Doubts | None = None,
    ) -> list[HalfCommitted | DelaywheelError]:
        """Commits halves that fit one call; returns what became of each, in order."""
        changes = NamedChanges(COMMIT, halves, on_settled, doubts)
        self.run(changes, lambda stub: stub.Commit, deadline_s)
        return changes.results

    def reschedule(
        self,
        messages: Sequence[pb.NewDue],
        deadline_s: float,
        on_settled: OnSettled[Rescheduled] | None = None,
        doubts: Doubts | None = None,
    ) -> list[Rescheduled | DelaywheelError]:
        """Gives messages that fit one call other dues; returns what became of each, in order."""
        changes = NamedChanges(RESCHEDULE, messages, on_settled, doubts)
        self.run(changes, lambda stub: stub.Reschedule, deadline_s)
        return changes.results

    def limits(self, deadline_s: float) -> Facts:
        """Returns the limits of one request: asked for once, or assumed if no node answers."""
        now_s = monotonic()
        if self._facts.want_limits(now_s):
            attempt_s = self._settings.attempt_s((deadline_s - now_s) / 2, alone=False)
            try:
                self._ask_facts(now_s + attempt_s)
            except DelaywheelError:  # messages are sent all the same; their errors show it
                if not self._facts.known:  # from another node meanwhile
                    self._facts = Facts.assumed(now_s)
        return self._facts

    def stop(self) -> None:
        """Ends waits and calls; gives up unfinished exchanges."""
        self._stopped.set()
        with self._lock:
            for line in (*self._lines.values(), *self._old):
                line.channel.close()
        self._wake_waiting()

    def _attempt(
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
        line = self._take(address)
        if line is None:
            return
        request = exchange.request()
        started_s = monotonic()
        try:
            unsent = self._unsent(address, line, timeout_s) if asks_first else None
            if unsent is None:
                left_s = max(0.0, timeout_s - (monotonic() - started_s))
                response = method(line.stub)(request, timeout=left_s)
        except grpc.RpcError as error:
            failure = self._failure_of(address, error)
            self._endpoints.reached(address, connected=not failure.unsent)
            line.answers = not failure.unanswered
            report = exchange.failed(failure)
        except ValueError:  # the channel was closed between `_take` and here; nothing was sent
            if not self._stopped.is_set():
                raise
            return
        else:
            line.answers = unsent is None
            report = exchange.answered(response) if unsent is None else exchange.failed(unsent)
        finally:
            self._release(line)
        if route.report(address, started_s=started_s, now_s=monotonic(), report=report):
            self._wake_waiting()

    def _unsent(self, address: str, line: _Line, timeout_s: float) -> AttemptFailure | None:
        """Returns why nothing can be sent; None if something listens. Called before a first answer.

        A failed attempt on such a line would have to count as perhaps accepted. The answer also
        names the other nodes: they are asked at once, in case this one hangs later.
        """
        if line.answers:
            return None
        try:
            response = line.stub.DescribeCluster(pb.DescribeClusterRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            failure = self._failure_of(address, error)
            self._endpoints.reached(address, connected=not failure.unsent)
            return failure.before_sending() if failure.unanswered else None
        self._learn(address, Description.of(response, monotonic()))
        self._look_around(but=None)
        return None

    def _failure_of(self, address: str, error: grpc.RpcError) -> AttemptFailure:
        failure = _failure_of(error)
        if self._security.may_explain(failure):
            return self._security.explained(address, failure)
        return failure

    def _look_around(self, but: str | None) -> None:
        """Asks the addresses whose turn it is to describe the cluster; does not wait for them."""
        started_s = monotonic()
        for address in self._endpoints.ask(started_s, but):
            line = self._take(address)
            if line is None:
                return
            try:
                call = line.stub.DescribeCluster.future(
                    pb.DescribeClusterRequest(), timeout=self._settings.attempt_timeout_s
                )
            except ValueError:  # closed meanwhile, as in `_attempt`
                return
            call.add_done_callback(partial(self._looked, address, line, started_s))

    def _looked(
        self,
        address: str,
        line: _Line,
        started_s: float,
        call: grpc.Future[pb.DescribeClusterResponse],
    ) -> None:
        now_s = monotonic()
        self._release(line)
        if self._stopped.is_set():
            return
        ended = cast("EndedCall", call)  # which it is, too
        if ended.code() is grpc.StatusCode.OK:
            line.answers = True
            self._learn(address, Description.of(call.result(), now_s))
        else:
            failure = AttemptFailure.of_call(ended)
            reached = not failure.verdict.retry
            self._endpoints.reached(address, connected=not failure.unsent)
            self._endpoints.not_described(
                address, started_s=started_s, now_s=now_s, reached=reached
            )
        self._wake_waiting()

    def _learn(self, address: str, description: Description) -> None:
        self._endpoints.reached(address, connected=True)
        if self._endpoints.described(address, description.said, monotonic()):
            self._facts = description.facts
        known = self._endpoints.addresses
        with self._lock:
            for dropped in self._lines.keys() - known:
                if not self._lines[dropped].calls:
                    self._lines.pop(dropped).channel.close()

    def _take(self, address: str) -> _Line | None:
        """Returns the line to an address, until `_release`; None if the client is closed."""
        credentials = self._security.credentials()
        with self._lock:
            if self._stopped.is_set():
                return None
            line = self._lines.get(address)
            if line is not None and line.edition != credentials.edition:
                self._old.add(line)
                self._close_if_old(line)
                line = None
            if line is None:
                line = self._lines[address] = _Line(address, credentials)
            line.calls += 1
            return line

    def _release(self, line: _Line) -> None:
        with self._lock:
            line.calls -= 1
            self._close_if_old(line)

    def _close_if_old(self, line: _Line) -> None:
        if line in self._old and not line.calls:
            self._old.discard(line)
            line.channel.close()

    def _wake_waiting(self) -> None:
        with self._lock:
            news, self._news = self._news, Event()
        news.set()

    def _levels(self, messages: Sequence[Message], deadline_s: float) -> dict[str, int]:
        if self._facts.want_levels(messages, monotonic()):
            self._ask_facts(deadline_s)
        return self._facts.levels

    def _ask_facts(self, deadline_s: float) -> None:
        question = describe_question(monotonic())
        address = self.run(question, lambda stub: stub.DescribeCluster, deadline_s, describing=True)
        self._learn(address, question.answer())


def _failure_of(error: grpc.RpcError) -> AttemptFailure:
    # A stub raises the call itself, which the types do not say.
    return AttemptFailure.of_call(cast("EndedCall", error))
