"""The options of a read, and that secrets stay secret. No Kafka: milliseconds."""

from __future__ import annotations

import pickle
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from confluent_kafka import Consumer

from delaywheel_audit.kafka import options as kafka_options
from delaywheel_audit.kafka.errors import KafkaSourceError, Reason, reason_of
from delaywheel_audit.kafka.options import SourceOptions
from delaywheel_audit.kafka.questions import KafkaQuestions, made
from delaywheel_replica import hiding

BASE = {"kafka.bootstrap.servers": "a:1", "topics": "one"}


def refusal(options: dict[str, str]) -> KafkaSourceError:
    with pytest.raises(KafkaSourceError) as caught:
        SourceOptions.of(options)
    return caught.value


def test_reads_options_in_any_case() -> None:
    options = SourceOptions.of(
        {
            "KAFKA.bootstrap.servers": "a:1,b:2",
            "TOPICS": "one, two,one",
            "startingtimestampms": "5",
            "endingTimestampMs": "7",
            "columns": "offset,key",
            "recordsPerPartition": "10",
            "timeoutMs": "1500",
            "missingTopics": "skip",
        }
    )
    assert options.topics == ("one", "two")
    assert (options.starting_ms, options.ending_ms) == (5, 7)
    assert options.columns == ("offset", "key")
    assert options.records_per_partition == 10
    assert options.timeout_s == 1.5
    assert options.skips_missing
    assert options.client.values == {"bootstrap.servers": "a:1,b:2"}


def test_topics_may_be_a_json_list() -> None:
    assert SourceOptions.of(BASE | {"topics": '["one", "two"]'}).topics == ("one", "two")


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({"topic": "one"}, "topic"),
        ({"path": "/x"}, "path"),
        ({"topics": "one,,two"}, "topics"),
        ({"topics": "[1]"}, "topics"),
        ({"topics": '["one"'}, "topics"),
        ({"topicsPattern": "one"}, "exactly one"),
        ({"topics": "", "topicsPattern": "one("}, "topicsPattern"),
        ({"ranges": "{}"}, "exactly one"),
        ({"startingTimestampMs": "now"}, "startingTimestampMs"),
        ({"startingTimestampMs": "-1"}, "startingTimestampMs"),
        ({"endingTimestampMs": "9" * 19}, "endingTimestampMs"),
        ({"startingTimestampMs": "7", "endingTimestampMs": "6"}, "before"),
        ({"recordsPerPartition": "0"}, "recordsPerPartition"),
        ({"recordsPerPartition": "1", "bytesPerPartition": "1"}, "not both"),
        ({"missingTopics": "yes"}, "missingTopics"),
        ({"kafka.isolation.level": "read_uncommitted"}, "isolation.level"),
        ({"kafka.auto.offset.reset": "earliest"}, "auto.offset.reset"),
        ({"kafka.error_cb": "print"}, "error_cb"),
        ({"kafka.bootstrap.servers": ""}, "bootstrap.servers"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(more: dict[str, str], names: str) -> None:
    error = refusal(BASE | more)
    assert error.reason is Reason.OPTION_INVALID
    assert names in error.message


def test_ranges_take_no_timestamps() -> None:
    error = refusal({"kafka.bootstrap.servers": "a:1", "ranges": "{}", "startingTimestampMs": "5"})
    assert "ranges" in error.message


def test_takes_the_kafka_settings_of_a_node(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(
        'cluster_id = "c"\nnode_id = "n"\ndata_dir = "/nowhere"\n'
        '[kafka]\n"bootstrap.servers" = "a:1"\n"client.id" = "node"\n'
        '"sasl.password" = "hush"\n"compression.type" = "zstd"\n'
    )
    options = SourceOptions.of({"settings": str(file), "topics": "x", "kafka.client.id": "audit"})
    assert options.client.values["sasl.password"] == "hush"
    assert options.client.values["client.id"] == "audit"
    # Settings of producers are no hindrance.
    made(options.client, lambda: Consumer(options.client.consumer())).close()
    KafkaQuestions(options.client, timeout_s=1)


@pytest.mark.parametrize("text", [None, "cluster_id = 'c'\n", "nonsense"])
def test_a_settings_file_that_is_none_is_named(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "node.toml"
    if text is not None:
        file.write_text(text)
    error = refusal({"settings": str(file), "topics": "x"})
    assert error.reason is Reason.SETTINGS_UNREADABLE
    assert str(file) in error.message


@pytest.mark.parametrize(
    ("name", "value"),
    [("no.such.setting", "1"), ("security.protocol", "sometimes"), ("ssl.key.pem", "s3cret")],
)
def test_settings_that_the_client_refuses_end_by_name_without_secrets(
    name: str, value: str
) -> None:
    others = {"kafka.security.protocol": "ssl", "kafka.sasl.password": "hushhush"}
    options = SourceOptions.of(BASE | others | {f"kafka.{name}": value})
    with pytest.raises(KafkaSourceError) as caught:
        KafkaQuestions(options.client, timeout_s=1)
    assert caught.value.reason is Reason.CLIENT_REFUSED
    reported = "".join(traceback.format_exception(caught.value))
    assert name in reported
    assert "hushhush" not in reported
    assert "s3cret" not in reported


def test_secrets_are_in_no_text() -> None:
    secrets = {
        "kafka.sasl.password": "hush-1",
        "kafka.ssl.key.password": "hush-2",
        "kafka.sasl.oauthbearer.client.secret": "hush-3",
        "kafka.sasl.oauthbearer.config": "hush-4",
        "kafka.ssl.key.pem": "hush-5",
    }
    options = SourceOptions.of(BASE | secrets)
    assert "hush" not in repr(options) + str(options.client)
    assert options.client.masked("of hush-1 and hush-5") == "of ******** and ********"


@pytest.mark.parametrize(
    "name",
    [
        *("sasl.password", "SASL.JAAS.config", "ssl.key.pem", "sasl.oauthbearer.config"),
        *("sasl.oauthbearer.client.secret", "x.token", "client.id", "ssl.key.location", "acks"),
    ],
)
def test_what_is_a_secret_here_is_one_everywhere(name: str) -> None:
    assert kafka_options.is_secret(name) == hiding.is_secret(name)
    assert (kafka_options._HARMLESS, kafka_options.HIDDEN) == (hiding._HARMLESS, hiding.HIDDEN)


def test_what_executors_import_needs_none_of_the_other_packages() -> None:
    """Only this package is sent to them."""
    reported = (
        "import sys; sys.modules.update(dict.fromkeys(('delaywheel', 'delaywheel_replica')))\n"
    )
    reported += "import delaywheel_audit.kafka.source"
    ended = subprocess.run([sys.executable, "-c", reported], capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_goes_to_the_executors_as_it_is() -> None:
    options = SourceOptions.of(BASE | {"kafka.sasl.password": "hush"})
    assert pickle.loads(pickle.dumps(options)) == options


def test_a_reason_is_found_in_what_spark_makes_of_it() -> None:
    ours = KafkaSourceError(Reason.OFFSETS_GONE, "t [0]: gone")
    sparks = RuntimeError(f"Job aborted: {''.join(traceback.format_exception(ours))}\n\tat org.x")
    found = reason_of(sparks)
    assert found is not None
    assert (found.reason, found.message) == (Reason.OFFSETS_GONE, "t [0]: gone")
    assert reason_of(ours) is ours
    assert reason_of(pickle.loads(pickle.dumps(ours))) is not None
    assert reason_of(RuntimeError("KafkaSourceError: NONE_OF_OURS: x")) is None
