"""`config check --connect`, with a real broker, ports and folders; rights: tests/e2e/test_acls."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from delaywheel_replica.cli.doing.checking import kafka as checking
from delaywheel_replica.cli.doing.checking.kafka import _answer, _Objections
from delaywheel_replica.cli.doing.checking.topics import topic_items
from delaywheel_replica.config import Config
from delaywheel_replica.kafka_settings import KafkaNames, KafkaSettings
from local.loopback.kafka import KafkaBroker, free_ports
from support.clients.command import Command
from support.kafka.read_committed import create_topic, topic_exists

pytestmark = pytest.mark.kafka


class Checks:
    """Checks a node's settings, and looks at single items."""

    def __init__(self, command: Command, cluster_id: str, kafka: str, data_dir: Path) -> None:
        (port,) = free_ports(1)
        self._command = command
        self._settings = {
            "cluster_id": cluster_id,
            "node_id": "n1",
            "data_dir": str(data_dir),
            "listen": f"127.0.0.1:{port}",
            "kafka.bootstrap.servers": kafka,
        }
        self.code = -1

    def __call__(self, *more: str, topics: tuple[str, ...] = ()) -> Mapping[str, Mapping[str, Any]]:
        settings = [f"{name}={value}" for name, value in self._settings.items()]
        flags = [word for setting in (*settings, *more) for word in ("--set", setting)]
        asked = [word for topic in topics for word in ("--topic", topic)]
        ended = self._command("config", "check", "--connect", "--json", *flags, *asked)
        self.code = ended.code
        return {item["what"]: item for item in ended.document["items"]}


@pytest.fixture
def check(command: Command, kafka: KafkaBroker, cluster_id: str, tmp_path: Path) -> Checks:
    return Checks(command, cluster_id, kafka.address, tmp_path / "to" / "come")


def create(kafka: KafkaBroker, name: str, partitions: int = 1, **config: str) -> None:
    settings = {k.replace("_", "."): v for k, v in config.items()}
    create_topic(kafka.address, name, partitions=partitions, config=settings)


def test_what_is_in_order_and_nothing_is_changed(
    check: Checks, kafka: KafkaBroker, cluster_id: str, tmp_path: Path
) -> None:
    create(kafka, f"{cluster_id}-orders", 3)
    items = check(topics=(f"{cluster_id}-orders",))
    unfit = [item for what, item in items.items() if what != "clock" and item["level"] != "ok"]
    assert (check.code, unfit) == (0, [])
    names = KafkaNames(cluster_id)
    for topic in (names.control, names.outcomes, names.dead, names.ingress):
        assert items[f"topic {topic}"]["text"] == "missing, and will be created"
        assert not topic_exists(kafka.address, topic)
    orders = items[f"topic {cluster_id}-orders"]["text"]
    assert orders.startswith("3 partitions, 1 replica, delete, ")
    assert items["broker 1"]["text"].endswith("Kafka 4.0 or later")
    assert not list(tmp_path.iterdir())


def test_topics_that_stop_forwarding_or_make_dead_letters(
    check: Checks, kafka: KafkaBroker, cluster_id: str
) -> None:
    names = KafkaNames(cluster_id)
    create(kafka, names.control, cleanup_policy="compact")
    create(kafka, names.outcomes, cleanup_policy="compact", max_message_bytes="1000")
    create(kafka, names.dead, max_message_bytes="1100000")
    create(kafka, names.ingress, cleanup_policy="compact")
    keyed = f"{cluster_id}-keyed"
    create(kafka, keyed, cleanup_policy="compact", max_message_bytes="500000")
    items = check("create_topics=false", topics=(keyed, f"{cluster_id}-none"))
    assert check.code == 1
    outcomes = items[f"topic {names.outcomes}"]
    assert outcomes["level"] == "fault"
    assert "raise its max.message.bytes" in outcomes["advice"]
    risk = items[f"topic {names.control}"]
    assert (risk["level"], "LogAppendTime" in risk["advice"]) == ("warning", True)
    assert items[f"topic {names.dead}"]["level"] == "ok"
    assert items[f"topic {names.ingress}"]["level"] == "fault"
    assert items[f"topic {keyed}"]["level"] == "warning"
    absent = items[f"topic {cluster_id}-none"]
    assert (absent["level"], "topic create" in absent["advice"]) == ("fault", True)
    made = check("create_topics=true", topics=(f"{cluster_id}-none",))
    assert made[f"topic {cluster_id}-none"]["level"] == "ok"


