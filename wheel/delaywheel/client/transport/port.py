"""What `Calls` needs of its surroundings, all of it awaited: channels, waits, work side by side.

The transport for threads blocks where the one for a loop awaits. So its coroutines never suspend,
and are run to their end with one `send`: what is decided between calls is written once, for both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import grpc

from delaywheel.client.exchange.channel import Credentials
from delaywheel.client.exchange.retry import AttemptFailure
from delaywheel_proto.v1.delaywheel_pb2_grpc import DelayWheelStub

ItemT = TypeVar("ItemT")
RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
ReturnT = TypeVar("ReturnT")

Method: TypeAlias = Callable[[DelayWheelStub], "grpc.UnaryUnaryMultiCallable[RequestT, ResponseT]"]
"""Selects a method of the service; the stub of a loop has the same ones, awaited."""


class Line(ABC):
    """A channel to one address, its number of calls, and whether the last one was answered.

    Attributes:
        asked: The question under way whether something listens there; None: there is none.
    """

    def __init__(self, credentials: Credentials) -> None:
        self.edition: Final = credentials.edition
        self.calls = 0
        self.answers = False
        self.asked: FirstQuestion | None = None

    @abstractmethod
    async def call(
        self, method: Method[RequestT, ResponseT], request: RequestT, timeout_s: float
    ) -> ResponseT | AttemptFailure:
        """Makes a call, and returns its response or why there is none."""

    @abstractmethod
    def ask(
        self,
        method: Method[RequestT, ResponseT],
        request: RequestT,
        timeout_s: float,
        then: Callable[[ResponseT | AttemptFailure], Coroutine[Any, Any, None]],
    ) -> None:
        """Makes a call, and does not wait for its end; `close` may call `then` with a failure."""

    @abstractmethod
    async def close(self) -> None:
        """Closes the channel; calls under way fail."""


class News(Protocol):
    """Told once, to all who wait."""

    def tell(self) -> None:
        """Ends all waits."""

    async def wait(self, most_s: float) -> None:
        """Waits until it is told, for so long at most."""


_NO_ANSWER: Final = AttemptFailure(
    grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time", unsent=True
)


@dataclass(slots=True)
class FirstQuestion:
    """A question for all who would send meanwhile: why nothing can be sent; None: something can."""

    news: News
    unsent: AttemptFailure | None = _NO_ANSWER


class Transport(Protocol):
    """Opens channels, waits and works side by side."""

    @property
    def blocks(self) -> bool:
        """Whether `begin` returns when the work has ended: it takes its caller's own time."""

    def open(self, address: str, credentials: Credentials) -> Line:
        """Opens a channel; nothing is sent yet."""

    def news(self) -> News:
        """Returns news that are not told yet."""

    async def aside(self, work: Callable[[], ReturnT]) -> ReturnT:
        """Does what blocks, without keeping others waiting."""

    async def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Begins work that goes on if its caller leaves, unless it blocks."""

    async def side_by_side(
        self,
        work: Callable[[ItemT], Coroutine[Any, Any, ReturnT]],
        items: Sequence[ItemT],
        at_once: int,
    ) -> list[ReturnT]:
        """Works on each item, on so many at once; returns what came of each, in order."""

    async def stop(self) -> None:
        """Ends what `Line.ask` has begun."""


def finished(work: Coroutine[Any, Any, ReturnT]) -> ReturnT:
    """Runs a coroutine that never suspends, as its transport is one for threads."""
    try:
        work.send(None)
    except StopIteration as end:
        result: ReturnT = end.value
        return result
    work.close()
    raise AssertionError(f"{work!r} has suspended")
