"""What both clients are told in memory; client/table shows that a node tells the same."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import pytest

from client.testing.worlds import Arrived, World
from delaywheel import (
    CancelOutcome,
    Message,
    MessageState,
    RefusedError,
    RescheduleOutcome,
)

LATER = timedelta(hours=1)


def test_a_message_appears_as_it_was_sent(world: World, client: Any) -> None:
    headers = [("trace", b"7"), ("trace", None), ("empty", b"")]
    handle = client.produce(world.topic, b"v", key=b"k", headers=headers, delay="2s")
    stored = client.get(handle)
    assert (stored.state, stored.key, stored.value) == (MessageState.PENDING, b"k", b"v")
    assert (stored.headers, stored.topic, stored.handle) == (tuple(headers), world.topic, handle)
    assert stored.due_ms // 1000 == handle.slot
    client.produce(world.topic, None, delay="2500ms")
    assert world.arrived(2) == [
        Arrived(b"k", b"v", tuple(headers)),
        Arrived(None, None, ()),
    ]
    done = client.get(handle)
    assert (done.state, done.dead_reason) == (MessageState.DELIVERED, None)
    cancelled = client.cancel(handle)
    assert (cancelled.outcome, cancelled.due_ms) == (CancelOutcome.ALREADY_DELIVERED, None)
    moved = client.reschedule(handle, to=world.now() + LATER)
    assert moved.outcome is RescheduleOutcome.ALREADY_DELIVERED


def test_of_many_each_is_answered(world: World, client: Any) -> None:
    messages = [Message(world.topic, b"%d" % n, delay="1h" if n % 3 else "300d") for n in range(9)]
    results = client.produce_many(messages)
    assert [result.message for result in results] == messages
    assert [result.error is None for result in results] == [n % 3 != 0 for n in range(9)]
    pending = client.produce_async(world.topic, b"v", delay="1h")
    client.flush()
    assert client.get(pending.result()).value == b"v"


def test_search_and_cancels_of_many(world: World, client: Any) -> None:
    trip = uuid.uuid4().bytes
    messages = [
        Message(world.topic, b"%d" % n, key=b"k%d" % (n % 2), headers=[("trip", trip)], delay="1h")
        for n in range(6)
    ]
    handles = [result.unwrap() for result in client.produce_many(messages)]
    found = client.search(world.topic, key=b"k1", header=("trip", trip))
    assert {message.handle for message in found.messages} == {handles[n] for n in (1, 3, 5)}
    assert found.complete
    assert not client.search(world.topic, due_from=world.now() + 2 * LATER).messages
    assert len(client.search(world.topic, header="trip", limit=2).messages) == 2
    dry = client.cancel_many(world.topic, header=("trip", trip), dry_run=True)
    assert (len(dry.cancelled), len(dry.unknown)) == (0, 6)
    first = client.cancel_many(world.topic, key=b"k0", header=("trip", trip), limit=2)
    assert (len(first.cancelled), first.complete) == (2, False)
    done = client.cancel_many(world.topic, key=b"k0", header=("trip", trip), limit=2)
    assert set(done.cancelled) == {handles[n] for n in (0, 2, 4)}
    assert done.complete
    named = client.cancel_many(handles=handles)
    assert set(named.cancelled) == set(handles)
    assert not client.search(world.topic, header=("trip", trip)).messages
    with pytest.raises(RefusedError, match=r"^FILTER_MISSING: "):
        client.cancel_many(due_to=world.now())
