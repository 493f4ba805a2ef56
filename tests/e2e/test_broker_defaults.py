"""A broker whose defaults are not Kafka's: its own timestamps, compression, small messages, topics
that are made for whoever asks, and records that are deleted as soon as their time has passed."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from confluent_kafka import (
    TIMESTAMP_LOG_APPEND_TIME,
    Consumer,
    KafkaError,
    Producer,
    TopicPartition,
)

from delaywheel import Client, RefusedError, ingress
from local.loopback.cluster import LocalCluster
from local.loopback.kafka import KafkaBroker
from support.kafka.read_committed import PATIENCE_S, CommittedReader, create_topic, headers_of
from support.services.trio import NO_METRICS
from support.services.waiting import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

CLUSTER = "odd"
DEFAULTS = {
    "message.max.bytes": "20000",
    "log.message.timestamp.type": "LogAppendTime",
    "compression.type": "zstd",
    "auto.create.topics.enable": "true",
    "log.retention.check.interval.ms": "1000",
    "log.initial.task.delay.ms": "1000",
}
SOON = timedelta(milliseconds=300)
LONG_AGO = datetime.now(UTC) - timedelta(days=40)


@pytest.fixture(scope="module")
def broker() -> Iterator[KafkaBroker]:
    with KafkaBroker(heap="512m", settings=DEFAULTS) as running:
        yield running


@pytest.fixture(scope="module")
def client(broker: KafkaBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("cluster")
    settings = {"cluster_id": CLUSTER, **NO_METRICS}
    with LocalCluster(kafka=broker.address, folder=folder, settings=settings) as cluster:
        cluster.wait_until_accepting()
        with Client(cluster.nodes[0].address) as connected:
            yield connected


def test_a_topic_takes_what_it_says_whatever_the_broker_says(
    broker: KafkaBroker, client: Client
) -> None:
    small, large = "small", "large"
    create_topic(broker.address, small)
    create_topic(broker.address, large, config={"max.message.bytes": "1200000"})
    with CommittedReader(broker.address, large) as reader:
        client.produce(large, b"x" * 500_000, delay=SOON)
        assert len(reader.wait_for(1)[0].value() or b"") == 500_000
    with pytest.raises(RefusedError, match="small accepts"):
        client.produce(small, b"x" * 30_000, delay=SOON)


def test_the_brokers_timestamps_are_in_the_place_of_callers(
    broker: KafkaBroker, client: Client
) -> None:
    topic = "stamped"
    create_topic(broker.address, topic)
    began_ms = time.time() * 1000
    with CommittedReader(broker.address, topic) as reader:
        client.produce(topic, b"by gRPC", timestamp=LONG_AGO, delay=SOON)
        (got,) = reader.wait_for(1)
        kind, timestamp_ms = got.timestamp()
        assert kind == TIMESTAMP_LOG_APPEND_TIME
        assert timestamp_ms >= began_ms
        # And delays count from there in an ingress topic.
        producer = Producer({"bootstrap.servers": broker.address})
        headers: list[tuple[str, str | bytes | None]] = [
            (ingress.TOPIC, topic.encode()),
            (ingress.DELAY_MS, b"300"),
        ]
        old_ms = round(LONG_AGO.timestamp() * 1000)
        producer.produce(
            ingress.ingress_topic(CLUSTER), b"by ingress", headers=headers, timestamp=old_ms
        )
        assert producer.flush(PATIENCE_S) == 0
        delayed = reader.wait_for(2)[1]
    assert int(dict(headers_of(delayed))["dw-due"] or b"") >= began_ms + 300


def test_an_old_timestamp_of_the_callers_own_is_deleted_by_a_short_retention(
    broker: KafkaBroker, client: Client
) -> None:
    topic = "short"
    create_topic(
        broker.address,
        topic,
        config={"message.timestamp.type": "CreateTime", "retention.ms": "3600000"},
    )
    client.produce(topic, b"old", timestamp=LONG_AGO, delay=SOON)
    watcher = Consumer({"bootstrap.servers": broker.address, "group.id": topic})
    at = TopicPartition(topic, 0)
    wait_until("Kafka has deleted it", lambda: watcher.get_watermark_offsets(at)[0] > 0)
    client.produce(topic, b"new", delay=SOON)
    with CommittedReader(broker.address, topic) as reader:
        assert reader.wait_for(1)[0].value() == b"new"
    watcher.close()


CHECK_ON = """
import sys
from delaywheel_replica.cleaner.kafka.clients import KafkaClients
from delaywheel_replica.cleaner.outside.ports import KafkaAway
from delaywheel_replica.kafka_settings import KafkaNames, KafkaSettings

servers, cluster = sys.argv[1:]
clients = KafkaClients(KafkaSettings(KafkaNames(cluster), {"bootstrap.servers": servers}))
while True:
    try:
        print(clients.check(has_wheels=False), flush=True)
    except KafkaAway as away:
        print(away, flush=True)
"""


def test_a_kafka_without_brokers_ends_no_process(broker: KafkaBroker, cluster_id: str) -> None:
    """A controller that does not hear from brokers takes them off its list; they answer on.

    And to ask for the brokers makes no topic, on those that make what anybody asks about. Nothing
    can be done with this broker afterwards.
    """
    checking = subprocess.Popen(
        [sys.executable, "-c", CHECK_ON, broker.address, cluster_id],
        stdout=subprocess.PIPE,
        text=True,
    )
    with checking:
        assert checking.stdout is not None
        assert any(line.startswith("Checked(") for line in checking.stdout)
        take_off_the_list(broker)
        is_reported = any("fenced all brokers" in line for line in checking.stdout)
        checking.kill()
    broker.kill()
    assert is_reported, f"it ended with {checking.returncode}"


def take_off_the_list(broker: KafkaBroker) -> None:
    """Has the controller forget its only broker, which runs on: as if it were fenced for good."""
    unregister_broker, version, correlation, no_tags = 64, 0, 1, b"\0"
    head = struct.pack(">hhih", unregister_broker, version, correlation, -1) + no_tags
    request = head + struct.pack(">i", 1) + no_tags
    host, _, port = broker.address.partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(struct.pack(">i", len(request)) + request)
        reply = connection.recv(1024)
    # Length, correlation id, tags, throttle time, error.
    assert struct.unpack_from(">h", reply, 13) == (KafkaError.NO_ERROR,)
