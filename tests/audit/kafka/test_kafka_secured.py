"""Kafka behind TLS and passwords, on a separate broker. About 12 s, most of it the broker."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from delaywheel_audit.kafka.errors import KafkaSourceError, Reason
from delaywheel_audit.kafka.options import SourceOptions
from delaywheel_audit.kafka.read import read_slice
from delaywheel_audit.kafka.source import pin
from local.loopback.kafka import KafkaBroker
from support.kafka.audit_topic import numbered
from support.kafka.safe_listener import listen_safely, make_certificate

pytestmark = pytest.mark.kafka

PASSWORD = "hush-hush"
TOPIC = "secured"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def secured(certificate: Path) -> Iterator[str]:
    """The address of a listener that wants TLS and a password."""
    users = f'username="broker" password="x" user_broker="x" user_reader="{PASSWORD}"'
    broker = KafkaBroker()
    safe = listen_safely(broker, certificate, {"PLAIN": users})
    with broker:
        admin = AdminClient({"bootstrap.servers": broker.address})
        admin.create_topics([NewTopic(TOPIC, num_partitions=1)])[TOPIC].result()
        producer = Producer({"bootstrap.servers": broker.address})
        for value in numbered(20):
            producer.produce(TOPIC, value)
        assert producer.flush(60) == 0
        yield safe


def options(secured: str, certificate: Path, password: str = PASSWORD) -> dict[str, str]:
    return {
        "topics": TOPIC,
        "timeoutMs": "30000",
        "kafka.bootstrap.servers": secured,
        "kafka.security.protocol": "sasl_ssl",
        "kafka.ssl.ca.location": str(certificate),
        "kafka.sasl.mechanism": "PLAIN",
        "kafka.sasl.username": "reader",
        "kafka.sasl.password": password,
    }


def test_reads_through_tls_with_a_password(secured: str, certificate: Path) -> None:
    given = options(secured, certificate)
    (piece,) = pin(given).slices(records=100, size=0)
    client = SourceOptions.of(given).client
    read = [m.value() for batch in read_slice(client, piece, timeout_s=30) for m in batch]
    assert read == numbered(20)


def test_reads_with_the_settings_file_of_a_node(
    secured: str, certificate: Path, tmp_path: Path
) -> None:
    given = options(secured, certificate)
    lines = [
        f'"{name.removeprefix("kafka.")}" = "{value}"'
        for name, value in given.items()
        if name.startswith("kafka.")
    ]
    file = tmp_path / "node.toml"
    head = ['cluster_id = "c"', 'node_id = "n"', 'data_dir = "/nowhere"', "[kafka]"]
    file.write_text("\n".join(head + lines))
    assert pin({"topics": TOPIC, "settings": str(file)}).ends() == {TOPIC: {0: 20}}


def test_a_wrong_password_is_said_at_once_and_not_shown(secured: str, certificate: Path) -> None:
    wrong = options(secured, certificate, password="hush-wrong")
    with pytest.raises(KafkaSourceError) as caught:
        pin(wrong)
    assert caught.value.reason is Reason.AUTHENTICATION_FAILED
    assert "hush" not in "".join(traceback.format_exception(caught.value))
    (piece,) = pin(options(secured, certificate)).slices(records=100, size=0)
    with pytest.raises(KafkaSourceError, match="AUTHENTICATION_FAILED"):
        list(read_slice(SourceOptions.of(wrong).client, piece, timeout_s=30))


def test_a_broker_that_is_not_trusted_is_said_at_once(secured: str, certificate: Path) -> None:
    given = options(secured, certificate)
    del given["kafka.ssl.ca.location"]
    with pytest.raises(KafkaSourceError) as caught:
        pin(given)
    assert caught.value.reason is Reason.AUTHENTICATION_FAILED
    assert "certificate" in caught.value.message