def test_a_topic_that_keeps_less_than_a_delay_takes_no_timestamps_of_messages_own(
    check: Checks, kafka: KafkaBroker, cluster_id: str
) -> None:
    """Kafka deletes by a record's timestamp, which may be that of its sending."""
    brief, stamped = f"{cluster_id}-brief", f"{cluster_id}-stamped"
    create(kafka, brief, retention_ms="3600000")
    create(kafka, stamped, retention_ms="3600000", message_timestamp_type="LogAppendTime")
    items = check(topics=(brief, stamped))
    found = items[f"topic {brief}"]
    assert (check.code, found["level"]) == (0, "warning")
    assert found["text"].startswith("retention.ms=3600000 is less than the greatest delay")
    assert items[f"topic {stamped}"]["level"] == "ok"


class MakesNone:
    """A Kafka that knows no topics, and makes none: for lack of a right, say."""

    def __init__(self, code: int = KafkaError.TOPIC_AUTHORIZATION_FAILED) -> None:
        self._code = code

    def describe_topics(self, topics: Any, **_: Any) -> Mapping[str, Future[Any]]:
        names = (topics.topic_names, KafkaError.UNKNOWN_TOPIC_OR_PART)
        return self._failed(*names)

    def create_topics(self, new: list[NewTopic], **_: Any) -> Mapping[str, Future[Any]]:
        return self._failed([each.topic for each in new], self._code)

    def _failed(self, names: Iterable[str], code: int) -> Mapping[str, Future[Any]]:
        failed: Future[Any] = Future()
        failed.set_exception(KafkaException(KafkaError(code)))
        return dict.fromkeys(names, failed)


def test_a_missing_halves_topic_is_no_fault() -> None:
    """Nodes lead without it, and refuse halves."""
    names = KafkaNames("c")
    settings = KafkaSettings(names, {}, halves=True)
    config = SimpleNamespace(kafka_settings=settings, taken_topics=(), create_topics=False)
    items = topic_items(cast("AdminClient", MakesNone()), cast("Config", config), (), brokers=1)
    levels = {item.what: (item.level, item.text) for item in items}
    text = "it is missing, and may not be created"
    assert levels == {
        f"topic {names.control}": ("fault", text),
        f"topic {names.outcomes}": ("fault", text),
        f"topic {names.dead}": ("fault", text),
        f"topic {names.halves}": ("warning", text),
    }


def test_a_topic_that_was_just_made_is_not_called_missing() -> None:
    """The broker that is asked may not know it yet, when the controller does."""
    config = SimpleNamespace(
        kafka_settings=KafkaSettings(KafkaNames("c"), {}), taken_topics=(), create_topics=True
    )
    kafka = cast("AdminClient", MakesNone(KafkaError.TOPIC_ALREADY_EXISTS))
    items = {
        item.what: item for item in topic_items(kafka, cast("Config", config), ["new"], brokers=1)
    }
    new = items["topic new"]
    assert (new.level, new.advice) == ("warning", "check again")


