"""Handlers of dead letters without Kafka."""

from __future__ import annotations

from collections.abc import Awaitable

import pytest

from delaywheel.deadletters import DROP, KEEP, REPLAY, Decision, Letter, Replay
from delaywheel.testing import MemoryConsumer, MemoryService


def given_up(service: MemoryService, *values: bytes) -> MemoryConsumer:
    consumer = service.consumer("orders", group="g", retry=())
    with service.client() as client:
        for value in values:
            client.produce("orders", value, key=b"k", delay="1s")
    service.advance("1s")
    for message in consumer:
        message.dead((message.value or b"")[:20].decode().upper())
    return consumer


def test_what_is_decided_is_done_and_each_letter_is_asked_about_once() -> None:
    asked: list[bytes | None] = []

    def broken(letter: Letter) -> Decision:
        asked.append(letter.value)
        raise ConnectionError

    with MemoryService() as service:
        consumer = given_up(service, b"again", b"elsewhere", b"never", b"broken", b"else")
        letters = service.dead_letter_consumer(
            consumer,
            {
                "AGAIN": lambda _: REPLAY,
                "ELSEWHERE": lambda _: Replay("audit", as_new=True),
                "NEVER": lambda _: DROP,
                "BROKEN": broken,
            },
            otherwise=lambda _: None,
        )
        for _ in range(2):
            assert letters.run() is None
        assert [decision for _, decision in letters.decided] == [
            *(REPLAY, Replay("audit", as_new=True), DROP, KEEP)
        ]
        assert asked == [b"broken"] * 4
        assert [record.value for record in service.delivered("audit")] == [b"elsewhere"]
        [back] = consumer  # as the group's next retry
        assert (back.value, back.attempt, back.origin.topic) == (b"again", 2, "orders")


async def test_handlers_may_be_coroutines() -> None:
    async def dropped(_: Letter) -> Decision:
        if len(letters.decided) == 1:
            raise ConnectionError
        return DROP

    with MemoryService() as service:
        consumer = given_up(service, b"a", b"b")
        letters = service.dead_letter_consumer(consumer, {}, otherwise=dropped, attempts=2)
        running = letters.run()
        assert isinstance(running, Awaitable)
        await running
    assert [letter.value for letter, _ in letters.decided] == [b"a"]


def test_a_letter_is_made_whole_from_its_record() -> None:
    value = b"v" * 1_048_300
    with MemoryService(max_message_bytes=2_000_000) as service:
        consumer = given_up(service, value)
        assert consumer.dead_letters[0].value is None
        letters = service.dead_letter_consumer(consumer, {}, otherwise=lambda _: Replay("audit"))
        letters.run()
        assert [record.value for record in service.delivered("audit")] == [value]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", "delaywheel")
