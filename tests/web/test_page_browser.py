"""The page in Debian's Chromium: what a viewer sees and does, before a scripted node."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import AsyncIterator
from copy import deepcopy
from itertools import count
from typing import Any, NamedTuple

import pytest

from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.web.commands.running import CommandRunner
from support.clients.fake_service import abort, answer, cancelled
from support.clients.page_user import PageUser, knows, page, who
from support.clients.scripted_node import ScriptedNode, describe_cluster
from support.process.axe import find_axe

CHROMIUM = shutil.which("chromium")
playwright = pytest.importorskip("playwright.async_api", reason="pip install playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="apt-get install chromium")

LETTER = {
    "place": "0:7",
    "timestamp_ms": 1_900_000_000_000,
    "state": "waiting",
    "reason": "EXPIRED",
    "detail": None,
    "topic": "orders",
    "id": "00" * 16,
    "due_ms": 1_900_000_000_000,
    "length_bytes": 12,
    "settled": None,
    "key": "NDI=",
    "value": "c3RpbGwgdGhlcmU/",
    "headers": [{"name": "tags", "value": "ZXU="}],
}
COUNTED = {"topic": "orders", "reason": "EXPIRED", "waiting": 1, "replayed": 2, "dropped": 0}
STEP = {"began": None, "time": "2030-03-17T17:46:40.250Z", "told_by": None}
WAY = {
    "root": "00" * 16,
    "topic": "orders",
    "clocks_differ": {"ms": 40, "ahead": "n1", "behind": "web-1"},
    "steps": [
        {**STEP, "step": "sent", "status": "ACCEPTED", "client": "web-1", "due_ms": 1.9e12},
        {**STEP, "step": "forwarded", "late_ms": 21},
        {**STEP, "step": "processed", "status": "RETRIED", "why": "ConnectionError: refused"},
    ],
}
PRINTED = {
    "list": {"topic": "dead", "letters": [LETTER], "counts": [COUNTED], "complete": True},
    "show": LETTER,
    "trace": {"ways": [WAY], "nothing": None, "searched": [], "missing": []},
    "drop": {"executed": True, "done": 1, "refused": {}, "refused_letters": []},
}

HOSTILE = "<img src=x onerror=alert(1)></script>\u202eevil"


class Tab(NamedTuple):
    """A browser's tab, signed in, and what it complained of."""

    page: Any
    user: PageUser
    complaints: list[str]

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


async def test_who_operates_sees_whose_quota_was_too_small(node: ScriptedNode, tab: Tab) -> None:
    described = describe_cluster()
    described.members[0].report.quota_refusals.add(principal="token:bob", messages=1_234)
    node.describe = answer(described)
    node.who_am_i = knows({"o": who("ops", "operate", "inspect"), "i": who("ann", "inspect")})
    await tab.signs_in("i")
    await tab.sees("Nodes")
    assert await tab.page.get_by_text("Refused for their quotas").count() == 0
    await tab.page.get_by_role("button", name="Sign out").click()
    await tab.signs_in("o")
    await tab.sees("token:bob")
    await tab.sees("1,234")


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
    await tab.signs_in("t")
    await tab.sees("token:ann")


VIEWS = {
    "now": "Messages a second",
    "wheel": "The next minute",
    "second?slot=1900000000": "That is all.",
    "message?handle=x": "Look for its way",
    "search?topic=orders": "Cancel all that match",
    "dead": "By topic and reason",
    "letter?place=0:7": "Replay: count first",
    "acts": "dead/drop",
}


