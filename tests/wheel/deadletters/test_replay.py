"""Replays on the real Kafka: each letter once, even if replays are killed or run together."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from delaywheel.deadletters import (
    DeadLettersError,
    DeadLettersReason,
    DeadLetterTopic,
    LetterCounts,
    LetterPlace,
    LetterState,
    Replay,
    Selection,
    settling,
    topic,
)
from delaywheel.deadletters.counting import Settled
from delaywheel.deadletters.writing import LetterWriter
from delaywheel.ingress import IngressLimits
from local.loopback.kafka import KafkaBroker
from support.kafka import killed_replay
from support.kafka.read_committed import (
    create_topic,
    delete_topic,
    headers_of,
    read_all,
    set_topic,
    wait_decided,
)
from support.services.waiting import wait_until

pytestmark = pytest.mark.kafka

LETTERS = 60


class Letters:
    """A dead-letter topic with letters for one topic."""

    def __init__(self, kafka: KafkaBroker, cluster_id: str) -> None:
        self.address = kafka.address
        self.name, self.orders = f"dead-{cluster_id}", f"orders-{cluster_id}"
        create_topic(self.address, self.name, partitions=2)
        create_topic(self.address, self.orders)

    def write(self, count: int, *, reason: str = "TOPIC_MISSING", **rest: object) -> None:
        producer = Producer({"bootstrap.servers": self.address})
        for number in range(count):
            reported: dict[str, object] = {"value": b"%d" % number, "topic": self.orders} | rest
            named = [("dw-dead-reason", reason.encode())]
            named.append(("dw-dead-topic", str(reported.pop("topic")).encode()))
            producer.produce(
                self.name,
                key=b"k%d" % number,
                partition=number % 2,
                headers=[("h", None), ("dw-id", b"%032x" % number), *named],
                **reported,  # type: ignore[arg-type]
            )
        assert producer.flush(30) == 0

    def open(self) -> DeadLetterTopic:
        return DeadLetterTopic(self.name, {"bootstrap.servers": self.address})

    def count(self) -> LetterCounts:
        with self.open() as letters:
            return letters.count()

    def arrived(self, topic: str | None = None, *, at_least: int = 0) -> Counter[bytes]:
        found = read_all(self.address, topic or self.orders, at_least=at_least)
        return Counter(cast("bytes", message.value()) for message in found)


@pytest.fixture
def letters(kafka: KafkaBroker, cluster_id: str) -> Letters:
    return Letters(kafka, cluster_id)


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "BATCH_LETTERS", 8)


ONCE = Counter({b"%d" % number: 1 for number in range(LETTERS)})


@pytest.mark.usefixtures("small_batches")
def test_letters_are_sent_once_and_marked(letters: Letters) -> None:
    letters.write(LETTERS)
    heard: list[int] = []
    with letters.open() as dead:
        settled = dead.replay(Selection(), on_progress=lambda reported: heard.append(reported.done))
        assert settled.done == LETTERS
        assert heard == [*range(8, LETTERS, 8), LETTERS]
        assert dead.replay(Selection()).done == 0
        letter, mark = dead.get(LetterPlace(1, 0))
        assert mark is not None
        assert (mark.state, mark.to) == (LetterState.REPLAYED, None)
        assert letter.value == b"1"
    assert letters.arrived(at_least=LETTERS) == ONCE
    message = next(m for m in read_all(letters.address, letters.orders) if m.value() == b"1")
    assert message.key() == b"k1"
    assert headers_of(message) == [
        ("h", None),
        ("dw-dead-replayed", f"{letters.name}/1/0".encode()),
    ]
    (row,) = letters.count().rows()
    assert row[1:] == ("TOPIC_MISSING", 0, LETTERS, 0)


def test_records_of_an_ingress_topic_go_back_to_where_they_are_read(
    kafka: KafkaBroker, cluster_id: str
) -> None:
    """Once a partition is cut off nobody reads what lies there; nor while `ingress` is off."""
    ingress, dead = f"delaywheel-{cluster_id}-ingress", f"delaywheel-{cluster_id}-dead"
    create_topic(kafka.address, ingress, partitions=3)
    create_topic(kafka.address, dead, partitions=1)
    limits = IngressLimits(1_000, 1_000)

    def replay(said: IngressLimits) -> Settled:
        _say(kafka, ingress, said)
        producer = Producer({"bootstrap.servers": kafka.address})
        for number in range(9):
            headers: dict[str, str | bytes | None] = {
                "dw-dead-reason": b"SLOT_FULL",
                "dw-dead-origin": f"{ingress}/0/5",
            }
            producer.produce(dead, b"v", b"%d" % number, headers=headers)
        assert producer.flush(30) == 0
        with DeadLetterTopic(dead, {"bootstrap.servers": kafka.address}) as letters:
            return letters.replay(Selection())

    assert replay(limits._replace(read=(2,))).done == 9
    assert {
        message.partition()
        for message in read_all(kafka.address, ingress, at_least=9, partitions=3)
    } == {2}
    refused = replay(limits._replace(is_read=False))
    assert (refused.done, refused.refused) == (0, {"INGRESS_UNREAD": 9})
    assert replay(limits).done == 18
    found = read_all(kafka.address, ingress, at_least=27, partitions=3)
    assert len({message.partition() for message in found}) > 1


def test_a_claim_hears_that_an_ingress_topic_is_read_again(
    kafka: KafkaBroker, cluster_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A consumer of letters keeps its claim for weeks, and what it was told for seconds."""
    monkeypatch.setattr(topic, "KNOWN_S", 0.1)
    ingress, dead = f"delaywheel-{cluster_id}-ingress", f"delaywheel-{cluster_id}-dead"
    create_topic(kafka.address, dead, partitions=1)
    headers: dict[str, str | bytes | None] = {
        "dw-dead-reason": b"SLOT_FULL",
        "dw-dead-origin": f"{ingress}/0/5",
    }
    producer = Producer({"bootstrap.servers": kafka.address})
    producer.produce(dead, b"v", b"k", headers=headers)
    assert producer.flush(30) == 0
    with (
        DeadLetterTopic(dead, {"bootstrap.servers": kafka.address}) as letters,
        letters.claimed() as (bounds, settling),
    ):
        (letter,) = letters.read(Selection(), bounds)

        def why() -> str | None:
            return settling.take(letter, Replay())

        assert why() == f"TOPIC_MISSING: {ingress}"
        create_topic(kafka.address, ingress, partitions=1)
        _say(kafka, ingress, IngressLimits(1_000, 1_000, is_read=False))
        unread = f"INGRESS_UNREAD: no leader reads {ingress}"
        wait_until("it is known that the topic is there", lambda: why() == unread, timeout_s=20)
        _say(kafka, ingress, IngressLimits(1_000, 1_000))
        wait_until("it is known that it is read", lambda: why() is None, timeout_s=20)


