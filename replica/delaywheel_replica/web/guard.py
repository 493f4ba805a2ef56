"""What a request must be before anybody is asked about it. docs/PAGE.md has the rules in order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from delaywheel_replica.web.nodes import NodeCalls, Viewer
from delaywheel_replica.web.refusals import PageRefusal, signed_out
from delaywheel_replica.web.sessions import Sessions

PageHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OWN_HEADER: Final = "Delaywheel-Page"
"""No page of another origin can send it: its browser would ask us first, and hear no yes."""
API: Final = "/api/v1/"
SIGN_IN: Final = f"{API}session"
_UNREAD_S: Final = 30.0
_VIEWER: Final[web.RequestKey[Viewer]] = web.RequestKey("viewer", Viewer)
_SESSION: Final[web.RequestKey[str]] = web.RequestKey("session", str)
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Judges requests.

    Attributes:
        hosts: What browsers may send as `Host`; known once it is listened.
    """

    def __init__(self, sessions: Sessions, nodes: NodeCalls, *, insecure: bool) -> None:
        self.hosts: frozenset[str] = frozenset()
        self._sessions: Final = sessions
        self._nodes: Final = nodes
        self._insecure: Final = insecure

    @web.middleware
    async def guarded(self, request: web.Request, handler: PageHandler) -> web.StreamResponse:
        """Lets a request through, or answers why not."""
        try:
            answer = await self._judged(request, handler)
        except PageRefusal as refusal:
            answer = refusal.response()
        except web.HTTPException as error:  # of aiohttp: no such path, no such method
            reason = error.reason.upper().replace(" ", "_")
            answer = PageRefusal(error.status, reason, error.reason).response()
        await _send(request, answer)
        return answer

    async def _judged(self, request: web.Request, handler: PageHandler) -> web.StreamResponse:
        if request.headers.get("Host", "").lower() not in self.hosts:
            raise PageRefusal(421, "HOST_UNKNOWN", "not one of this page's names: see --host")
        if request.match_info.http_exception is not None:
            raise request.match_info.http_exception
        if not request.path.startswith(API):
            return await handler(request)
        if request.path == SIGN_IN:
            self._refuse_others(request)
            return await handler(request)
        address = address_of(request)
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() == "bearer":
            request[_VIEWER], _ = await self._sessions.known(token.strip(), address, self._nodes)
            return await handler(request)
        self._refuse_others(request)
        session = request.cookies.get(cookie_name(request), "")
        viewer = self._sessions.viewer(session, address)
        if viewer is None:
            raise signed_out("sign in: with a token, or by the link that the start printed")
        request[_VIEWER], request[_SESSION] = viewer, session
        try:
            return await handler(request)
        except PageRefusal as refusal:
            if refusal.status == 401:  # the token is no longer known, or never meant anything
                self._sessions.end(session)
            raise

    def refuse_signed_out(self, request: web.Request) -> None:
        """Judges anew, for what lasts: a cookie whose session has ended is refused as SIGN_IN."""
        session = request.get(_SESSION)
        if session is not None and self._sessions.viewer(session, address_of(request)) is None:
            raise signed_out("this session has ended: sign in again")

    def _refuse_others(self, request: web.Request) -> None:
        """Refuses what other sites had a browser send.

        Browsers tell `Sec-Fetch-Site` over TLS and on loopback alone.
        """
        site = request.headers.get("Sec-Fetch-Site", "same-origin" if self._insecure else "")
        if site != "same-origin" or request.headers.get(OWN_HEADER) != "1":
            raise PageRefusal(
                403, "NOT_FROM_THE_PAGE", "a cookie counts for this page's own scripts alone"
            )


async def _send(request: web.Request, answer: web.StreamResponse) -> None:
    """Sends an answer; who does not take it in time loses the connection, and we the answer."""
    try:
        async with asyncio.timeout(_UNREAD_S):
            await answer.prepare(request)
            await answer.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
    except ConnectionError:  # they have left: the server finds out, too
        return


async def add_headers(_request: web.Request, response: web.StreamResponse) -> None:
    """Adds what all answers have."""
    response.headers.update(HEADERS)
    response.headers["Server"] = "delaywheel"


def viewer_of(request: web.Request) -> Viewer:
    """Returns who makes a request that the guard has let through."""
    return request[_VIEWER]


def address_of(request: web.Request) -> str:
    """Returns where a request comes from; what proxies say of that is not believed."""
    return request.remote or ""


def cookie_name(request: web.Request) -> str:
    """Returns the name of the session's cookie: cookies are shared by a host's ports."""
    own = None if request.transport is None else request.transport.get_extra_info("sockname")
    return f"delaywheel-{own[1] if own else 0}"
