"""The page in Debian's Chromium: what a viewer sees and does, before a scripted node."""

from __future__ import annotations

import shutil
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest

from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from support.clients.fake_service import abort, answer, cancelled
from support.clients.page_user import PageUser, knows, page, who
from support.clients.scripted_node import ScriptedNode, describe_cluster

CHROMIUM = shutil.which("chromium")
playwright = pytest.importorskip("playwright.async_api", reason="pip install playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="apt-get install chromium")

HOSTILE = "<img src=x onerror=alert(1)></script>\u202eevil"


class Tab(NamedTuple):
    """A browser's tab, signed in, and what it complained of."""

    page: Any
    user: PageUser
    complaints: list[str]

    async def go(self, view: str) -> None:
        await self.page.evaluate("to => { location.hash = to }", view)

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
        headers=[pb.Header(name=HOSTILE, value=b'{"a": 1}')],
    )
    for name, value in changes.items():
        setattr(message, name, value)
    return message


def _of_policy(text: str) -> list[str]:
    return [text] if "Content Security Policy" in text else []


@pytest.fixture
async def tab(node: ScriptedNode) -> AsyncIterator[Tab]:
    described = describe_cluster()
    described.now_ms = time.time_ns() // 1_000_000
    described.lateness_ms = 5_000
    node.describe = answer(described)
    async with page([node.address]) as user, playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened = await browser.new_page(timezone_id="Europe/Berlin")
        complaints: list[str] = []
        opened.on("pageerror", lambda error: complaints.extend([str(error)]))
        opened.on("dialog", lambda dialog: complaints.extend([dialog.message]))
        opened.on("console", lambda said: complaints.extend(_of_policy(said.text)))
        await opened.goto(f"{user.address}#secret={user.site.sessions.secret}")
        try:
            yield Tab(opened, user, complaints)
        finally:
            await browser.close()
        assert complaints == []


async def test_trouble_comes_first_with_its_section(tab: Tab) -> None:
    await tab.sees("messages are late by up to 5 s")
    await tab.sees("RUNBOOK: Lateness grows")
    assert await tab.page.locator("h1").inner_text() == "DEGRADED"
    assert "secret" not in tab.page.url
    await tab.sees("Europe/Berlin")


async def test_the_wheel_has_a_table_that_leads_to_a_second(node: ScriptedNode, tab: Tab) -> None:
    def slots(_service: Any, request: pb.ListSlotsRequest, _context: Any) -> Any:
        row = pb.SlotRow(slot=request.from_slot + 30, messages=7)
        return pb.ListSlotsResponse(slots=[row], bucket_seconds=request.bucket_seconds)

    node.list_slots = slots
    node.get_slot = answer(pb.GetSlotResponse(messages=[pending()], next_page_token="more"))
    await tab.go("wheel")
    await tab.page.locator("canvas[aria-label^='7 messages pending']").first.wait_for()
    await tab.page.locator("summary").first.click()
    await tab.page.locator("section a").first.click()
    await tab.sees("There is more.")


async def test_what_senders_wrote_is_text(node: ScriptedNode, tab: Tab) -> None:
    node.script.append(answer(pb.GetMessageResponse(message=pending())))
    await tab.go("message?handle=x")
    await tab.sees("<img src=x onerror=alert(1)></script><U+202E>evil")
    await tab.sees("ff 00")
    assert await tab.page.locator("img").count() == 0


async def test_an_act_asks_and_says_what_came_of_it(node: ScriptedNode, tab: Tab) -> None:
    found = answer(pb.GetMessageResponse(message=pending()))
    node.script.extend([found, cancelled(pb.CANCEL_OUTCOME_TOO_LATE), found])
    await tab.go("message?handle=x")
    await tab.page.get_by_role("button", name="Cancel it").click()
    await tab.page.get_by_role("button", name="Leave it").click()
    assert node.cancels == []
    await tab.page.get_by_role("button", name="Cancel it").click()
    await tab.sees("It is cancelled: it will never be delivered.")
    await tab.page.get_by_role("button", name="Do it").click()
    await tab.sees("too late: nothing was done")


async def test_halves_are_left_to_their_senders(node: ScriptedNode, tab: Tab) -> None:
    found = pb.GetMessageResponse(message=pending(state=pb.MESSAGE_STATE_HELD))
    node.script.append(answer(found))
    await tab.go("message?handle=x")
    await tab.sees("by their senders and checkers alone")
    assert await tab.page.get_by_role("button", name="Cancel it").count() == 0


async def test_a_failed_question_is_not_nothing_there(node: ScriptedNode, tab: Tab) -> None:
    node.search = abort(Reason.QUOTA_EXCEEDED)
    await tab.go("search?topic=orders")
    await tab.sees("not known: QUOTA_EXCEEDED")


async def test_who_is_no_longer_known_is_signed_out(node: ScriptedNode, tab: Tab) -> None:
    await tab.sees("DEGRADED")
    node.who_am_i = knows({"t": who("ann", "inspect")})
    await tab.go("acts")
    await tab.page.locator("#token").fill("t")
    await tab.page.get_by_role("button", name="Sign in").click()
    await tab.sees("token:ann")
