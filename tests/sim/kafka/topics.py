"""What the simulated Kafka says of topics when it is asked, and producers of trials."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from delaywheel_replica.cleaner.delivery.topics import CreateTopics, Described, Limits, TopicState
from delaywheel_replica.cleaner.kafka.topic_admin import CALL_S
from delaywheel_replica.cleaner.outside.ports import KafkaAway
from delaywheel_replica.core.protocol.transaction_outcomes import Verdict
from sim.kafka.producers import SimProducer
from sim.kafka.topic_troubles import TopicTrouble

if TYPE_CHECKING:
    from sim.kafka.brokers import SimKafka
    from sim.kafka.line import KafkaLine

LARGEST_BYTES = 1_048_588
MIN_INSYNC = 2


_STATES = {
    TopicTrouble.LEADERLESS: TopicState.LEADERLESS,
    TopicTrouble.DENIED: TopicState.DENIED,
    TopicTrouble.MISSING: TopicState.MISSING,
}


class SimTopicAdmin:
    """What one node is told about topics: `TopicAdmin` of the cleaner."""

    def __init__(self, line: KafkaLine) -> None:
        self._line = line

    def describe(self, names: Sequence[str]) -> Mapping[str, Described]:
        """Of each topic what Kafka says now."""
        kafka = self._line.kafka
        told = self._line.ask(lambda: {name: _described(kafka, name) for name in names}, CALL_S)
        if told is None:
            raise KafkaAway("describing topics")
        answers: Mapping[str, Described] = told
        return answers

    def limits(self, names: Sequence[str]) -> Mapping[str, Limits | None]:
        """What each topic asks of messages."""
        told = self._line.ask(lambda: True, CALL_S)
        limits = None if told is None else Limits(LARGEST_BYTES, min_insync=MIN_INSYNC)
        return dict.fromkeys(names, limits)

    def create(self, names: Sequence[str], how: CreateTopics) -> None:
        """Is not asked for."""
        raise NotImplementedError


class SimTrialProducer(SimProducer):
    """One transactional id as trials use it."""

    @property
    def abortable(self) -> bool:
        """Whether the client itself refuses to commit the running transaction."""
        return self._failed is not None and self._failed.verdict is Verdict.ABORT

    def cause(self) -> str | None:
        """In Kafka's words, why the transaction failed."""
        return None if self._failed is None else self._failed.cause

    def warm(self, topics: Iterable[str], timeout_ms: int) -> bool:
        """Looks topics up."""
        del topics
        return self._line.ask(lambda: True, timeout_ms / 1000) is not None


def _described(kafka: SimKafka, name: str) -> Described:
    trouble = kafka.troubles.of(name)
    if not kafka.has(name):
        return Described(TopicState.MISSING)
    state = TopicState.PRESENT if trouble is None else _STATES.get(trouble, TopicState.PRESENT)
    missing = (
        frozenset({(1, 3)}) if trouble is TopicTrouble.SHRUNK else frozenset[tuple[int, int]]()
    )
    return Described(state, len(kafka.partitions(name)), missing)
