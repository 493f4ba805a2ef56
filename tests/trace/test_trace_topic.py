"""Events in the real Kafka: a program's own, those of a forked one, and a Kafka that is away."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from typing import Any

import pytest
from confluent_kafka import Message as Record
from confluent_kafka.admin import (  # type: ignore[attr-defined] # missing in its stubs
    AdminClient,
    ResourceType,
)

from delaywheel import Client, Handle, Message
from delaywheel.consumer.kafka.topics import may_write
from delaywheel.ingress import counts_topic, trace_topic
from delaywheel.message import Result
from delaywheel.testing import MemoryService
from delaywheel.trace import Trace
from delaywheel.trace.batch import BatchHead, decode
from local.loopback.kafka import KafkaBroker
from local.loopback.shared import JoinedBroker
from support.consumer.documents import program_of
from support.kafka.read_committed import create_topic, read_all
from support.kafka.rights import Rights, documented_of

pytestmark = pytest.mark.kafka

_FORKS = """
import os, sys, time
from delaywheel import Client, Handle, Message
from delaywheel.message import Result
from delaywheel.trace import Trace

def send(topic):
    message = Message(topic, b"", delay="1h")
    trace.sent([Result(message, Handle("n1.1", 1, message.id, topic), None)], 0.001, 1)

trace = Trace({"bootstrap.servers": sys.argv[1]}, cluster=sys.argv[2])
send("before")
assert trace.flush(30)
send("parents")
if os.fork() == 0:
    send("childs")
    sys.exit()
os.wait()
"""


def result(topic: str = "orders") -> Result:
    message = Message(topic, b"", delay="1h")
    return Result(message, Handle("n1.1", 1, message.id, topic), None)


def told(kafka: KafkaBroker, cluster: str) -> list[tuple[BatchHead, dict[str, list[Any]]]]:
    records: list[Record] = read_all(kafka.address, trace_topic(cluster))
    return [decode(record.value() or b"") for record in records]


def test_a_forked_program_has_a_trace_of_its_own(kafka: KafkaBroker, cluster_id: str) -> None:
    create_topic(kafka.address, trace_topic(cluster_id))
    program = [sys.executable, "-c", _FORKS, kafka.address, cluster_id]
    subprocess.run(program, check=True, timeout=60)
    by_reporter: dict[str, list[Any]] = {}
    for head, rows in told(kafka, cluster_id):
        by_reporter.setdefault(head.reporter, []).append((head.number, rows["topic"]))
    assert sorted(by_reporter.values()) == [
        [(1, ["before"]), (2, ["parents"])],
        [(1, ["childs"])],
    ]


def test_a_kafka_that_is_away_is_in_nobodys_way(caplog: pytest.LogCaptureFixture) -> None:
    with Trace({"bootstrap.servers": "127.0.0.1:9"}) as trace:
        for _ in range(100):
            trace.sent([result()] * 1_000, 0.001, 1)
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 10
    lines = caplog.messages
    assert sum(int(line.split()[2]) for line in lines) == 100_000
    assert len(lines) <= 2  # in the first minute, and at the end
    assert "Connection refused" in lines[-1]


@pytest.mark.parametrize("may", [[], ["DESCRIBE"]])
def test_a_program_goes_on_without_rights_and_tells_with_those_that_are_listed(
    kafka: JoinedBroker,
    cluster_id: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    may: list[str],
) -> None:
    monkeypatch.setattr("delaywheel.trace.reporter._LOOK_AGAIN_S", 0.2)
    for topic in (trace_topic(cluster_id), counts_topic(cluster_id)):
        create_topic(kafka.address, topic)
    with Rights.of(kafka) as rights, MemoryService(topics=["orders"]) as service:
        listed = documented_of("a program with a [trace]", cluster_id)
        assert {one.name for one in listed} == {trace_topic(cluster_id), counts_topic(cluster_id)}
        for one in listed:
            for operation in may:
                rights.allow(ResourceType.TOPIC, one.name, operation, prefixed=False)
        with (
            Trace(rights.user_settings, cluster=cluster_id) as trace,
            Client(service.address, trace=trace) as client,
        ):
            for _ in range(3):
                assert client.produce("orders", b"", delay="1h").id
                assert not trace.flush(1)
            lines = len(caplog.messages)
            of_a_consumer = AdminClient({**rights.user_settings})
            assert may_write(of_a_consumer, counts_topic(cluster_id)) is False
            # Counts first: who finds the other topic does not look for this one again at once.
            rights.allow_all(reversed(listed))
            assert may_write(of_a_consumer, counts_topic(cluster_id)) is True
            client.produce("orders", b"", delay="1h")
            assert trace.flush(30)
    # Held until the topic shows; or refused by it, counted, and said once in the minute.
    dropped = 3 if may else 0
    assert lines == (2 if may else 0)
    said = [line.split() for line in caplog.messages if line.startswith("events dropped:")]
    assert sum(int(number) for _, _, number, *_ in said) == dropped
    batches = told(kafka, cluster_id)
    assert sum(head.dropped for head, _ in batches) == dropped
    assert sum(len(rows["id"]) for _, rows in batches) == 4 - dropped
    records = [json.loads(one.value() or b"") for one in read_all(kafka.address, listed[1].name)]
    cells = [one for one in records if one["direction"] == "sent"]
    assert [(one["messages"], one["lost"]) for one in cells[-1:]] == [(4, 0)]


def test_the_documents_program_tells_both_ends(kafka: KafkaBroker, cluster_id: str) -> None:
    create_topic(kafka.address, trace_topic(cluster_id))
    create_topic(kafka.address, counts_topic(cluster_id))
    with MemoryService(topics=["orders"], start=datetime.now(UTC)) as service:
        program = program_of("TRACE.md", "trace.flush()")
        for shown, own in (
            ("localhost:9092", kafka.address),
            ("127.0.0.1:7420", service.address),
            ('tags="tags"', f'tags="tags", cluster="{cluster_id}"'),
        ):
            assert shown in program
            program = program.replace(shown, own)
        ran = subprocess.run(
            [sys.executable, "-c", program], check=True, timeout=60, stdout=subprocess.PIPE
        )
    assert ran.stdout == b"True\n"
    batches = {head.kind: (head, rows) for head, rows in told(kafka, cluster_id)}
    head, sent = batches["sent"]
    assert (head.client, sent["key"], sent["tags"]) == ("web", ["42"], ["eu"])
    assert batches["changed"][1]["status"] == ["CANCELLED"]
    counts = [
        json.loads(one.value() or b"") for one in read_all(kafka.address, counts_topic(cluster_id))
    ]
    [last] = {one["topic"]: one for one in counts if one["direction"] == "sent"}.values()
    assert not last["exact"]
    assert (last["messages"], last["bytes"]) == (1, len(b"unpaid?") + len(b"42"))
    assert [one["reporter"] for one in counts if one["direction"] == "end"] == [head.reporter]
