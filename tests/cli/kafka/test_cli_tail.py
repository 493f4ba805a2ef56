"""`delaywheel tail`, on the real Kafka."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from base64 import b64decode
from typing import Any

import pytest
from confluent_kafka import Producer

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from local.loopback.kafka import KafkaBroker
from support.clients.command import Command
from support.clients.fake_service import answer
from support.clients.scripted_node import ScriptedNode, describe_cluster
from support.kafka.read_committed import create_topic, wait_decided

pytestmark = pytest.mark.kafka

DUE_MS = 1_700_000_000_100
DELIVERED: list[tuple[str, str | bytes | None]] = [
    ("trace", b"\x1b[2J"),
    ("dw-id", b"0190163d8694739b8d3f8a4d6a1f5d10"),
    ("dw-due", b"%d" % DUE_MS),
    ("dw-accepted", b"1899999940250"),
    ("dw-wheel", b"n1.7"),
]


class Topic:
    """A topic of two partitions, with records that committed and ones that did not."""

    def __init__(self, kafka: KafkaBroker) -> None:
        self.kafka = kafka.address
        self.name = f"tailed-{uuid.uuid4().hex[:8]}"
        create_topic(kafka.address, self.name, partitions=2)

    def send(self, values: list[bytes], *, abort: bool = False) -> None:
        producer = Producer(
            {"bootstrap.servers": self.kafka, "transactional.id": f"{self.name}-sender"}
        )
        producer.init_transactions(30)
        producer.begin_transaction()
        for number, value in enumerate(values):
            producer.produce(
                self.name,
                value,
                key=b"42",
                partition=number % 2,
                timestamp=DUE_MS + 23,
                headers=DELIVERED,
            )
        assert producer.flush(30) == 0
        producer.abort_transaction(30) if abort else producer.commit_transaction(30)
        wait_decided(self.kafka, self.name, partitions=2)


@pytest.fixture
def topic(kafka: KafkaBroker) -> Topic:
    return Topic(kafka)


def values(out: str) -> list[bytes]:
    return sorted(b64decode(json.loads(line)["value"]) for line in out.splitlines())


def test_a_delivered_message_is_a_line(topic: Topic, command: Command) -> None:
    topic.send([b"still there?"])
    ended = command("tail", topic.name, "--from-beginning", "--until-end", "--kafka", topic.kafka)
    assert ended == (
        0,
        (
            f"due 2023-11-14T22:13:20.100Z  23 ms late  {topic.name}/0/0"
            '  id 0190163d8694739b8d3f8a4d6a1f5d10  key "42"  value "still there?"'
            '  header trace "\\u001b[2J"\n'
        ),
        "",
    )


def test_as_json_everything_is_there(topic: Topic, command: Command) -> None:
    topic.send([b"v"])
    asked = ("--from-beginning", "--count", "1", "--json", "--kafka", topic.kafka)
    document: dict[str, Any] = command("tail", topic.name, *asked).document
    headers = document.pop("headers")
    assert [(row["name"], b64decode(row["value"])) for row in headers] == DELIVERED
    assert document == {
        "topic": topic.name,
        "partition": 0,
        "offset": 0,
        "timestamp_ms": DUE_MS + 23,
        "id": "0190163d8694739b8d3f8a4d6a1f5d10",
        "due_ms": DUE_MS,
        "accepted_at_ms": 1_899_999_940_250,
        "wheel": "n1.7",
        "forwarded_ms": DUE_MS + 23,
        "committed_ms": None,
        "lateness_ms": 23,
        "key": "NDI=",
        "value": "dg==",
    }


def test_what_another_program_sent_has_no_due(topic: Topic, command: Command) -> None:
    producer = Producer({"bootstrap.servers": topic.kafka})
    producer.produce(topic.name, None, headers=[("a", None)], timestamp=DUE_MS, partition=0)
    assert producer.flush(30) == 0
    ended = command("tail", topic.name, "--last", "1", "--until-end", "--kafka", topic.kafka)
    assert ended.out == (
        f"sent 2023-11-14T22:13:20.100Z, no due  {topic.name}/0/0"
        "  key null  value null  header a null\n"
    )


def test_the_last_ones_are_found_behind_ends_of_transactions(
    topic: Topic, command: Command
) -> None:
    topic.send([b"old-%03d" % number for number in range(100)])
    topic.send([b"new-%d" % number for number in range(3)])
    for _ in range(30):
        topic.send([b"aborted"] * 2, abort=True)
    asked = ("--until-end", "--json", "--kafka", topic.kafka)
    out = command("tail", topic.name, "--last", "5", *asked).out
    assert len(out.splitlines()) == 5
    assert b"aborted" not in values(out)
    everything = command("tail", topic.name, "--last", "5000", *asked).out
    assert len(everything.splitlines()) == 103


def test_from_now_on_without_a_word_about_kafka(topic: Topic, node: ScriptedNode) -> None:
    """The node says which Kafka; what was there is not shown; Ctrl-C is a good end."""
    topic.send([b"before"])
    described: pb.DescribeClusterResponse = describe_cluster()
    described.kafka = topic.kafka
    node.describe = answer(described)
    with subprocess.Popen(
        [sys.executable, "-m", "delaywheel_replica.cli.app", "tail", topic.name, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "DELAYWHEEL_SERVER": node.address},
    ) as tail:
        assert tail.stdout is not None
        assert tail.stderr is not None
        try:
            assert "waiting for messages" in tail.stderr.readline()
            topic.send([b"after"])
            assert values(tail.stdout.readline()) == [b"after"]
            tail.send_signal(signal.SIGINT)
            assert tail.wait(30) == 0
            assert tail.stderr.read() == ""
        finally:
            tail.kill()  # else a failure waits for its end


@pytest.mark.parametrize(
    ("asked", "code", "reason"),
    [
        (("--last", "3", "--from-beginning"), 2, "USAGE"),
        (("--until-end",), 2, "USAGE"),
        (("--kafka-setting", "no.such=1", "--kafka", "127.0.0.1:1"), 1, "CONFIG_INVALID"),
        (("--kafka", "127.0.0.1:1", "--timeout", "0.5"), 3, "KAFKA_UNREACHABLE"),
        (("--server", "127.0.0.1:1"), 3, "UNAVAILABLE"),
    ],
    ids=["both", "nowhere-to-end", "setting", "kafka-away", "node-away"],
)
def test_refusals_have_names(
    asked: tuple[str, ...], code: int, reason: str, command: Command
) -> None:
    ended = command("tail", "orders", *asked)
    assert (ended.code, ended.out) == (code, "")
    assert ended.err.startswith(f"error: {reason}: ")


def test_a_missing_topic_is_named_with_what_makes_it(kafka: KafkaBroker, command: Command) -> None:
    ended = command("tail", "no-such-topic", "--kafka", kafka.address)
    assert (ended.code, ended.err) == (
        1,
        (
            "error: TOPIC_MISSING: Kafka has no topic no-such-topic: "
            "delaywheel topic create no-such-topic makes it\n"
        ),
    )
