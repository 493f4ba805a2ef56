"""Expired messages are found among those that the wheels hold, and no others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delaywheel.identity import WheelId
from delaywheel_replica.cleaner.delivery.expiring import find_expired
from delaywheel_replica.cleaner.due.reader import DueReader
from delaywheel_replica.cleaner.due.rows import DueRows
from delaywheel_replica.core.protocol.progress import Progress
from support.due.wheels import Sent, wheels_in_memory

WHEEL = WheelId("a", 1)
DUE_MS = 1_700_000_000_000

_HEADERS = st.lists(
    st.tuples(
        st.sampled_from(["ttl", "Ttl", "ttl2", "x-life", "trace"]),
        st.none()
        | st.sampled_from([b"1", b"20", b"x", b"0", b"ttl", b"\0\0\0ttl", (30).to_bytes(8, "big")])
        | st.binary(max_size=300),
    ),
    max_size=3,
)
_MESSAGES = st.lists(
    st.tuples(
        st.none() | st.sampled_from([b"", b"\0\0\0ttl", b"key"]),
        st.none() | st.sampled_from([b"", b"\0\0\0ttl", b"value"]),
        _HEADERS,
        st.sampled_from([-1, DUE_MS - 10_000, DUE_MS + 5_000]),
    ),
    min_size=1,
    max_size=6,
)


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


def plainly(message: Sent, now_ms: int, ttl_header: str) -> bool:
    """The same in few words."""
    values = [value for name, value in message.headers if name == ttl_header]
    value = values[-1] if values else None
    if value is None:
        return False
    if value.isdigit() and value.isascii() and len(value) < 20:
        ttl_s = int(value)
    else:
        ttl_s = int.from_bytes(value, "big", signed=True) if len(value) == 8 else 0
    begin_ms = message.due_ms if message.timestamp_ms == -1 else message.timestamp_ms
    return ttl_s > 0 and begin_ms + ttl_s * 1000 <= now_ms


@settings(deadline=None)
@given(
    _MESSAGES, st.integers(DUE_MS, DUE_MS + 40_000), st.sampled_from(["ttl", "ttl", "x-life", ""])
)
def test_exactly_those_that_have_expired_are_found(
    messages: list[tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]], int]],
    now_ms: int,
    ttl_header: str,
) -> None:
    rows = [
        sent(number, key=key, value=value, headers=tuple(headers), timestamp_ms=timestamp_ms)
        for number, (key, value, headers, timestamp_ms) in enumerate(messages)
    ]
    found = find_expired(step_of(rows, ttl_header), now_ms, ttl_header)
    assert list(found) == [n for n, row in enumerate(rows) if plainly(row, now_ms, ttl_header)]


@pytest.mark.parametrize(("timestamp_ms", "begin_ms"), [(-1, DUE_MS), (DUE_MS - 900, DUE_MS - 900)])
def test_to_the_millisecond(timestamp_ms: int, begin_ms: int) -> None:
    rows = step_of([sent(1, headers=(("ttl", b"2"),), timestamp_ms=timestamp_ms)])
    assert not find_expired(rows, begin_ms + 1_999, "ttl")
    found = find_expired(rows, begin_ms + 2_000, "ttl")
    assert found == {0: f"its ttl of 2 s ended at {begin_ms + 2000}"}


def test_messages_without_one_are_not_looked_at_one_by_one() -> None:
    rows = step_of([sent(n, headers=(("trace", b"1"), ("ttl2", b"5"))) for n in range(1, 50)])
    assert not rows.records["ttl"].any()
