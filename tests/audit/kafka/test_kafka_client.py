"""One set of settings for both clients, and that secrets stay secret. No Kafka: milliseconds."""

from __future__ import annotations

import traceback
from pathlib import Path

import pyspark
import pytest

from delaywheel_audit.kafka.client import ClientSettings
from delaywheel_audit.kafka.errors import KafkaSourceError, Reason, reason_in_java
from delaywheel_audit.kafka.jars import JARS_VARIABLE, settings_of_the_connector
from delaywheel_audit.kafka.questions import KafkaQuestions

BASE = {"bootstrap.servers": "a:1"}
PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule required"
SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule required"


PEM, OAUTH = {"ssl.truststore.type": "PEM"}, {"sasl.mechanism": "OAUTHBEARER"}


@pytest.mark.parametrize(
    ("ours", "javas"),
    [
        ({"client.id": "me"}, {"client.id": "me"}),
        ({"security.protocol": "sasl_ssl"}, {"security.protocol": "SASL_SSL"}),
        ({"ssl.ca.location": "/ca"}, PEM | {"ssl.truststore.location": "/ca"}),
        ({"ssl.ca.pem": "CA"}, PEM | {"ssl.truststore.certificates": "CA"}),
        (
            {"ssl.certificate.pem": "CHAIN", "ssl.key.pem": "KEY", "ssl.key.password": "p"},
            {
                "ssl.keystore.type": "PEM",
                "ssl.keystore.certificate.chain": "CHAIN",
                "ssl.keystore.key": "KEY",
                "ssl.key.password": "p",
            },
        ),
        (
            (store := {"ssl.keystore.location": "/k", "ssl.keystore.password": "p"}),
            store | {"ssl.keystore.type": "PKCS12"},
        ),
        (
            {"ssl.endpoint.identification.algorithm": "none"},
            {"ssl.endpoint.identification.algorithm": ""},
        ),
        ({"ssl.endpoint.identification.algorithm": "https"}, {}),
        (
            {"sasl.mechanism": "PLAIN", "sasl.username": 'a"b', "sasl.password": "c\\d"},
            {
                "sasl.mechanism": "PLAIN",
                "sasl.jaas.config": PLAIN + ' username="a\\"b" password="c\\\\d";',
            },
        ),
        (
            {"sasl.mechanisms": "SCRAM-SHA-512", "sasl.username": "a", "sasl.password": "b"},
            {
                "sasl.mechanism": "SCRAM-SHA-512",
                "sasl.jaas.config": SCRAM + ' username="a" password="b";',
            },
        ),
        ({"compression.type": "zstd", "queued.min.messages": "1"}, {}),
        (OAUTH | {"spark.sasl.jaas.config": "x"}, OAUTH | {"sasl.jaas.config": "x"}),
    ],
)
def test_javas_client_is_told_what_decides_how_kafka_is_reached(
    ours: dict[str, str], javas: dict[str, str]
) -> None:
    assert ClientSettings(BASE | ours).java() == BASE | javas


def test_a_certificate_in_files_is_given_as_text(tmp_path: Path) -> None:
    (tmp_path / "chain").write_text("CHAIN")
    (tmp_path / "key").write_text("-----BEGIN PRIVATE KEY-----")
    files = {f"ssl.{what}.location": str(tmp_path / file) for what, file in
             (("certificate", "chain"), ("key", "key"))}  # fmt: skip
    java = ClientSettings(BASE | files).java()
    assert java["ssl.keystore.certificate.chain"] == "CHAIN"
    assert java["ssl.keystore.key"] == "-----BEGIN PRIVATE KEY-----"
    (tmp_path / "key").write_text("-----BEGIN RSA PRIVATE KEY-----")
    with pytest.raises(KafkaSourceError, match=r"CLIENT_REFUSED: .*openssl pkcs8"):
        ClientSettings(BASE | files).java()
    (tmp_path / "key").unlink()
    with pytest.raises(KafkaSourceError, match=r"CLIENT_REFUSED: ssl.key.location: .*cannot be"):
        ClientSettings(BASE | files).java()


@pytest.mark.parametrize(
    "name",
    ["enable.ssl.certificate.verification", "ssl.providers", "sasl.oauthbearer.client.secret"],
)
def test_what_javas_client_cannot_be_told_is_refused_by_name(name: str) -> None:
    with pytest.raises(KafkaSourceError) as caught:
        ClientSettings(BASE | {name: "hush"}).java()
    assert caught.value.reason is Reason.CLIENT_REFUSED
    assert name in caught.value.message
    assert "hush" not in caught.value.message


@pytest.mark.parametrize(
    ("name", "value"),
    [("no.such.setting", "1"), ("security.protocol", "sometimes"), ("ssl.key.pem", "s3cret")],
)
def test_settings_that_the_client_refuses_end_by_name_without_secrets(
    name: str, value: str
) -> None:
    others = {"security.protocol": "ssl", "sasl.password": "hushhush"}
    with pytest.raises(KafkaSourceError) as caught:
        KafkaQuestions(ClientSettings(BASE | others | {name: value}))
    assert caught.value.reason is Reason.CLIENT_REFUSED
    reported = "".join(traceback.format_exception(caught.value))
    assert name in reported
    assert "hushhush" not in reported
    assert "s3cret" not in reported


def test_secrets_are_in_no_text() -> None:
    names = "sasl.password", "ssl.key.password", "ssl.key.pem", "spark.sasl.jaas.config"
    client = ClientSettings(BASE | {name: f"hush-{n}" for n, name in enumerate(names)})
    assert "hush" not in repr(client)
    assert client.masked("of hush-0, hush-2 and hush-3") == "of ********, ******** and ********"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("org.apache.kafka.common.errors.TopicAuthorizationException: Not", Reason.ACCESS_DENIED),
        ("Caused by: org…SaslAuthenticationException: no", Reason.AUTHENTICATION_FAILED),
        ("CorruptRecordException: Record size", Reason.RECORD_UNREADABLE),
        ("java.util.concurrent.TimeoutException: Cannot fetch record", Reason.BROKER_AWAY),
        ("java.io.FileNotFoundException: part-0.parquet", None),
    ],
)
def test_what_javas_client_says_has_a_name(said: str, reason: Reason | None) -> None:
    assert reason_in_java(said) is reason


def test_spark_fetches_its_connector_unless_a_folder_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(JARS_VARIABLE, raising=False)
    package = settings_of_the_connector()["spark.jars.packages"]
    assert package == f"org.apache.spark:spark-sql-kafka-0-10_2.13:{pyspark.__version__}"
    for name in ("b.jar", "a.jar", "a.txt"):
        (tmp_path / name).touch()
    monkeypatch.setenv(JARS_VARIABLE, str(tmp_path))
    assert settings_of_the_connector() == {"spark.jars": f"{tmp_path}/a.jar,{tmp_path}/b.jar"}
    monkeypatch.setenv(JARS_VARIABLE, str(tmp_path / "absent"))
    with pytest.raises(FileNotFoundError):
        settings_of_the_connector()
    monkeypatch.setenv(JARS_VARIABLE, "")
    assert settings_of_the_connector() == {}
