"""One node's client of the simulated Kafka, as `cleaner/outside/ports.py` wants it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet

from delaywheel_replica.cleaner.kafka.brokers import CALL_S
from delaywheel_replica.cleaner.outside.ports import (
    Checked,
    IngressFound,
    KafkaAway,
    LeadingRefused,
)
from delaywheel_replica.core.election.repeating import EndTimes
from delaywheel_replica.kafka_settings import KafkaNames
from sim.kafka.brokers import SimKafka
from sim.kafka.control import SimControl
from sim.kafka.ingress import SimIngress, partitions_of
from sim.kafka.line import KafkaLine
from sim.kafka.producers import SimProducers
from sim.machine.clocks import SimClock


class SimKafkaClient:
    """One node's access to Kafka, as `KafkaPort` wants it."""

    def __init__(self, kafka: SimKafka, node: str, names: KafkaNames, clock: SimClock) -> None:
        """Begins with nothing sent.

        Args:
            kafka: The brokers.
            node: Whose client this is.
            names: Of our topics and transactional ids.
            clock: The node's: records without a timestamp get its wall clock's time.
        """
        self._line = KafkaLine(kafka, node, names, clock)
        self._ends = EndTimes()

    def check(self, *, has_wheels: bool, on_answer: Callable[[], None] = lambda: None) -> Checked:
        """Makes sure that Kafka answers and can keep our promises; creates our topics."""
        kafka, names = self._line.kafka, self._line.names

        def ensure() -> str:
            if has_wheels and not kafka.has(names.control):
                return f"the control topic {names.control} is missing"
            kafka.create(names.control, compacted=True)
            for name in (names.outcomes, names.dead):
                kafka.create(name)
                trouble = kafka.troubles.of(name)
                if trouble is not None and trouble.refusal is not None:
                    return f"topic {name} is {trouble}"
            return ""

        objection = self._line.ask(ensure, CALL_S, brokers_us=kafka.faults.check_us)
        if objection is None:
            raise KafkaAway("Kafka does not answer")
        if objection:
            raise LeadingRefused(objection)
        on_answer()
        halves = kafka.troubles.of(names.halves)
        is_closed = halves is not None and halves.refusal is not None
        return Checked(halves_objection=f"topic {names.halves} is {halves}" if is_closed else None)

    def find_ingress(self, also: AbstractSet[str] = frozenset()) -> IngressFound:
        """Finds the ingress topic, which another client creates."""
        return IngressFound(partitions_of(self._line, [self._line.names.ingress, *sorted(also)]))

    def ingress(self, on_news: Callable[[], None]) -> SimIngress:
        """Makes a new reader of the ingress topics."""
        return SimIngress(self._line, on_news)

    def producers(self) -> SimProducers:
        """Makes the producers of a new candidacy."""
        return SimProducers(self._line, self._ends)

    def control(self) -> SimControl:
        """Makes a new reader of the control topic."""
        return SimControl(self._line)