def _say(kafka: KafkaBroker, ingress: str, limits: IngressLimits) -> None:
    """Notes, as a leader does, what ingress takes."""
    leader = Consumer({"bootstrap.servers": kafka.address, "group.id": ingress})
    note = TopicPartition(ingress, 0, 0, limits.as_note())
    leader.commit(offsets=[note], asynchronous=False)
    leader.close()


@pytest.mark.parametrize("step", killed_replay.STEPS)
@pytest.mark.parametrize("number", [1, 2])
def test_killed_at_any_step_and_run_again(letters: Letters, step: str, number: int) -> None:
    """The first transaction is the claim, the second has all letters."""
    if step.startswith("init") and number > 1:
        pytest.skip("there is one")
    letters.write(LETTERS)
    killed = subprocess.run(
        [
            *(sys.executable, killed_replay.__file__),
            *(letters.address, letters.name, step, str(number)),
        ],
        check=False,
        timeout=120,
    )
    assert killed.returncode == -signal.SIGKILL
    with letters.open() as dead:
        settled = dead.replay(Selection())
        assert not settled.refused
        is_committed = (step, number) == ("commit_transaction-after", 2)
        assert settled.done == (0 if is_committed else LETTERS)
        assert dead.replay(Selection()).done == 0
    assert letters.arrived(at_least=LETTERS) == ONCE


