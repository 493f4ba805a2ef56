"""Tests of consumers run over a real node and in memory; those of clients with both of them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from client.testing.sites import GROUP, MemorySite, RealSite, Site
from client.testing.worlds import World
from delaywheel import Client
from delaywheel.testing import MemoryService
from local.loopback.kafka import KafkaBroker
from support.clients.either_client import LoopClient
from support.kafka.read_committed import create_topic
from support.services.service import Service

WORLDS = [pytest.param("real", marks=pytest.mark.kafka), "memory"]


@pytest.fixture
def place() -> Iterator[tuple[World, str]]:
    """The service in memory, and its address."""
    with MemoryService(topics=["orders"]) as service:
        yield World(service), service.address


@pytest.fixture(params=WORLDS)
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    """Where records are handled, by either consumer."""
    if request.param == "memory":
        with MemoryService(topics=["orders", f"orders-retry-{GROUP}"]) as service:
            yield MemorySite("orders", service)
        return
    broker: KafkaBroker = request.getfixturevalue("kafka")
    running: Service = request.getfixturevalue("node")
    running.wait_accepting()
    topic = f"orders-{uuid.uuid4().hex[:8]}"
    create_topic(broker.address, topic)
    yield RealSite(topic, broker.address, running.cluster_id)


@pytest.fixture
def world(place: tuple[World, str]) -> World:
    return place[0]


@pytest.fixture(params=[Client, LoopClient], ids=["sync", "asyncio"])
def client(request: pytest.FixtureRequest, place: tuple[World, str]) -> Iterator[Any]:
    with request.param(place[1]) as made:
        yield made
