"""A node whose data folder is lost: refused by name, replaced by the operator, reported lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from delaywheel import Message
from delaywheel_replica.kafka_settings import KafkaNames
from local.loopback.kafka import KafkaBroker
from support.kafka.read_committed import CommittedReader
from support.services.service import Service
from support.services.waiting import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

MESSAGES = 20


@pytest.fixture
def service(kafka: KafkaBroker, tmp_path: Path, cluster_id: str) -> Iterator[Service]:
    with Service(kafka.address, tmp_path / "cluster", cluster_id) as running:
        yield running


def test_an_emptied_node_is_replaced(kafka: KafkaBroker, service: Service, topic: str) -> None:
    with service.client() as client:
        batch = [
            Message(topic, b"%d" % n, delay=timedelta(seconds=600 + n)) for n in range(MESSAGES)
        ]
        handles = [result.handle for result in client.produce_many(batch)]
    assert all(handles)
    wheel = str(handles[0]).partition(":")[0]
    wait_until("all of it is taken account of", lambda: _is_taken(service, wheel))
    node = service.status().node

    # The first stop closes the wheel; its messages wait in it.
    service.stop()
    folder = service.data / node
    folder.rename(service.data / "lost")
    service.start(wait=False)

    wait_until("it is refused by name", lambda: _is_refused(service))
    status = json.loads(service.answer_of("status", "--json").stdout)
    assert status["refusing"]["reason"] == "NO_WHEEL"
    assert [member["accepting"] for member in status["members"]] == [False]
    refused = service.answer_of("node", "remove", node, "--yes", code=1)
    assert refused.stderr.partition(":")[2].startswith(" NODE_LEADS:")

    done = service.answer_of("node", "replace", node, "--yes", "--json")
    assert "given up for good" in done.stderr
    change = json.loads(done.stdout)
    at_risk = {row["wheel"]: row["frames_at_risk"] for row in change["wheels"]}
    assert at_risk[wheel] >= 1
    again = service.answer_of("node", "replace", node, "--yes", code=1)
    assert "NOTHING_TO_REPLACE" in again.stderr

    service.wait_accepting()
    with service.client() as client, CommittedReader(kafka.address, topic) as reader:
        handle = client.produce(topic, b"after", delay=timedelta(milliseconds=200))
        assert str(handle).partition(":")[0] not in at_risk
        reader.wait_for(1)
        assert [m.value() for m in reader.read_to_end()] == [b"after"]
    with CommittedReader(kafka.address, KafkaNames(service.cluster_id).outcomes) as outcomes:
        outcomes.wait_for(1)
        reported = [json.loads(m.value() or b"") for m in outcomes.read_to_end()]
    (lost,) = [row for row in reported if row["outcome"] == "lost"]
    assert (lost["wheel"], lost["seq"], lost["last_seq"]) == (wheel, 1, at_risk[wheel])


def _is_taken(service: Service, wheel: str) -> bool:
    (row,) = (row for row in service.status().wheels if row.wheel == wheel)
    return row.progress_seq == row.applied_seq


def _is_refused(service: Service) -> bool:
    seen = service.status()
    if not seen.HasField("leader") or not seen.members[0].storage_replaced:
        return False
    return "STORAGE_REPLACED" in seen.refusing.message
