"""An operator's page before scripted nodes, and what asks it as a browser would."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
import grpc

from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.web.settings import PageSettings
from delaywheel_replica.web.site import PageSite
from support.clients.fake_service import Behaviour, abort

OF_THE_PAGE = {"Sec-Fetch-Site": "same-origin", "Delaywheel-Page": "1"}
"""What a browser sends for the page's own scripts."""


class PageUser(NamedTuple):
    """A page that runs, and what asks it."""

    site: PageSite
    address: str
    session: aiohttp.ClientSession

    async def sign_in(self, token: str | None = None) -> int:
        """Returns the status."""
        shown = {"token": self.site.sessions.secret if token is None else token}
        return (await self.post("session", shown))[0]

    async def post(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Returns status and JSON."""
        sent = {"data": body} if isinstance(body, bytes) else {"json": body}
        url = f"{self.address}api/v1/{path}"
        headers = OF_THE_PAGE if headers is None else headers
        async with self.session.post(url, headers=headers, **sent) as answer:
            return answer.status, await answer.json()

    async def get(self, path: str) -> tuple[int, Any]:
        """The same, for what is only read."""
        url = f"{self.address}api/v1/{path}"
        async with self.session.get(url, headers=OF_THE_PAGE) as answer:
            return answer.status, await answer.json()


@asynccontextmanager
async def page(nodes: Sequence[str], **settings: Any) -> AsyncIterator[PageUser]:
    """Runs a page."""
    site = PageSite(PageSettings("127.0.0.1:0", tuple(nodes), **settings))
    try:
        address = await site.start()
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
            yield PageUser(site, address, session)
    finally:
        await site.stop()


def knows(tokens: dict[str, pb.WhoAmIResponse]) -> Behaviour:
    """WhoAmI of a node with grants, that knows these tokens."""

    def behave(service: Any, request: Any, context: grpc.ServicerContext) -> Any:
        shown = dict(context.invocation_metadata())
        token = str(shown.get("authorization", "")).removeprefix("Bearer ")
        if token in tokens:
            return tokens[token]
        return abort(Reason.TOKEN_UNKNOWN)(service, request, context)

    return behave


def who(name: str, *may: str) -> pb.WhoAmIResponse:
    return pb.WhoAmIResponse(
        node="n1", principal=f"token:{name}", grants=[pb.Grant(may=may, topics=["*"])]
    )
