"""The real Kafka behind the ports."""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from functools import partial

from confluent_kafka import KafkaException

from delaywheel.kafka_admin import KafkaAdmin
from delaywheel.transactional import replicas_on
from delaywheel_replica.cleaner.kafka.brokers import (
    brokers_of,
    check_brokers,
    ensure_topics,
    look_over,
)
from delaywheel_replica.cleaner.kafka.client_log import LOGGER, error_of
from delaywheel_replica.cleaner.kafka.control_topic import ControlReader
from delaywheel_replica.cleaner.kafka.ingress_finding import IngressTopics, find_ingress, topic_ids
from delaywheel_replica.cleaner.kafka.ingress_thread import IngressThread
from delaywheel_replica.cleaner.kafka.producers import LeaderProducers
from delaywheel_replica.cleaner.outside.ports import Checked, IngressFound, KafkaAway
from delaywheel_replica.core.election.repeating import EndTimes
from delaywheel_replica.kafka_settings import KafkaSettings


class KafkaClients:
    """Makes clients for one cluster."""

    def __init__(
        self,
        settings: KafkaSettings,
        *,
        replication_factor: int | None = None,
        ingress_topics: IngressTopics | None = None,
        checks_brokers: bool = True,
    ) -> None:
        """Connects when first asked; takes records from the ingress topics, if any."""
        self._settings = settings
        self._replication_factor = replication_factor
        self._checks_brokers = checks_brokers
        self._ingress_topics = ingress_topics or IngressTopics()
        self._ends = EndTimes()
        self._lock = threading.Lock()
        self._made_admin: KafkaAdmin | None = None

    @property
    def _admin(self) -> KafkaAdmin:
        with self._lock:
            if self._made_admin is None:
                self._made_admin = KafkaAdmin(self._settings.admin(), logger=LOGGER)
            return self._made_admin

    def check(self, *, has_wheels: bool, on_answer: Callable[[], None] = lambda: None) -> Checked:
        """Checks that Kafka answers, has our topics, and that this node can lead on it.

        Each candidacy checks all: brokers may be replaced and topics lost while this process lives.
        """
        self._admin.poll(0)  # logs what the client has reported meanwhile
        try:
            brokers = brokers_of(self._admin, self._settings.names.control)
            on_answer()
            silent = frozenset[int]()
            if self._checks_brokers:
                silent = check_brokers(self._admin, [broker.id for broker in brokers])
            self._admin.avoid(silent)
            enough = self._replication_factor or replicas_on(len(brokers))
            objections = ensure_topics(
                self._admin, self._settings, replicas=enough, has_wheels=has_wheels
            )
            ingress = self._settings.names.ingress in self._ingress_topics.names
            warnings = look_over(self._admin, self._settings, enough=enough, ingress=ingress)
        except KafkaException as exception:
            raise KafkaAway(error_of(exception).str()) from exception
        halves_objection = objections.pop(self._settings.names.halves, None)
        unchecked = [f"broker {one} does not answer: it is not checked" for one in sorted(silent)]
        warnings = (*unchecked, *warnings, *objections.values())
        return Checked(
            warnings, halves_objection, self._settings.halves, are_all_checked=not silent
        )

    def topic_id(self, name: str) -> str | None:
        """Returns Kafka's id of a topic; None: it is missing, or hidden from this node."""
        return topic_ids(self._admin, [name]).get(name)

    def producers(self) -> LeaderProducers:
        """Makes the producers of a new candidacy."""
        return LeaderProducers(self._settings, self._ends)

    def control(self) -> ControlReader:
        """Makes a new reader of the control topic."""
        return ControlReader(self._settings)

    def find_ingress(self, also: AbstractSet[str]) -> IngressFound:
        """Finds the ingress topics, and creates missing ones of the settings."""
        return find_ingress(self._admin, self._ingress_topics, also)

    def ingress(self, on_news: Callable[[], None]) -> IngressThread:
        """Makes a new reader of the ingress topics."""
        return IngressThread(self._settings, partial(topic_ids, self._admin), on_news)
