"""Handlers of letters on the real Kafka: what each decides is done once, whoever is killed."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from confluent_kafka import Producer

from delaywheel.deadletters import (
    DROP,
    KEEP,
    REPLAY,
    DeadLetterConsumer,
    DeadLetterTopic,
    Decision,
    Letter,
    LetterHandler,
    LetterState,
)
from delaywheel.deadletters.letter import OutgoingRecord
from delaywheel.deadletters.selection import EVERYTHING
from delaywheel.deadletters.writing import LetterWriter
from local.loopback.kafka import KafkaBroker
from support.kafka.read_committed import create_topic, read_all

pytestmark = pytest.mark.kafka

PATIENCE_S = 30.0


class Letters:
    """A dead-letter topic with one letter of each reason that is given."""

    def __init__(self, address: str, cluster_id: str) -> None:
        self.client = {"bootstrap.servers": address}
        self.name, self.orders = f"dead-{cluster_id}", f"orders-{cluster_id}"
        self._address = address
        create_topic(address, self.name)
        create_topic(address, self.orders)

    def write(self, *reasons: str) -> None:
        producer = Producer(self.client)
        for reason in reasons:
            headers = [("dw-dead-reason", reason), ("dw-dead-topic", self.orders)]
            producer.produce(self.name, reason, headers=headers)  # type: ignore[arg-type]
        assert producer.flush(PATIENCE_S) == 0

    def states(self) -> dict[str, LetterState]:
        with DeadLetterTopic(self.name, self.client) as topic:
            return {letter.reason: state for letter, state in topic.letters()}

    def arrived(self) -> Counter[bytes | None]:
        return Counter(message.value() for message in read_all(self._address, self.orders))

    def handled(self, handlers: dict[str, LetterHandler], until: str) -> list[str]:
        """Runs handlers until the one of this reason has run, and its decision is committed."""
        seen: list[str] = []

        def noting(handle: LetterHandler) -> LetterHandler:
            def noted(letter: Letter) -> Decision | None:
                seen.append(letter.reason)
                if letter.reason == until:
                    consumer.stop()
                return handle(letter)

            return noted

        with DeadLetterConsumer(
            self.name,
            self.client,
            {reason: noting(handle) for reason, handle in handlers.items()},
            retry=("1ms",),
            takeover_after="0s",
        ) as consumer:
            timer = threading.Timer(PATIENCE_S, consumer.stop)
            timer.start()
            try:
                consumer.run()
            finally:
                timer.cancel()
        return seen


@pytest.fixture
def letters(kafka: KafkaBroker, cluster_id: str) -> Letters:
    return Letters(kafka.address, cluster_id)


def broken(_: Letter) -> Decision:
    raise ConnectionError("the stock does not answer")


HANDLERS: dict[str, LetterHandler] = {
    "AGAIN": lambda _: REPLAY,
    "NEVER": lambda _: DROP,
    "ASK": lambda _: KEEP,
    "SILENT": lambda _: None,
    "BROKEN": broken,
    "LAST": lambda _: DROP,
}


def test_each_reason_has_its_handler_and_what_it_decides_is_done(letters: Letters) -> None:
    letters.write("AGAIN", "NEVER", "ASK", "SILENT", "BROKEN", "NOBODY'S", "LAST")
    seen = letters.handled(HANDLERS, until="LAST")
    assert seen == ["AGAIN", "NEVER", "ASK", "SILENT", "BROKEN", "BROKEN", "LAST"]
    assert letters.arrived() == {b"AGAIN": 1}
    kept = dict.fromkeys(("ASK", "SILENT", "BROKEN", "NOBODY'S"), LetterState.WAITING)
    dropped = dict.fromkeys(("NEVER", "LAST"), LetterState.DROPPED)
    assert letters.states() == {"AGAIN": LetterState.REPLAYED, **kept, **dropped}
    letters.write("LATER")
    assert letters.handled({**HANDLERS, "LATER": broken}, until="LATER") == ["LATER"]


def test_what_was_decided_and_not_committed_is_decided_again(
    letters: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    transact = LetterWriter.transact

    def dies(writer: LetterWriter, records: list[OutgoingRecord], marks: object) -> object:
        if records:
            raise KeyboardInterrupt
        return transact(writer, records, marks)  # type: ignore[arg-type]

    letters.write("AGAIN", "LAST")
    monkeypatch.setattr(LetterWriter, "transact", dies)
    with pytest.raises(KeyboardInterrupt):
        letters.handled(HANDLERS, until="LAST")
    monkeypatch.undo()
    assert letters.handled(HANDLERS, until="LAST") == ["AGAIN", "LAST"]
    assert letters.arrived() == {b"AGAIN": 1}


def test_an_operator_who_replays_meanwhile_is_let_do_so(letters: Letters) -> None:
    def replayed_by_hand(_: Letter) -> Decision:
        with DeadLetterTopic(letters.name, letters.client) as topic:
            topic.replay(EVERYTHING, limit=1)
        return REPLAY

    letters.write("AGAIN", "LAST")
    seen = letters.handled({**HANDLERS, "AGAIN": replayed_by_hand}, until="LAST")
    assert (seen[0], seen[-1]) == ("AGAIN", "LAST")
    assert letters.arrived() == {b"AGAIN": 1}
    assert letters.states()["LAST"] is LetterState.DROPPED
