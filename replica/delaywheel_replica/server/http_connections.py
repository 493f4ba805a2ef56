"""The connections of the HTTP port: a bounded number. Beyond, the address with most gives way.

aiohttp keeps any number, and one that never sends a request for ever: whoever reaches the port
could take the descriptors that the wheel needs. Who scrapes metrics keeps one or two. Of the
address with most connections the oldest ends first; those of the node's own address, from which
orchestrators probe, only if there are no others.
"""

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from traceback import clear_frames
from typing import Any, Final

from aiohttp import web

from delaywheel_replica.peers import sockets
from delaywheel_replica.process.logs import stranger_refused

CONNECTIONS_AT_MOST: Final = 64
"""So many are open, and so many are within the handshake of TLS."""
_HANDSHAKE_S: Final = 10.0
_HANDSHAKE_FAILED: Final = "TLS_REFUSED"
_CLOSING_S: Final = 1.0
_OWN: Final = ""
"""Stands for the host of connections from the address that they came to."""
_NO_ROOM_PAUSE_S: Final = 0.1
"""No descriptor is to be had: asking again at once would be all that is done."""


class HttpConnections:
    """Accepts connections for an HTTP server. For the event loop's thread."""

    def __init__(self, server: web.Server, context: Callable[[], ssl.SSLContext] | None) -> None:
        """Begins without listening; `context` returns what a handshake needs now."""
        self._server: Final = server
        self._context: Final = context
        self._shaking: Final[dict[asyncio.Task[None], tuple[socket.socket, str]]] = {}
        self._accepting: asyncio.Task[None] | None = None
        self._socket: socket.socket | None = None

    def start(self, listen: str) -> int:
        """Listens on host:port; returns the port. An OSError says why it cannot."""
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
                connected, address = await loop.sock_accept(listening)
            except OSError:
                await asyncio.sleep(_NO_ROOM_PAUSE_S)
                continue
            if len(self._shaking) >= CONNECTIONS_AT_MOST:
                hosts = [host for _, host in self._shaking.values()]
                self._end([*self._shaking][_giving_way(hosts)])
            task = asyncio.create_task(self._begin(connected, address))
            self._shaking[task] = connected, _host_of(address, connected.getsockname())
            task.add_done_callback(lambda task: self._shaking.pop(task, None))

    def _end(self, shaking: asyncio.Task[None]) -> None:
        """Ends a handshake as if its other side were gone: whose it is by then closes it."""
        with suppress(OSError):
            self._shaking.pop(shaking)[0].shutdown(socket.SHUT_RDWR)

    async def _begin(self, connected: socket.socket, address: Any) -> None:
        context = None if self._context is None else self._context()
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._server,
                connected,
                ssl=context,
                ssl_handshake_timeout=None if context is None else _HANDSHAKE_S,
                ssl_shutdown_timeout=None if context is None else _CLOSING_S,
            )
        except OSError as error:  # gone, silent for too long, or it speaks another TLS, or none
            if context is not None:
                why = f"{type(error).__name__}: {error}"
                stranger_refused("metrics_listen", _HANDSHAKE_FAILED, f"{address[0]}: {why}")
            # They hold the error, and it them: 256 KiB until all garbage is looked for.
            clear_frames(error.__traceback__)
            return
        opened = [each.transport for each in self._server.connections if each.transport]
        while len(opened) > CONNECTIONS_AT_MOST:
            hosts = [
                _host_of(*map(each.get_extra_info, ("peername", "sockname"))) for each in opened
            ]
            opened.pop(_giving_way(hosts)).abort()


def _host_of(address: Any, own: Any) -> str:
    return _OWN if address[0] == own[0] else str(address[0])


def _giving_way(hosts: Sequence[str]) -> int:
    """Returns which of some connections ends for others, given the hosts of these, oldest first."""
    counts = Counter(host for host in hosts if host != _OWN)
    return hosts.index(max(counts, key=counts.__getitem__)) if counts else 0
