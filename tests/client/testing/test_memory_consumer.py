"""What only the consumer in memory has: the test's clock, and letters at hand.

All else is in test_same_consumers.py, which runs over it and over the real one.
"""

from __future__ import annotations

import asyncio
import itertools
import threading

import pytest

from delaywheel import DELIVERED_HEADERS
from delaywheel.consumer import (
    AsyncRetryConsumer,
    Batch,
    BatchItemError,
    ConsumerError,
    ReceivedMessage,
    RetryConsumer,
)
from delaywheel.testing import MemoryService


def test_a_retry_appears_when_the_clock_is_moved_to_its_due() -> None:
    with MemoryService(topics=["orders"]) as service, service.client() as client:
        consumer = service.consumer("orders", group="billing", retry=("1s", "2s"))
        client.produce("orders", b"v", key=b"k", delay="5s")
        assert not list(consumer)
        service.advance("5s")
        for before_ms in (999, 1_999):
            for message in consumer:
                with message:
                    raise ConnectionError("the bank does not answer")
            assert not service.advance(f"{before_ms}ms")
            (record,) = service.advance("1ms")
            assert (record.topic, record.value) == ("orders-retry-billing", b"v")
        for message in consumer:
            with message:
                raise ConnectionError("the bank does not answer")
        (letter,) = consumer.dead_letters
        assert (letter.topic, letter.key) == ("orders-dead-billing", b"k")
        assert dict(letter.headers)["dw-dead-topic"] == b"orders-retry-billing"
        assert (consumer.counts.retried, consumer.counts.dead) == (2, 1)
        service.advance("7d")
        assert not list(consumer)


def test_what_handlers_write_is_there_if_their_records_are_done() -> None:
    with (
        MemoryService(topics=["orders", "bills", "reminders"]) as service,
        service.client() as client,
    ):
        consumer = service.consumer("orders", group="billing", retry=("1s",))
        client.produce("orders", b"v", key=b"k", delay="0s")
        for attempt in (1, 2):
            for message in consumer:
                with message:
                    message.produce("bills", b"%d" % attempt, headers={"trace": b"7"})
                    message.produce("reminders", b"later %d" % attempt, key=b"k", after="1h")
                    if attempt == 1:
                        raise ConnectionError("the printer does not answer")
            service.advance("1s")
        assert [(one.topic, one.value) for one in consumer.produced] == [("bills", b"2")]
        (reminder,) = service.advance("1h")
        assert (reminder.topic, reminder.key, reminder.value) == ("reminders", b"k", b"later 2")
        client.produce("orders", b"w", delay="0s")
        for message in consumer:
            message.produce("bills", b"put back")
            if message.nack():
                break
        for message in consumer:
            message.done()
        assert len(consumer.produced) == 1
        assert consumer.counts.produced == 2, "with the reminder"


def test_what_ingress_does_not_take_is_a_dead_letter() -> None:
    with MemoryService(span="1h") as service, service.client() as client:
        consumer = service.consumer("orders", group="billing", retry=("1s",))
        client.produce("orders", b"v", delay="0s")
        for message in consumer:
            message.retry("2h")
        (letter,) = consumer.dead_letters
        assert dict(letter.headers)["dw-dead-reason"] == b"DELAY_BEYOND_SPAN"
        with pytest.raises(ConsumerError, match="DELAY_BEYOND_SPAN"):
            list(service.consumer("orders", group="billing", retry=("2h",)))


def test_a_lost_retry_is_waited_for_and_then_given_up() -> None:
    """The service in memory loses nothing, so a cancel does."""
    with MemoryService() as service, service.client() as client:
        options = {"ordered": True, "retry": ("1s",), "lost_after": "1h"}
        consumer = service.consumer("orders", group="billing", **options)  # type: ignore[arg-type]
        for value in (b"a1", b"a2"):
            client.produce("orders", value, key=b"a", delay="0s")
        with next(iter(consumer)):
            raise OSError("down")
        assert not list(consumer), "a2 is parked behind it"
        client.cancel_many("orders-retry-billing", key=b"a", limit=1)
        service.advance("30m")
        assert not list(consumer)
        for _ in range(20):
            service.advance("10m")
            if found := next(iter(consumer), None):
                break
        assert found is not None
        assert found.value == b"a2"


