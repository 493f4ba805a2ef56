"""Expired messages are found among those that the wheels hold, and no others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from delaywheel.identity import WheelId
from delaywheel_replica.cleaner.delivery.expiring import find_expired
from delaywheel_replica.cleaner.due.reader import DueReader
from delaywheel_replica.cleaner.due.rows import DueRows
from delaywheel_replica.core.protocol.progress import Progress
from support.due.wheels import Sent, wheels_in_memory

WHEEL = WheelId("a", 1)
DUE_MS = 1_700_000_000_000


def step_of(messages: Sequence[Sent], ttl_header: str = "ttl") -> DueRows:
    """The messages as a step has them, read from files."""
    with wheels_in_memory() as wheels:
        wheels.write(WHEEL, messages)
        reader = DueReader(wheels.disk, wheels.data, ttl_header=ttl_header, preload_thread=False)
        reader.start(Progress(DUE_MS - 1, None))
        reader.update({WHEEL: 1})
        step = reader.next_step(DUE_MS, 1_000, 1 << 30)
        reader.close()
        assert len(step.messages) == len(messages)
        return step.messages


def sent(number: int, **rest: object) -> Sent:
    return Sent(DUE_MS, number.to_bytes(16, "big"), **rest)  # type: ignore[arg-type]


@pytest.mark.parametrize(("timestamp_ms", "begin_ms"), [(-1, DUE_MS), (DUE_MS - 900, DUE_MS - 900)])
def test_to_the_millisecond(timestamp_ms: int, begin_ms: int) -> None:
    rows = step_of([sent(1, headers=(("ttl", b"2"),), timestamp_ms=timestamp_ms)])
    assert not find_expired(rows, begin_ms + 1_999, "ttl")
    found = find_expired(rows, begin_ms + 2_000, "ttl")
    assert found == {0: f"its ttl of 2 s ended at {begin_ms + 2000}"}


def test_messages_without_one_are_not_looked_at_one_by_one() -> None:
    rows = step_of([sent(n, headers=(("trace", b"1"), ("ttl2", b"5"))) for n in range(1, 50)])
    assert not rows.records["ttl"].any()
