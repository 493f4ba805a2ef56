"""Connects the event loop with the driver's groups: one future for each request.

A group costs a node and its mirrors some 2 ms of CPU, however few messages it has. So groups begin
`APART_S` apart: a request that comes sooner after another waits for that, and for others that come
meanwhile. A lone caller waits for nothing, since its answer takes longer than that.
"""

import asyncio
from functools import partial
from math import inf
from typing import Final

from delaywheel.identity import WheelId
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.process.defects import fatal
from delaywheel_replica.server.commit.committer import Answers, Committed, Request, RequestOutcome
from delaywheel_replica.server.commit.driver import Driver
from delaywheel_replica.server.node.refusals import Refusal, RequestRefusedError

APART_S: Final = 0.005


class Writing:
    """Submits requests to the driver. For the thread of the event loop that makes it."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._loop = asyncio.get_running_loop()
        self._begun_s = -inf
        self._gathered: list[Request] = []

    def submit(
        self,
        columns: Columns,
        kind: Kind = Kind.MESSAGES,
        wheel: WheelId | None = None,
        released_bytes: int = 0,
    ) -> "asyncio.Future[Committed]":
        """Submits a request's messages; returns the answer once they may be acknowledged.

        The arguments are those of a `Request`. The answer is a RequestRefusedError if none of them
        was accepted, or (WHEEL_LOST) if that is unknown.
        """
        answer: asyncio.Future[Committed] = self._loop.create_future()
        request = Request(columns, kind, partial(_resolve, answer), wheel, released_bytes)
        self._gathered.append(request)
        if len(self._gathered) == 1:
            begin_s = self._begun_s + APART_S
            if begin_s <= self._loop.time():
                self._begin()
            else:
                self._loop.call_at(begin_s, self._begin)
        return answer

    def _begin(self) -> None:
        self._begun_s = self._loop.time()
        gathered, self._gathered = self._gathered, []
        self._driver.submit(*gathered)


@fatal
def settle(answers: Answers) -> None:
    """Resolves the futures of a whole group in one call on the event loop."""
    for request, outcome in answers:
        request.on_answer(outcome)


def _resolve(answer: "asyncio.Future[Committed]", outcome: RequestOutcome) -> None:
    if answer.done():  # its caller gave up
        return
    if isinstance(outcome, Refusal):
        answer.set_exception(RequestRefusedError(outcome.reason, outcome.detail))
        answer.exception()  # retrieved now, or asyncio would log it for a caller that gave up
    else:
        answer.set_result(outcome)
