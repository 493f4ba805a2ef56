"""Reads all of gRPC's wake-ups of an event loop at once.

`grpc.aio`'s poller writes one byte to a socket for each event. The loop takes all events that there
are in one pass, but reads one byte of them (grpcio 1.85, `PollerCompletionQueue._handle_events`).
So where several events come in a pass, bytes remain: each costs a pass that finds nothing. Once
some 280 have gathered, the poller waits in `write`, and each pass takes one event, however many
there are. A busy program does not get out of that again: a server whose passes take 5 ms, asked
200 times in a second, answers 40 a second, and all of them in that second if it reads all bytes.
"""

import asyncio
import functools
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

_MOST_BYTES: Final = 4_096


@contextmanager
def reading_all_wakeups() -> Iterator[None]:
    """The first channel or server of the running loop is to be made within this.

    A loop that has some already, or takes no attributes, stays as it is.
    """
    loop = asyncio.get_running_loop()
    add_reader = loop.add_reader

    def add(source: Any, callback: Callable[..., object], *args: Any) -> None:
        if isinstance(source, socket.socket) and _is_of_grpc(callback):
            callback = functools.partial(_read_all_before, source, callback)
        add_reader(source, callback, *args)

    try:
        loop.add_reader = add  # type: ignore[assignment,method-assign]
    except AttributeError:
        yield
        return
    try:
        yield
    finally:
        del loop.add_reader


def _is_of_grpc(callback: Callable[..., object]) -> bool:
    function = callback.func if isinstance(callback, functools.partial) else callback
    return getattr(function, "__name__", None) == "_handle_events"


def _read_all_before(source: socket.socket, callback: Callable[..., object], *args: object) -> None:
    """Reads all bytes but one, which the callback reads.

    Their events were queued before they were written, so the callback finds all of them.
    """
    unread_bytes = len(source.recv(_MOST_BYTES, socket.MSG_PEEK))
    if unread_bytes > 1:
        source.recv(unread_bytes - 1)
    callback(*args)
