"""Drivers on simulated disks."""

from __future__ import annotations

import pytest

from sim.machine.disk import SimulatedDisk
from support.server.driven import ONE, TWO, Driven


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk()


@pytest.fixture
def node(disk: SimulatedDisk) -> Driven:
    return Driven(disk)


@pytest.fixture
def ready(node: Driven) -> Driven:
    """With a wheel open, and a spare."""
    node.hear(w1=None)
    node.hear(w1=None, w2=None)
    assert (node.row.heartbeat.open, node.row.heartbeat.spare) == (ONE, TWO)
    return node
