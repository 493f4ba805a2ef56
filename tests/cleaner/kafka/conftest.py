"""Shared by tests of the cleaner's Kafka: the settings of its clients."""

from __future__ import annotations

import pytest

from delaywheel_replica.kafka_settings import KafkaNames, KafkaSettings
from local.loopback.kafka import KafkaBroker


@pytest.fixture
def settings(kafka: KafkaBroker, cluster_id: str) -> KafkaSettings:
    return KafkaSettings(KafkaNames(cluster_id), {"bootstrap.servers": kafka.address})