def test_clocks_are_compared_by_what_a_leader_wrote(
    check: Checks, kafka: KafkaBroker, cluster_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Here nobody writes on: what was written last is as old as a busy machine makes it.
    monkeypatch.setattr(checking, "_CLOCKS_MS", 60_000)
    control = KafkaNames(cluster_id).control
    create(kafka, control, cleanup_policy="compact")
    assert "not compared" in check()["kafka's clock"]["text"]
    producer = Producer({"bootstrap.servers": kafka.address})
    for ahead_s, level, text in ((0, "ok", "agrees"), (3_600, "warning", "ahead of this")):
        stamp_ms = int((time.time() + ahead_s) * 1000)
        producer.produce(control, b"v", b"k", timestamp=stamp_ms)
        assert producer.flush(60) == 0
        item = check()["kafka's clock"]
        assert (item["level"], text in item["text"]) == (level, True)


def test_a_machine_without_room_or_ports(check: Checks, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = "{}:{}".format(*taken.getsockname())
        items = check(f"metrics_listen={address}", f"disk_reserve_bytes={1 << 60}")
    assert check.code == 1
    assert items["disk"]["level"] == "fault"
    assert items["metrics_listen"]["level"] == "fault"
    assert items["listen"]["level"] == "ok"
    assert check("listen=192.0.2.1:7420", "insecure=true")["listen"]["level"] == "fault"
    assert not list(tmp_path.iterdir())


def test_peers_are_tried(check: Checks) -> None:
    mine, nobody = free_ports(2)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        items = check(
            f"members.n1=127.0.0.1:{mine}",
            f"members.n2=127.0.0.1:{listening.getsockname()[1]}",
            f"members.n3=127.0.0.1:{nobody}",
            "members.n4=nowhere.invalid:1",
        )
    assert check.code == 0, "others may not be started yet"
    levels = {what: item["level"] for what, item in items.items() if what.startswith("peer ")}
    assert levels == {"peer n2": "ok", "peer n3": "warning", "peer n4": "warning"}
    assert "nothing listens there" in items["peer n3"]["text"]
    assert items["peer_listen"]["level"] == "ok"


def test_kafka_that_does_not_answer_is_another_exit_code(check: Checks) -> None:
    (nobody,) = free_ports(1)
    items = check(f"kafka.bootstrap.servers=127.0.0.1:{nobody}")
    assert check.code == 3
    assert items["kafka"]["level"] == "away"
    assert "Connection refused" in items["kafka"]["text"]


@pytest.mark.parametrize(
    "wrong", ["bootstrap.servers=nowhere.invalid:9092", "security.protocol=SSL"]
)
def test_kafka_that_the_settings_do_not_fit_is_a_fault(check: Checks, wrong: str) -> None:
    items = check(f"kafka.{wrong}")
    assert (check.code, items["kafka"]["level"]) == (1, "fault")
    assert "correct the settings in [kafka]" in items["kafka"]["advice"]


class AnswersLate:
    """A Kafka that needs more than a second for an answer; no time passes here.

    Attributes:
        waited_s: For how long each question was waited for.
    """

    def __init__(self, objections: _Objections, refusal: KafkaError | None = None) -> None:
        self.waited_s: list[float] = []
        self._objections = objections
        self._refusal = refusal

    def list_topics(self, _topic: str, timeout: float) -> SimpleNamespace:
        self.waited_s.append(timeout)
        if timeout < 1.5 or self._refusal is not None:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return SimpleNamespace(brokers={1: "b"})

    def poll(self, _timeout_s: float) -> None:
        if self._refusal is not None:
            self._objections(self._refusal)


def test_kafka_that_takes_longer_than_the_first_try_is_not_away() -> None:
    """Each question was waited for half a second, and dropped: for 15 s, in vain."""
    objections = _Objections()
    late = AnswersLate(objections)
    assert len(_answer(cast("AdminClient", late), "t", objections)) == 1
    assert late.waited_s == [0.5, 1.0, 2.0]


def test_what_the_client_objects_to_is_heard_after_the_first_question() -> None:
    objections = _Objections()
    late = AnswersLate(objections, KafkaError(KafkaError._AUTHENTICATION, "wrong password"))
    with pytest.raises(KafkaException):
        _answer(cast("AdminClient", late), "t", objections)
    assert (late.waited_s, objections.refusal) == ([0.5], "wrong password")


def test_people_read_what_to_do_below(command: Command, kafka: KafkaBroker, tmp_path: Path) -> None:
    flags = (
        "cluster_id=c",
        "node_id=n",
        f"data_dir={tmp_path}",
        "listen=192.0.2.1:1",
        "insecure=true",
    )
    sets = [
        word
        for each in (*flags, f"kafka.bootstrap.servers={kafka.address}")
        for word in ("--set", each)
    ]
    ended = command("config", "check", "--connect", *sets)
    assert ended.code == 1
    assert "- listen: set listen to an address of this machine" in ended.out
    assert command("config", "check", "--topic", "orders", *sets).code == 2
