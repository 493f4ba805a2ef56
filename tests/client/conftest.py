"""A real node for the tests that ask one what the service in memory is asked, too."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from local.loopback.kafka import KafkaBroker
from support.services.service import Service


@pytest.fixture(scope="session")
def node(kafka: KafkaBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service") / "cluster"
    with Service(kafka.address, folder, f"t{uuid.uuid4().hex[:12]}") as running:
        yield running
