"""Answers queries about topics of the simulated Kafka, and provides producers for trials."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from delaywheel_replica.cleaner.delivery.topics import (
    CreateTopics,
    Limits,
    TopicDescription,
    TopicState,
)
from delaywheel_replica.cleaner.kafka.topic_admin import CALL_S
from delaywheel_replica.cleaner.outside.ports import KafkaAway
from delaywheel_replica.core.protocol.transaction_outcomes import TransactionState
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
    """Answers one node's queries about topics: the cleaner's `TopicAdmin`."""

    def __init__(self, line: KafkaLine) -> None:
        self._line = line

    def describe(self, names: Sequence[str]) -> Mapping[str, TopicDescription]:
        """Returns Kafka's present description of each topic."""
        kafka = self._line.kafka
        reply = self._line.ask(lambda: {name: _described(kafka, name) for name in names}, CALL_S)
        if reply is None:
            raise KafkaAway("describing topics")
        answers: Mapping[str, TopicDescription] = reply
        return answers

    def limits(self, names: Sequence[str]) -> Mapping[str, Limits | None]:
        """Returns the limits of each topic for messages."""
        troubles = self._line.kafka.troubles
        reply = self._line.ask(lambda: {name: troubles.of(name) for name in names}, CALL_S)
        if reply is None:
            return dict.fromkeys(names)
        return {
            name: Limits(
                LARGEST_BYTES,
                needs_key=trouble is TopicTrouble.COMPACTED,
                min_insync=MIN_INSYNC,
            )
            for name, trouble in reply.items()
        }

    def create(self, names: Sequence[str], how: CreateTopics) -> None:
        """Does nothing: it is never requested."""
        raise NotImplementedError


class SimTrialProducer(SimProducer):
    """One transactional id, as trials use it."""

    @property
    def abortable(self) -> bool:
        """Whether the client itself refuses to commit the running transaction."""
        return self._failed is not None and self._failed.verdict is TransactionState.ABORT

    def cause(self) -> str | None:
        """Kafka's reason why the transaction failed."""
        return None if self._failed is None else self._failed.cause

    def warm(self, topics: Iterable[str], timeout_ms: int) -> bool:
        """Looks topics up."""
        del topics
        return self._line.ask(lambda: True, timeout_ms / 1000) is not None

    def close(self) -> None:
        """Says nothing to the brokers."""


def _described(kafka: SimKafka, name: str) -> TopicDescription:
    if not kafka.has(name):
        return TopicDescription(TopicState.MISSING)
    of_each = [kafka.troubles.of(name, each.number) for each in kafka.partitions(name)]
    found: dict[TopicTrouble, set[int]] = {}
    for number, trouble in enumerate(of_each):
        if trouble is not None:
            found.setdefault(trouble, set()).add(number)
    states = [state for trouble, state in _STATES.items() if trouble in found]
    return TopicDescription(
        states[0] if states else TopicState.PRESENT,
        len(of_each),
        frozenset(found.get(TopicTrouble.LEADERLESS, ())),
        dict.fromkeys(found.get(TopicTrouble.SHRUNK, ()), (1, 3)),
    )
