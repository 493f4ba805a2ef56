"""What clients tell of messages that they send and change; both kinds, at the service in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from delaywheel import AsyncClient, Client, Message, RefusedError
from delaywheel.testing import MemoryService
from local.loopback.kafka import free_ports


@pytest.fixture
def service() -> Iterator[MemoryService]:
    with MemoryService(topics=["orders"]) as running:
        yield running


def told(service: MemoryService, *columns: str) -> list[tuple[Any, ...]]:
    """These columns of all events so far, which are forgotten."""
    events = [tuple(event[column] for column in columns) for event in service.traced]
    service.traced.clear()
    return events


def test_what_is_sent_is_told_with_its_answer(service: MemoryService) -> None:
    trace = service.trace(tags="tags")
    with service.client(trace=trace) as client:
        headers = {"tags": b"eu"}
        handle = client.produce("orders", b"1", key=b"42", delay="1h", headers=headers)
        [event] = service.traced
        assert 0 < event.pop("cost_us") < 60_000_000
        assert event == {
            "kind": "sent",
            "id": handle.id,
            "due_ms": service.now_ms + 3_600_000,
            "topic": "orders",
            "time_ms": service.now_ms,
            "status": "ACCEPTED",
            "key": "42",
            "tags": "eu",
            "root": None,
            "attempts": 1,
            "node": handle.wheel.partition(".")[0],
        }
        service.traced.clear()
        many = [Message(topic, b"", level="30s") for topic in ("orders", "bills", "orders")]
        client.produce_many(many)
        assert told(service, "id", "status", "due_ms") == [
            (many[0].id, "ACCEPTED", service.now_ms + 30_000),
            (many[1].id, "TOPIC_UNKNOWN", service.now_ms + 30_000),
            (many[2].id, "ACCEPTED", service.now_ms + 30_000),
        ]
        pending = [client.produce_async("orders", b"", delay="1h") for _ in range(3)]
        client.flush()
        assert told(service, "id") == [(one.result().id,) for one in pending]
        with suppress(RefusedError):
            client.produce("orders", b"", level="no such level")
        assert told(service, "status", "due_ms") == [("LEVEL_UNKNOWN", None)]


def test_what_no_node_answered_is_told() -> None:
    with MemoryService() as service:
        trace = service.trace()
        address = f"127.0.0.1:{free_ports(1)[0]}"
        with Client(address, timeout=0.2, trace=trace) as client, suppress(TimeoutError):
            client.produce("orders", b"", delay="1h")
        assert told(service, "status", "node") == [("TIMED_OUT", None)]


CHANGES = ("what", "status", "id", "topic", "due_ms", "slot", "to_ms")


def test_changes_are_told_with_their_outcomes(service: MemoryService) -> None:
    with service.client() as client:
        handles = [client.produce("orders", b"", key=b"42", delay="1h") for _ in range(6)]
    due_ms = service.now_ms + 3_600_000
    slot, later_ms = due_ms // 1000, service.now_ms + 7_200_000

    with service.client(trace=service.trace()) as client:

        def now(what: str, status: str, number: int, due_ms: int | None, **to: int) -> Any:
            return (what, status, handles[number].id, "orders", due_ms, slot, to.get("to_ms"))

        client.cancel(handles[0])
        client.cancel(topic="orders", id=handles[0].id, due=service.now)
        [named, unknown] = told(service, *CHANGES)
        assert named == now("CANCEL", "CANCELLED", 0, None)
        assert unknown[:2] == ("CANCEL", "NOT_FOUND")
        assert unknown[4:6] == (service.now_ms, service.now_ms // 1000)
        client.reschedule(handles[1], delay="2h")
        assert told(service, *CHANGES) == [
            now("RESCHEDULE", "RESCHEDULED", 1, None, to_ms=later_ms)
        ]
        client.reschedule_many([(handles[2], "2h"), (handles[0], "2h")])
        assert told(service, *CHANGES) == [
            now("RESCHEDULE", "RESCHEDULED", 2, None, to_ms=later_ms),
            now("RESCHEDULE", "CANCELLED", 0, None),
        ]
        client.cancel_many(handles=[handles[3], handles[1]])
        assert told(service, *CHANGES) == [
            now("CANCEL", "CANCELLED", 3, None),
            now("CANCEL", "RESCHEDULED", 1, None, to_ms=later_ms),
        ]
        client.cancel_many("orders", key=b"42", dry_run=True)
        assert told(service, *CHANGES) == []
        client.cancel_many("orders", id=handles[4].id)
        assert told(service, *CHANGES) == [now("CANCEL", "CANCELLED", 4, due_ms)]
        service.advance("1h")
        client.cancel(handles[5])
        assert told(service, "what", "status") == [("CANCEL", "ALREADY_DELIVERED")]


def test_halves_are_told_with_what_is_said_of_them(service: MemoryService) -> None:
    with service.client(trace=service.trace()) as client:
        first, second = (client.begin("orders", b"", group="shop") for _ in range(2))
        first.commit()
        second.rollback()
        halves = client.begin_many([Message("orders", b"", delay="1h")] * 2, group="shop")
        halves.commit()
        with suppress(RefusedError):
            client.begin_many(
                [Message("orders", b"", delay="1h"), Message("bills", b"", delay="1h")],
                group="shop",
            )
    assert [(event["kind"], event.get("what"), event["status"]) for event in service.traced] == [
        ("sent", None, "ACCEPTED"),
        ("sent", None, "ACCEPTED"),
        ("changed", "COMMIT", "COMMITTED"),
        ("changed", "ROLL_BACK", "ROLLED_BACK"),
        ("sent", None, "ACCEPTED"),
        ("sent", None, "ACCEPTED"),
        ("changed", "COMMIT", "COMMITTED"),
        ("changed", "COMMIT", "COMMITTED"),
        ("sent", None, "ACCEPTED"),
        ("sent", None, "TOPIC_UNKNOWN"),
        ("changed", "ROLL_BACK", "ROLLED_BACK"),
    ]
    first_ms = next(event for event in service.traced if event["kind"] == "changed")["due_ms"]
    assert first_ms == first.due_ms


async def test_both_clients_tell_the_same(service: MemoryService) -> None:
    async with service.async_client(trace=service.trace()) as client:
        handle = await client.produce("orders", b"", delay="1h")
        await client.reschedule(handle, delay="2h")
        await client.cancel(handle)
        half = await client.begin("orders", b"", group="shop")
        await half.commit()
        half = await client.begin("orders", b"", group="shop")
        await half.rollback()
    assert [(event.get("what", "SEND"), event["status"]) for event in service.traced] == [
        ("SEND", "ACCEPTED"),
        ("RESCHEDULE", "RESCHEDULED"),
        ("CANCEL", "RESCHEDULED"),
        ("SEND", "ACCEPTED"),
        ("COMMIT", "COMMITTED"),
        ("SEND", "ACCEPTED"),
        ("ROLL_BACK", "ROLLED_BACK"),
    ]


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_trace_that_is_none_is_an_error_at_once(kind: Callable[..., object]) -> None:
    with pytest.raises(TypeError, match="trace must be a Trace, not dict"):
        kind("127.0.0.1:1", trace={"bootstrap.servers": "127.0.0.1:9092"})
