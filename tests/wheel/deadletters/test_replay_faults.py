"""Replays whose connection breaks at bad moments: unknown outcomes are reported, and resolved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import cast

import pytest
from confluent_kafka import Producer

from delaywheel.deadletters import (
    DeadLettersError,
    DeadLettersReason,
    DeadLetterTopic,
    Selection,
    Settled,
    settling,
)
from local.loopback.kafka import KafkaBroker
from support.kafka.proxy import KafkaProxy
from support.kafka.read_committed import create_topic, read_all

pytestmark = pytest.mark.kafka

LETTERS = 24
BATCH = 8


class Letters:
    """Some letters, and a replay of them through a proxy."""

    def __init__(self, kafka: KafkaBroker, proxy: KafkaProxy, cluster_id: str) -> None:
        self.kafka, self.proxy = kafka, proxy
        self.name, self.orders = f"dead-{cluster_id}", f"orders-{cluster_id}"
        create_topic(kafka.address, self.name)
        create_topic(kafka.address, self.orders)
        producer = Producer({"bootstrap.servers": kafka.address})
        reported = [("dw-dead-reason", b"REFUSED"), ("dw-dead-topic", self.orders.encode())]
        for number in range(LETTERS):
            producer.produce(self.name, value=b"%d" % number, headers=[*reported])
        assert producer.flush(30) == 0

    def replay(self, before_second: Callable[[], None] | None = None) -> int:
        """All letters; the fault happens before the second transaction with some."""
        calls: list[int] = []

        def hear(settled: Settled) -> None:
            calls.append(settled.done)
            if before_second is not None and len(calls) == 1:
                before_second()

        settings = {"bootstrap.servers": self.kafka.proxy_address}
        with DeadLetterTopic(self.name, settings) as dead:
            return dead.replay(Selection(), on_progress=hear).done

    def assert_all_once(self) -> None:
        found = read_all(self.kafka.address, self.orders, at_least=LETTERS)
        arrived = Counter(cast("bytes", message.value()) for message in found)
        assert arrived == Counter({b"%d" % number: 1 for number in range(LETTERS)})


@pytest.fixture
def letters(
    kafka: KafkaBroker, cluster_id: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Letters]:
    monkeypatch.setattr(settling, "BATCH_LETTERS", BATCH)
    with KafkaProxy(kafka) as proxy:
        yield Letters(kafka, proxy, cluster_id)


def test_a_commit_that_was_made_and_not_heard_of(letters: Letters) -> None:
    with pytest.raises(DeadLettersError) as raised:
        letters.replay(letters.proxy.lose_next_end_txn_reply)
    assert raised.value.reason is DeadLettersReason.OUTCOME_UNKNOWN, raised.value
    assert not raised.value.outcome_known
    assert letters.proxy.lost_replies == 1
    assert letters.replay() == LETTERS - 2 * BATCH, "it was committed"
    letters.assert_all_once()


def test_a_claim_that_was_not_heard_of_is_made_once_more(letters: Letters) -> None:
    letters.proxy.lose_next_end_txn_reply()
    assert letters.replay() == LETTERS
    assert letters.proxy.lost_replies == 1
    letters.assert_all_once()


def test_a_commit_that_arrives_after_the_next_replay(letters: Letters) -> None:
    with pytest.raises(DeadLettersError) as raised:
        letters.replay(letters.proxy.hold_next_end_txn)
    assert raised.value.reason is DeadLettersReason.OUTCOME_UNKNOWN
    assert letters.proxy.held_requests == 1, "it was not sent again"
    assert letters.replay() == LETTERS - BATCH, "it was not committed"
    letters.proxy.release_held()
    letters.assert_all_once()
    assert letters.replay() == 0


def test_a_connection_that_breaks_before_the_commit(letters: Letters) -> None:
    with pytest.raises(DeadLettersError) as raised:
        letters.replay(lambda: letters.proxy.break_at_next_produce(letters.orders))
    assert (raised.value.reason, raised.value.outcome_known) == (
        DeadLettersReason.KAFKA_UNREACHABLE,
        True,
    )
    assert letters.replay() == LETTERS - BATCH
    letters.assert_all_once()
