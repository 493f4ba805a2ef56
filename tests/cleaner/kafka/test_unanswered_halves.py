"""Letters about half messages that wait, counted on a real broker."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from delaywheel_replica.cleaner import unanswered_halves
from delaywheel_replica.cleaner.kafka.clients import KafkaClients
from delaywheel_replica.cleaner.unanswered_halves import UnansweredLetters, _Letter
from delaywheel_replica.core.protocol.status_files import UnansweredHalves
from delaywheel_replica.kafka_settings import KafkaNames, KafkaSettings
from local.loopback.kafka import KafkaBroker
from support.consumer.half_letters import SentHalf
from support.kafka.read_committed import create_topic, topic_exists
from support.services.waiting import wait_until

pytestmark = pytest.mark.kafka

WRITTEN_MS = 1_700_000_000_000
"""In the past: a broker takes no timestamp that is far ahead."""


class Letters:
    """The topic of letters, and groups that read it."""

    def __init__(self, kafka: KafkaBroker, cluster_id: str) -> None:
        self.client = {"bootstrap.servers": kafka.address}
        self.settings = KafkaSettings(KafkaNames(cluster_id), self.client)
        self.topic = self.settings.names.halves
        self._producer = Producer(self.client)
        self._refused: list[KafkaError | None] = []
        self.leads = True
        self.written = 0

    def counting(self) -> UnansweredLetters:
        clients = KafkaClients(self.settings)
        return UnansweredLetters(
            self.settings,
            is_leading=lambda: self.leads,
            written=lambda: self.written,
            topic_id=partial(clients.topic_id, self.topic),
        )

    def ask(self, *groups: str) -> None:
        for group in groups:
            headers = SentHalf("orders", group=group).letter_headers()
            self._producer.produce(
                self.topic,
                b"v",
                headers=[*headers],
                timestamp=WRITTEN_MS,
                on_delivery=lambda error, _: self._refused.append(error),
            )
        self.written += len(groups)
        assert self._producer.flush(60) == 0
        assert set(self._refused) == {None}

    def answer(self, group: str, *, up_to: int) -> None:
        reader = Consumer({**self.client, "group.id": group})
        reader.commit(offsets=[TopicPartition(self.topic, 0, up_to)], asynchronous=False)
        reader.close()


@pytest.fixture
def letters(kafka: KafkaBroker, cluster_id: str) -> Letters:
    return Letters(kafka, cluster_id)


def waits(group: str, letters: int) -> UnansweredHalves:
    return UnansweredHalves(group, letters, WRITTEN_MS)


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collects the groups of the clients that are made."""
    made: list[str] = []

    def make(settings: dict[str, str], **options: Any) -> Consumer:
        made.append(settings["group.id"])
        return Consumer(settings, **options)

    monkeypatch.setattr(unanswered_halves, "Consumer", make)
    return made


def test_what_a_group_has_not_read_waits_and_what_it_has_read_does_not(
    kafka: KafkaBroker, letters: Letters, clients: list[str]
) -> None:
    counting = letters.counting()

    def found() -> list[UnansweredHalves]:
        counting.look()
        return [*counting.found]

    assert found() == [], "there is no such topic yet"
    create_topic(kafka.address, letters.topic)
    letters.ask("shop", "till", "shop")
    assert found() == [waits("shop", 2), waits("till", 1)]
    letters.answer("shop", up_to=2)
    letters.ask("shop")
    assert found() == [waits("shop", 2), waits("till", 1)]
    letters.answer("shop", up_to=4)
    assert found() == [waits("till", 1)]
    letters.ask("shop")
    assert {*found()} == {waits("shop", 1), waits("till", 1)}
    assert clients.count("till") == 1, "it is kept while letters wait"
    assert clients.count("shop") == 2, "meanwhile none waited"
    admin = AdminClient({**letters.client})
    (deleted,) = admin.delete_records([TopicPartition(letters.topic, 0, 4)]).values()
    deleted.result()
    assert found() == [waits("shop", 1)], "nobody can read the other one any more"
    letters.leads = False
    assert found() == [], "another node leads"


def test_a_topic_that_is_recreated_has_other_letters(kafka: KafkaBroker, letters: Letters) -> None:
    """At offsets that were read in the former one, and that nobody waits for any more."""
    counting, admin = letters.counting(), AdminClient({**letters.client})
    create_topic(kafka.address, letters.topic)
    letters.ask("shop", "shop", "till")
    counting.look()
    assert {*counting.found} == {waits("shop", 2), waits("till", 1)}
    admin.delete_topics([letters.topic])[letters.topic].result()
    wait_until("it is gone", lambda: not topic_exists(kafka.address, letters.topic))
    counting.look()
    assert [*counting.found] == []
    create_topic(kafka.address, letters.topic)
    letters.ask("shop")
    counting.look()
    assert [*counting.found] == [waits("shop", 1)]


class Pretended(UnansweredLetters):
    """Without Kafka: letters that are there, and groups that the node may not describe."""

    def __init__(self) -> None:
        settings = KafkaSettings(KafkaNames("c"), {})
        super().__init__(settings, is_leading=lambda: True, written=lambda: 0, topic_id=lambda: "")
        self.letters: dict[str, list[_Letter]] = {}
        self.hidden: set[str] = set()

    def _read(self) -> bool:
        self._letters = {group: [*letters] for group, letters in self.letters.items()}
        self._drop_first()
        return True

    def _committed(self, group: str) -> dict[int, int]:
        if group in self.hidden:
            raise KafkaException(KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED))
        return {}


