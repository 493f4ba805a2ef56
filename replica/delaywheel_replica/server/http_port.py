"""Metrics, health and readiness over HTTP, for Prometheus and orchestrators (docs/METRICS.md).

Health looks at nothing but the event loop, so that no orchestrator restarts a node because Kafka is
away. The port is its own, TLS if asked, without authentication; nothing can be changed through it.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client.exposition import choose_encoder

from delaywheel_replica.peers.sockets import why_not
from delaywheel_replica.process.logs import get_logger, stranger_refused
from delaywheel_replica.server.http_connections import HttpConnections
from delaywheel_replica.server.listening import ListenError
from delaywheel_replica.server.metrics.catalogue import Collected
from delaywheel_replica.server.metrics.scrape import Scrape, Sources

# How long a running scrape is waited for when the server stops.
_SHUTDOWN_S: Final = 0.5
# Between two scrapes lies so many times what the first one took: whoever asks without end takes a
# tenth of the node's time. All that wait meanwhile have the next one together.
_PAUSE_FACTOR: Final = 9
_PAUSE_AT_MOST_S: Final = 1.0

_Encode = Callable[[Collected], bytes]

_log = get_logger(__name__)


class _Said(logging.LoggerAdapter[logging.Logger]):
    """What aiohttp says: of a request that is none one short line, whatever else as it is."""

    def __init__(self) -> None:
        super().__init__(logging.getLogger("aiohttp.server"))

    def exception(self, msg: object, *args: Any, exc_info: Any = True, **more: Any) -> None:
        if isinstance(exc_info, HttpProcessingError):
            why = exc_info.message.partition("\n")[0]
            stranger_refused("metrics_listen", "MALFORMED", f"{args[0]}: {why}")
        else:
            super().exception(msg, *args, exc_info=exc_info, **more)


class HttpPort:
    """The HTTP port. For the event loop's thread."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._one_scrape = asyncio.Lock()
        self._coming: dict[str, asyncio.Future[bytes]] = {}
        self._connections: HttpConnections | None = None
        self._runner = web.AppRunner(
            self._app(),
            handle_signals=False,
            access_log=None,
            logger=_Said(),
            shutdown_timeout=_SHUTDOWN_S,
        )

    async def start(self) -> str:
        """Listens; returns the address. A ListenError says why it cannot."""
        config, certificates = self._sources.config, self._sources.certificates
        listen = config.metrics_listen
        assert listen is not None
        await self._runner.setup()
        assert self._runner.server is not None, "it is set up"
        context = certificates.http_context if certificates and config.metrics_tls else None
        connections = HttpConnections(self._runner.server, context)
        try:
            port = connections.start(listen)
        except OSError as error:
            await self._runner.cleanup()
            raise ListenError(f"metrics_listen {listen}: {why_not(error)}") from error
        self._connections = connections
        address = f"{listen.rpartition(':')[0]}:{port}"
        _log.info("metrics", address=address)
        return address

    async def stop(self) -> None:
        """Stops listening."""
        if self._connections is not None:
            await self._connections.stop()
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
        encode, content_type = _encoder(request.headers.get("Accept", ""))
        coming = self._coming.get(content_type)
        if coming is None:
            coming = asyncio.ensure_future(self._scraped(encode, content_type))
            self._coming[content_type] = coming
        body = await asyncio.shield(coming)
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _scraped(self, encode: _Encode, content_type: str) -> bytes:
        """Reads everything, for all that wait for it by then, and some time after the last time."""
        await self._one_scrape.acquire()
        del self._coming[content_type]  # who asks from now on waits for the next one
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            return await asyncio.to_thread(encode, Collected(Scrape(self._sources)))
        finally:
            pause_s = _PAUSE_FACTOR * (loop.time() - began_s)
            loop.call_later(min(pause_s, _PAUSE_AT_MOST_S), self._one_scrape.release)

    async def _healthz(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _request: web.Request) -> web.Response:
        refusal = self._sources.refusal()
        if refusal is None:
            return web.Response(text="ok\n")
        return web.Response(status=503, text=f"{refusal.reason.value}: {refusal.text}\n")


def _encoder(accepted: str) -> tuple[_Encode, str]:
    """Returns how to write metrics, and how that is called; as usual for who asks for nonsense."""
    try:
        return choose_encoder(accepted)
    except (TypeError, ValueError):  # a version that is none (prometheus_client 0.26)
        return choose_encoder("")
