"""The page in Debian's Chromium: what a viewer sees and does, before a scripted node."""

from __future__ import annotations

import os
import re
import time
from copy import deepcopy
from itertools import count
from typing import Any

import pytest

from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.web.commands.running import CommandRunner
from support.clients.fake_service import abort, answer, cancelled
from support.clients.page_tab import Tab, pending
from support.clients.page_user import knows, who
from support.clients.scripted_node import ScriptedNode, describe_cluster
from support.process.axe import find_axe

pytestmark = pytest.mark.asyncio(loop_scope="package")  # that of the browser
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
    await tab.page.locator("#token").wait_for()
    await tab.signs_in("o")
    await tab.sees("token:bob")
    await tab.sees("1,234")


async def test_disks_and_answers_about_halves_are_told(node: ScriptedNode, tab: Tab) -> None:
    described = describe_cluster()
    for name, answers in (("n1", 1_200), ("n2", 34)):
        report = pb.MemberReport(
            role="leading" if name == "n1" else "standby",
            disk=pb.DiskSpace(free_bytes=69_960_000_000, reserve_bytes=512_000_000),
            counts=pb.MemberCounts(halves=pb.HalfCounts(asked=2_000, rolled_back=answers)),
        )
        if name == "n2":
            described.members.add(node=name, reachable=True)
        described.members[-1].report.CopyFrom(report)
    node.describe = answer(described)
    await tab.sees("70 GB, reserve 512 MB")
    await tab.sees("4,000")
    await tab.sees("committed 0, rolled back 1,234, undecided 0")
    await tab.sees("2 of 2 nodes, for all groups")
    await tab.sees("no letter waits")


async def test_halves_are_left_to_their_senders(node: ScriptedNode, tab: Tab) -> None:
    found = pb.GetMessageResponse(message=pending(state=pb.MESSAGE_STATE_HELD))
    node.script.append(answer(found))
    await tab.go("message?handle=x")
    await tab.sees("by their senders and checkers alone")
    assert await tab.page.get_by_role("button", name="Cancel it").count() == 0


