"""Cancels, reschedules and questions at a rate, by one process, which awaits each.

What is measured is what a program sees: how long each call took, and what came of it. Calls come
at a rate whatever becomes of those before (an open loop): each message is sent, and changed at
random within `WITHIN_S` after that. So as many calls as messages come only after that time:
measured are the calls that begin then, while messages still are sent.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import chain
from random import Random
from typing import Any, Final, Protocol

import numpy as np

from delaywheel import AsyncClient, DelaywheelError, Handle, Message

_AHEAD_S: Final = 60.0
WITHIN_S: Final = 10.0
_CALL: Final = 1_000
_CALM_MS: Final = 300.0
"""After an overload: what a call takes at most once all is as before."""
_CALM_CALLS: Final = 20
_SEARCHES_AT_LEAST: Final = 3
_random: Final = Random()  # noqa: S311 - it spreads load


@dataclass(slots=True)
class Changed:
    """What came of all calls.

    Attributes:
        outcomes: How many had each outcome, or ended with which error.
        times_ms: How long each took, by outcome.
        produced_ms: How long each `produce` took.
        beside_ms: The same beside what is measured, if both are.
        seconds: How long the measurement lasted.
        calm_after_s: After an overload, when calls were quick again.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    times_ms: dict[str, list[float]] = field(default_factory=dict)
    produced_ms: list[float] = field(default_factory=list)
    beside_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0
    calm_after_s: float | None = None

    def took(self, outcome: str, began_s: float) -> None:
        """Notes how long a call took that has just ended."""
        self.times_ms.setdefault(outcome, []).append((time.monotonic() - began_s) * 1000)

    def document(self) -> dict[str, Any]:
        """The figures as JSON values."""
        return {
            "per_s": round(sum(self.outcomes.values()) / max(self.seconds, 1e-9)),
            "seconds": self.seconds,
            "outcomes": dict(self.outcomes.most_common()),
            "took": _quantiles([*chain.from_iterable(self.times_ms.values())]),
            "took_by_outcome": {
                outcome: _quantiles(times_ms) for outcome, times_ms in self.times_ms.items()
            },
            "produce_took": _quantiles(self.produced_ms),
            "produce_beside_took": _quantiles(self.beside_ms),
            "calm_after_s": self.calm_after_s,
        }


class Changing(Protocol):
    """The load; see `Changes` in local/bench/workloads.py."""

    @property
    def rate_per_s(self) -> int: ...  # noqa: D102

    @property
    def way(self) -> str: ...  # noqa: D102

    @property
    def one_second(self) -> bool: ...  # noqa: D102

    @property
    def messages(self) -> int: ...  # noqa: D102


SENDS, CALLS, ENDS = "sends", "calls", "ends"
"""Moments of a load at a rate: messages are sent; there are as many calls as messages; the end."""


def change(
    addresses: Sequence[str],
    topic: str,
    how: Changing,
    seconds: float,
    on_moment: Callable[[str], object] = lambda _: None,
) -> Changed:
    """Measures; blocks.

    Args:
        addresses: Of the nodes.
        topic: Where messages go.
        how: The load.
        seconds: How long calls are measured.
        on_moment: Called at each moment of a load at a rate.
    """
    return asyncio.run(_change(addresses, topic, how, seconds, on_moment))


async def _change(
    addresses: Sequence[str],
    topic: str,
    how: Changing,
    seconds: float,
    on_moment: Callable[[str], object],
) -> Changed:
    changed = Changed()
    async with AsyncClient(addresses) as client:
        await client.produce(topic, b"warm", delay=timedelta(seconds=_AHEAD_S))
        load = _Load(client, topic, how, changed, on_moment)
        match how.way:
            case "handles":
                await _by_handles(client, topic, how, seconds, changed)
            case "get":
                await _gets(client, topic, how, seconds, changed)
            case "search":
                await _searches(load, seconds)
            case "overload":
                await _overload(load, seconds)
            case _:
                await load.run(seconds)
    return changed


class _Load:
    """Messages at a rate, each with its call."""

    def __init__(
        self,
        client: AsyncClient,
        topic: str,
        how: Changing,
        changed: Changed,
        on_moment: Callable[[str], object],
    ) -> None:
        self.client = client
        self._on_moment = on_moment
        self.changed = changed
        self.topic = topic
        self._how = how
        self._one_due = time.time() + _AHEAD_S
        self._from_s = 0.0  # calls that begin in this time are measured
        self._until_s = 0.0

    async def run(self, seconds: float, *, calls: bool = True) -> None:
        """Sends for so long, and once calls come at the same rate; waits for all calls."""
        calls = calls and self._how.way != "none"
        lead_s = WITHIN_S if calls else 0.0
        self._one_due = time.time() + lead_s + seconds + _AHEAD_S
        began_s = time.monotonic()
        self._from_s, self._until_s = began_s + lead_s, began_s + lead_s + seconds
        number = 0
        self._on_moment(SENDS)
        if calls:
            asyncio.get_running_loop().call_later(lead_s, self._on_moment, CALLS)
        async with asyncio.TaskGroup() as tasks:
            while (now_s := time.monotonic()) < self._until_s:
                wanted = int((now_s - began_s) * self._how.rate_per_s)
                while number < wanted:
                    number += 1
                    tasks.create_task(self._one(calls=calls))
                await asyncio.sleep(0.005)
            self._on_moment(ENDS)
        self.changed.seconds = seconds

    def _due(self) -> datetime:
        at_s = self._one_due if self._how.one_second else time.time() + _AHEAD_S
        return datetime.fromtimestamp(int(at_s) + _random.random() * 0.999, UTC)

    async def _one(self, *, calls: bool) -> None:
        began_s, due = time.monotonic(), self._due()
        try:
            handle = await (await self.client.produce_async(self.topic, bytes(200), deliver_at=due))
        except DelaywheelError as error:
            self.changed.outcomes[f"produce: {_name(error)}"] += 1
            return
        if began_s >= self._from_s:
            self.changed.produced_ms.append((time.monotonic() - began_s) * 1000)
        if not calls:
            return
        await asyncio.sleep(_random.random() * WITHIN_S)
        if not self._from_s <= time.monotonic() < self._until_s:
            return

        async def call() -> str:
            if self._how.way == "reschedule":
                later = due + timedelta(seconds=30)
                return str((await self.client.reschedule(handle, to=later)).outcome)
            return str((await self.client.cancel(handle)).outcome)

        await _timed(call, self.changed)


