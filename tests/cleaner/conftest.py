"""Shared by tests of the cleaner: wheels in memory, and a topic to forward to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from local.loopback.kafka import KafkaBroker
from support.due.wheels import Wheels, wheels_in_memory
from support.kafka.read_committed import create_topic


@pytest.fixture
def wheels() -> Iterator[Wheels]:
    with wheels_in_memory() as made:
        yield made


@pytest.fixture
def topic(kafka: KafkaBroker, cluster_id: str) -> str:
    name = f"orders-{cluster_id}"
    create_topic(kafka.address, name)
    return name
