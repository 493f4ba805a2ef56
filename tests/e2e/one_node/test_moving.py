"""Pending messages are moved to another cluster while callers send: each arrives once.

Half of `MOVED_MESSAGES`, between clusters of `MOVED_NODES` nodes: more of
either than usual shows what a move takes (`pytest -s`).
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from delaywheel import Client, Message
from delaywheel_replica.kafka_settings import KafkaNames
from local.loopback.kafka import KafkaBroker
from support.clients.command import Command, Ended
from support.kafka.read_committed import create_topic, headers_of, read_all
from support.services.caller import Caller
from support.services.service import Service

pytestmark = pytest.mark.kafka

MESSAGES = int(os.environ.get("MOVED_MESSAGES", "1000"))
NODES = int(os.environ.get("MOVED_NODES", "1"))
LATER_S = 14 + MESSAGES // 400
"""How far ahead those are due that are moved; others are due in a second or two."""

HEADERS = [("a", b"1"), ("a", None), ("b", b"\xfe\0"), ("dw-retry-attempt", b"2")]
"""Such as a retry of a RetryConsumer has, among others."""


class Sending(Caller):
    """Sends messages, of which every second one is due soon."""

    def __init__(self, server: str, topic: str) -> None:
        super().__init__(Client(server), topic, pause_s=0.1)
        self.dues: dict[bytes, int] = {}

    def send(self, count: int) -> None:
        """Sends some, with all that a message may have."""
        messages = [
            Message(
                self._topic,
                None if number % 7 == 0 else b"\xff%d" % number,
                key=None if number % 5 == 0 else b"k%d" % number,
                headers=HEADERS,
                delay=timedelta(seconds=1.5 if number % 2 else LATER_S, milliseconds=number % 900),
                partition=0 if number % 3 == 0 else None,
                timestamp=None,
            )
            for number in range(count)
        ]
        for message, result in zip(messages, self._client.produce_many(messages), strict=True):
            result.unwrap()
            assert message.due_ms is not None
            self.dues[message.id] = message.due_ms

    def _call(self) -> None:
        self.send(20)


@pytest.fixture
def here(request: pytest.FixtureRequest, kafka: KafkaBroker, tmp_path: Path) -> Iterator[Service]:
    if NODES == 1:
        yield request.getfixturevalue("service")
        return
    with Service(kafka.address, tmp_path / "here", f"h{uuid.uuid4().hex[:9]}", nodes=NODES) as one:
        yield one


@pytest.fixture
def other(kafka: KafkaBroker, tmp_path: Path, cluster_id: str) -> Iterator[Service]:
    with Service(kafka.address, tmp_path / "other", cluster_id, nodes=NODES) as running:
        yield running


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def test_each_message_arrives_once_when_it_is_moved_under_load(
    here: Service,
    other: Service,
    command: Command,
    kafka: KafkaBroker,
    cluster_id: str,
    tmp_path: Path,
) -> None:
    topic, pending, moved = f"{cluster_id}-moved", tmp_path / "pending", tmp_path / "moved"
    create_topic(kafka.address, topic)
    timed = Timed(command)
    old, new = ("--server", here.address), ("--server", other.address)
    with Sending(here.address, topic) as callers:
        for _ in range(max(1, MESSAGES // 10_000)):
            callers.send(min(MESSAGES, 10_000))
        listed = timed("export", "--topic", topic, "--from", "now+4s", *old)
        pending.write_text(listed.out)
        cancelled = timed("export", "--cancel", str(pending), *old)
        # A run that was killed is repeated: it answers the same.
        again = timed("export", "--cancel", str(pending), *old)
        assert again.out == cancelled.out
        moved.write_text(cancelled.out)
        for _ in range(2):
            timed("produce", "--jsonl", str(moved), *new)
    print("\n".join(timed.lines))  # noqa: T201 - `pytest -s`
    number = len(cancelled.out.splitlines())
    assert MESSAGES // 3 <= number <= len(listed.out.splitlines())
    for cluster in (here, other):
        cluster.wait_done(max(callers.dues.values()))
    records = read_all(kafka.address, topic)
    assert all(list(headers_of(record))[: len(HEADERS)] == HEADERS for record in records)
    told = [dict(headers_of(record)) for record in records]
    assert Counter(each["dw-id"] for each in told) == Counter(_hex(id_) for id_ in callers.dues)
    assert {each["dw-id"]: int(each["dw-due"] or 0) for each in told} == {
        _hex(id_): due_ms for id_, due_ms in callers.dues.items()
    }
    # Both books: what was moved is cancelled in one, and was accepted twice by the other.
    ids = {json.loads(line)["id"] for line in cancelled.out.splitlines()}
    assert outcomes(kafka, here, "cancelled", ids) == Counter(ids)
    assert outcomes(kafka, other, "duplicate", ids) == Counter(ids)


class Timed:
    """Runs commands, which must succeed, and notes how long each took."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self.lines: list[str] = []

    def __call__(self, *words: str) -> Ended:
        began = time.monotonic()
        ended = self._command(*words)
        assert ended.code == 0, ended.err
        took_s = time.monotonic() - began
        self.lines.append(f"{' '.join(words[:2])}: {took_s:.1f} s; {ended.err.strip()}")
        return ended


def outcomes(kafka: KafkaBroker, of: Service, kind: str, ids: set[str]) -> Counter[str]:
    """How often each of these messages has such an outcome in a cluster."""
    records = read_all(kafka.address, KafkaNames(of.cluster_id).outcomes)
    found = [json.loads(record.value() or b"{}") for record in records]
    return Counter(each["id"] for each in found if each["outcome"] == kind and each["id"] in ids)


def _hex(id_: bytes) -> bytes:
    return id_.hex().encode()
