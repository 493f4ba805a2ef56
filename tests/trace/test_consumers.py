"""What consumers tell of records, once their outcomes are committed; at the service in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from delaywheel.consumer import AskedHalf, HalfChecker
from delaywheel.testing import MemoryConsumer, MemoryService
from delaywheel.transactional import Outgoing
from delaywheel.transactions import HalfVerdict


@pytest.fixture
def service() -> Iterator[MemoryService]:
    with MemoryService(topics=["orders", "orders-retry-billing"]) as running:
        yield running


def handle(consumer: MemoryConsumer, **fails: str) -> None:
    """Handles what there is; values named in `fails` raise with that text."""
    for message in consumer:
        with message:
            value = (message.value or b"").decode()
            if value in fails:
                raise ConnectionError(fails[value])


def told(service: MemoryService, *columns: str) -> list[tuple[Any, ...]]:
    """These columns of all events so far, which are forgotten."""
    events = [tuple(event[column] for column in columns) for event in service.traced]
    service.traced.clear()
    return events


def test_a_retried_message_is_one_way(service: MemoryService) -> None:
    consumer = service.consumer(
        "orders", group="billing", retry=("30s",), trace=service.trace(tags="tags")
    )
    with service.client() as client:
        first = client.produce("orders", b"42", key=b"k", delay="5s", headers={"tags": b"eu"})
        service.advance("5s")
        due_ms = service.now_ms
        handle(consumer, **{"42": "refused"})
        [event] = service.traced
        service.traced.clear()
        assert event.pop("handler_us") >= 0
        again = event.pop("next_id")
        assert event == {
            "kind": "processed",
            "id": first.id,
            "due_ms": due_ms,
            "topic": "orders",
            "time_ms": due_ms,
            "status": "RETRIED",
            "key": "k",
            "tags": "eu",
            "root": None,
            "to_ms": due_ms + 30_000,
            "partition": 0,
            "offset": 0,
            "group": "billing",
            "attempt": 1,
            "why": "ConnectionError: refused",
        }
        [waiting] = client.search("orders-retry-billing").messages
        assert waiting.handle.id == again
        service.advance("30s")
        handle(consumer, **{"42": "refused"})
        shown = "id", "due_ms", "topic", "status", "root", "attempt", "to_ms", "next_id", "why"
        root = first.id.hex()
        [dead] = told(service, *shown)
        assert dead == (
            *(again, due_ms + 30_000, "orders-retry-billing", "DEAD", root, 2, None, None),
            "ATTEMPTS_EXHAUSTED: ConnectionError: refused",
        )


def test_a_way_that_began_without_an_id_has_its_place_as_root(service: MemoryService) -> None:
    consumer = service.consumer("orders", group="billing", trace=service.trace())
    service.write(Outgoing("orders", None, b"41", []))
    service.write(Outgoing("orders", None, b"42", [("dw-id", b"no id"), ("dw-due", b"-1")]))
    handle(consumer, **{"41": ""})
    assert told(service, "id", "due_ms", "offset", "status", "root") == [
        (None, None, 0, "RETRIED", None),
        (None, None, 1, "DONE", None),
    ]
    service.advance("5s")
    handle(consumer)
    [(_, status, root)] = told(service, "id", "status", "root")
    assert (status, root) == ("DONE", "orders/0/0")


def test_all_ends_keep_the_same_ways(service: MemoryService) -> None:
    trace = service.trace(sample=0.2)
    consumer = service.consumer("orders", group="billing", retry=("5s",), trace=trace)
    with service.client(trace=trace) as client:
        for number in range(100):
            client.produce_async("orders", b"%d" % (number % 2), delay="5s")
        client.flush()
    sent = {event["id"] for event in service.traced}
    assert 0 < len(sent) < 100
    service.traced.clear()
    service.advance("5s")
    handle(consumer, **{"1": "fails"})
    first = service.traced.copy()
    assert {event["id"] for event in first if event["status"] == "DONE"} < sent
    assert sum(event["status"] == "RETRIED" for event in first) == 50  # failures always
    service.traced.clear()
    service.advance("5s")
    handle(consumer)
    ends = {bytes.fromhex(event["root"]) for event in service.traced}
    assert ends == {each["id"] for each in first if each["status"] == "RETRIED"} & sent


def test_what_is_not_handled_is_told_without_a_time(service: MemoryService) -> None:
    consumer = service.consumer(
        "orders", group="billing", route=["eu"], trace=service.trace(key="none")
    )
    past = b"%d" % (service.now_ms - 10_000)
    service.write(Outgoing("orders", b"k", b"", [("routingkey", b"us")]))
    late = Outgoing("orders", b"k", b"", [("routingkey", b"eu"), ("ttl", b"1")])
    service.write(late._replace(timestamp_ms=int(past)))
    service.advance("5s")
    handle(consumer)
    assert told(service, "status", "handler_us", "key") == [
        ("SKIPPED", None, None),
        ("EXPIRED", None, None),
    ]


def test_nothing_is_told_before_its_transaction(service: MemoryService) -> None:
    consumer = service.consumer("orders", group="billing", trace=service.trace())
    for value in (b"1", b"2"):
        service.write(Outgoing("orders", None, value, []))
    with next(iter(consumer)):
        assert service.traced == []
    consumer.flush()
    assert told(service, "offset", "status") == [(0, "DONE")]


class Shop(HalfChecker):
    def check(self, half: AskedHalf) -> HalfVerdict:
        return HalfVerdict((half.value or b"").decode())


def test_verdicts_are_told_by_the_group_that_gives_them(service: MemoryService) -> None:
    trace = service.trace()
    shop = Shop(group="shop", bootstrap="-", cluster="-", retry=(), trace=trace)
    other = Shop(group="other", bootstrap="-", cluster="-", trace=trace)
    with service.client() as client:
        halves = [client.begin("orders", one.encode(), group="shop") for one in HalfVerdict]
    service.advance("4s")
    for checker in (shop, other):
        service.half_checker(checker).run()
    assert sorted(told(service, "id", "due_ms", "status", "group")) == sorted(
        (half.id, half.due_ms, status, "shop")
        for half, status in zip(halves, ("COMMITTED", "ROLLED_BACK", "UNDECIDED"), strict=True)
    )
