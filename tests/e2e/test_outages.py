"""Kafka goes and comes back: acceptance continues, and everything is delivered once."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from delaywheel import Message
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.folder.node_file import load_node_state
from delaywheel_replica.kafka_settings import KafkaNames
from local.loopback.cluster import described
from local.loopback.kafka import KafkaBroker
from support.kafka.proxy import KafkaProxy
from support.kafka.read_committed import CommittedReader, create_topic, read_all
from support.services.service import Service
from support.services.waiting import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


def test_kafka_away_at_start_with_a_spare(
    kafka: KafkaBroker, tmp_path: Path, cluster_id: str
) -> None:
    """Nothing listens where the node looks for Kafka."""
    topic = f"orders-{cluster_id}"
    create_topic(kafka.address, topic)
    service = Service(kafka.proxy_address, tmp_path / "cluster", cluster_id, restart=False)
    with KafkaProxy(kafka):
        service.start()
        # The status shows a spare from its registration on: only a saved one outlives the kill.
        wait_until("the spare is saved", partial(_has_saved_spare, service))
        service.kill()
        service.stop()
    service.start(wait=False)
    try:
        with service.client(timeout=60.0) as client:
            handle = client.produce(topic, b"accepted alone", delay=timedelta(seconds=1))
            assert handle
        with KafkaProxy(kafka), CommittedReader(kafka.address, topic) as reader:
            reader.wait_for(1, timeout_s=90)
            assert [m.value() for m in reader.read_to_end()] == [b"accepted alone"]
            service.stop()
    finally:
        service.stop()


def _has_saved_spare(service: Service) -> bool:
    (file,) = service.data.rglob("node.json")
    state = load_node_state(PosixDisk(), file.parent)
    return state is not None and state.open is not None and state.spare is not None


def test_a_topic_that_takes_nothing_for_a_while(
    kafka: KafkaBroker, tmp_path: Path, cluster_id: str
) -> None:
    """Its messages come back through the ingress topic until it takes them."""
    stuck, good = f"stuck-{cluster_id}", f"good-{cluster_id}"
    create_topic(kafka.address, stuck)
    create_topic(kafka.address, good)
    with (
        KafkaProxy(kafka) as proxy,
        Service(kafka.proxy_address, tmp_path / "cluster", cluster_id) as service,
        service.client(timeout=20.0) as client,
    ):
        release = proxy.swallow_produces(stuck)
        delay = timedelta(seconds=1)
        for result in client.produce_many(
            [Message(each, b"1", delay=delay) for each in (stuck, good)]
        ):
            result.unwrap()
        with CommittedReader(kafka.address, good) as reader:
            reader.wait_for(1, timeout_s=60)
        wait_until("it is deferred again", lambda: _deferred(service) > 1)
        release()
        with CommittedReader(kafka.address, stuck) as reader:
            (record,) = reader.wait_for(1, timeout_s=60)
        headers: dict[str, bytes] = dict(record.headers() or [])  # type: ignore[arg-type]
        assert int(headers["dw-first-due"]) < int(headers["dw-due"])
        wait_until("it is well", lambda: not _deferred(service))
    assert not read_all(kafka.address, KafkaNames(cluster_id).dead)
    assert len(read_all(kafka.address, stuck)) == 1


def _deferred(service: Service) -> int:
    seen = described(service.address, details=True)
    reports = () if seen is None else (member.report for member in seen.members)
    return sum(each.deferred_messages for report in reports for each in report.unavailable)
