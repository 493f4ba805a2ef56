"""Three nodes for all tests of this folder, which reach the broker through a proxy."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from local.loopback.kafka import KafkaBroker
from support.kafka.proxy import KafkaProxy
from support.services.trio import Trio


@pytest.fixture(scope="package")
def started(
    kafka: KafkaBroker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[KafkaProxy, Trio]]:
    folder = tmp_path_factory.mktemp("three") / "cluster"
    with (
        KafkaProxy(kafka) as proxy,
        Trio(kafka.proxy_address, folder, f"t{uuid.uuid4().hex[:12]}", halves=True) as trio,
    ):
        yield proxy, trio


@pytest.fixture
def proxy(started: tuple[KafkaProxy, Trio]) -> KafkaProxy:
    """Between the nodes and the broker."""
    return started[0]


@pytest.fixture
def trio(started: tuple[KafkaProxy, Trio]) -> Trio:
    """All nodes are present and in sync, whatever the previous test has done."""
    _, trio = started
    trio.wait_accepting()
    trio.wait_in_sync()
    return trio
