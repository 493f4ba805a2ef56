"""A call that concerns messages, each of which is settled on its own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Generic, TypeVar

_Result = TypeVar("_Result")


@dataclass(slots=True, eq=False)
class AwaitedCall(Generic[_Result]):
    """One caller's messages, and what became of each; for the event loop that makes it.

    Attributes:
        results: What became of each; None: that is not known yet.
        some: Done once one of them is known.
        done: Done once all are.
        is_over: Its caller does not wait any more.
    """

    results: list[_Result | None]
    some: asyncio.Future[None] = field(init=False)
    done: asyncio.Future[None] = field(init=False)
    is_over: bool = False
    _left: int = field(init=False)

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.some, self.done = loop.create_future(), loop.create_future()
        self._left = len(self.results)

    @classmethod
    def of(cls, messages: int) -> AwaitedCall[_Result]:
        """Returns a call of so many messages."""
        return cls([None] * messages)

    def settle(self, row: int, result: _Result) -> None:
        """Notes what became of one."""
        self.results[row] = result
        self._left -= 1
        if not self.some.done():
            self.some.set_result(None)
        if not self._left and not self.done.done():
            self.done.set_result(None)
