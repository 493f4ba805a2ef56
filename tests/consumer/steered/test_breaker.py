"""While too much fails, one record is tried at a time, in place of making letters of a topic."""

from __future__ import annotations

import time

import pytest

from delaywheel.consumer import CircuitBreaker
from delaywheel.consumer.message import DONE, State
from delaywheel.consumer.records import Partition
from delaywheel.consumer.watching.health import ConsumerTrouble
from support.consumer.driven import DrivenConsumer, start
from support.consumer.fake_kafka import FakeKafka

BREAKER = CircuitBreaker(share=0.5, of=4, wait="1h")


def failing(records: int = 30, *, ordered: bool = False) -> DrivenConsumer:
    """A consumer that has failed in two of its first four attempts."""
    kafka = FakeKafka(partitions=1)
    for number in range(records):
        kafka._append(Partition(kafka.source, 0), b"%d" % number, b"%d" % number, [])
    consumer = start(kafka, breaker=BREAKER, max_deliveries=None, ordered=ordered, retry=("9h",))
    while consumer.engine._book.held < records:
        consumer.run_once()
    for number, message in enumerate(consumer.take(4)):
        with message:
            if number % 2:
                raise ConnectionError("the bank is down")
    consumer.run_once()
    return consumer


def wait_is_over(consumer: DrivenConsumer) -> None:
    circuit = consumer.engine.desk._circuit
    assert circuit is not None
    circuit._open_until_s = 0.0


@pytest.mark.parametrize("ordered", [False, True])
def test_it_opens_and_closes_once_a_record_that_is_tried_is_done(*, ordered: bool) -> None:
    consumer = failing(ordered=ordered)
    assert consumer.take(9) == []
    text = consumer.engine.health.troubles[ConsumerTrouble.CIRCUIT_OPEN]
    assert text.startswith(
        "2 of the last 4 attempts have failed, and one record is tried each 3600"
    )
    assert text.endswith("ConnectionError: the bank is down")
    begun_s = time.monotonic()
    consumer.engine.desk.wait(0.2)  # records wait, and nobody spins over that
    assert time.monotonic() - begun_s >= 0.1
    wait_is_over(consumer)
    [trial] = consumer.take(9)
    assert consumer.take(9) == []
    with trial:
        raise ConnectionError("still down")
    assert consumer.take(9) == []
    wait_is_over(consumer)
    [trial] = consumer.take(9)
    with trial:
        pass
    consumer.run_once()
    assert len(consumer.take(9)) == 9
    assert consumer.engine.health.is_well


def test_a_record_that_is_tried_in_vain_is_followed_by_another() -> None:
    consumer = failing()
    wait_is_over(consumer)
    [stuck] = consumer.take(9)
    assert stuck.state is State.IN_HAND
    wait_is_over(consumer)
    [other] = consumer.take(9)
    assert stuck.done()
    assert consumer.take(9) == [], "it is no longer the one that counts"
    assert other.done()
    assert len(consumer.take(9)) == 9


def test_what_is_dead_by_its_own_fault_opens_nothing() -> None:
    kafka = FakeKafka(partitions=1)
    consumer = start(kafka, breaker=BREAKER, max_deliveries=None)
    for _ in range(9):
        kafka.send(b"v")
    while consumer.engine._book.held < 9:
        consumer.run_once()
    for message in consumer.take(8):
        message.dead("UNKNOWN_ARTICLE")
    assert len(consumer.take(9)) == 1


@pytest.mark.parametrize("wrong", [{"share": 0}, {"share": 1.1}, {"of": 0}, {"wait": "soon"}])
def test_an_impossible_breaker_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"share|of|soon"):
        CircuitBreaker(**wrong)  # type: ignore[arg-type]


def test_turns_wait_too() -> None:
    consumer = failing()
    assert consumer.engine.desk.take_turns(9) == []
    wait_is_over(consumer)
    [trial] = consumer.engine.desk.take_turns(9)
    assert consumer.engine.desk._settle(trial, DONE)
    assert len(consumer.engine.desk.take_turns(9)) == 9
