"""What became of a message that a cancel names, looked for among the outcomes on a real broker."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partialmethod
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)

from delaywheel.identity import WheelId
from delaywheel_replica.cleaner.delivery.outcomes import dropped
from delaywheel_replica.cleaner.due.rows import Dropped, MessageOutcome
from delaywheel_replica.cleaner.kafka import places
from delaywheel_replica.cleaner.kafka.places import PlaceFinder
from delaywheel_replica.kafka_settings import KafkaNames, KafkaSettings
from delaywheel_replica.link import AskPlace, LinkPlace, PlaceFound
from local.loopback.kafka import KafkaBroker
from support.kafka.read_committed import create_topic
from support.services.waiting import wait_until

pytestmark = pytest.mark.kafka

CANCELLED, DELIVERED, ASKED = (bytes(15) + each for each in (b"c", b"d", b"a"))
RELEASED, LETTER = bytes(15) + b"r", bytes(15) + b"l"
NAMES = KafkaNames("c")
NOW_MS = time.time_ns() // 1_000_000
DUE_MS = NOW_MS - 2_000


def outcome(
    id_: bytes, what: MessageOutcome, due_ms: int = DUE_MS, *, topic: str = "orders"
) -> Dropped:
    return Dropped(
        what,
        content_differs=False,
        topic=topic,
        due_ms=due_ms,
        id=id_,
        accepted_at_ms=NOW_MS - 9_000,
        wheel=WheelId("a", 1),
        seq=3,
        row=0,
    )


class Looking:
    """A search's thread, asked until it has found something."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._found: list[PlaceFound] = []
        self._reported = threading.Event()
        self._places = PlaceFinder(settings, send=self._send, on_found=self._reported.set)
        threading.Thread(target=self._places.run, daemon=True).start()

    def _send(self, found: PlaceFound) -> bool:
        self._found.append(found)
        return True

    def find(self, asked: AskPlace) -> PlaceFound:
        def look() -> PlaceFound | None:
            self._reported.clear()
            self._places.ask(asked)
            assert self._reported.wait(60)
            self._places.report()
            found = self._found.pop()
            return found if found.place or found.answer else None

        return wait_until("it is found", look)


