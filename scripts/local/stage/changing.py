"""Cancels and reschedules at a rate, each after its message was sent, by one process.

What is measured is what a program sees that awaits each call: how long it took, and what came of
it. The messages are due long after, all over a minute, or in one second.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any, Final, Protocol

import numpy as np

from delaywheel import AsyncClient, DelaywheelError, Handle, Message

_AHEAD_S: Final = 60.0
_WITHIN_S: Final = 2.0
"""A message is cancelled at random within this time."""
_CALL: Final = 1_000
_random: Final = Random()  # noqa: S311 - it spreads load


@dataclass(slots=True)
class Changed:
    """What came of all calls.

    Attributes:
        outcomes: How many had each outcome, or ended with which error.
        times_ms: How long each took.
        produced_ms: How long each `produce` took.
        seconds: How long the measurement lasted.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    times_ms: list[float] = field(default_factory=list)
    produced_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def document(self) -> dict[str, Any]:
        """The figures as JSON values."""
        return {
            "per_s": round(sum(self.outcomes.values()) / max(self.seconds, 1e-9)),
            "seconds": self.seconds,
            "outcomes": dict(self.outcomes.most_common()),
            "took": _quantiles(self.times_ms),
            "produce_took": _quantiles(self.produced_ms),
        }


class Changing(Protocol):
    """The load; see `Changes` in local/bench/workloads.py."""

    @property
    def rate_per_s(self) -> int: ...  # noqa: D102

    @property
    def way(self) -> str: ...  # noqa: D102

    @property
    def one_second(self) -> bool: ...  # noqa: D102


def change(addresses: Sequence[str], topic: str, how: Changing, seconds: float) -> Changed:
    """Measures; blocks."""
    return asyncio.run(_change(addresses, topic, how, seconds))


async def _change(addresses: Sequence[str], topic: str, how: Changing, seconds: float) -> Changed:
    changed = Changed()
    async with AsyncClient(addresses) as client:
        await client.produce(topic, b"warm", delay=timedelta(seconds=_AHEAD_S))
        began_s = time.monotonic()
        if how.way == "handles":
            await _by_handles(client, topic, how, seconds, changed)
        else:
            await _each(client, topic, how, seconds, changed)
        changed.seconds = changed.seconds or time.monotonic() - began_s
    return changed


def _dues(how: Changing, seconds: float) -> Callable[[], datetime]:
    begin_s = time.time() + seconds + _AHEAD_S
    spread_s = 0.999 if how.one_second else 60.0
    return lambda: datetime.fromtimestamp(int(begin_s) + _random.random() * spread_s, UTC)


async def _each(
    client: AsyncClient, topic: str, how: Changing, seconds: float, changed: Changed
) -> None:
    """One call for each message, some time after it was sent."""
    due, until_s = _dues(how, seconds), time.monotonic() + seconds
    async with asyncio.TaskGroup() as tasks:
        number, began_s = 0, time.monotonic()
        while (now_s := time.monotonic()) < until_s:
            wanted = int((now_s - began_s) * how.rate_per_s)
            while number < wanted:
                number += 1
                tasks.create_task(_one(client, topic, how, due(), changed))
            await asyncio.sleep(0.005)


async def _one(
    client: AsyncClient, topic: str, how: Changing, due: datetime, changed: Changed
) -> None:
    began_s = time.monotonic()
    try:
        handle = await (await client.produce_async(topic, bytes(200), deliver_at=due))
    except DelaywheelError as error:
        changed.outcomes[f"produce: {_name(error)}"] += 1
        return
    changed.produced_ms.append((time.monotonic() - began_s) * 1000)
    if how.way == "none":
        return
    await asyncio.sleep(_random.random() * _WITHIN_S)

    async def call() -> str:
        if how.way == "reschedule":
            later = due + timedelta(seconds=30)
            return str((await client.reschedule(handle, to=later)).outcome)
        return str((await client.cancel(handle)).outcome)

    await _timed(call, changed)


async def _timed(call: Callable[[], Awaitable[str]], changed: Changed) -> None:
    began_s = time.monotonic()
    try:
        outcome = await call()
    except DelaywheelError as error:
        outcome = _name(error)
    changed.outcomes[outcome] += 1
    changed.times_ms.append((time.monotonic() - began_s) * 1000)


async def _by_handles(
    client: AsyncClient, topic: str, how: Changing, seconds: float, changed: Changed
) -> None:
    """`cancel_many(handles=…)` of what was sent before; as fast as it is answered."""
    due = _dues(how, seconds)
    handles: list[Handle] = []
    wanted = int(how.rate_per_s * seconds)
    while len(handles) < wanted:
        messages = [Message(topic, bytes(200), deliver_at=due()) for _ in range(5 * _CALL)]
        results = await client.produce_many(messages)
        handles += [result.handle for result in results if result.handle is not None]
    began_s = time.monotonic()
    slots = asyncio.Semaphore(4)

    async def cancel(begin: int) -> None:
        async with slots:
            sent_s = time.monotonic()
            done = await client.cancel_many(handles=handles[begin : begin + _CALL])
            changed.times_ms.append((time.monotonic() - sent_s) * 1000)
            changed.outcomes["CANCELLED"] += len(done.cancelled)
            changed.outcomes["unknown"] += len(done.unknown)

    async with asyncio.TaskGroup() as tasks:
        for begin in range(0, len(handles), _CALL):
            tasks.create_task(cancel(begin))
    changed.seconds = time.monotonic() - began_s


def _name(error: DelaywheelError) -> str:
    return str(getattr(error, "reason", type(error).__name__))


def _quantiles(times_ms: list[float]) -> dict[str, float] | None:
    if not times_ms:
        return None
    p50, p99, most = np.quantile(times_ms, [0.5, 0.99, 1.0]).tolist()
    return {"p50_ms": p50, "p99_ms": p99, "max_ms": most}
