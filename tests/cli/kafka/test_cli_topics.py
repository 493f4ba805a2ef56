"""`delaywheel topic create`, against a Kafka client that answers as scripted."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import pytest
from confluent_kafka import KafkaError, KafkaException

from delaywheel_replica.cli.doing.kafka import topics
from support.clients.command import Command


class Admin:
    """Remembers its settings and requests; refuses topics that are named after an error."""

    made: ClassVar[list[dict[str, str]]] = []
    asked: ClassVar[list[tuple[str, int, int]]] = []

    def __init__(self, settings: dict[str, str]) -> None:
        self.made.append(settings)

    def create_topics(self, wanted: list[Any], **_: object) -> dict[str, Future[None]]:
        answers = {}
        for new in wanted:
            self.asked.append((new.topic, new.num_partitions, new.replication_factor))
            answers[new.topic] = future = Future[None]()
            if code := REFUSED.get(new.topic):
                future.set_exception(KafkaException(KafkaError(code)))
            else:
                future.set_result(None)
        return answers


REFUSED = {
    "there": KafkaError.TOPIC_ALREADY_EXISTS,
    "forbidden": KafkaError.TOPIC_AUTHORIZATION_FAILED,
    "away": KafkaError._TRANSPORT,
}


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch) -> type[Admin]:
    monkeypatch.setattr(topics, "AdminClient", Admin)
    monkeypatch.setattr(Admin, "made", [])
    monkeypatch.setattr(Admin, "asked", [])
    return Admin


def test_topics_are_made_or_there(command: Command, admin: type[Admin]) -> None:
    ended = command("topic", "create", "orders", "there", "--kafka", "k:1")
    assert (ended.code, ended.out) == (0, "made: orders\nthere already: there\n")
    assert "all nodes accept messages for new topics" in ended.err
    assert admin.asked == [("orders", -1, -1), ("there", -1, -1)]
    assert admin.made[0]["bootstrap.servers"] == "k:1"


def test_settings_come_from_a_nodes_file(
    command: Command, admin: type[Admin], tmp_path: Path
) -> None:
    file = tmp_path / "node.toml"
    file.write_text(
        'cluster_id = "c"\nnode_id = "n"\ndata_dir = "/d"\n'
        '[kafka]\n"bootstrap.servers" = "k:1"\n"security.protocol" = "SSL"\n'
    )
    ended = command(
        *("topic", "create", "a", "--partitions", "12", "--replication-factor", "3"),
        *("--config", str(file), "--kafka-setting", "client.id=me"),
    )
    assert ended.code == 0
    assert admin.asked == [("a", 12, 3)]
    reported = {"bootstrap.servers": "k:1", "security.protocol": "SSL", "client.id": "me"}
    assert admin.made[0].items() >= reported.items()


@pytest.mark.usefixtures("admin")
@pytest.mark.parametrize(
    ("arguments", "code", "reported"),
    [
        (("forbidden", "--kafka", "k:1"), 1, "TOPIC_REFUSED: forbidden: "),
        (("away", "--kafka", "k:1"), 3, "KAFKA_UNREACHABLE: away: "),
        (("orders", "--server", "127.0.0.1:1"), 3, "UNAVAILABLE: "),
        (("orders", "--kafka", "k:1", "--partitions", "0"), 2, "USAGE: argument --partitions"),
        (("orders", "--config", "/none.toml"), 1, "CONFIG_INVALID: /none.toml: no such file"),
    ],
)
def test_what_kafka_refuses_has_a_name(
    command: Command, arguments: tuple[str, ...], code: int, reported: str
) -> None:
    ended = command("topic", "create", *arguments)
    assert ended.code == code
    assert ended.err.startswith(f"error: {reported}")


def test_a_setting_that_the_client_does_not_know_is_named(command: Command) -> None:
    ended = command("topic", "create", "a", "--kafka", "k:1", "--kafka-setting", "linger.msec=5")
    assert (ended.code, "linger.msec" in ended.err) == (1, True)