def test_a_pattern_matches_topics_as_they_appear() -> None:
    with MemoryService() as service, service.client() as client:
        both = [
            service.consumer(["named", "^orders-"], group=group, retry=("1s",)) for group in "gh"
        ]
        for topic in ("orders-eu", "invoices", "named"):
            client.produce(topic, topic.encode(), delay="0s")
        for consumer in both:
            seen = []
            for message in consumer:
                seen.append(message.topic)
                with message:
                    raise OSError("down")
            assert sorted(seen) == ["named", "orders-eu"]
        client.produce("orders-us", b"later", delay="2s")
        service.advance("2s")
        # Each has its own retries, and not the other's.
        for consumer in both:
            again = []
            for message in consumer:
                again.append((message.topic, message.attempt))
                message.done()
            assert sorted(again) == [("named", 2), ("orders-eu", 2), ("orders-us", 1)]


def test_what_a_stopped_batch_had_put_back_comes_once() -> None:
    with MemoryService(topics=["orders"]) as service, service.client() as client:
        consumer = service.consumer("orders", group="billing", retry=("1s",))
        for value in (b"1", b"2", b"3"):
            client.produce("orders", value, delay="0s")
        [batch] = consumer.batches(3)
        with batch:
            batch[2].nack()
            raise BatchItemError(batch[0]) from ConnectionError("the bank does not answer")
        assert sorted(message.value or b"" for message in consumer) == [b"2", b"3"]


def test_what_was_delivered_is_passed_on_with_its_headers() -> None:
    with MemoryService() as service, service.client() as client:
        consumer = service.consumer("orders", group="billing", retry=("1s",))
        client.produce("orders", b"v", delay="1s", headers={"trace": b"\xff"})
        for attempt in (1, 2):
            (record,) = service.advance("1s")
            for message in consumer:
                assert message.headers[0] == ("trace", b"\xff")
                assert {name for name, _ in message.headers[1:]} <= DELIVERED_HEADERS
                assert message.header("dw-id") == record.id.hex().encode() or attempt == 2
                with message:
                    message.produce("bills", b"now", headers=message.headers)
                    message.produce("later", b"later", headers=message.headers, after="1s")
                    client.produce("elsewhere", b"w", headers=message.headers, delay="1h")
                    if attempt == 1:
                        raise OSError("down")
        assert consumer.counts.done == 1
        assert [one.headers for one in consumer.produced] == [[("trace", b"\xff")]]
        (later,) = service.advance("1s")
        assert later.headers == (("trace", b"\xff"),)
        assert [name for name, _ in later.added] == ["dw-id", "dw-due", "dw-accepted", "dw-wheel"]


def test_a_programs_own_consumer_is_there_in_memory_with_its_topics_and_options() -> None:
    seen: list[bytes | None] = []

    def charge(message: ReceivedMessage) -> None:
        seen.append(message.value)
        raise ConnectionError("the bank does not answer")

    class Billing:
        def __init__(self) -> None:
            self.consumer = RetryConsumer(
                "^orders", group="billing", bootstrap="kafka:9092", retry=("1s",)
            )

        def main(self) -> None:
            with self.consumer as consumer:
                consumer.run({"^orders": charge})

    billing = Billing()
    production = billing.consumer
    for topic in ("orders-eu", "orders-us"):
        with MemoryService(topics=[topic]) as service, service.client() as client:
            client.produce(topic, topic.encode(), delay="0s")
            billing.consumer = memory = service.in_memory(production)
            for _ in range(2):
                billing.main()
                service.advance("1s")
            assert [letter.topic for letter in memory.dead_letters] == [f"{topic}-dead-billing"]
    assert seen == [b"orders-eu"] * 2 + [b"orders-us"] * 2


