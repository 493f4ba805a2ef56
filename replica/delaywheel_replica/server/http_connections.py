"""The connections of the HTTP port: a bounded number, of which the oldest gives way to newer ones.

aiohttp keeps any number, and one that never sends a request for ever: whoever reaches the port
could take the descriptors that the wheel needs. Who scrapes metrics keeps one or two.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from aiohttp import web

from delaywheel_replica.peers import sockets

CONNECTIONS_AT_MOST: Final = 64
"""So many are open, and so many are within the handshake of TLS."""
_HANDSHAKE_S: Final = 10.0
_CLOSING_S: Final = 1.0
_NO_ROOM_PAUSE_S: Final = 0.1
"""No descriptor is to be had: asking again at once would be all that is done."""


class HttpConnections:
    """Accepts connections for an HTTP server. For the event loop's thread."""

    def __init__(self, server: web.Server, context: Callable[[], ssl.SSLContext] | None) -> None:
        """Begins without listening.

        Args:
            server: Serves connections, and knows those that are open.
            context: Returns what a handshake needs now; None: plain text.
        """
        self._server: Final = server
        self._context: Final = context
        self._shaking: Final[dict[asyncio.Task[None], socket.socket]] = {}  # as they came
        self._accepting: asyncio.Task[None] | None = None
        self._socket: socket.socket | None = None

    def start(self, listen: str) -> int:
        """Listens on host:port; returns the port.

        Raises:
            OSError: It cannot be listened on.
        """
        self._socket = sockets.listen(listen)
        self._socket.setblocking(False)  # noqa: FBT003 - the library's
        self._accepting = asyncio.create_task(self._accept(self._socket))
        return int(self._socket.getsockname()[1])

    async def stop(self) -> None:
        """Takes no more; those that are open are the server's."""
        if self._accepting is not None:
            self._accepting.cancel()
        if self._socket is not None:
            self._socket.close()
        shaking = list(self._shaking)
        for task in shaking:
            self._end(task)
        await asyncio.gather(*shaking)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connected, _ = await loop.sock_accept(listening)
            except OSError:
                await asyncio.sleep(_NO_ROOM_PAUSE_S)
                continue
            if len(self._shaking) >= CONNECTIONS_AT_MOST:
                self._end(next(iter(self._shaking)))
            task = asyncio.create_task(self._begin(connected))
            self._shaking[task] = connected
            task.add_done_callback(lambda task: self._shaking.pop(task, None))

    def _end(self, shaking: asyncio.Task[None]) -> None:
        """Ends a handshake as if its other side were gone: whose it is by then closes it."""
        with suppress(OSError):
            self._shaking.pop(shaking).shutdown(socket.SHUT_RDWR)

    async def _begin(self, connected: socket.socket) -> None:
        context = None if self._context is None else self._context()
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._server,
                connected,
                ssl=context,
                ssl_handshake_timeout=None if context is None else _HANDSHAKE_S,
                ssl_shutdown_timeout=None if context is None else _CLOSING_S,
            )
        except OSError:  # gone, silent for too long, or it speaks another TLS, or none
            return
        opened = self._server.connections
        for handler in opened[: max(0, len(opened) - CONNECTIONS_AT_MOST)]:
            if handler.transport is not None:
                handler.transport.abort()
