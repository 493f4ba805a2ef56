"""`delaywheel dead`, on the real Kafka."""

from __future__ import annotations

from base64 import b64decode
from pathlib import Path

import pytest
from confluent_kafka import Producer

from delaywheel.deadletters import (
    DeadLetterTopic,
    Selection,
    dead_letter_topic,
    undecided_topic,
)
from delaywheel.deadletters.marks import MARKS_SUFFIX
from local.loopback.kafka import KafkaBroker
from support.clients.command import Command, Ended
from support.kafka.read_committed import create_topic, read_all, wait_decided

pytestmark = pytest.mark.kafka

ID = "0190163d8694739b8d3f8a4d6a1f5d10"


class Dead:
    """The command, with options that name letters."""

    def __init__(self, command: Command, kafka: KafkaBroker, cluster_id: str) -> None:
        self._command = command
        self.address, self.cluster = kafka.address, cluster_id
        self.orders = f"orders-{cluster_id}"
        create_topic(self.address, self.orders)
        create_topic(self.address, dead_letter_topic(cluster_id))
        producer = Producer({"bootstrap.servers": self.address})
        for number, reason in enumerate(["TOPIC_MISSING"] * 3 + ["EXPIRED"] * 2):
            producer.produce(
                dead_letter_topic(cluster_id),
                key=b"k%d" % number,
                value=b"v%d" % number,
                headers=[
                    ("trace", b"t%d" % number),
                    ("dw-id", ID.encode() if number == 2 else b"%032x" % number),
                    ("dw-dead-reason", reason.encode()),
                    ("dw-dead-topic", self.orders.encode()),
                ],
            )
        assert producer.flush(30) == 0

    def __call__(self, *arguments: str) -> Ended:
        where = ("--kafka", self.address, "--cluster", self.cluster)
        ended = self._command("dead", *arguments, *where)
        if "--execute" in arguments and ended.code == 0:  # the next command is to see it
            wait_decided(self.address, f"{dead_letter_topic(self.cluster)}{MARKS_SUFFIX}")
        return ended

    def arrived(self, at_least: int) -> list[bytes | None]:
        return [
            message.value() for message in read_all(self.address, self.orders, at_least=at_least)
        ]


@pytest.fixture
def dead(command: Command, kafka: KafkaBroker, cluster_id: str) -> Dead:
    return Dead(command, kafka, cluster_id)


def test_letters_are_listed_counted_and_shown(dead: Dead) -> None:
    listed = dead("list", "--json").document
    assert [row["place"] for row in listed["letters"]] == [f"0:{n}" for n in range(5)]
    assert listed["complete"]
    assert listed["counts"] == [
        {"topic": dead.orders, "reason": "EXPIRED", "waiting": 2, "replayed": 0, "dropped": 0},
        {
            "topic": dead.orders,
            "reason": "TOPIC_MISSING",
            "waiting": 3,
            "replayed": 0,
            "dropped": 0,
        },
    ]
    for filters, places in {
        ("--reason", "EXPIRED"): ["0:3", "0:4"],
        ("--id", ID): ["0:2"],
        ("--key", "k1"): ["0:1"],
        ("--header", "trace=t4"): ["0:4"],
        ("--header", "trace", "--limit", "1"): ["0:0"],
        ("--topic", "mails"): [],
        ("--to", "now-1h"): [],
        ("--from", "now-1h", "--reason", "EXPIRED"): ["0:3", "0:4"],
    }.items():
        assert [
            row["place"] for row in dead("list", *filters, "--json").document["letters"]
        ] == places
    assert "there are more: --limit 20" in dead("list", "--limit", "2").err
    assert dead("list", "--counts").out.split()[:2] == ["topic", "reason"]
    rows = dead("list", "--ndjson").out.splitlines()
    assert len(rows) == 5
    first = dead("list", "--ndjson", "--limit", "2")
    assert (len(first.out.splitlines()), "there are more" in first.err) == (2, True)
    shown = dead("show", "0:2", "--json").document
    assert (shown["id"], shown["state"], b64decode(shown["value"])) == (ID, "waiting", b"v2")
    ended = dead("show", "0:77")
    assert (ended.code, ended.err.split(":")[1]) == (1, " LETTER_MISSING")


