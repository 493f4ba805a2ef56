"""The programs of docs/TRANSACTIONS.md on real letters: what is said there happens."""

from __future__ import annotations

import re
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Message, Producer

from delaywheel.deadletters import DeadLetterTopic, Selection
from delaywheel.ingress import halves_topic
from delaywheel.transactions import Barrier, Dialect
from local.loopback.kafka import KafkaBroker
from support.consumer.documents import DOCS, PATIENCE_S, Program, program_of
from support.consumer.half_letters import SentHalf
from support.kafka.read_committed import CommittedReader, create_topic, headers_of, topic_exists

DOCUMENT = "TRANSACTIONS.md"
DELAY_MS = 2_000


def write_letters(address: str, topic: str, *halves: SentHalf) -> None:
    producer = Producer({"bootstrap.servers": address})
    for half in halves:
        headers: Any = half.letter_headers()
        producer.produce(topic, half.value, half.key, headers=headers)
    assert producer.flush(PATIENCE_S) == 0


@pytest.mark.kafka
def test_each_half_ends_as_its_local_transaction(
    kafka: KafkaBroker, cluster: str, orders: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ordering: dict[str, Any] = {}
    exec(compile(program_of(DOCUMENT, "def order("), DOCUMENT, "exec"), ordering)
    now_ms = time.time_ns() // 1_000_000

    def half(value: bytes, delay_ms: int = 0) -> SentHalf:
        return SentHalf(
            orders, value, own=[("trace", b"1")], group="shop", delay_ms=delay_ms, due_ms=now_ms
        )

    ordered, later, dropped, open_ = half(b"1"), half(b"2", DELAY_MS), half(b"3"), half(b"4")
    with closing(sqlite3.connect("shop.db")) as db:
        ordering["order"](db, ordered, 1)
        ordering["order"](db, later, 2)
    halves = halves_topic(cluster)
    if not topic_exists(kafka.address, halves):
        create_topic(kafka.address, halves)
    write_letters(kafka.address, halves, ordered, later, dropped, SentHalf(orders, b"5", group="b"))
    code = program_of(DOCUMENT, "HalfChecker").replace("localhost:9092", kafka.address)
    code = code.replace('connect("shop.db")', 'connect("shop.db", timeout=0.1)')
    shop = Program(code.replace('cluster="main"', f'cluster="{cluster}"'), folder=tmp_path)
    try:
        expected = [f"{orders} 1 commit", f"{orders} 2 commit", f"{orders} 3 rollback"]
        assert sorted(shop.wait_for(3)) == expected
        with CommittedReader(kafka.address, orders, partitions=2) as reader:
            first, second = reader.wait_for(2)
        assert (first.value(), second.value()) == (b"1", b"2")
        for message, sent in ((first, ordered), (second, later)):
            check_message(message, sent)
        # A table that is locked for ever: asked three times, and then somebody has to look.
        with closing(sqlite3.connect("shop.db")) as db:
            db.execute("BEGIN IMMEDIATE")
            write_letters(kafka.address, halves, open_)
            assert shop.wait_for(6)[3:] == [f"{orders} 4 unknown"] * 3
            dead = f"{halves}-dead-shop"
            with CommittedReader(kafka.address, dead) as reader:
                (letter,) = reader.wait_for(1)
            assert dict(headers_of(letter))["dw-dead-reason"] == b"UNDECIDED"
            ordering["Barrier"]().record(db, open_)
            db.commit()
        client = {"bootstrap.servers": kafka.address}
        with DeadLetterTopic(dead, client) as topic:
            assert topic.replay(Selection(reason="UNDECIDED")).done == 1
        assert shop.wait_for(7)[6:] == [f"{orders} 4 commit"]
        with CommittedReader(kafka.address, orders, partitions=2) as reader:
            check_message(reader.wait_for(3)[2], open_)
        shop.stop()
    finally:
        shop.kill()
    cleaning = Program(program_of(DOCUMENT, "BARRIER.clean"), folder=tmp_path)
    assert cleaning.wait_for(1) == ["deleted: 0"]
    cleaning.kill()


def check_message(message: Message, sent: SentHalf) -> None:
    headers = headers_of(message)
    reported = dict(headers)
    assert (message.key(), message.value()) == (sent.key, sent.value)
    assert reported["trace"] == b"1"
    assert reported["dw-id"] == sent.id.hex().encode()
    assert int(reported["dw-due"] or b"") == sent.deliver_at_ms
    assert not [name for name, _ in headers if name.startswith("dw-half")]
    assert message.timestamp()[1] >= sent.deliver_at_ms


def test_the_table_is_the_one_that_is_created() -> None:
    text = (DOCS / DOCUMENT).read_text(encoding="utf-8")
    (block,) = re.findall(r"^```sql\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)

    def words(statement: str) -> list[str]:
        return re.findall(r"\w+|[^\w\s]", statement)

    created = ";".join(Barrier().statements(Dialect.POSTGRESQL)) + ";"
    assert words(block) == words(created)
