"""One node for all tests of this folder: each may kill it, and waits until it is back."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from local.loopback.kafka import KafkaBroker
from support.services.service import Service


@pytest.fixture(scope="package")
def started(kafka: KafkaBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service") / "cluster"
    name = f"t{uuid.uuid4().hex[:12]}"
    with Service(kafka.address, folder, name, topics=["orders", "reminders"]) as running:
        yield running


@pytest.fixture
def service(started: Service) -> Service:
    """The node accepts messages, whatever the previous test has done."""
    started.wait_accepting()
    return started