def test_nothing_is_done_unless_it_is_said(dead: Dead) -> None:
    ended = dead("replay", "--reason", "TOPIC_MISSING")
    assert ended.code == 0
    assert "nothing was done: --execute will replay 3 letters" in ended.out
    reported = dead("replay", "--reason", "TOPIC_MISSING", "--limit", "2", "--json").document
    assert (reported["executed"], reported["would"]) == (False, 2)
    assert "nothing was done: --execute will replay 1 letter" in dead("replay", "--id", ID).out
    assert "nothing was done: --execute will drop 1 letter" in dead("drop", "0:2").out
    assert dead("replay", "--id", ID, "--execute").out == "replayed: 1 letter\n"
    assert dead.arrived(1) == [b"v2"]
    assert "nothing to do" in dead("replay", "--id", ID).out
    assert dead("show", "0:2", "--json").document["settled"]["to"] is None
    reported = dead("replay", "--reason", "TOPIC_MISSING", "--execute", "--json").document
    assert (reported["executed"], reported["done"]) == (True, 2)
    assert dead.arrived(3) == [b"v2", b"v0", b"v1"]
    assert dead("drop", "0:3", "--execute").out == "dropped: 1 letter\n"
    assert [row["place"] for row in dead("list", "--json").document["letters"]] == ["0:4"]
    states = [row["state"] for row in dead("list", "--all", "--json").document["letters"]]
    assert states == ["replayed", "replayed", "replayed", "dropped", "waiting"]


def test_what_goes_wrong_has_a_name_and_a_code(dead: Dead, command: Command) -> None:
    ended = dead("replay", "0:0", "--send-to", "no-such", "--execute")
    assert (ended.code, ended.out) == (1, "replayed: 0 letters\n")
    assert "TOPIC_MISSING" in ended.err
    where = ("--kafka", dead.address, "--dead-topic", "no-such")
    ended = command("dead", "replay", *where, "--execute")
    assert ended.code == 1
    assert ended.err.endswith("it never had a letter, or has another name\n")
    ended = dead("replay", "0:0", "--send-to", "delaywheel-a-control", "--execute")
    assert (ended.code, "TOPIC_RESERVED" in ended.err) == (1, True)
    ended = command("dead", "list", "--kafka", dead.address, "--dead-topic", "no-such")
    assert (ended.code, "TOPIC_MISSING" in ended.err) == (1, True)


def test_where_other_letters_lie_is_said_if_the_topic_has_none(dead: Dead) -> None:
    said = "in a topic of their own: --dead-topic TOPIC"
    assert said in dead("list", "--topic", f"{dead.orders}-dead-billing").err
    assert said in dead("replay", "--topic", f"{dead.orders}-dead-billing").err
    assert said in dead("list", "--to", "now-1h").err
    assert said not in dead("list", "--topic", dead.orders).err
    assert said not in dead("list", "--reason", "NONE").err


def test_half_messages_that_were_not_decided_are_pointed_at_and_listed(dead: Dead) -> None:
    for group in ("billing", "shop"):
        create_topic(dead.address, undecided_topic(dead.cluster, group))
    create_topic(dead.address, f"{undecided_topic(dead.cluster, 'shop')}-marks")
    producer = Producer({"bootstrap.servers": dead.address})
    headers: dict[str, str | bytes | None] = {
        "dw-half": "shop",
        "dw-half-topic": dead.orders,
        "dw-dead-reason": "UNDECIDED",
        "dw-dead-topic": "halves-retry-shop",
        "dw-dead-group": "shop",
    }
    producer.produce(undecided_topic(dead.cluster, "shop"), b"v", headers=headers)
    assert producer.flush(30) == 0
    [said] = dead("list").err.splitlines()  # nothing of a group that decided all
    assert said.endswith("group shop did not decide are elsewhere: --halves-of shop")
    listed = dead("list", "--halves-of", "shop", "--topic", dead.orders, "--json").document
    assert [row["topic"] for row in listed["letters"]] == [dead.orders]
    facts = dead("show", "0:0", "--halves-of", "shop").out
    assert "replay, which sends the letter to halves-retry-shop" in facts
    both = dead("list", "--halves-of", "shop", "--dead-topic", "x")
    assert (both.code, "not both" in both.err) == (2, True)


def test_letters_of_others_and_of_a_nodes_settings(
    dead: Dead, command: Command, tmp_path: Path
) -> None:
    file = tmp_path / "node.toml"
    file.write_text(
        f'cluster_id = "{dead.cluster}"\nnode_id = "n"\ndata_dir = "{tmp_path}"\n'
        f'[kafka]\n"bootstrap.servers" = "{dead.address}"\n'
    )
    assert len(command("dead", "list", "--config", str(file), "--json").document["letters"]) == 5
    with DeadLetterTopic(
        dead_letter_topic(dead.cluster), {"bootstrap.servers": dead.address}
    ) as topic:
        assert topic.drop(Selection()).done == 5
    ended = command("dead", "list", "--config", str(file), "--dead-topic", dead.orders)
    assert ended.out == f"no such letters in {dead.orders}\n"