def test_one_group_that_is_not_known_hides_no_other() -> None:
    """Senders name groups: one that the node may not describe comes soon."""
    counting = Pretended()
    counting.letters = {group: [_Letter(0, 0, WRITTEN_MS)] for group in ("shop", "till")}
    counting.look()
    counting.hidden = {"shop", "secret"}
    counting.letters["till"].append(_Letter(0, 7, WRITTEN_MS))
    counting.letters["secret"] = [_Letter(0, n, WRITTEN_MS) for n in range(8, 20)]
    with pytest.raises(KafkaException):
        counting.look()
    assert counting.found == (waits("till", 2), waits("shop", 1))


def test_letters_are_few_whatever_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one transaction may have one time, and a leader's clock may be set back."""
    monkeypatch.setattr(unanswered_halves, "READ_AT_MOST", 3)
    counting = Pretended()
    times_ms = (9, 9, 1, 9, 9)
    counting.letters = {"shop": [_Letter(0, n, ms) for n, ms in enumerate(times_ms)]}
    counting.look()
    assert counting.found == (UnansweredHalves("shop", 3, 9),)


def test_at_rest_nothing_is_asked_of_kafka(
    kafka: KafkaBroker, letters: Letters, clients: list[str]
) -> None:
    create_topic(kafka.address, letters.topic)
    letters.ask("shop")
    letters.answer("shop", up_to=1)
    counting = letters.counting()
    for _ in range(4):
        counting.look()
    assert [*counting.found] == []
    assert (len(clients), counting._consumer, counting._members) == (2, None, {})
    letters.ask("till")
    counting.look()
    assert [*counting.found] == [waits("till", 1)]
    assert len(clients) == 4, "it went on where it was: nobody asked again how far shop is"


class SlowTopic(UnansweredLetters):
    """Letters that Kafka does not hand out for a while."""

    def __init__(self) -> None:
        self.mark = 0
        self.reads = list[bool]()
        settings = KafkaSettings(KafkaNames("c"), {})
        super().__init__(
            settings, is_leading=lambda: True, written=lambda: self.mark, topic_id=lambda: ""
        )

    def _read(self) -> bool:
        return self.reads.pop()


@pytest.mark.parametrize("change", ["not read", "another term"])
def test_it_rests_only_if_the_end_was_seen_in_this_term(change: str) -> None:
    """Else letters that wait since an earlier leader are told to nobody."""
    counting = SlowTopic()
    counting.reads = [True] * 3
    for _ in range(2):
        if change == "not read":
            counting.reads[-1] = False
        counting.look()
    counting.mark += change == "another term"
    counting.look()
    assert counting.reads == []
    counting.mark += 1
    with pytest.raises(IndexError):
        counting.look()


def test_letters_that_this_leader_has_not_written_are_seen_soon() -> None:
    """Operators replay letters that were dead letters, and nobody may read them."""
    counting = Pretended()
    for _ in range(4):
        counting.look()
    counting.letters = {"shop": [_Letter(0, 0, WRITTEN_MS)]}
    for _ in range(unanswered_halves.IDLE_LOOKS):
        counting.look()
    assert counting.found == (waits("shop", 1),)


class Unanswering:
    """A client of a broker that has letters, and hands none out: their disk hangs, say."""

    def __init__(self, *_: Any, error: KafkaError | None = None, **__: Any) -> None:
        self.error = error

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None

    def list_topics(self, topic: str, **_: Any) -> Any:
        return SimpleNamespace(topics={topic: SimpleNamespace(error=None, partitions={0: None})})

    def get_watermark_offsets(self, *_: Any, **__: Any) -> tuple[int, int]:
        return 0, 3

    def position(self, places: list[TopicPartition]) -> list[TopicPartition]:
        return places

    def consume(self, *_: Any) -> list[Any]:
        none: tuple[Any, ...] = (lambda: 0, lambda: 0, lambda: self.error)
        names = ("partition", "offset", "error")
        return [SimpleNamespace(**dict(zip(names, none, strict=True)))] if self.error else []


def test_what_was_not_read_is_not_taken_for_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unanswered_halves, "_ANSWER_S", 0.01)
    settings = KafkaSettings(KafkaNames("c"), {})
    counting = UnansweredLetters(
        settings, is_leading=lambda: True, written=lambda: 0, topic_id=lambda: ""
    )
    ends = KafkaError(KafkaError._PARTITION_EOF)
    refused = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    monkeypatch.setattr(unanswered_halves, "Consumer", Unanswering)
    assert not counting._read()
    counting._close()
    monkeypatch.setattr(unanswered_halves, "Consumer", partial(Unanswering, error=ends))
    assert counting._read()
    counting._close()
    monkeypatch.setattr(unanswered_halves, "Consumer", partial(Unanswering, error=refused))
    with pytest.raises(KafkaException, match="TOPIC_AUTHORIZATION_FAILED"):
        counting._read()


def test_a_new_leader_knows_the_last_letters(
    kafka: KafkaBroker, letters: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unanswered_halves, "READ_AT_MOST", 2)
    create_topic(kafka.address, letters.topic)
    letters.ask("till", "shop", "shop")
    counting = letters.counting()
    counting.look()
    assert counting.found == (waits("shop", 2),)
