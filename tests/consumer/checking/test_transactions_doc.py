"""The programs of docs/TRANSACTIONS.md on real letters: what is said there happens."""

from __future__ import annotations

import json
import re
import sqlite3
import uuid
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Message, Producer

from delaywheel import Client, MessageState
from delaywheel.deadletters import DeadLetterTopic, Selection
from delaywheel.ingress import halves_topic
from delaywheel.transactions import Barrier, Dialect
from delaywheel_replica.kafka_settings import KafkaNames
from local.loopback.kafka import KafkaBroker
from support.consumer.documents import DOCS, PATIENCE_S, Program, program_of
from support.consumer.half_letters import SentHalf
from support.kafka.read_committed import CommittedReader, headers_of
from support.services.waiting import wait_until

DOCUMENT = "TRANSACTIONS.md"


def write_letters(address: str, topic: str, *halves: SentHalf) -> None:
    producer = Producer({"bootstrap.servers": address})
    for half in halves:
        headers: Any = half.letter_headers()
        producer.produce(topic, half.value, half.key, headers=headers)
    assert producer.flush(PATIENCE_S) == 0


@pytest.mark.kafka
def test_one_is_committed_one_rolled_back_and_one_decided_by_the_check(
    kafka: KafkaBroker, nodes: tuple[str, str], orders: str, tmp_path: Path
) -> None:
    cluster, address = nodes
    group = f"shop-{orders}"

    def program(holding: str) -> Program:
        code = program_of(DOCUMENT, holding)
        for written, here in (
            ("localhost:9092", kafka.address),
            ("localhost:7420", address),
            ('cluster="main"', f'cluster="{cluster}"'),
            ('"orders"', f'"{orders}"'),
            ('group="shop"', f'group="{group}"'),
            ('connect("shop.db")', 'connect("shop.db", timeout=0.1)'),
        ):
            code = code.replace(written, here)
        return Program(code, folder=tmp_path)

    sender, shop = program("sold out"), program("signal.SIGTERM")
    try:
        assert sender.wait_for(1) == ["order 1 COMMITTED"]
        expected = [f"{orders} order 2 rollback", f"{orders} order 3 commit"]
        assert sorted(shop.wait_for(2)) == expected
        with CommittedReader(kafka.address, orders, partitions=2) as reader:
            first, second = reader.wait_for(2)
        assert (first.value(), second.value()) == (b"order 1", b"order 3")
        assert not [name for name, _ in headers_of(second) if name.startswith("dw-half")]
        # A table that stays locked: it is asked three times, and then somebody has to look.
        undecided = SentHalf(orders, b"4", own=[("trace", b"1")], group=group)
        with closing(sqlite3.connect(tmp_path / "shop.db")) as db:
            db.execute("BEGIN IMMEDIATE")
            write_letters(kafka.address, halves_topic(cluster), undecided)
            assert shop.wait_for(5)[2:] == [f"{orders} 4 unknown"] * 3
            dead = f"{halves_topic(cluster)}-dead-{group}"
            with CommittedReader(kafka.address, dead) as reader:
                (letter,) = reader.wait_for(1)
            assert dict(headers_of(letter))["dw-dead-reason"] == b"UNDECIDED"
            Barrier().record(db, undecided)
            db.commit()
        with DeadLetterTopic(dead, {"bootstrap.servers": kafka.address}) as topic:
            assert topic.replay(Selection(reason="UNDECIDED")).done == 1
        assert shop.wait_for(6)[5:] == [f"{orders} 4 commit"]
        with CommittedReader(kafka.address, orders, partitions=2) as reader:
            check_message(reader.wait_for(3)[2], undecided)
        check_answers(kafka.address, nodes, tmp_path / "shop.db", undecided)
        shop.stop()
        cleaning = program("BARRIER.clean")
        assert cleaning.wait_for(1) == ["deleted: 0"]
        cleaning.kill()
    finally:
        sender.kill()
        shop.kill()


def check_answers(address: str, nodes: tuple[str, str], file: Path, undecided: SentHalf) -> None:
    """What the group has answered is among the outcomes, and `get` knows it."""
    cluster, node = nodes
    with closing(sqlite3.connect(file)) as db:
        rows = db.execute("SELECT id, due_ms FROM delaywheel_barrier WHERE verdict = 'rollback'")
        ((id_, due_ms),) = rows.fetchall()
    at = datetime.fromtimestamp(due_ms / 1000, UTC)
    with Client(node) as client:

        def is_known() -> bool:
            half = client.get(
                topic=undecided.topic, id=uuid.UUID(id_).bytes, due=at, find_place=True
            )
            return half is not None and half.state is MessageState.ROLLED_BACK

        wait_until("the second order is known to be rolled back", is_known)
    with CommittedReader(address, KafkaNames(cluster).outcomes) as reader:
        ours = (each for each in reader.read_to_end() if each.key() == undecided.id)
        told = [json.loads(each.value() or b"") for each in ours]
    assert [each["answer"] for each in told] == ["undecided", "committed"]


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
