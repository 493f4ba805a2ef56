"""Pending results of `produce_async`, light enough to have one for each message.

A `SendBatch` is settled as a whole, once; a `PendingResult` is a batch and an index. Threads wait
on one Event per batch, coroutines on a future each; neither exists before a caller waits.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Generator, Sequence
from math import inf
from threading import Event, Lock
from time import monotonic
from typing import Final

from grpc import StatusCode

from delaywheel.errors import CallFailedError, TimedOutError
from delaywheel.functions import check_plain
from delaywheel.message import Handle, Message, Result

_log = logging.getLogger("delaywheel")
_CHANGING = Lock()  # guards the few fields of any batch that change; never held while calling out
_forks = 0


def forks() -> int:
    """How many forks lie between the process that imported this module and this one."""
    return _forks


def _note_fork() -> None:
    global _forks, _CHANGING  # noqa: PLW0603  the child's own copies
    _forks += 1
    _CHANGING = Lock()  # another thread may have held it


os.register_at_fork(after_in_child=_note_fork)


class SendBatch:
    """Messages that are sent together; filled by the client, then settled once.

    Attributes:
        messages: Its messages, in the order in which they were given.
        length_bytes: The length of their keys, values and headers.
        opened_s: When the first one was added (monotonic).
        send_by_s: When the first of them has lingered long enough, if no request is under way.
        send_busy_by_s: The same while one is.
        deadline_s: When the first one is given up; no other one has much more time.
        is_awaited: Whether a caller has announced that it waits.
        is_expedited: Whether it goes as soon as nothing is under way: a caller waits for a message.
        is_tried: Whether messages for each of its topics were accepted before.
        results: One for each message; None until it is settled.
    """

    __slots__ = (
        "_event",
        "_forks",
        "_loop",
        "_on_wait",
        "_watchers",
        "deadline_s",
        "is_awaited",
        "is_expedited",
        "is_tried",
        "length_bytes",
        "messages",
        "opened_s",
        "results",
        "send_busy_by_s",
        "send_by_s",
    )

    def __init__(
        self,
        opened_s: float,
        deadline_s: float,
        on_wait: Callable[["SendBatch"], object],
        *,
        is_tried: bool = True,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.messages: Final[list[Message]] = []
        self.length_bytes = 0
        self.opened_s: Final = opened_s
        self.send_by_s = self.send_busy_by_s = float("inf")
        self.deadline_s: Final = deadline_s
        self.is_awaited = self.is_expedited = False
        self.is_tried: Final = is_tried
        self._on_wait: Final = on_wait
        self._loop: Final = loop
        self._forks: Final = _forks
        self.results: Sequence[Result] | None = None
        self._watchers: list[Callable[[Sequence[Result]], object]] = []
        self._event: Event | None = None

    def add(self, message: Message, send_by_s: float, send_busy_by_s: float) -> "PendingResult":
        """Adds a message, which lingers until then; only before the batch is sent."""
        self.messages.append(message)
        self.send_by_s = min(self.send_by_s, send_by_s)
        self.send_busy_by_s = min(self.send_busy_by_s, send_busy_by_s)
        self.length_bytes += message.length_bytes
        return PendingResult(self, len(self.messages) - 1)

    def expedite(self, send_by_s: float) -> None:
        """Lets it linger no longer than `send_by_s`, and only while a request is under way."""
        self.is_expedited = True
        self.send_busy_by_s = min(self.send_busy_by_s, send_by_s)

    def announce_wait(self) -> None:
        """Reports that a caller is about to wait, once for all who wait for the batch."""
        if not self.is_awaited:
            self.is_awaited = True
            self._on_wait(self)

    def settle(self, results: Sequence[Result]) -> None:
        """Gives the results to all waiting callers; logs what their callbacks raise."""
        with _CHANGING:
            self.results = results
            watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            _call(watcher, results)

    def settle_defective(self, defect: Exception) -> None:
        """Settles with an unexpected error, so that callers do not wait forever."""
        text = f"a defect of the SDK: {defect!r}"
        results = []
        for message in self.messages:
            error = CallFailedError(StatusCode.INTERNAL, text, outcome_known=False, failed=message)
            error.__cause__ = defect
            results.append(Result(message, None, error))
        self.settle(results)

    def watch(self, watcher: Callable[[Sequence[Result]], object]) -> None:
        """Calls `watcher` once the batch is settled, perhaps immediately."""
        with _CHANGING:
            results = self.results
            if results is None:
                self._watchers.append(watcher)
                return
        _call(watcher, results)

    def wait(self, timeout_s: float | None) -> bool:
        """Blocks until the batch is settled or the timeout has passed.

        Raises:
            TimedOutError: This process was forked from the one that knows the results.
            RuntimeError: It would block the event loop in which the batch is sent.
        """
        with _CHANGING:
            if self.results is not None:
                return True
            if self._forks != _forks:
                raise TimedOutError(
                    "no result is known in a process that was forked before there was one",
                    outcome_known=False,
                )
            if self._loop is not None and _is_running(self._loop):
                raise RuntimeError("its event loop sends nothing while this blocks it: await it")
            if self._event is None:
                self._event = event = Event()
                self._watchers.append(lambda _results: event.set())
            event = self._event
        self.announce_wait()
        return event.wait(timeout_s)


class PendingResult:
    """The pending result of one `produce_async`: wait for it, await it, or add a callback.

    Example:
        >>> # doctest: +SKIP
        >>> client.produce_async("orders", b"…", level="30s").result(timeout=5)
        >>> await client.produce_async("orders", b"…", level="30s")
        >>> client.produce_async("orders", b"…", level="30s").add_done_callback(print)
    """

    __slots__ = ("_batch", "_number")

    def __init__(self, batch: SendBatch, number: int) -> None:
        self._batch: Final = batch
        self._number: Final = number

    @property
    def message(self) -> Message:
        """The message that was sent."""
        return self._batch.messages[self._number]

    @property
    def first(self) -> bool:
        """Whether this message opened its batch."""
        return self._number == 0

    def done(self) -> bool:
        """Whether there is a result."""
        return self._batch.results is not None

    def outcome(self, timeout: float | None = None) -> Result:
        """Blocks until there is a result, which may be an error; returns it.

        Raises:
            TimedOutError: There is none after `timeout` seconds; the message is still under way.
        """
        if not self._batch.wait(timeout):
            raise TimedOutError(
                f"no result within {timeout} s, still under way",
                outcome_known=False,
                failed=self.message,
            )
        return self._result()

    def result(self, timeout: float | None = None) -> Handle:
        """Blocks until there is a result, and returns the handle.

        Raises:
            DelaywheelError: The message was not acknowledged, or there is no result yet.
        """
        return self.outcome(timeout).unwrap()

    def add_done_callback(self, callback: Callable[[Result], object]) -> None:
        """Calls back with the result on the client's own thread or loop: do not block there.

        A callback does not wait: the message may gather with others for `Queue.linger`.

        Raises:
            TypeError: It has to be awaited, or is no function.
        """
        check_plain("callback", callback)
        number = self._number
        self._batch.watch(lambda results: callback(results[number]))

    def __await__(self) -> Generator[object, None, Handle]:
        """Awaits the handle, in any event loop; raises as `result` does."""
        return self.handle_by(inf).__await__()

    async def handle_by(self, deadline_s: float) -> Handle:
        """Awaits the handle until a time (monotonic), raises as `result` does; not for programs."""
        if not self.done():
            loop = asyncio.get_running_loop()
            settled: asyncio.Future[None] = loop.create_future()
            self._batch.watch(lambda _results: _wake(loop, settled))
            self._batch.announce_wait()
            if deadline_s == inf:
                await settled
            else:
                timer = loop.call_later(deadline_s - monotonic(), _set, settled)
                try:
                    await settled
                finally:
                    timer.cancel()
                if not self.done():
                    raise TimedOutError(
                        "not answered in time", outcome_known=False, failed=self.message
                    )
        return self._result().unwrap()

    def _result(self) -> Result:
        results = self._batch.results
        assert results is not None
        return results[self._number]


def _call(watcher: Callable[[Sequence[Result]], object], results: Sequence[Result]) -> None:
    try:
        watcher(results)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001  a callback may raise anything; the others must be called
        _log.exception("a callback of produce_async failed")


def _wake(loop: asyncio.AbstractEventLoop, settled: "asyncio.Future[None]") -> None:
    if _is_running(loop):  # the usual case: the other way costs a system call for each message
        _set(settled)
    elif not loop.is_closed():
        loop.call_soon_threadsafe(_set, settled)


def _is_running(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the caller runs in that loop."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _set(settled: "asyncio.Future[None]") -> None:
    if not settled.done():  # the awaiting task may have been cancelled
        settled.set_result(None)