@pytest.mark.parametrize("tab", [{"read_only": True}], indirect=True)
async def test_a_page_to_look_at_alone_offers_no_act(
    node: ScriptedNode, tab: Tab, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fill(node, monkeypatch)
    await _offers(tab, [])
    await tab.sees("everybody (no grants), read only")


@pytest.mark.parametrize(
    ("may", "offered"),
    [
        (["inspect", "read"], []),
        (["inspect", "change"], ["Cancel it", "Reschedule it", "Cancel all that match"]),
        (["inspect", "read", "operate"], ["Replay: count first", "Drop: count first"]),
    ],
)
async def test_acts_are_offered_as_nodes_grant_them(
    node: ScriptedNode,
    tab: Tab,
    monkeypatch: pytest.MonkeyPatch,
    may: list[str],
    offered: list[str],
) -> None:
    _fill(node, monkeypatch)
    node.who_am_i = knows({"t": who("ann", *may)})
    await tab.signs_in("t")
    await tab.sees("token:ann")
    await _offers(tab, offered)


_ACTS = [
    *("Cancel it", "Reschedule it", "Cancel all that match"),
    *("Replay: count first", "Drop: count first"),
]


async def _offers(tab: Tab, offered: list[str]) -> None:
    found = []
    for view, text in (
        ("message?handle=x", "Look for its way"),
        ("search?topic=a", "That is all."),
    ):
        await tab.go(view)
        await tab.sees(text)
        found += [name for name in _ACTS if await tab.page.get_by_role("button", name=name).count()]
    await tab.go("dead")
    await tab.page.get_by_text(re.compile("By topic and reason|not known")).first.wait_for()
    found += [name for name in _ACTS if await tab.page.get_by_role("button", name=name).count()]
    assert found == offered


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
    "second?slot=1900000000": "There is more.",
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
    node.script.extend([answer(pb.GetMessageResponse(message=message))] * len(VIEWS))
    several = [pending(handle=f"n1.3:19000000{n:02}:01:orders") for n in range(20)]
    node.list_slots = slots
    node.get_slot = answer(pb.GetSlotResponse(messages=several, next_page_token="more"))
    node.search = answer(
        pb.SearchResponse(messages=several, looked=pb.Looked(node="n1", messages=70))
    )
    node.describe = _growing()

    async def run(_runner: CommandRunner, words: list[str], **_how: Any) -> Any:
        return deepcopy(PRINTED[words[1] if words[0] == "dead" else words[0]])

    monkeypatch.setattr(CommandRunner, "run", run)


SHARES = (0, 0, 5, 20, 40, 20, 8, 4, 2, 1, 0, 0, 0)
"""Of a hundred messages, how late they are: about 16 ms, seldom a second."""


def _growing(lateness_ms: int = 0) -> Any:
    """A cluster that forwards 1,000 messages more each time it is asked."""
    asked = count()
    bounds = [1_000 * 2**n for n in range(12)]

    def describe(_service: Any, _request: Any, _context: Any) -> pb.DescribeClusterResponse:
        described = describe_cluster()
        described.lateness_ms = lateness_ms
        now_ms = described.now_ms = time.time_ns() // 1_000_000
        number = next(asked) * 1_000
        late = pb.LatenessHistogram(bounds_us=bounds, counts=[number * n // 100 for n in SHARES])
        counts = pb.MemberCounts(
            accepted_messages=number + number // 3,
            forwarded_messages=number,
            refused_messages=[pb.ReasonCount(reason="QUOTA_EXCEEDED", messages=number // 9)],
            dead_letters=[pb.ReasonCount(reason="EXPIRED", messages=number // 50)],
            lateness=late,
            halves=pb.HalfCounts(asked=7, committed=3, rolled_back=1),
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
                disk=pb.DiskSpace(free_bytes=69_960_000_000, reserve_bytes=512_000_000),
            )
        )
        described.wheels[0].replicas.add(node="n1", state=pb.REPLICA_STATE_IN_SYNC)
        described.pending.messages = 1_390
        for name in ("n2", "n3"):
            report = pb.MemberReport(
                version="0.1.0",
                now_ms=now_ms,
                role="standby",
                cleaner_started_ms=1,
                counts=pb.MemberCounts(),
            )
            described.members.add(node=name, reachable=True, accepting=True, report=report)
            described.wheels[0].replicas.add(node=name, state=pb.REPLICA_STATE_IN_SYNC)
        return described

    return describe


COLOURS = {"runOnly": {"type": "tag", "values": ["cat.color"]}}
"""Rules whose outcome depends on light or dark."""


async def test_axe_finds_nothing_serious_in_any_view(
    node: ScriptedNode, tab: Tab, monkeypatch: pytest.MonkeyPatch
) -> None:
    axe = find_axe().read_text()
    _fill(node, monkeypatch)
    bearer = {"Authorization": f"Bearer {tab.user.site.sessions.secret}"}
    assert (await tab.user.post("dead/drop", {"execute": True}, bearer))[0] == 200
    page = await tab.another(bypass_csp=True)  # axe is no script of the page
    await page.get_by_text("Messages a second").wait_for(timeout=60_000)
    await page.evaluate(axe)
    for view, text in VIEWS.items():
        await page.evaluate("to => { location.hash = to }", view)
        await page.get_by_text(text).first.wait_for(timeout=60_000)
        if view.startswith("message"):
            await page.get_by_role("button", name="Look for its way").click()
            await page.locator("ol.way").wait_for(timeout=60_000)
        for width in (1280, 400):
            await page.set_viewport_size({"width": width, "height": 900})
            for scheme, options in (("light", {}), ("dark", COLOURS)):
                await page.emulate_media(color_scheme=scheme)
                run = "options => axe.run({ resultTypes: ['violations'], ...options })"
                found = await page.evaluate(run, options)
                serious = [
                    (each["id"], each["nodes"][0]["html"], each["nodes"][0]["failureSummary"])
                    for each in found["violations"]
                    if each["impact"] in {"serious", "critical"}
                ]
                assert serious == [], (view, width, scheme)
            fits = "() => document.documentElement.scrollWidth <= innerWidth"
            await page.wait_for_function(fits, timeout=60_000)


@pytest.mark.skipif("DELAYWHEEL_PICTURES" not in os.environ, reason="they are made on demand")
async def test_pictures_of_the_page_are_made(
    node: ScriptedNode, tab: Tab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into the folder `DELAYWHEEL_PICTURES`: docs/PAGE.md shows them."""
    _fill(node, monkeypatch)
    down = describe_cluster()
    down.members[0].accepting = False
    down.ClearField("leader")
    degraded = _growing(lateness_ms=5_000)
    scenes: dict[str, tuple[str, str, Any]] = {
        "healthy": ("now", "kept in this tab, for 12 s", _growing()),
        "degraded": ("now", "RUNBOOK: Lateness grows", degraded),
        "down": ("now", "DOWN", answer(down)),
        "wheel": ("wheel", "The next minute", _growing()),
        "second": ("second?slot=1900000000", "There is more.", _growing()),
        "way": ("message?handle=x", "processed", _growing()),
    }
    for scheme, width in (("light", 1280), ("dark", 400), ("dark", 1280), ("light", 400)):
        size = {"width": width, "height": 900}
        for name, (view, text, described) in scenes.items():
            node.describe = described
            page = await tab.another(color_scheme=scheme, viewport=size)
            await page.evaluate("to => { location.hash = to }", view)
            if name == "way":
                await page.get_by_role("button", name="Look for its way").click()
            await page.get_by_text(text).first.wait_for(timeout=90_000)
            file = f"{os.environ['DELAYWHEEL_PICTURES']}/{name}-{width}-{scheme}.png"
            await page.screenshot(path=file, full_page=True)
            await page.context.close()
