"""Carries requests of one node to the simulated Kafka, and answers back.

A call waits in the calling task, and no longer than it may. What it sent may take effect later,
even if the caller has given up, or died:

    reachable? -> way_us -> reachable? -> time at the brokers -> up? -> effect
    effect -> way_us -> reachable? -> answer

A request that cannot leave waits for the connection, as long as its caller does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from delaywheel_replica.kafka_settings import KafkaNames
from sim.kafka.brokers import SimKafka
from sim.kafka.faults import RangeUs, draw_us
from sim.machine.clocks import SimClock
from sim.machine.scheduler import US_PER_MS, US_PER_S, Process, Signal

CONNECT_RETRY_US = 100 * US_PER_MS
"""How often a client tries to connect."""


class _Exchange:
    """One request and its answer; None until it has come."""

    __slots__ = (
        "answer",
        "arrived",
        "brokers_us",
        "deadline_us",
        "late_us",
        "lost_reply",
        "request",
    )

    def __init__(
        self,
        request: Callable[[], Any],
        arrived: Signal,
        deadline_us: int,
        *,
        late_us: int = 0,
        brokers_us: int = 0,
        lost_reply: float = 0.0,
    ) -> None:
        self.request = request
        self.arrived = arrived
        self.deadline_us = deadline_us
        self.late_us = late_us
        self.brokers_us = brokers_us
        self.lost_reply = lost_reply
        self.answer: Any = None


class KafkaLine:
    """One node's requests.

    Attributes:
        kafka: The brokers.
        node: Whose client this is.
        names: Of our topics and transactional ids.
        clock: The node's: records without a timestamp get its wall clock's time.
        scheduler: Of true time.
        random: The client's random stream.
    """

    def __init__(self, kafka: SimKafka, node: str, names: KafkaNames, clock: SimClock) -> None:
        self.kafka = kafka
        self.node = node
        self.names = names
        self.clock = clock
        self.scheduler = kafka.scheduler
        self.random = kafka.scheduler.stream(f"kafka client {node} {kafka.scheduler.now_us}")

    @property
    def round_trip_us(self) -> int:
        """The approximate time of a request and its answer."""
        return sum(self._way())

    def ask(
        self,
        request: Callable[[], Any],
        timeout_s: float,
        *,
        late_us: int = 0,
        brokers_us: int = 0,
        lost_reply: float = 0.0,
    ) -> Any:
        """Sends a request to the brokers; returns their answer, or None when none came in time.

        Args:
            request: What it does there.
            timeout_s: How long to wait for the answer.
            late_us: How much longer than others it is under way.
            brokers_us: How long it takes there before it has its effect.
            lost_reply: How likely its answer is lost, beyond the general probability.
        """
        scheduler = self.scheduler
        timeout_s = max(0.0, timeout_s)
        exchange = _Exchange(
            request,
            Signal(scheduler),
            scheduler.now_us + round(timeout_s * US_PER_S),
            late_us=late_us,
            brokers_us=brokers_us,
            lost_reply=lost_reply,
        )
        self._send(exchange, scheduler.calling_task().owner)
        exchange.arrived.wait(timeout_s)
        return exchange.answer

    def send_copy(self, request: Callable[[], Any], late_us: int) -> None:
        """Sends a request without waiting for an answer."""
        scheduler = self.scheduler
        self._send(_Exchange(request, Signal(scheduler), scheduler.now_us, late_us=late_us), None)

    def chance(self, probability: float) -> bool:
        """Draws whether something happens."""
        return probability > 0.0 and self.random.random() < probability

    def _way_us(self) -> int:
        return draw_us(self.random, self._way())

    def _way(self) -> RangeUs:
        faults = self.kafka.faults
        return faults.slow_us.get(self.node, faults.way_us)

    def _send(self, exchange: _Exchange, owner: Process | None) -> None:
        scheduler = self.scheduler
        if not self.kafka.is_reachable(self.node):
            if scheduler.now_us < exchange.deadline_us:
                scheduler.call_later(CONNECT_RETRY_US, self._send, exchange, owner, owner=owner)
        elif not self.chance(self.kafka.faults.lost_request):
            scheduler.call_later(self._way_us() + exchange.late_us, self._arrive, exchange)

    def _arrive(self, exchange: _Exchange) -> None:
        if not self.kafka.is_reachable(self.node):
            return
        if exchange.brokers_us:
            self.scheduler.call_later(exchange.brokers_us, self._carry_out, exchange)
        else:
            self._carry_out(exchange)

    def _carry_out(self, exchange: _Exchange) -> None:
        if not self.kafka.is_up:
            return
        answer = exchange.request()
        lost = self.chance(self.kafka.faults.lost_reply) or self.chance(exchange.lost_reply)
        if not lost:
            self.scheduler.call_later(self._way_us(), self._answer, exchange, answer)

    def _answer(self, exchange: _Exchange, answer: Any) -> None:
        if self.kafka.is_reachable(self.node):
            exchange.answer = answer
            exchange.arrived.set()