def test_whether_a_cancel_took_effect_is_read_from_the_outcomes(
    kafka: KafkaBroker, cluster_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "SEARCH_S", 30.0)  # for a busy machine
    names = KafkaNames(cluster_id)
    topic = f"orders-{cluster_id}"
    for name in (names.outcomes, names.dead, topic):
        create_topic(kafka.address, name)
    producer = Producer({"bootstrap.servers": kafka.address})
    for about, answer in ((CANCELLED, "committed"), (ASKED, "undecided"), (ASKED, "committed")):
        told = {"outcome": "answered", "answer": answer, "due_ms": DUE_MS, "topic": topic}
        producer.produce(names.outcomes, json.dumps(told), about)
    reported = [
        outcome(CANCELLED, MessageOutcome.CANCELLED, DUE_MS + 1, topic=topic),
        outcome(CANCELLED, MessageOutcome.DUPLICATE, topic=topic),
        outcome(DELIVERED, MessageOutcome.CANCELLED, topic="somebody-elses"),
        outcome(CANCELLED, MessageOutcome.CANCELLED, topic=topic),
        outcome(
            RELEASED,
            MessageOutcome.CANCELLED,
            released_ms := time.time_ns() // 1_000_000 + 9_000,
            topic=topic,
        ),
        outcome(LETTER, MessageOutcome.ASKED, topic=topic),
    ]
    for record in dropped(names, reported):
        producer.produce(record.topic, record.value, record.key)
    headers: list[tuple[str, str | bytes | None]] = [
        ("dw-id", DELIVERED.hex()),
        ("dw-due", str(DUE_MS)),
    ]
    # Another cluster delivers to the topic, too: the same message, which was moved there.
    for cluster in ("another", cluster_id):
        by: list[tuple[str, str | bytes | None]] = [("dw-wheel", f"{cluster}/n1.1")]
        producer.produce(topic, b"it came", headers=headers + by)
    headers = [
        ("dw-id", ASKED.hex()),
        ("dw-due", str(DUE_MS)),
        ("dw-dead-reason", "it was"),
        ("dw-dead-topic", topic),
    ]
    producer.produce(names.dead, b"replayed, and answered since", headers=headers)
    assert producer.flush(60) == 0

    clients: list[Consumer] = []

    def make(settings: dict[str, Any], **options: Any) -> Consumer:
        clients.append(Consumer(settings, **options))
        return clients[-1]

    monkeypatch.setattr(places, "Consumer", make)
    looking = Looking(KafkaSettings(names, {"bootstrap.servers": kafka.address}))
    asked = AskPlace(1, CANCELLED, DUE_MS, topic, is_dead=False, is_named_by_cancel=True)
    found = looking.find(asked)
    assert found == PlaceFound(1, LinkPlace(names.outcomes, 0, 6), outcome="cancelled")
    asked = AskPlace(2, DELIVERED, DUE_MS, topic, is_dead=False, is_named_by_cancel=True)
    assert looking.find(asked) == PlaceFound(2, LinkPlace(topic, 0, 1))
    asked = AskPlace(3, ASKED, DUE_MS, topic, is_asked_half=True)
    assert looking.find(asked) == PlaceFound(3, answer="committed"), "the last one counts"
    asked = AskPlace(
        4, RELEASED, released_ms, topic, is_dead=False, is_named_by_cancel=True, early_ms=10_000
    )
    found = looking.find(asked)
    assert found == PlaceFound(4, LinkPlace(names.outcomes, 0, 7), outcome="cancelled")
    asked = AskPlace(5, LETTER, DUE_MS, topic, is_dead=False, is_named_by_cancel=True)
    found = looking.find(asked)
    assert found == PlaceFound(5, LinkPlace(names.outcomes, 0, 8), outcome="asked")
    assert len(clients) == 1, "searches share it"


