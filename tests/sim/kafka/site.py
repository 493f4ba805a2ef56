"""A simulated Kafka with a client on each of two nodes, for tests of its ports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from delaywheel_replica.cleaner.outside.ports import KafkaCallEnd, KafkaPort, ProducersPort, Record
from delaywheel_replica.core.protocol.transaction_outcomes import TransactionState
from delaywheel_replica.kafka_settings import KafkaNames
from sim.kafka.brokers import SimKafka
from sim.kafka.faults import KafkaFaults
from sim.kafka.ports import SimKafkaClient
from sim.machine.clocks import SimClock
from sim.machine.scheduler import Scheduler, Task

NAMES = KafkaNames("c")
TOPIC = "t"
T = TypeVar("T")


class Site:
    """Kafka, and one client of each of two nodes."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(3)
        self.kafka = SimKafka(self.scheduler, {TOPIC: 3})
        self.clock = SimClock(self.scheduler)
        self.a = self.client("a")
        self.b = self.client("b")

    def client(self, node: str) -> KafkaPort:
        return SimKafkaClient(self.kafka, node, NAMES, self.clock)

    def faults(self, **changes: Any) -> None:
        self.kafka.faults = replace(KafkaFaults(), **changes)

    def start(self, call: Callable[[], object]) -> Task:
        return self.scheduler.spawn("call", call)

    def do(self, call: Callable[[], T]) -> T:
        """Makes a blocking call, and runs it to its end."""
        found: list[T] = []
        self.start(lambda: found.append(call()))
        self.scheduler.run_until(predicate=lambda: bool(found))
        return found[0]

    def do_raising(self, call: Callable[[], object]) -> None:
        """Makes a call in a separate task; its errors come out of the run unchanged."""
        task = self.start(call)
        self.scheduler.run_until(predicate=lambda: task.ended)

    def settle(self, seconds: float = 1.0) -> None:
        self.scheduler.run_for(seconds)

    def producers(self, client: KafkaPort) -> ProducersPort:
        """Inits all ids."""

        def init() -> ProducersPort:
            client.check(has_wheels=False)
            producers = client.producers()
            for number in (0, 1):
                assert producers.init(number, 5_000) == KafkaCallEnd(TransactionState.CONTINUE)
            return producers

        return self.do(init)

    def transact(
        self, producers: ProducersPort, *values: bytes, number: int = 0, timeout_ms: int = 2_000
    ) -> KafkaCallEnd:
        def call() -> KafkaCallEnd:
            producers.begin(number)
            producers.write(number, [Record(TOPIC, b"k", value, []) for value in values])
            return producers.commit(number, control(b"progress", values[-1]), timeout_ms)

        return self.do(call)

    def values(self) -> list[bytes | None]:
        return [entry.value for entry in self.kafka.visible(TOPIC)]


def control(key: bytes, value: bytes | None) -> Record:
    return Record(NAMES.control, key, value, [], partition=0)
