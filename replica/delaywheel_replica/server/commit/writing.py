"""Connects the event loop with the driver's groups: one future for each request."""

import asyncio
from functools import partial

from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.format import Kind
from delaywheel_replica.process.defects import fatal
from delaywheel_replica.server.commit.committer import Answers, Committed, Outcome, Request
from delaywheel_replica.server.commit.driver import Driver
from delaywheel_replica.server.node.refusals import Refusal, RefusedError


class Writing:
    """Submits requests to the driver. For the thread of the event loop that makes it."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._loop = asyncio.get_running_loop()

    def submit(self, columns: Columns, kind: Kind = Kind.MESSAGES) -> "asyncio.Future[Committed]":
        """Submits a request's messages; returns the answer once they may be acknowledged.

        The answer is a RefusedError if none of them was accepted, or (WHEEL_LOST) if that is
        unknown.
        """
        answer: asyncio.Future[Committed] = self._loop.create_future()
        self._driver.submit(Request(columns, kind, partial(_settle, answer)))
        return answer


@fatal
def settle(answers: Answers) -> None:
    """Resolves the futures of a whole group in one call on the event loop."""
    for request, outcome in answers:
        request.on_answer(outcome)


def _settle(answer: "asyncio.Future[Committed]", outcome: Outcome) -> None:
    if answer.done():  # its caller gave up
        return
    if isinstance(outcome, Refusal):
        answer.set_exception(RefusedError(outcome.reason, outcome.detail))
        answer.exception()  # retrieved now, or asyncio would log it for a caller that gave up
    else:
        answer.set_result(outcome)
