"""Has gRPC's server accept several calls of a method at a time.

`grpc.aio` asks its core for one call of each method, and for the next one once it has begun that
one (grpcio 1.85, `AioServer._server_main_loop`). Between the two lie a wake-up of its polling
thread, and some six passes of the event loop. Here several are asked for, and the main loop gets
those that have come one by one, each two passes after the one before.

Calls of methods that nobody has are answered here. gRPC's main loop decodes their path, and one
that is not UTF-8 ends it (grpcio 1.85): one request of 138 bytes, from anybody. So that loop never
gets one; all that is decoded there are names of our own methods.

Of what anybody may call, health checks and reflection, each call is shown to `takes` first, which
may drop it: its caller hears CANCELLED. gRPC's core keeps all that has come in one line, also when
a connection is gone; a call that is dropped costs a fifth of what its handler would.

It also says when that main loop has ended by itself: `wait_for_termination` goes on while any call
is under way.

A call that comes at the very moment of a stop may be lost in gRPC's core, with a plain server too
(grpcio 1.85: 3 of 170 stops on a busy machine): the stop then takes its whole grace period, and
the caller hears UNAVAILABLE.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from grpc._cython import cygrpc  # type: ignore[attr-defined]

from delaywheel_replica.server.node.turns import start

CALLS_AT_ONCE: Final = 8
"""Of one method."""

Takes = Callable[[str, Callable[[], object]], bool]
"""Whether a call is begun, by its connection, as gRPC names it, and what that shows, if asked."""


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


class Accepting:
    """How far an event loop's servers are with accepting calls.

    Attributes:
        has_ended: Set once one of them accepts no more, by itself or since it was stopped.
    """

    def __init__(self) -> None:
        self.has_ended: Final = asyncio.Event()
        self.lines: Final[list[_Line]] = []

    @property
    def is_behind(self) -> bool:
        """Whether calls have come that wait to be begun, and gRPC's core may keep any number."""
        return any(len(line.come) >= CALLS_AT_ONCE // 2 for line in self.lines)


class _SeveralCallsServer(cygrpc.AioServer):  # type: ignore[misc] # it has no types
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *args: Any,
        accepting: Accepting,
        takes: Takes,
        open_to_all: tuple[str, ...],
    ) -> None:
        super().__init__(loop, *args)
        self._accepting: Final = accepting
        self._takes: Final = takes
        self._open_to_all: Final = tuple(f"/{service}/".encode() for service in open_to_all)
        self._running_loop: Final = loop
        self._lines: Final[dict[bytes, _Line]] = {}
        self._calls_at_once = CALLS_AT_ONCE
        self._has_ended = False
        self._error: BaseException | None = None
        self._tasks: Final[set[asyncio.Task[None]]] = set()

    def _make_request_call_future(self, method: bytes | None) -> "asyncio.Future[Any]":
        if method is None:
            for _ in range(CALLS_AT_ONCE):
                start(self._answer_unknown(), self._tasks)
            return self._running_loop.create_future()  # until gRPC cancels it
        line = self._lines.get(method)
        if line is None:
            line = self._lines[method] = _Line()
            self._accepting.lines.append(line)
        while line.asked < self._calls_at_once:
            line.asked += 1
            self._ask(method, line)
        if line.come:
            line.asked -= 1
            return line.come.popleft()
        line.waiting = self._running_loop.create_future()
        return line.waiting

    def _ask(self, method: bytes, line: _Line) -> None:
        """Asks for one call of a method, and for another in place of one that is dropped."""

        def come(call: "asyncio.Future[Any]") -> None:
            if self._drops(call):
                self._ask(method, line)
            else:
                line.pass_on(call)

        call = super()._make_request_call_future(method)
        is_open = method.startswith(self._open_to_all)
        call.add_done_callback(come if is_open else line.pass_on)

    def _drops(self, call: "asyncio.Future[Any]") -> bool:
        if call.cancelled() or call.exception() is not None:
            return False
        context = cygrpc._ServicerContext(  # noqa: SLF001 - gRPC's own
            call.result(), None, None, self._running_loop
        )
        return not self._takes(context.peer(), context.auth_context)

    async def _answer_unknown(self) -> None:
        """Has gRPC answer calls of unknown methods, by a name that no caller chose."""
        nothing, name = cygrpc._MethodResolver([], {}), ""  # noqa: SLF001 - gRPC's own
        while self._calls_at_once > 1:
            try:
                call = await self._request_call()
            except cygrpc._RequestCallError:  # noqa: SLF001 - the server stops
                continue
            answer = cygrpc._handle_rpc(  # noqa: SLF001
                name, nothing, (), call, self._running_loop, concurrency_exceeded=False
            )
            work = cygrpc._schedule_rpc_coro(  # noqa: SLF001
                answer, call, self._running_loop, name
            )
            start(work, self._tasks)

    async def shutdown(self, grace: float | None) -> None:
        self._calls_at_once = 1
        lines = self._lines.values()
        # Until the main loop has begun them: nothing announces that.
        while any(line.come for line in lines) and not self._has_ended:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for line in lines:
            line.come = deque(maxlen=0)  # whose call comes now hears CANCELLED
        try:
            await super().shutdown(grace)
        except Exception as error:
            if error is not self._error:  # which gRPC has logged
                raise

    def _serving_task_crash_handler(self, task: "asyncio.Task[None]") -> None:
        self._error = None if task.cancelled() else task.exception()
        self._has_ended = True
        self._accepting.has_ended.set()
        super()._serving_task_crash_handler(task)


@contextmanager
def accepting_several_calls(
    takes: Takes = lambda *_: True, open_to_all: tuple[str, ...] = ()
) -> Iterator[Accepting]:
    """Yields what tells of the running loop's servers, which are to be made within this.

    Calls of the services that are open to all are shown to `takes` (see `Takes`).
    """
    plain, accepting = cygrpc.AioServer, Accepting()
    cygrpc.AioServer = partial(
        _SeveralCallsServer, accepting=accepting, takes=takes, open_to_all=open_to_all
    )
    try:
        yield accepting
    finally:
        cygrpc.AioServer = plain
