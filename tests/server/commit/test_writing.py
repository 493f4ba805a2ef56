"""Callers wait for their requests to be written, for as long as they like."""

from __future__ import annotations

import asyncio
import gc
from typing import Any, cast

import pytest

from delaywheel.reasons import Reason
from delaywheel.storage.frames.columns import Columns
from delaywheel_replica.core.protocol.reschedules import MessageKey
from delaywheel_replica.server.commit.committer import Request
from delaywheel_replica.server.commit.driver import Driver
from delaywheel_replica.server.commit.writing import APART_S, Writing, settle
from delaywheel_replica.server.node.naming import rows_naming
from delaywheel_replica.server.node.refusals import Refusal, RequestRefusedError


class Held:
    """A driver that keeps its requests."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.groups: list[int] = []
        self.again = asyncio.Event()  # set by the second group

    def submit(self, *requests: Request) -> None:
        self.requests += requests
        self.groups.append(len(requests))
        if len(self.groups) == 2:
            self.again.set()


def columns() -> Columns:
    return rows_naming([MessageKey(bytes(16), 17, "orders")])


async def test_a_caller_hears_why_nothing_was_written() -> None:
    driver = Held()
    answer = Writing(cast("Driver", driver)).submit(columns())
    settle([(driver.requests[0], Refusal(Reason.DISK_STALLED))])
    with pytest.raises(RequestRefusedError, match="DISK_STALLED"):
        await answer


async def test_a_refusal_for_whom_nobody_waits_any_more_is_no_defect() -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    driver = Held()
    answer = Writing(cast("Driver", driver)).submit(columns())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(answer), 0.01)
    settle([(driver.requests[0], Refusal(Reason.DISK_STALLED))])
    del answer
    driver.requests.clear()
    await asyncio.sleep(0)
    gc.collect()
    assert reported == []


async def test_requests_that_come_soon_after_one_another_are_written_together() -> None:
    driver = Held()
    writing = Writing(cast("Driver", driver))
    for _ in range(10):
        writing.submit(columns())
    assert driver.groups == [1]  # a lone caller does not wait
    async with asyncio.timeout(30):
        await driver.again.wait()
    assert driver.groups == [1, 9]
    await asyncio.sleep(2 * APART_S)
    writing.submit(columns())
    assert driver.groups == [1, 9, 1]
