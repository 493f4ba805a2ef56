"""Topics on the session's broker. Nodes that several tests share are in the folders."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest

from local.loopback.kafka import KafkaBroker
from support.kafka.read_committed import create_topic


@pytest.fixture
def topic(kafka: KafkaBroker) -> str:
    """A new topic with one partition."""
    name = f"orders-{uuid.uuid4().hex[:8]}"
    create_topic(kafka.address, name)
    return name


@pytest.fixture
def new_topic(kafka: KafkaBroker) -> Callable[..., str]:
    """Makes topics with settings of their own."""

    def make(partitions: int = 1, **config: str) -> str:
        name = f"topic-{uuid.uuid4().hex[:8]}"
        settings = {key.replace("_", "."): value for key, value in config.items()}
        create_topic(kafka.address, name, partitions=partitions, config=settings)
        return name

    return make