async def _overload(load: _Load, seconds: float) -> None:
    """Cancels of what was sent before, all at a rate that is too high; then single ones."""
    client, changed = load.client, load.changed
    wanted = int(load._how.rate_per_s * seconds)  # noqa: SLF001
    handles = await _sent(client, load.topic, wanted + 1_000)
    began_s, number = time.monotonic(), 0

    async def one(handle: Handle) -> None:
        async def call() -> str:
            return str((await client.cancel(handle, timeout=5.0)).outcome)

        await _timed(call, changed)

    async with asyncio.TaskGroup() as tasks:
        while (now_s := time.monotonic()) < began_s + seconds:
            upto = int((now_s - began_s) * load._how.rate_per_s)  # noqa: SLF001
            for handle in handles[number:upto]:
                tasks.create_task(one(handle))
            number = max(number, upto)
            await asyncio.sleep(0.005)
        changed.seconds = time.monotonic() - began_s
        changed.calm_after_s = await _calm_after(client, handles[wanted:])


async def _calm_after(client: AsyncClient, handles: Sequence[Handle]) -> float | None:
    """When single cancels became quick again, and stayed so for a while."""
    began_s, quick, quick_since_s = time.monotonic(), 0, 0.0
    for handle in handles:
        sent_s = time.monotonic()
        try:
            await client.cancel(handle, timeout=5.0)
        except DelaywheelError:
            quick = 0
            continue
        if (time.monotonic() - sent_s) * 1000 > _CALM_MS:
            quick = 0
            continue
        quick_since_s = quick_since_s if quick else sent_s
        quick += 1
        if quick == _CALM_CALLS:
            return quick_since_s - began_s
    return None


async def _gets(
    client: AsyncClient, topic: str, how: Changing, seconds: float, changed: Changed
) -> None:
    """One `get` after the other, of a second with many messages."""
    due = datetime.fromtimestamp(int(time.time() + 600), UTC)
    handles = await _sent(client, topic, how.messages, lambda: due)
    await client.get(handles[0])  # reads the second
    began_s = time.monotonic()
    while time.monotonic() < began_s + seconds:

        async def call() -> str:
            got = await client.get(_random.choice(handles))
            return "found" if got is not None else "not found"

        await _timed(call, changed)
    changed.seconds = time.monotonic() - began_s


async def _searches(load: _Load, seconds: float) -> None:
    """Searches for what no message has, one after the other, with messages sent beside it."""
    changed = load.changed
    await load.run(seconds, calls=False)
    changed.beside_ms, changed.produced_ms = changed.produced_ms, []
    began_s = time.monotonic()
    sending = asyncio.create_task(load.run(max(seconds, 4.0 * _SEARCHES_AT_LEAST), calls=False))
    while not sending.done() or sum(changed.outcomes.values()) < _SEARCHES_AT_LEAST:

        async def call() -> str:
            found = await load.client.search(load.topic, key=b"mine", timeout=300.0)
            return f"{len(found.messages)} found"

        await _timed(call, changed)
    await sending
    changed.produced_ms, changed.beside_ms = changed.beside_ms, changed.produced_ms
    changed.seconds = time.monotonic() - began_s


async def _sent(
    client: AsyncClient, topic: str, count: int, due: Callable[[], datetime] | None = None
) -> list[Handle]:
    """Sends messages as fast as they are taken, due within a minute from a minute on."""
    handles: list[Handle] = []

    def in_a_while() -> datetime:
        return datetime.fromtimestamp(time.time() + 2 * _AHEAD_S + _random.random() * 60, UTC)

    due = due or in_a_while
    while len(handles) < count:
        many = min(5 * _CALL, count - len(handles))
        messages = [Message(topic, bytes(200), deliver_at=due()) for _ in range(many)]
        results = await client.produce_many(messages)
        handles += [result.handle for result in results if result.handle is not None]
    return handles


async def _timed(call: Callable[[], Awaitable[str]], changed: Changed) -> None:
    began_s = time.monotonic()
    try:
        outcome = await call()
    except DelaywheelError as error:
        outcome = _name(error)
    changed.outcomes[outcome] += 1
    changed.took(outcome, began_s)


async def _by_handles(
    client: AsyncClient, topic: str, how: Changing, seconds: float, changed: Changed
) -> None:
    """`cancel_many(handles=…)` of what was sent before; as fast as it is answered."""
    handles = await _sent(client, topic, int(how.rate_per_s * seconds))
    began_s = time.monotonic()
    slots = asyncio.Semaphore(4)

    async def cancel(begin: int) -> None:
        async with slots:
            sent_s = time.monotonic()
            done = await client.cancel_many(handles=handles[begin : begin + _CALL])
            changed.took("CANCELLED", sent_s)
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
