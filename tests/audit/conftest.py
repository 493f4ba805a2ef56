"""Fixtures for the tests of the audit: their own topics."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from local.loopback.kafka import KafkaBroker
from support.kafka.audit_topic import AuditTopic


@pytest.fixture
def topic(kafka: KafkaBroker) -> Callable[..., AuditTopic]:
    """Makes a topic."""

    def make(*, partitions: int = 1, config: dict[str, str] | None = None) -> AuditTopic:
        return AuditTopic(kafka.address, partitions=partitions, config=config)

    return make