@pytest.mark.usefixtures("small_batches")
def test_of_two_at_once_the_later_one_goes_on(
    letters: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    letters.write(LETTERS)
    real = LetterWriter.transact
    calls: list[int] = []

    def transact(self: LetterWriter, *arguments: object) -> object:
        calls.append(1)
        if len(calls) == 4:  # the claim and two transactions are done
            monkeypatch.setattr(LetterWriter, "transact", real)
            with letters.open() as other:
                assert other.replay(Selection(), limit=20).done == 20
        return real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(LetterWriter, "transact", transact)
    with letters.open() as dead:
        with pytest.raises(DeadLettersError) as raised:
            dead.replay(Selection())
        assert raised.value.reason is DeadLettersReason.OVERTAKEN
        assert sum(letters.arrived(at_least=36).values()) == 36
        assert dead.replay(Selection()).done == LETTERS - 36
    assert letters.arrived(at_least=LETTERS) == ONCE


@pytest.mark.usefixtures("small_batches")
def test_what_kafka_refuses_waits_on_and_holds_up_nothing(letters: Letters) -> None:
    letters.write(20)
    set_topic(letters.address, letters.orders, "max.message.bytes", "2000")
    letters.write(2, value=b"x" * 5_000)
    letters.write(1, topic="nowhere", value=b"lost")
    letters.write(1, topic="delaywheel-a-control", value=b"evil")
    with letters.open() as dead:
        settled = dead.replay(Selection())
        assert settled.done == 20
        assert settled.refused == {"MSG_SIZE_TOO_LARGE": 2, "TOPIC_MISSING": 1, "TOPIC_RESERVED": 1}
        assert len(settled.examples) == 4
        set_topic(letters.address, letters.orders, "max.message.bytes", "100000")
        assert dead.replay(Selection(topic=letters.orders)).done == 2
    assert sum(letters.arrived(at_least=22).values()) == 22


def test_dropped_letters_are_not_replayed(letters: Letters) -> None:
    letters.write(10)
    letters.write(10, reason="EXPIRED")
    with letters.open() as dead:
        assert dead.drop(Selection(reason="EXPIRED"), limit=4).done == 4
        assert dead.replay(Selection()).done == 16
        wait_decided(letters.address, f"{letters.name}-marks")  # to count waits for no commit
        (expired, missing) = dead.count().rows()
    assert expired[1:] == ("EXPIRED", 0, 6, 4)
    assert missing[1:] == ("TOPIC_MISSING", 0, 10, 0)


def test_by_time_only_what_lies_there_is_read(letters: Letters) -> None:
    base_ms = 1_700_000_000_000
    for number in range(10):
        letters.write(1, value=b"%d" % number, timestamp=base_ms + number * 100_000)
    with letters.open() as dead:
        chosen = Selection(from_ms=base_ms + 300_000, to_ms=base_ms + 600_000)
        assert [letter.value for letter, _ in dead.letters(chosen)] == [b"3", b"4", b"5"]
        assert not list(dead.letters(Selection(from_ms=base_ms + 2_000_000)))
        assert [each.value for each, _ in dead.letters(Selection(to_ms=base_ms + 1))] == [b"0"]


def test_a_topic_that_is_recreated_has_no_marks(letters: Letters) -> None:
    letters.write(4)
    with letters.open() as dead:
        assert dead.replay(Selection()).done == 4
    delete_topic(letters.address, letters.name)
    create_topic(letters.address, letters.name, partitions=2)
    letters.write(4)
    with letters.open() as dead:
        assert dead.replay(Selection()).done == 4
        assert dead.replay(Selection()).done == 0
    assert sum(letters.arrived(at_least=8).values()) == 8


def test_a_broker_that_has_not_heard_of_the_marks_is_not_believed(
    letters: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    letters.write(4)
    with letters.open() as dead:
        assert dead.replay(Selection()).done == 4
    real = DeadLetterTopic._describe
    compact = {"cleanup.policy": SimpleNamespace(value="compact")}
    monkeypatch.setattr(DeadLetterTopic, "_marks_config", lambda _: compact)
    monkeypatch.setattr(
        DeadLetterTopic,
        "_describe",
        lambda self, name: None if name.endswith("-marks") else real(self, name),
    )
    with letters.open() as dead:
        assert dead.replay(Selection()).done == 0


def test_marks_that_would_be_forgotten_are_not_relied_upon(letters: Letters) -> None:
    letters.write(1)
    create_topic(letters.address, f"{letters.name}-marks")
    with letters.open() as dead, pytest.raises(DeadLettersError) as raised:
        dead.replay(Selection())
    assert raised.value.reason is DeadLettersReason.MARKS_NOT_COMPACTED
    assert not letters.arrived()


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        (lambda dead: dead.get(LetterPlace(0, 99)), DeadLettersReason.LETTER_MISSING),
        (lambda dead: dead.get(LetterPlace(9, 0)), DeadLettersReason.LETTER_MISSING),
        (
            lambda dead: dead.replay(Selection(), to="delaywheel-a-outcomes"),
            DeadLettersReason.TOPIC_RESERVED,
        ),
    ],
)
def test_what_cannot_be_has_a_name(
    letters: Letters, ask: Callable[[DeadLetterTopic], object], reason: DeadLettersReason
) -> None:
    with letters.open() as dead, pytest.raises(DeadLettersError) as raised:
        ask(dead)
    assert raised.value.reason is reason


