"""Nodes are killed at the worst moments, callers retry: still exactly once."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from local.loopback.kafka import KafkaBroker
from local.loopback.node import PROCESSES
from support.kafka.read_committed import CommittedReader, read_all
from support.process.night import NIGHT
from support.services.ingress import IngressLoad, assert_delivered, faults_of, passed_on
from support.services.load import LATEST_S, Load, assert_arrived
from support.services.service import Service

pytestmark = pytest.mark.kafka


def test_killed_under_load(
    service: Service, kafka: KafkaBroker, new_topic: Callable[..., str]
) -> None:
    """A node, and each process of it, is killed; acks, records, transactions are on their way.

    A push kills all of it, and its supervisor; three_nodes/test_leader.py the other two.
    """
    topic, of_records = new_topic(), new_topic()
    with (
        Load(service.client(timeout=30.0), topic) as load,
        IngressLoad(kafka.address, service.cluster_id, of_records) as records,
    ):
        for which in (PROCESSES, ("pid",), *((("server_pid",), ("cleaner_pid",)) if NIGHT else ())):
            load.wait_for_more()
            records.wait_for_more()
            service.kill_and_wait(*which)
        load.wait_for_more()
        records.wait_for_more()
    # Also messages that were accepted without an answer to the caller.
    service.wait_done(time.time() * 1000 + LATEST_S * 1000)
    with CommittedReader(kafka.address, topic) as reader:
        assert_arrived(reader, load.acknowledged)
    with CommittedReader(kafka.address, of_records) as reader:
        assert_delivered(reader, records.sent)
    service.wait_done(time.time() * 1000)
    arrived = read_all(kafka.address, of_records)
    assert not faults_of(arrived, records.sent), "nothing comes twice later on"
    assert len({passed_on(message) for message in arrived}) > 1
