"""Metrics, health and readiness over HTTP, for Prometheus and for those who run containers.

============  =================================================================================
path          answers
============  =================================================================================
``/metrics``  all metrics, in the text format that is asked for (Prometheus' own, OpenMetrics)
``/healthz``  200 while the process lives and its event loop turns. Nothing else is looked at, so
              that nobody restarts a node because Kafka is away
``/readyz``   200 while new messages are taken; else 503, and the reason's name begins the text
============  =================================================================================

It has a port of its own and neither TLS nor authentication; nothing can be changed through it.
"""

import asyncio
import contextlib
from typing import Final

import structlog
from aiohttp import web
from prometheus_client.exposition import choose_encoder

from delaywheel_replica.config import Config
from delaywheel_replica.server.facts import Gatherer, Sources
from delaywheel_replica.server.listening import ListenError
from delaywheel_replica.server.metrics import Collected
from delaywheel_replica.server.pulse import Pulse

# A scrape that runs when the server stops is waited for so long.
_SHUTDOWN_S: Final = 0.5

_log = structlog.get_logger(__name__)


class Monitoring:
    """The pulse, and the HTTP port, if one is configured. For the event loop's thread."""

    def __init__(self, config: Config, sources: Sources) -> None:
        self._listen = config.metrics_listen
        self._sources = sources
        self._pulse = Pulse(sources.in_sync)
        self._gatherer = Gatherer(config, sources, self._pulse)
        self._one_scrape = asyncio.Lock()
        self._runner: web.AppRunner | None = None
        self._pulsing: asyncio.Task[None] | None = None

    @property
    def in_sync_changes(self) -> int:
        """How often the set of members in sync with the open wheel changed; see `Pulse`."""
        return self._pulse.in_sync_changes

    async def start(self) -> str | None:
        """Listens, and begins to count; returns the address, None when none is configured.

        Raises:
            ListenError: the address cannot be listened on.
        """
        address = None if self._listen is None else await self._bind(self._listen)
        self._pulsing = asyncio.create_task(self._pulse.run())
        return address

    async def _bind(self, listen: str) -> str:
        host, _, port = listen.rpartition(":")
        self._runner = web.AppRunner(
            self._app(), handle_signals=False, access_log=None, shutdown_timeout=_SHUTDOWN_S
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host.strip("[]"), int(port)).start()
        except (OSError, OverflowError) as error:
            await self._runner.cleanup()
            raise ListenError(f"metrics_listen {listen}: {error}") from error
        address = f"{host}:{self._runner.addresses[0][1]}"
        _log.info("metrics", address=address)
        return address

    async def stop(self) -> None:
        """Ends it."""
        if self._pulsing is not None:
            self._pulsing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._pulsing
        if self._runner is not None:
            await self._runner.cleanup()

    def _app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/metrics", self._metrics),
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
            ]
        )
        return app

    async def _metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        # Many impatient scrapers are no reason to gather everything many times at once.
        async with self._one_scrape:
            facts = await asyncio.to_thread(self._gatherer.gather)
            body = await asyncio.to_thread(encode, Collected(facts))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _healthz(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _request: web.Request) -> web.Response:
        refusal = self._sources.refusal()
        if refusal is None:
            return web.Response(text="ok\n")
        return web.Response(status=503, text=f"{refusal.reason.value}: {refusal.text}\n")
