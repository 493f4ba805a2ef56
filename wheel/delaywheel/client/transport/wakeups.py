"""Takes all of gRPC's wake-ups of an event loop in one pass.

`grpc.aio`'s poller writes one byte to a socket for each event. The loop takes all events that there
are in one pass, but reads one byte of them (grpcio 1.85, `PollerCompletionQueue._handle_events`).
So where several events come in a pass, bytes remain: each costs a pass that finds nothing. Once
some 280 have gathered, the poller waits in `write`, and each pass takes one event, however many
there are. A busy program does not get out of that again.

Loops of several threads read the same socket. So no byte may be read without events being taken
after it: the loop that does not get the byte takes none.
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
    add_reader, attributes = loop.add_reader, getattr(loop, "__dict__", None)

    def add(source: Any, callback: Callable[..., object], *args: Any) -> None:
        if isinstance(source, socket.socket) and _is_of_grpc(callback):
            callback = functools.partial(_take_all, source, callback)
        add_reader(source, callback, *args)

    if attributes is None:
        yield
        return
    earlier = attributes.get("add_reader")
    attributes["add_reader"] = add
    try:
        yield
    finally:
        if earlier is None:
            del attributes["add_reader"]
        else:
            attributes["add_reader"] = earlier


def _is_of_grpc(callback: Callable[..., object]) -> bool:
    function = callback.func if isinstance(callback, functools.partial) else callback
    return getattr(function, "__name__", None) == "_handle_events"


def _take_all(source: socket.socket, callback: Callable[..., object], *args: object) -> None:
    """Calls gRPC's reader once for each byte that there is."""
    try:
        for _ in range(len(source.recv(_MOST_BYTES, socket.MSG_PEEK))):
            callback(*args)
    except BlockingIOError:  # another thread's loop has read the rest
        return
