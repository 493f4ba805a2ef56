"""Kafka behind TLS and passwords, on a separate broker. About 12 s, most of it the broker."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from pyspark.sql import SparkSession

from delaywheel_audit.kafka.client import ClientSettings
from delaywheel_audit.kafka.errors import KafkaSourceError, Reason
from delaywheel_audit.kafka.plan import Plan, plan
from delaywheel_audit.kafka.questions import KafkaQuestions
from delaywheel_audit.sources.inputs import KafkaPlace
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


def settings(secured: str, certificate: Path, password: str = PASSWORD) -> dict[str, str]:
    return {
        "bootstrap.servers": secured,
        "security.protocol": "sasl_ssl",
        "ssl.ca.location": str(certificate),
        "sasl.mechanism": "PLAIN",
        "sasl.username": "reader",
        "sasl.password": password,
    }


def planned(values: dict[str, str]) -> Plan:
    return plan([TOPIC], KafkaQuestions(ClientSettings(values, timeout_s=30)))


def test_reads_through_tls_with_a_password(
    spark: SparkSession, secured: str, certificate: Path
) -> None:
    place = KafkaPlace(ClientSettings(settings(secured, certificate)), "shop")
    rows = place.read(spark, place.pin([TOPIC], None, None)).orderBy("offset").collect()
    assert [bytes(row.value) for row in rows] == numbered(20)


def test_a_wrong_password_is_said_at_once_and_not_shown(
    spark: SparkSession, secured: str, certificate: Path
) -> None:
    wrong = settings(secured, certificate, password="hush-wrong")
    with pytest.raises(KafkaSourceError) as caught:
        planned(wrong)
    assert caught.value.reason is Reason.AUTHENTICATION_FAILED
    assert "hush" not in "".join(traceback.format_exception(caught.value))
    # Changed since it was planned.
    place = KafkaPlace(ClientSettings(wrong), "shop")
    with pytest.raises(Exception) as failed:  # noqa: PT011 - Spark has several for it
        place.read(spark, planned(settings(secured, certificate))).collect()
    assert isinstance(failed.value, Exception)
    said = place.why(failed.value)
    assert said is not None
    assert said.reason is Reason.AUTHENTICATION_FAILED
    assert "hush" not in str(said)


def test_a_broker_that_is_not_trusted_is_said_at_once(secured: str, certificate: Path) -> None:
    given = settings(secured, certificate)
    del given["ssl.ca.location"]
    with pytest.raises(KafkaSourceError) as caught:
        planned(given)
    assert caught.value.reason is Reason.AUTHENTICATION_FAILED
    assert "certificate" in caught.value.message