def test_all_that_are_asked_for_meanwhile_are_found_by_one_search(
    kafka: KafkaBroker, cluster_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a leader was killed, hundreds of cancels are asked about at once."""
    monkeypatch.setattr(places, "SEARCH_S", 30.0)  # for a busy machine
    monkeypatch.setattr(places, "ANSWER_S", 60.0)
    searches: list[int] = []

    class Counted(places._Search):
        def __init__(self, settings: KafkaSettings, asked: Iterable[AskPlace]) -> None:
            super().__init__(settings, asked)
            searches.append(len(self._open))

    monkeypatch.setattr(places, "_Search", Counted)
    names = KafkaNames(cluster_id)
    topic = f"orders-{cluster_id}"
    for name in (names.outcomes, names.dead, topic):
        create_topic(kafka.address, name)
    producer = Producer({"bootstrap.servers": kafka.address})
    ids = [bytes(15) + bytes([number]) for number in range(200)]
    cancelled = [outcome(id_, MessageOutcome.CANCELLED, topic=topic) for id_ in ids[:199]]
    for record in dropped(names, cancelled):
        producer.produce(record.topic, record.value, record.key)
    assert producer.flush(60) == 0

    found: list[PlaceFound] = []

    def send(each: PlaceFound) -> bool:
        found.append(each)
        return True

    finder = PlaceFinder(
        KafkaSettings(names, {"bootstrap.servers": kafka.address}),
        send=send,
        on_found=lambda: None,
    )
    asked = [
        AskPlace(number, id_, DUE_MS, topic, is_dead=False, is_named_by_cancel=True)
        for number, id_ in enumerate(ids)
    ]
    long_ago = AskPlace(999, ids[0], DUE_MS - 86_400_000, topic, is_named_by_cancel=True)
    for each in (*asked, long_ago):
        finder.ask(each)
    threading.Thread(target=finder.run, daemon=True).start()

    def are_all_told() -> bool:
        finder.report()
        return len(found) == 201

    wait_until("all are told", are_all_told)
    assert searches == [200, 1]
    told = {each.question: each.outcome == "cancelled" for each in found if each.place is not None}
    assert told == dict.fromkeys(range(199), True)


def test_who_asks_for_records_far_apart_waits_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 of them, two seconds each, were before everybody's single one."""
    searches: list[list[int]] = []
    begun, goes_on, found = threading.Event(), threading.Event(), list[PlaceFound]()

    class Slow(places._Search):
        def run(self, _: object) -> None:
            searches.append([*self._open])
            begun.set()
            assert goes_on.wait(60)

    def finds(each: PlaceFound) -> bool:
        found.append(each)
        return True

    monkeypatch.setattr(places, "_Search", Slow)
    monkeypatch.setattr(
        places, "Consumer", lambda *_, **__: SimpleNamespace(unassign=bool, close=bool)
    )
    monkeypatch.setattr(places, "ANSWER_S", 600.0)
    finder = PlaceFinder(KafkaSettings(NAMES, {}), send=finds, on_found=lambda: None)
    threading.Thread(target=finder.run, daemon=True).start()
    for number in range(1, 33):
        apart_ms = 2 * places.TOGETHER_MS * number
        finder.ask(AskPlace(number, LETTER, DUE_MS - apart_ms, "orders", sharer=1))
    assert begun.wait(60)
    for number in (98, 99):
        finder.ask(AskPlace(number, LETTER, DUE_MS, "orders", sharer=2))
    finder.ask(AskPlace(100, LETTER, DUE_MS, "orders", sharer=3))
    goes_on.set()

    def are_all_told() -> bool:
        finder.report()
        return len(found) == 35

    wait_until("all are told", are_all_told)
    assert searches[:3] == [[1], [98, 99], [100]]
    assert [number for search in searches for number in search if number < 33] == [*range(1, 33)]


RECORD = {"dw-id": LETTER.hex().encode(), "dw-due": b"%d" % DUE_MS}
COPY_DIED = RECORD | {"dw-dead-topic": b"mine"}
COPY_ASKED = RECORD | {"dw-half-topic": b"mine"}
FORGED = RECORD | {"dw-topic": b"orders", "dw-half-topic": b"orders", "dw-dead-origin": b"in/0/7"}
COPY_UNASKED = COPY_ASKED | {"dw-dead-topic": NAMES.halves.encode()}


@pytest.mark.parametrize(
    ("topic", "headers", "named"),
    [
        ("orders", RECORD, "orders"),
        (NAMES.dead, COPY_DIED, "mine"),
        (NAMES.dead, COPY_UNASKED, "mine"),
        (NAMES.halves, COPY_ASKED, "mine"),
        (NAMES.dead, RECORD, None),
        (NAMES.dead, FORGED, None),
    ],
)
def test_a_copy_in_another_topic_is_another_message(
    topic: str, headers: dict[str, bytes], named: str | None
) -> None:
    """Who knew id and due of a message cancelled a copy of his own: the owner heard CANCELLED.

    Or wrote a record of an ingress topic that could not be delayed: its letter was the message's.
    """

    class Record:
        def topic(self) -> str:
            return topic

        def headers(self) -> list[tuple[str, bytes]]:
            return [*headers.items()]

    record = cast("Message", Record())
    expected = None if named is None else (RECORD["dw-id"], RECORD["dw-due"], named)
    assert places._delivered(NAMES, record) == expected


@pytest.mark.parametrize("value", [b"{", b"[]", b"\xff", b"7", None])
def test_what_is_no_outcome_ends_no_search(value: bytes | None) -> None:
    """Whoever may write to the topic could keep hundreds of cancels from being found."""
    strange = SimpleNamespace(key=lambda: bytes(16), value=lambda: value)
    assert places._ended(cast("Message", strange)) is None


class Busy:
    """A client of a broker with a letter, and with outcomes that do not end.

    Attributes:
        ends: What comes after the first record of the outcomes; None: they do not end.
        unknown: How many of the partitions have no offset that is known.
        partitions: How many there are.
    """

    ends: int | KafkaException | None = None
    unknown = 0
    partitions = 1

    def __init__(self, answer: str) -> None:
        self._answer, self._topic, self._consumed = answer, "", 0

    def list_topics(self, topic: str, **_: Any) -> Any:
        partitions = dict.fromkeys(range(self.partitions))
        known = SimpleNamespace(error=None, partitions=partitions)
        return SimpleNamespace(topics={topic: known})

    def offsets_for_times(self, since: list[TopicPartition], **_: Any) -> list[Any]:
        errors = [None] * (len(since) - self.unknown) + ["no leader"] * self.unknown
        return [
            SimpleNamespace(topic=each.topic, partition=each.partition, offset=5, error=error)
            for each, error in zip(since, errors, strict=True)
        ]

    def assign(self, places: list[TopicPartition]) -> None:
        self._topic, self._consumed = places[0].topic, 0

    def consume(self, *_: Any) -> list[Any]:
        topic = self._topic
        self._consumed += 1
        error = None
        if self._consumed > 1 and topic == NAMES.outcomes:
            if isinstance(self.ends, KafkaException):
                raise self.ends
            error = None if self.ends is None else KafkaError(self.ends)
        value = {"outcome": "answered", "answer": self._answer, "due_ms": DUE_MS, "topic": "orders"}
        headers = [
            ("dw-id", LETTER.hex().encode()),
            ("dw-due", b"%d" % DUE_MS),
            ("dw-half-topic", b"orders"),
        ]
        said = {
            "error": error,
            "topic": topic,
            "partition": 0,
            "offset": 5,
            "key": LETTER,
            "headers": headers if topic == NAMES.halves else [],
            "value": json.dumps(value).encode() if topic == NAMES.outcomes else b"v",
        }
        methods = {name: partialmethod(lambda _, it: it, it) for name, it in said.items()}
        return [type("Record", (), methods)()]


ASKED_LETTER = AskPlace(1, LETTER, DUE_MS, "orders", is_dead=False, is_asked_half=True)


@pytest.mark.parametrize(("answer", "told"), [("committed", "committed"), ("undecided", None)])
def test_where_a_letter_lies_is_found_whatever_outcomes_there_are(
    monkeypatch: pytest.MonkeyPatch, answer: str, told: str | None
) -> None:
    """Its answer may be the last of them, so that they are read to the end, or the limit.

    Who was undecided up to a limit may have answered behind it.
    """
    monkeypatch.setattr(places, "RECORDS_AT_MOST", 100)
    search = places._Search(KafkaSettings(NAMES, {}), [ASKED_LETTER])
    search.run(cast("Consumer", Busy(answer)))
    found = PlaceFound(1, LinkPlace(NAMES.halves, 0, 5), answer=told)
    assert search.found == {1: found}


@pytest.mark.parametrize(
    ("ends", "unknown", "partitions", "told"),
    [
        (KafkaError._PARTITION_EOF, 0, 1, "undecided"),
        (KafkaError._BAD_MSG, 0, 1, None),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, 0, 1, None),
        (KafkaException(KafkaError(KafkaError._TRANSPORT)), 0, 1, None),
        (KafkaError._PARTITION_EOF, 1, 2, None),
        (KafkaError._PARTITION_EOF, 0, places.PARTITIONS_AT_MOST + 1, None),
    ],
)
def test_a_half_is_undecided_only_at_the_end_of_all_outcomes(
    monkeypatch: pytest.MonkeyPatch,
    ends: int | KafkaException,
    unknown: int,
    partitions: int,
    told: str | None,
) -> None:
    """What could not be read may have a later answer."""
    monkeypatch.setattr(places, "SEARCH_S", 0.2)
    broker = Busy("undecided")
    broker.ends, broker.unknown, broker.partitions = ends, unknown, partitions
    search = places._Search(KafkaSettings(NAMES, {}), [ASKED_LETTER])
    with suppress(KafkaException):
        search.run(cast("Consumer", broker))
    assert search.found[1].answer == told
