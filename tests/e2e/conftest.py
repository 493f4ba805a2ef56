"""A service on the session's broker, started once for the tests that leave it as they found it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from local.kafka import KafkaBroker
from support.read_committed import create_topic
from support.service import Service

pytestmark = pytest.mark.kafka


@pytest.fixture(scope="module")
def service(kafka: KafkaBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One healthy node for a whole module."""
    folder = tmp_path_factory.mktemp("service") / "cluster"
    with Service(kafka.address, folder, f"t{uuid.uuid4().hex[:12]}") as running:
        yield running


@pytest.fixture
def own_service(kafka: KafkaBroker, tmp_path: Path, cluster_id: str) -> Iterator[Service]:
    """A node that the test may kill."""
    with Service(kafka.address, tmp_path / "cluster", cluster_id) as running:
        yield running


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
