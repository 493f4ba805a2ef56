"""Has gRPC's server accept several calls of a method at a time.

`grpc.aio` asks its core for one call of each method, and for the next one once it has begun that
one (grpcio 1.85, `AioServer._server_main_loop`). Between the two lie a wake-up of its polling
thread, and some six passes of the event loop. Here several are asked for, and the main loop gets
those that have come one by one, each two passes after the one before.

It also says when that main loop has ended by itself: a call whose path is not UTF-8 does that
(grpcio 1.85), and `wait_for_termination` goes on while any call is under way.

A call that comes at the very moment of a stop may be lost in gRPC's core, with a plain server too
(grpcio 1.85: 3 of 170 stops on a busy machine): the stop then takes its whole grace period, and
the caller hears UNAVAILABLE.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from grpc._cython import cygrpc  # type: ignore[attr-defined]

CALLS_AT_ONCE: Final = 8
"""Of one method."""


class _Line:
    """Calls of one method: how many were asked for, those that have come, who waits for one."""

    def __init__(self) -> None:
        self.asked = 0
        self.come = deque[asyncio.Future[Any]]()
        self.waiting: asyncio.Future[Any] | None = None

    def pass_on(self, call: "asyncio.Future[Any]") -> None:
        """Passes a call on to the main loop if that waits for one, and keeps it otherwise."""
        waiting, self.waiting = self.waiting, None
        error = None if call.cancelled() else call.exception()
        if waiting is None or waiting.done():
            self.come.append(call)
            return
        self.asked -= 1
        if call.cancelled():
            waiting.cancel()
        elif error is not None:
            waiting.set_exception(error)
        else:
            waiting.set_result(call.result())


class _SeveralCallsServer(cygrpc.AioServer):  # type: ignore[misc] # it has no types
    def __init__(
        self, loop: asyncio.AbstractEventLoop, *args: Any, has_ended: asyncio.Event
    ) -> None:
        super().__init__(loop, *args)
        self._has_ended: Final = has_ended
        self._running_loop: Final = loop
        self._lines: Final[dict[bytes | None, _Line]] = {}
        self._calls_at_once = CALLS_AT_ONCE
        self._error: BaseException | None = None

    def _make_request_call_future(self, method: bytes | None) -> "asyncio.Future[Any]":
        line = self._lines.setdefault(method, _Line())
        while line.asked < self._calls_at_once:
            line.asked += 1
            super()._make_request_call_future(method).add_done_callback(line.pass_on)
        if line.come:
            line.asked -= 1
            return line.come.popleft()
        line.waiting = self._running_loop.create_future()
        return line.waiting

    async def shutdown(self, grace: float | None) -> None:
        self._calls_at_once = 1
        # Until the main loop has begun them: nothing announces that.
        while self._come() and not self._has_ended.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0)
        for line in self._lines.values():
            line.come = deque(maxlen=0)  # whose call comes now hears CANCELLED
        try:
            await super().shutdown(grace)
        except Exception as error:
            if error is not self._error:  # which gRPC has logged
                raise

    def _serving_task_crash_handler(self, task: "asyncio.Task[None]") -> None:
        self._error = None if task.cancelled() else task.exception()
        self._has_ended.set()
        super()._serving_task_crash_handler(task)

    def _come(self) -> int:
        return sum(len(line.come) for line in self._lines.values())


@contextmanager
def accepting_several_calls() -> Iterator[asyncio.Event]:
    """A server of the running loop is to be made within this.

    Yields:
        What is set once it accepts no more calls, by itself or since it was stopped.
    """
    plain, has_ended = cygrpc.AioServer, asyncio.Event()
    cygrpc.AioServer = partial(_SeveralCallsServer, has_ended=has_ended)
    try:
        yield has_ended
    finally:
        cygrpc.AioServer = plain