def test_a_topic_that_is_not_there_has_a_name(kafka: KafkaBroker) -> None:
    settings = {"bootstrap.servers": kafka.address}
    with DeadLetterTopic("no-such", settings) as dead, pytest.raises(DeadLettersError) as raised:
        dead.count()
    assert raised.value.reason is DeadLettersReason.TOPIC_MISSING


def test_a_letter_without_its_value_is_made_whole_or_refused(letters: Letters) -> None:
    """Sent as it is, its null value would delete its key from a compacted topic."""
    source = f"source-{letters.name}"
    create_topic(letters.address, source)
    producer = Producer({"bootstrap.servers": letters.address})
    producer.produce(source, b"large", key=b"k", headers=[("trace", b"7")], timestamp=77_000)
    producer.produce(source, b"", key=b"k")
    assert producer.flush(30) == 0
    for number, (place, timestamp, omitted) in enumerate(
        (
            (f"{source}/0/0", b"77000", b"value,headers,key"),
            (f"{source}/0/0", b"78000", b"value"),  # the topic was recreated since
            (f"{source}/0/9", b"77000", b"value"),
            ("nowhere/0/0", b"77000", b"value"),
            ("?", b"77000", b"value"),
        )
    ):
        producer.produce(
            letters.name,
            key=b"k%d" % number,
            partition=0,
            headers=[
                ("dw-dead-topic", letters.orders.encode()),
                ("dw-dead-reason", b"MESSAGE_TOO_LARGE"),
                ("dw-dead-origin", place.encode()),
                ("dw-dead-origin-timestamp", timestamp),
                ("dw-dead-omitted", omitted),
            ],
        )
    assert producer.flush(30) == 0
    with letters.open() as dead:
        settled = dead.replay(Selection())
    assert (settled.done, settled.refused) == (1, Counter({"ORIGIN_MISSING": 4}))
    (message,) = read_all(letters.address, letters.orders, at_least=1)
    assert (message.key(), message.value()) == (b"k", b"large")
    assert headers_of(message)[0] == ("trace", b"7")