def test_coroutines_of_a_programs_own_consumer_run_in_memory() -> None:
    seen: list[bytes | None] = []

    async def charge(message: ReceivedMessage) -> None:
        seen.append(message.value)

    with MemoryService(topics=["orders"]) as service, service.client() as client:
        for number in range(3):
            client.produce("orders", b"%d" % number, key=b"k", delay="0s")

        own = AsyncRetryConsumer("orders", group="billing", bootstrap="kafka:9092")

        async def main() -> None:
            async with consumer:
                await consumer.run(charge, concurrency=2)

        consumer = service.in_memory(own)
        asyncio.run(main())
        client.produce("orders", b"3", delay="0s")
        asyncio.run(main())
    assert seen == [b"0", b"1", b"2", b"3"]


def test_a_further_block_goes_on_after_a_stop_and_has_the_letters_of_before() -> None:
    with MemoryService(topics=["orders"]) as service, service.client() as client:
        consumer = service.consumer("orders", group="billing", retry=())

        def main() -> None:
            with consumer:
                for message in consumer:
                    message.dead("BY_HAND")
                    consumer.stop()

        for number in range(3):
            client.produce("orders", b"%d" % number, delay="0s")
        for count in range(1, 4):
            main()
            assert [one.value for one in consumer.dead_letters] == [b"0", b"1", b"2"][:count]
            assert consumer.counts.dead == 1
        with consumer:
            assert len(consumer.dead_letters) == 3
            assert consumer.counts.dead == 0
        assert len(service.engines) == 1


def test_threads_and_coroutines_handle_at_once() -> None:
    both, seen = threading.Barrier(2, timeout=30), list[bytes | None]()

    def handle(message: ReceivedMessage) -> None:
        both.wait()
        seen.append(message.value)

    async def handle_batch(batch: Batch) -> None:
        seen.extend(message.value for message in batch)

    async def batches(service: MemoryService) -> None:
        async with service.async_consumer("orders", group="h") as consumer:
            await consumer.run_batches(handle_batch, 3)
            assert [batch async for batch in consumer.batches()] == []
            assert consumer.counts.done == 4

    with MemoryService(topics=["orders"]) as service, service.client() as client:
        for number in range(4):
            client.produce("orders", b"%d" % number, delay="0s")
        consumer = service.consumer("orders", group="g")
        consumer.run(handle, concurrency=2)
        assert sorted(map(str, seen)) == ["b'0'", "b'1'", "b'2'", "b'3'"]
        asyncio.run(batches(service))
    assert seen[4:] == [b"0", b"1", b"2", b"3"]


def test_the_member_that_began_last_has_the_partitions() -> None:
    with MemoryService(topics=["orders"]) as service, service.client() as client:
        for number in range(3):
            client.produce("orders", b"%d" % number, delay="0s")
        first, second = (service.consumer("orders", group="g") for _ in range(2))
        done, kept = itertools.islice(first, 2)
        assert done.done()
        assert first.flush()
        assert [message.value for message in second] == [b"1", b"2"]
        assert first.partitions == []
        assert (kept.is_ours, kept.done()) == (False, False)


def test_a_message_without_topic_by_its_due_is_dead() -> None:
    with MemoryService(topics=["orders"]) as service, service.client() as client:
        consumer = service.consumer("orders", group="g")
        client.produce("orders", b"v", delay="0s")
        for message in consumer:
            message.produce("nowhere", b"w", after="1h")
            message.done()
        service.advance("1h")
        [letter] = service.delivered("delaywheel-memory-dead")
        assert (letter.value, dict(letter.headers)["dw-dead-reason"]) == (b"w", b"TOPIC_MISSING")
