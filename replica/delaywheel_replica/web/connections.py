"""Which connections the page takes: a bounded number, of one address half of it at most.

One that sends no request within `SILENT_S`, or no next one, is ended.
"""

from __future__ import annotations

import asyncio
import ipaddress
from functools import lru_cache
from typing import Final

from aiohttp import web

CONNECTIONS_AT_MOST: Final = 256
OF_AN_ADDRESS_AT_MOST: Final = 128
SILENT_S: Final = 10.0
_FULL: Final = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Door(asyncio.Protocol):
    """A new connection: it is passed on to the server, or told that there are too many."""

    def __init__(self, server: web.Server) -> None:
        self._server: Final = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Judges it."""
        assert isinstance(transport, asyncio.Transport)
        own = _address_of(transport)
        opened = [_address_of(each.transport) for each in self._server.connections]
        if len(opened) >= CONNECTIONS_AT_MOST or opened.count(own) >= OF_AN_ADDRESS_AT_MOST:
            transport.write(_FULL)
            transport.close()
            return
        inner = self._server()
        transport.set_protocol(inner)
        inner.connection_made(transport)


def _address_of(transport: asyncio.BaseTransport | None) -> str:
    """Returns where a connection comes from; of IPv6 the network, which one host has whole."""
    peer = None if transport is None else transport.get_extra_info("peername")
    return _network_of(peer[0]) if peer else ""


@lru_cache(CONNECTIONS_AT_MOST)
def _network_of(text: str) -> str:
    host = ipaddress.ip_address(text.partition("%")[0])
    if host.version == 6 and host.ipv4_mapped is None:
        return str(ipaddress.ip_network((host, 64), strict=False))
    return str(host)
