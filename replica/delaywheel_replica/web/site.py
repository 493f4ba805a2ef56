"""The page's process: its routes, its port, its start and end."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from contextlib import suppress
from importlib.resources import files
from typing import Any, Final

from aiohttp import web
from google.protobuf.json_format import MessageToDict

from delaywheel.client.exchange.channel import WatchedFiles
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.rights import Right
from delaywheel_replica.web import guard
from delaywheel_replica.web.acts import ActLog
from delaywheel_replica.web.calls import BODY_AT_MOST, METHODS, CallRoutes, short_body_of
from delaywheel_replica.web.commands.letters import COMMANDS, LetterRoutes
from delaywheel_replica.web.commands.running import CommandRunner
from delaywheel_replica.web.commands.traces import TraceRoutes
from delaywheel_replica.web.connections import SILENT_S, Door
from delaywheel_replica.web.live import Live
from delaywheel_replica.web.nodes import NodeCalls
from delaywheel_replica.web.refusals import PageRefusal
from delaywheel_replica.web.sessions import SESSION_S, Sessions
from delaywheel_replica.web.settings import PageSettings

_SHUTDOWN_S: Final = 1.0
_HANDSHAKE_S: Final = 10.0
_TYPES: Final = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
}


class PageSite:
    """The page. For the event loop's thread."""

    def __init__(self, settings: PageSettings) -> None:
        self.sessions: Final = Sessions()
        self.nodes: Final = NodeCalls(settings)
        self._settings: Final = settings
        self._acts: Final = ActLog()
        shows_insecure = settings.insecure and not settings.is_local
        self._guard: Final = guard.Guard(self.sessions, self.nodes, insecure=settings.insecure)
        self._live: Final = Live(self.nodes, self._guard.refuse_signed_out, insecure=shows_insecure)
        self._runner: Final = web.AppRunner(
            self._app(),
            handle_signals=False,
            handler_cancellation=True,  # of who has left; acts are shielded
            access_log=None,
            keepalive_timeout=SILENT_S,
            shutdown_timeout=_SHUTDOWN_S,
        )
        self._server: asyncio.Server | None = None
        self._reloading: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Listens; returns the address for browsers, without the secret.

        OSError: it cannot be listened on, or the certificate's files are not in order.
        """
        context = self._context()
        await self._runner.setup()
        served = self._runner.server
        assert served is not None, "it is set up"
        host, _, port = self._settings.listen.rpartition(":")
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Door(served),
            self._settings.host,
            int(port),
            ssl=context,
            ssl_handshake_timeout=None if context is None else _HANDSHAKE_S,
        )
        own = self._server.sockets[0].getsockname()[1]
        self._guard.hosts = self._settings.hosts_at(own)
        return f"{'http' if context is None else 'https'}://{host}:{own}/"

    async def stop(self) -> None:
        """Ends all connections."""
        if self._reloading is not None:
            self._reloading.cancel()
            with suppress(asyncio.CancelledError):
                await self._reloading
        if self._server is not None:
            self._server.close()
        await self._live.stop()
        await self._runner.cleanup()
        await self.nodes.stop()

    def _context(self) -> ssl.SSLContext | None:
        if self._settings.certificate is None:
            return None
        certificate, key = self._settings.certificate
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        watched = WatchedFiles((certificate, key))
        context.load_cert_chain(certificate, key)
        self._reloading = asyncio.create_task(
            _reload(watched, lambda: context.load_cert_chain(certificate, key))
        )
        return context

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard.guarded], client_max_size=BODY_AT_MOST)
        app.on_response_prepare.append(guard.add_headers)
        calls = CallRoutes(self.nodes, self._acts, read_only=self._settings.read_only)
        for name in METHODS:
            app.router.add_post(_named(name), calls.call)
        runner = CommandRunner()
        letters = LetterRoutes(self._settings, self.nodes, runner, self._acts)
        commands = "|".join(COMMANDS)
        app.router.add_post(f"{guard.API}dead/{{command:{commands}}}", letters.dead)
        traces = TraceRoutes(self._settings, self.nodes, runner)
        app.router.add_post(f"{guard.API}trace", traces.trace)
        app.router.add_post(guard.SIGN_IN, self._sign_in)
        app.router.add_delete(guard.SIGN_IN, self._sign_out)
        app.router.add_get(f"{guard.API}live", self._live.stream)
        app.router.add_get(f"{guard.API}acts", self._shown_acts)
        app.router.add_get(f"{guard.API}page", self._about)
        for name, (body, kind) in _front().items():
            app.router.add_get(name, _static(body, kind))
        return app

    async def _sign_in(self, request: web.Request) -> web.Response:
        try:
            shown = json.loads(await short_body_of(request))["token"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise PageRefusal(400, "REQUEST_MALFORMED", 'send {"token": "…"}') from error
        if not isinstance(shown, str):
            raise PageRefusal(400, "REQUEST_MALFORMED", "token: a text")
        viewer, who = await self.sessions.known(shown, guard.address_of(request), self.nodes)
        answer = _said(who)
        answer.set_cookie(
            guard.cookie_name(request),
            self.sessions.begin(viewer),
            max_age=int(SESSION_S),
            httponly=True,
            samesite="Strict",
            secure=self._settings.certificate is not None,
            path=guard.API,
        )
        return answer

    async def _sign_out(self, request: web.Request) -> web.Response:
        name = guard.cookie_name(request)
        self.sessions.end(request.cookies.get(name, ""))
        answer = web.json_response({})
        answer.del_cookie(name, path=guard.API)
        return answer

    async def _shown_acts(self, request: web.Request) -> web.Response:
        viewer = guard.viewer_of(request)
        sees_all = (await self.nodes.rights(viewer)).may_somewhere(Right.OPERATE)
        return web.json_response({"acts": self._acts.shown_to(viewer, all_of_them=sees_all)})

    async def _about(self, request: web.Request) -> web.Response:
        """Tells a viewer who they are, and what this page is."""
        return _said(
            await self.nodes.who(guard.viewer_of(request)), read_only=self._settings.read_only
        )


def _named(call: str) -> str:
    service, _, method = call.partition("/")
    return f"{guard.API}{{service:{service}}}/{{method:{method}}}"


def _said(who: pb.WhoAmIResponse, **more: Any) -> web.Response:
    told = MessageToDict(who, preserving_proto_field_name=True)
    may = sorted({right for grant in who.grants for right in grant.may})
    return web.json_response(
        {
            "unlimited": who.unlimited,
            "principal": who.principal,
            "may": may,
            "quota": told.get("quota"),
            "topic_quotas": told.get("topic_quotas", []),
            **more,
        }
    )


def _front() -> dict[str, tuple[bytes, str]]:
    """Returns the browser's part by path: it is read once, and is small."""
    found = {}
    for file in files("delaywheel_replica.web").joinpath("static").iterdir():
        kind = _TYPES.get(f".{file.name.rpartition('.')[2]}")
        if kind is not None:
            found[f"/{file.name}"] = file.read_bytes(), kind
    found["/"] = found.pop("/index.html")
    return found


def _static(body: bytes, kind: str) -> Callable[[web.Request], Any]:
    async def answer(_request: web.Request) -> web.Response:
        return web.Response(body=body, content_type=kind, charset="utf-8")

    return answer


async def _reload(watched: WatchedFiles, load: Callable[[], None]) -> None:
    """Takes files that have changed for new connections, once they are in order."""
    while True:
        await asyncio.sleep(1.0)
        if watched.have_changed():
            try:
                load()
            except (OSError, ssl.SSLError):  # somebody is writing them
                watched.read_again()
