"""Changes of named messages that clients gather."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any, cast

import pytest

from delaywheel.client import gathering
from delaywheel.client.gathering import AioChanges, SyncChanges
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
    monkeypatch.setattr(gathering, "LATE_S", 0.0)
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


def test_threads_that_wait_send_for_one_another() -> None:
    calls: list[list[int]] = []
    first_is_under_way, goes_on = threading.Event(), threading.Event()

    def call(messages: Sequence[Any], _deadline_s: float) -> list[Any]:
        calls.append(list(messages))
        if len(calls) == 1:
            first_is_under_way.set()
            assert goes_on.wait(60)
        return [-message for message in messages]

    changes = SyncChanges(cast("Any", call), calls_at_once=1)
    with ThreadPoolExecutor(50) as pool:
        waiting = [pool.submit(changes.change, cast("Any", 0), monotonic() + 60)]
        assert first_is_under_way.wait(60)
        waiting += [
            pool.submit(changes.change, cast("Any", n), monotonic() + 60) for n in range(1, 50)
        ]
        while len(changes._gathered) < 49:
            threading.Event().wait(0.001)
        goes_on.set()
        assert [one.result(60) for one in waiting] == [-n for n in range(50)]
    assert [sorted(each) for each in calls] == [[0], [*range(1, 50)]]


def test_thread_that_gives_up_or_is_interrupted_leaves_nobody_behind() -> None:
    goes_on, under_way = threading.Event(), threading.Event()

    def call(messages: Sequence[Any], _deadline_s: float) -> list[Any]:
        under_way.set()
        assert goes_on.wait(60)
        if messages == [0]:
            raise KeyboardInterrupt
        return list(messages)

    changes = SyncChanges(cast("Any", call), calls_at_once=1)
    with ThreadPoolExecutor(3) as pool:
        interrupted = pool.submit(changes.change, cast("Any", 0), monotonic() + 60)
        assert under_way.wait(60)
        with pytest.raises(TimedOutError) as gave_up:
            changes.change(cast("Any", 1), monotonic() + 0.01)
        assert gave_up.value.outcome_known
        later = pool.submit(changes.change, cast("Any", 2), monotonic() + 60)
        goes_on.set()
        assert cast("Any", later.result(60)) == 2
        with pytest.raises(KeyboardInterrupt):
            interrupted.result(60)
    assert not changes._gathered
