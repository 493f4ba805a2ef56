"""Letters about half messages that wait, counted on a real broker."""

from __future__ import annotations

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

from delaywheel_replica.cleaner import unanswered_halves
from delaywheel_replica.cleaner.unanswered_halves import UnansweredLetters
from delaywheel_replica.core.protocol.status_files import UnansweredHalves
from delaywheel_replica.kafka_settings import KafkaNames, KafkaSettings
from local.loopback.kafka import KafkaBroker
from support.consumer.half_letters import SentHalf
from support.kafka.read_committed import create_topic

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

    def counting(self) -> UnansweredLetters:
        return UnansweredLetters(self.settings, is_leading=lambda: self.leads)

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


def test_what_a_group_has_not_read_waits_and_what_it_has_read_does_not(
    kafka: KafkaBroker, letters: Letters
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
    letters.leads = False
    assert found() == [], "another node leads"


def test_a_new_leader_knows_the_last_letters(
    kafka: KafkaBroker, letters: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unanswered_halves, "READ_AT_MOST", 2)
    create_topic(kafka.address, letters.topic)
    letters.ask("till", "shop", "shop")
    counting = letters.counting()
    counting.look()
    assert counting.found == (waits("shop", 2),)
