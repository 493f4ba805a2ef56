"""What consumers tell of records, once their outcomes are committed; at the service in memory."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from delaywheel.consumer import AskedHalf, HalfChecker
from delaywheel.deadletters import DROP, Decision, Letter, Replay
from delaywheel.testing import MemoryConsumer, MemoryService
from delaywheel.transactional import Outgoing
from delaywheel.transactions import HalfVerdict


@pytest.fixture
def service() -> Iterator[MemoryService]:
    with MemoryService(topics=["orders", "orders-retry-billing", "audit"]) as running:
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
            "forwarded_ms": due_ms,
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


def test_when_it_was_forwarded_the_record_says_or_a_header_beside_a_senders_own_time(
    service: MemoryService,
) -> None:
    consumer = service.consumer("orders", group="billing", trace=service.trace())
    own = datetime(2031, 2, 3, tzinfo=UTC)
    with service.client() as client:
        client.produce("orders", b"1", delay="5s")
        client.produce("orders", b"2", delay="5s", timestamp=own)
    service.write(Outgoing("orders", None, b"3", []))
    service.advance("5s")
    due_ms = service.now_ms
    service.advance("1s")
    handle(consumer)
    assert told(service, "forwarded_ms", "time_ms") == [
        (None, due_ms + 1_000),
        (due_ms, due_ms + 1_000),
        (due_ms, due_ms + 1_000),
    ]


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


def test_what_a_handler_writes_for_later_is_on_the_same_way(service: MemoryService) -> None:
    trace = service.trace()
    consumer = service.consumer("orders", group="billing", retry=("5s",), trace=trace)
    with service.client() as client:
        first = client.produce("orders", b"42", delay="5s")
    service.write(Outgoing("orders", None, b"41", []))
    service.advance("5s")
    for message in consumer:
        with message:
            if message.attempt == 1:
                raise ConnectionError
    service.advance("5s")
    service.traced.clear()
    for message in consumer:
        with message:
            message.produce("orders", b"later", key=b"k", after="5s")
            message.produce("audit", b"now")
    written = [event for event in service.traced if event["kind"] == "sent"]
    assert [(each["status"], each["root"], each["key"]) for each in written] == [
        ("WRITTEN", "orders/0/0", "k"),
        ("WRITTEN", first.id.hex(), "k"),
    ]
    assert {each["due_ms"] for each in written} == {service.now_ms + 5_000}
    service.advance("5s")
    service.traced.clear()
    handle(consumer, later="refused")
    ids = [each["id"] for each in written]
    assert told(service, "status", "root", "id") == [
        ("RETRIED", "orders/0/0", ids[0]),
        ("RETRIED", first.id.hex(), ids[1]),
    ]
    service.advance("5s")
    handle(consumer)
    assert told(service, "status", "root", "attempt") == [
        ("DONE", "orders/0/0", 2),
        ("DONE", first.id.hex(), 2),
    ]


def test_letters_are_told_with_what_became_of_them(service: MemoryService) -> None:
    trace = service.trace(tags="tags")
    consumer = service.consumer("orders", group="billing", retry=(), trace=trace)
    service.write(Outgoing("orders", b"k", b"41", [("tags", b"eu")]))
    with service.client() as client:
        ids = [client.produce("orders", b"%d" % n, delay="5s").id.hex() for n in (42, 43, 44)]
    service.advance("5s")
    due_ms = service.now_ms
    handle(consumer, **{str(n): "refused" for n in (41, 42, 43, 44)})
    service.traced.clear()

    def decide(letter: Letter) -> Decision | None:
        to: dict[bytes, Decision] = {
            b"41": Replay(),
            b"42": Replay(to="orders", as_new=True),
            b"43": DROP,
        }
        return to.get(letter.value or b"")

    letters = service.dead_letter_consumer(
        consumer, {"ATTEMPTS_EXHAUSTED": decide}, trace=service.trace(tags="tags")
    )
    letters.run()
    first = service.traced[0]
    assert first.pop("handler_us") >= 0
    assert first == {
        "kind": "processed",
        "id": None,
        "due_ms": None,
        "topic": "orders-dead-billing",
        "time_ms": service.now_ms,
        "status": "REPLAYED",
        "key": "k",
        "tags": "eu",
        "root": "orders/0/0",
        "to_ms": None,
        "next_id": None,
        "partition": 0,
        "offset": 0,
        "forwarded_ms": None,
        "group": "billing",
        "attempt": None,
        "why": "ATTEMPTS_EXHAUSTED",
    }
    rest = told(service, "offset", "status", "id", "due_ms", "root")[1:]
    assert rest == [
        (1, "REPLAYED", bytes.fromhex(ids[0]), due_ms, None),
        (2, "DROPPED", bytes.fromhex(ids[1]), due_ms, None),
        (3, "KEPT", bytes.fromhex(ids[2]), due_ms, None),
    ]
    handle(consumer)
    assert told(service, "topic", "status", "root", "attempt") == [
        ("orders", "DONE", ids[0], 1),
        ("orders-retry-billing", "DONE", "orders/0/0", 2),
    ]


class Shop(HalfChecker):
    def check(self, half: AskedHalf) -> HalfVerdict:
        return HalfVerdict((half.value or b"").decode())


def test_verdicts_are_told_by_the_group_that_gives_them(service: MemoryService) -> None:
    trace = service.trace()
    shop = Shop(group="shop", bootstrap="-", cluster="-", retry=(), trace=trace)
    other = Shop(group="other", bootstrap="-", cluster="-", trace=trace)
    with service.client() as client:
        halves = [client.begin("orders", one.encode(), group="shop") for one in HalfVerdict]
        later = client.begin("orders", b"commit", group="shop", delay="1h")
        later_ms = service.now_ms + 3_600_000
    service.advance("10s")
    for checker in (shop, other):
        service.half_checker(checker).run()
    again = [event for event in service.traced if event["to_ms"] == later_ms]
    assert [(each["id"], each["next_id"], each["root"]) for each in again] == [
        (later.id, later.id, None)
    ]
    assert sorted(told(service, "id", "due_ms", "status", "forwarded_ms", "group")) == sorted(
        (half.id, half.due_ms, status, None, "shop")
        for half, status in [
            *zip(halves, ("COMMITTED", "ROLLED_BACK", "UNDECIDED"), strict=True),
            (later, "COMMITTED"),
        ]
    )
