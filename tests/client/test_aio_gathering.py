"""Cancels that an asynchronous client gathers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import monotonic
from typing import Any, cast

import pytest

from delaywheel.client import aio_gathering
from delaywheel.client.aio_gathering import AioChanges
from delaywheel.errors import TimedOutError


class _Named:
    """A message that counts comparisons with others."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        _Named.compared += 1
        return self is other

    __hash__ = object.__hash__


async def test_where_the_first_wait_for_long_the_last_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise all are sent when their time is nearly over, for as long as more come."""
    calls: list[list[Any]] = []
    goes_on = asyncio.Event()

    async def call(messages: Sequence[Any], _deadline_s: float) -> list[Any]:
        calls.append(list(messages))
        await goes_on.wait()
        return list(messages)

    cancels = AioChanges(cast("Any", call), calls_at_once=1)
    waiting = [asyncio.create_task(cancels.change(n, monotonic() + 60)) for n in range(1_501)]
    await asyncio.sleep(0)
    monkeypatch.setattr(aio_gathering, "LATE_S", 0.0)
    goes_on.set()
    assert await asyncio.gather(*waiting) == list(range(1_501))
    assert [sorted(each) for each in calls] == [[0], [*range(501, 1_501)], [*range(1, 501)]]


async def test_who_gives_up_is_not_searched_for_among_all_others() -> None:
    """40,000 that waited took their client 75 s to give up, during which it did nothing else."""

    async def hangs(_messages: Sequence[Any], _deadline_s: float) -> list[Any]:
        await asyncio.Event().wait()
        return []

    cancels = AioChanges(cast("Any", hangs), calls_at_once=1)
    deadline_s = monotonic() + 0.2
    callers = [cancels.change(cast("Any", _Named()), deadline_s) for _ in range(3_000)]
    results = await asyncio.gather(*callers, return_exceptions=True)
    errors = [each for each in results if isinstance(each, TimedOutError)]
    assert len(errors) == 3_000
    assert sum(error.outcome_known for error in errors) >= 1_000  # one call has the others
    assert _Named.compared == 0
    for task in cancels._tasks:
        task.cancel()
