"""Handlers of letters on the real Kafka: what each decides is done once, whoever is killed."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from itertools import count
from unittest.mock import MagicMock

import pytest
from confluent_kafka import Producer
from prometheus_client import CollectorRegistry, generate_latest

from delaywheel.deadletters import (
    DROP,
    KEEP,
    REPLAY,
    AsyncDeadLetterConsumer,
    DeadLetterConsumer,
    DeadLetterTopic,
    Decision,
    Letter,
    LetterHandler,
    LetterPlace,
    LetterState,
)
from delaywheel.deadletters.handling.metrics import DeadLetterMetrics
from delaywheel.deadletters.selection import EVERYTHING
from delaywheel.deadletters.writing import LetterWriter
from delaywheel.testing.tracing import MemoryTrace
from delaywheel.trace.options import TraceOptions
from delaywheel.trace.reports import EventReports
from delaywheel.transactional import Outgoing
from local.loopback.kafka import KafkaBroker
from support.kafka.read_committed import create_topic, read_all, wait_decided

pytestmark = pytest.mark.kafka

PATIENCE_S = 30.0


class Letters:
    """A dead-letter topic with one letter of each reason that is given."""

    def __init__(self, address: str, cluster_id: str) -> None:
        self.client = {"bootstrap.servers": address}
        self.name, self.orders = f"dead-{cluster_id}", f"orders-{cluster_id}"
        self.metrics = ""
        self.trace: EventReports | None = None
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
        wait_decided(self._address, f"{self.name}-marks")
        with DeadLetterTopic(self.name, self.client) as topic:
            return {letter.reason: state for letter, state in topic.letters()}

    def arrived(self) -> Counter[bytes | None]:
        wait_decided(self._address, self.orders)
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

        noted = {reason: noting(handle) for reason, handle in handlers.items()}
        with DeadLetterConsumer(
            self.name,
            self.client,
            noted,
            retry=("1ms",),
            takeover_after="0s",
            trace=self.trace,
        ) as consumer:
            timer = threading.Timer(PATIENCE_S, consumer.stop)
            timer.start()
            try:
                consumer.run()
            finally:
                timer.cancel()
            registry = CollectorRegistry()
            registry.register(DeadLetterMetrics(consumer))
            self.metrics = generate_latest(registry).decode()
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
    for line in (
        'letters_total{became="replayed",reason="AGAIN",topic="%s"} 1.0',
        'letters_total{became="dropped",reason="LAST",topic="%s"} 1.0',
        'letters_total{became="kept",reason="BROKEN",topic="%s"} 1.0',
        'handler_failures_total{topic="%s"} 2.0',
        'at_work{topic="%s"} 0.0',
        'trouble{topic="%s"} 0.0',
    ):
        assert f"delaywheel_letter_consumer_{line % letters.name}\n" in letters.metrics
    letters.write("LATER")
    assert letters.handled({**HANDLERS, "LATER": broken}, until="LATER") == ["LATER"]


def test_a_trace_is_told_what_was_committed(letters: Letters) -> None:
    events: list[dict[str, object]] = []
    options = TraceOptions()
    letters.trace = EventReports(MemoryTrace(events, options), options)
    letters.write("AGAIN", "ASK", "NOBODY'S")
    letters.orders = "no-such-topic"
    letters.write("AGAIN", "LAST")
    letters.handled(HANDLERS, until="LAST")
    shown = [tuple(event[name] for name in ("offset", "status", "root")) for event in events]
    statuses = ("REPLAYED", "KEPT", "KEPT", "REFUSED", "DROPPED")
    assert shown == [(offset, status, None) for offset, status in enumerate(statuses)]
    assert [event["why"] for event in events][2:4] == ["NOBODY'S", "TOPIC_MISSING: no-such-topic"]
    assert [event["handler_us"] is None for event in events] == [False, False, True, False, False]


async def test_coroutines_decide_while_the_loop_goes_on(
    letters: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    letters.write("AGAIN", "LAST", "HANGS")
    met, begun, was_cancelled = asyncio.Event(), asyncio.Event(), threading.Event()
    ask, asked = asyncio.run_coroutine_threadsafe, count(1)

    def ask_slowly(
        coroutine: Coroutine[object, object, Decision | None], loop: asyncio.AbstractEventLoop
    ) -> Future[Decision | None]:
        """Hears of the third handler, which hangs, only after it was cancelled."""
        future = ask(coroutine, loop)
        if next(asked) == 3:
            assert was_cancelled.wait(PATIENCE_S)
        return future

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", ask_slowly)

    async def replayed(_: Letter) -> Decision:
        await met.wait()  # another task of the loop is heard meanwhile
        return REPLAY

    async def dropped(_: Letter) -> Decision:
        return DROP

    async def hangs(_: Letter) -> Decision:
        begun.set()
        await asyncio.sleep(PATIENCE_S)
        return DROP

    async with AsyncDeadLetterConsumer(
        letters.name,
        letters.client,
        {"AGAIN": replayed, "HANGS": hangs},
        otherwise=dropped,
        takeover_after="0s",
    ) as consumer:
        running = asyncio.create_task(consumer.run())
        met.set()
        async with asyncio.timeout(PATIENCE_S):
            await begun.wait()
        running.cancel()
        await asyncio.sleep(0)  # until it has cancelled the handler
        was_cancelled.set()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert letters.arrived() == {b"AGAIN": 1}
    assert (letters.states()["LAST"], letters.states()["HANGS"]) == (
        LetterState.DROPPED,
        LetterState.WAITING,
    )


async def _awaited(_: Letter) -> Decision:
    return KEEP


def test_handlers_of_the_other_kind_are_refused() -> None:
    with pytest.raises(TypeError, match="use AsyncDeadLetterConsumer"):
        DeadLetterConsumer("dead", {}, {"A": _awaited})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="use DeadLetterConsumer"):
        AsyncDeadLetterConsumer("dead", {}, {"A": lambda _: KEEP})  # type: ignore[dict-item, return-value]
    for kind in (DeadLetterConsumer, AsyncDeadLetterConsumer):
        with pytest.raises(TypeError, match="handlers must be a Mapping, not function"):
            kind("dead", {}, _awaited)  # type: ignore[arg-type]


def test_a_handler_that_the_end_interrupts_has_decided_nothing() -> None:
    """As a coroutine that is cancelled: its letter was kept for good where no attempt was left."""

    def interrupted(_: Letter) -> Decision:
        consumer.stop()
        raise CancelledError

    client = {"bootstrap.servers": "127.0.0.1:1"}
    letter = Letter(LetterPlace(0, 0), 0, None, None, ())
    with DeadLetterConsumer("dead", client, {}, otherwise=interrupted, retry=()) as consumer:
        assert consumer._decided(letter, MagicMock()) is None


def test_what_was_decided_and_not_committed_is_decided_again(
    letters: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    transact = LetterWriter.transact

    def dies(writer: LetterWriter, records: list[Outgoing], marks: object) -> object:
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
