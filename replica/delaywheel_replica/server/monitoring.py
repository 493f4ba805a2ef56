"""Monitoring of a server: checks of its event loop and, if configured, the HTTP port."""

import asyncio
import contextlib
from typing import TYPE_CHECKING

from delaywheel_replica.server.metrics.scrape import Sources

if TYPE_CHECKING:
    from delaywheel_replica.server.http_port import HttpPort


class Monitoring:
    """The checks (`Pulse`) and the HTTP port. For the event loop's thread."""

    def __init__(self, sources: Sources) -> None:
        self._listen = sources.config.metrics_listen
        self._sources = sources
        self._port: HttpPort | None = None
        self._pulsing: asyncio.Task[None] | None = None

    async def start(self) -> str | None:
        """Starts both; returns the HTTP address, None if none is configured."""
        address = None if self._listen is None else await self._open_port(self._listen)
        self._pulsing = asyncio.create_task(self._sources.pulse.run())
        return address

    async def stop(self) -> None:
        """Stops both."""
        if self._pulsing is not None:
            self._pulsing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._pulsing
        if self._port is not None:
            await self._port.stop()

    async def _open_port(self, listen: str) -> str:
        # Imported only here: a node without this port starts a quarter faster without aiohttp.
        from delaywheel_replica.server.http_port import HttpPort  # noqa: PLC0415

        port = HttpPort(self._sources)
        address = await port.start(listen)
        self._port = port
        return address
