"""Waiting for what happens: it is asked for again and again, and never looked at only once.

What takes long is asked for less often: each question costs a process or a node some work.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import TypeVar

from delaywheel.errors import TimedOutError

T = TypeVar("T")


def wait_until(
    what: str, ask: Callable[[], T | None], *, timeout_s: float = 60, every_s: float = 0.02
) -> T:
    """Asks until the answer is true, and returns it; fails by name at the deadline."""
    began_s = time.monotonic()
    while not (answer := ask()):
        assert time.monotonic() - began_s < timeout_s, f"not within {timeout_s} s: {what}"
        _rest(began_s, every_s)
    return answer


def wait_to_hold(check: Callable[[], T], *, timeout_s: float = 60) -> T:
    """Checks until it holds, and returns the result; at the deadline the last failure is raised.

    For what several nodes say of each other: each hears the others some time later.
    """
    began_s = time.monotonic()
    while True:
        try:
            return check()
        except AssertionError:
            if time.monotonic() - began_s >= timeout_s:
                raise
        _rest(began_s, 0.02)


def wait_to_be_told(why: str, call: Callable[[], object]) -> None:
    """Makes a call that cannot succeed until its caller hears why (a regular expression).

    On a busy machine it may give up before it has heard anything. That nothing was done, it knows
    each time.
    """

    def is_told() -> bool:
        try:
            call()
        except TimedOutError as error:
            assert error.outcome_known, error  # noqa: PT017  each time
            return re.search(why, str(error)) is not None
        raise AssertionError("it succeeded")

    wait_until(f"it is told why: {why}", is_told)


async def until(holds: Callable[[], object]) -> None:
    """Lets the event loop go on until the condition holds."""
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110  nothing announces it
            await asyncio.sleep(0.001)


def _rest(began_s: float, every_s: float) -> None:
    time.sleep(max(every_s, min(0.4, (time.monotonic() - began_s) / 20)))
