"""A browser's tab that shows the operators' page before a scripted node."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from support.clients.fake_service import answer
from support.clients.page_user import PageUser, page
from support.clients.scripted_node import ScriptedNode, describe_cluster

HOSTILE = "<img src=x onerror=alert(1)></script>\u202eevil"


class Tab(NamedTuple):
    """A browser's tab, signed in, and what it complained of."""

    page: Any
    user: PageUser
    complaints: list[str]

    async def another(self, **options: Any) -> Any:
        """Opens the page in a window of its own, signed in."""
        browser = self.page.context.browser
        context = await browser.new_context(timezone_id="Europe/Berlin", **options)
        opened = await context.new_page()
        await opened.goto(f"{self.user.address}#secret={self.user.site.sessions.secret}")
        await opened.locator("nav").wait_for(timeout=60_000)
        return opened

    async def go(self, view: str) -> None:
        await self.page.evaluate("to => { location.hash = to }", view)

    async def signs_in(self, token: str) -> None:
        field = self.page.locator("#token")
        if not await field.count():  # who is in by the link is out at the next call
            await self.go("acts")
        await field.fill(token, timeout=60_000)
        await self.page.get_by_role("button", name="Sign in").click()

    async def sees(self, text: str) -> None:
        await self.page.get_by_text(text).first.wait_for(timeout=60_000)


def pending(**changes: Any) -> pb.StoredMessage:
    message = pb.StoredMessage(
        handle="n1.3:1900000000:01:orders",
        id=bytes(16),
        topic="orders",
        due_ms=1_900_000_000_000,
        state=pb.MESSAGE_STATE_PENDING,
        key=b"\xff\x00",
        value=HOSTILE.encode(),
        value_length_bytes=len(HOSTILE.encode()),
        accepted_at_ms=1_899_999_000_000,
        wheel="n1.3",
        seq=17,
        headers=[pb.Header(name=HOSTILE, value=b'{"a": 1}')],
    )
    for name, value in changes.items():
        setattr(message, name, value)
    return message


def _of_policy(text: str) -> list[str]:
    return [text] if "Content Security Policy" in text else []


@asynccontextmanager
async def opened_tab(browser: Any, node: ScriptedNode, **settings: Any) -> AsyncIterator[Tab]:
    """Opens one by the page's link; what it complains of in the end is a failure."""
    described = describe_cluster()
    described.now_ms = time.time_ns() // 1_000_000
    described.lateness_ms = 5_000
    node.describe = answer(described)
    async with page([node.address], **settings) as user:
        opened = await (await browser.new_context(timezone_id="Europe/Berlin")).new_page()
        complaints: list[str] = []
        opened.on("pageerror", lambda error: complaints.extend([str(error)]))
        opened.on("dialog", lambda dialog: complaints.extend([dialog.message]))
        opened.on("console", lambda said: complaints.extend(_of_policy(said.text)))
        await opened.goto(f"{user.address}#secret={user.site.sessions.secret}")
        try:
            yield Tab(opened, user, complaints)
        finally:
            for context in browser.contexts:
                await context.close()
        assert complaints == []