def _fill(node: ScriptedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has something to show in each view."""

    def slots(_service: Any, request: pb.ListSlotsRequest, _context: Any) -> Any:
        bucket = request.bucket_seconds or 1
        rows = [
            pb.SlotRow(slot=slot, messages=1 + (slot // bucket * 7919) % 40)
            for slot in range(request.from_slot, request.to_slot, bucket)
        ]
        return pb.ListSlotsResponse(node="n1", slots=rows, bucket_seconds=request.bucket_seconds)

    retry = [
        pb.Header(name="dw-retry-attempt", value=b"2"),
        pb.Header(name="dw-retry-origin", value=b"orders/0/17"),
        pb.Header(name="dw-retry-last-error", value=b"ConnectionError: refused"),
    ]
    message = pending()
    message.headers.extend(retry)
    node.script.append(answer(pb.GetMessageResponse(message=message)))
    several = [pending(handle=f"n1.3:19000000{n:02}:01:orders") for n in range(20)]
    node.list_slots = slots
    node.get_slot = answer(pb.GetSlotResponse(messages=several))
    node.search = answer(
        pb.SearchResponse(messages=several, looked=pb.Looked(node="n1", messages=70))
    )
    node.describe = _growing()

    async def run(_runner: CommandRunner, words: list[str], **_how: Any) -> Any:
        return deepcopy(PRINTED[words[1] if words[0] == "dead" else words[0]])

    monkeypatch.setattr(CommandRunner, "run", run)


def _growing() -> Any:
    """A cluster that forwards 1,000 messages more each time it is asked."""
    asked = count()
    bounds = [1_000 * 2**n for n in range(12)]

    def describe(_service: Any, _request: Any, _context: Any) -> pb.DescribeClusterResponse:
        described = describe_cluster()
        now_ms = described.now_ms = time.time_ns() // 1_000_000
        number = next(asked) * 1_000
        late = pb.LatenessHistogram(bounds_us=bounds, counts=[number // 13] * 13)
        counts = pb.MemberCounts(
            accepted_messages=number + number // 3,
            forwarded_messages=number,
            refused_messages=[pb.ReasonCount(reason="QUOTA_EXCEEDED", messages=number // 9)],
            dead_letters=[pb.ReasonCount(reason="EXPIRED", messages=number // 50)],
            lateness=late,
        )
        halves = [pb.UnansweredHalves(group="billing", letters=3, oldest_ms=now_ms - 60_000)]
        described.members[0].report.CopyFrom(
            pb.MemberReport(
                version="0.1.0",
                now_ms=now_ms,
                role="leading",
                server_started_ms=1,
                cleaner_started_ms=1,
                counts=counts,
                unanswered_halves=halves,
            )
        )
        return described

    return describe


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 400)])
async def test_axe_finds_nothing_serious_in_any_view(
    node: ScriptedNode, tab: Tab, monkeypatch: pytest.MonkeyPatch, scheme: str, width: int
) -> None:
    """With `DELAYWHEEL_PICTURES=DIR` it also makes pictures of the views."""
    axe = find_axe().read_text()
    _fill(node, monkeypatch)
    bearer = {"Authorization": f"Bearer {tab.user.site.sessions.secret}"}
    assert (await tab.user.post("dead/drop", {"execute": True}, bearer))[0] == 200
    context = await tab.page.context.browser.new_context(
        bypass_csp=True,  # axe is no script of the page
        color_scheme=scheme,
        viewport={"width": width, "height": 900},
        timezone_id="Europe/Berlin",
    )
    page = await context.new_page()
    await page.goto(f"{tab.user.address}#secret={tab.user.site.sessions.secret}")
    await page.get_by_text("Messages a second").wait_for(timeout=60_000)
    await page.evaluate(axe)
    folder = os.environ.get("DELAYWHEEL_PICTURES")
    for view, text in VIEWS.items():
        await page.evaluate("to => { location.hash = to }", view)
        await page.get_by_text(text).first.wait_for(timeout=60_000)
        if view.startswith("message"):
            await page.get_by_role("button", name="Look for its way").click()
            await page.locator("ol.way").wait_for(timeout=60_000)
        found = await page.evaluate("() => axe.run({ resultTypes: ['violations'] })")
        serious = [
            (each["id"], each["nodes"][0]["html"], each["nodes"][0]["failureSummary"])
            for each in found["violations"]
            if each["impact"] in {"serious", "critical"}
        ]
        assert serious == [], view
        is_wide = await page.evaluate("() => document.documentElement.scrollWidth > innerWidth")
        assert not is_wide, view
        if folder:
            name = f"{view.partition('?')[0]}-{width}-{scheme}.png"
            await page.screenshot(path=f"{folder}/{name}", full_page=True)
    await context.close()
