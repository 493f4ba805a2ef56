"""What may go wrong, in a browser: each row of the issue's table that a viewer sees.

Bodies and their bounds are in `test_page_guard.py`, connections in `test_page_connections.py`,
signing out in `test_page_browser.py`, two who act on one message in `e2e/three_nodes/test_page.py`.
"""

from __future__ import annotations

import asyncio
from copy import deepcopy
from typing import Any

import pytest
from grpc import StatusCode

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.web.commands.running import CommandRunner
from support.clients.fake_service import abort_bare, answer
from support.clients.page_tab import HOSTILE, Tab, pending
from support.clients.scripted_node import ScriptedNode, describe_cluster

pytestmark = pytest.mark.asyncio(loop_scope="package")  # that of the browser
SHOWN = "<img src=x onerror=alert(1)></script><U+202E>evil"
TOPIC = ("t" * 240 + HOSTILE)[:249]
NEWEST = {"from": "2030-01-01T00:00:00Z", "to": "2030-01-02T00:00:00Z", "newest": None}


async def test_nodes_that_do_not_answer_leave_no_picture_that_looks_fresh(
    node: ScriptedNode, tab: Tab
) -> None:
    await tab.sees("DEGRADED")
    node.describe = abort_bare(StatusCode.UNAVAILABLE)
    await tab.sees("Nodes do not answer: UNAVAILABLE")
    await tab.page.get_by_text("s ago.").wait_for(timeout=60_000)
    await tab.page.locator("main.old").wait_for()
    node.describe = answer(describe_cluster())
    await tab.page.locator("main:not(.old)").wait_for(timeout=60_000)
    await tab.page.get_by_text("s ago.").wait_for(state="hidden")


async def test_a_node_of_an_earlier_release_tells_less_and_nothing_of_it_is_0(
    node: ScriptedNode, tab: Tab
) -> None:
    described = describe_cluster()
    described.ClearField("lateness_ms")
    report = pb.MemberReport(version="0.0.9", now_ms=described.now_ms, role="standby")
    described.members.add(node="n2", reachable=True, report=report)
    node.describe = answer(described)
    node.list_slots = answer(
        pb.ListSlotsResponse(node="n1", slots=[pb.SlotRow(slot=1, messages=7)])
    )
    await tab.sees("not told by n1, n2")
    row = tab.page.get_by_role("row", name="n1").first
    assert (await row.inner_text()).count("not told") >= 4
    row = tab.page.get_by_role("row", name="n2").first
    assert (await row.inner_text()).count("not told") == 1, "how much of its disk is free"
    facts = tab.page.locator("dl")
    assert (await facts.first.inner_text()).count("not told") == 2, "lateness, and what is pending"
    assert (await facts.last.inner_text()).count("not told") == 2, "halves asked about, and answers"
    await tab.sees("whether letters wait: not told, no node leads")
    await tab.go("wheel")
    summaries = tab.page.locator("summary")
    for number in range(3):
        await summaries.nth(number).click()
    assert await tab.page.get_by_text("not told: the node has an earlier release").count() == 2


async def test_rates_name_the_nodes_that_they_lack(node: ScriptedNode, tab: Tab) -> None:
    """A sum of those that tell looked like that of the cluster."""
    described = describe_cluster()
    del described.members[:]
    counts = pb.MemberCounts(accepted_messages=7)
    for name, report in (
        ("n1", pb.MemberReport(counts=counts, cleaner_started_ms=1)),
        ("n2", pb.MemberReport(version="0.0.9", cleaner_started_ms=1)),
        ("n3", None),
        ("n4", pb.MemberReport(counts=counts)),
    ):
        described.members.add(node=name, report=report)
    node.describe = answer(described)
    opened = await tab.another()
    await opened.get_by_text("so far; not told by n2, n3, n4").wait_for(timeout=60_000)


async def test_what_others_wrote_is_text_wherever_it_is(
    node: ScriptedNode, tab: Tab, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = describe_cluster()
    member = described.members[0]
    member.settings_differ = HOSTILE
    member.report.unanswered_halves.add(group=HOSTILE, letters=1, oldest_ms=1)
    member.report.insecure = HOSTILE
    node.describe = answer(described)
    long = pending(topic=TOPIC, key=b"k" * (1 << 20), value=b"\xff" * 100_000, handle=HOSTILE)
    node.script.append(answer(pb.GetMessageResponse(message=long)))
    node.search = answer(pb.SearchResponse(messages=[long]))
    _prints_hostile(monkeypatch)
    for view, seen in (
        ("now", "INSECURE: "),
        ("search?topic=x", "That is all."),
        ("dead?reason=x", "By topic and reason"),
        ("letter?place=0:7", "a dead letter's error"),
        ("message?handle=x", "the first 64 KiB of 1,048,576 bytes"),
    ):
        await tab.go(view)
        await tab.sees(seen)
        await tab.sees(SHOWN)
        assert await tab.page.locator("img, main script").count() == 0
    await tab.sees("the first 64 KiB of 100,000 bytes")
    assert not await tab.page.evaluate("() => document.documentElement.scrollWidth > innerWidth")
    await tab.page.get_by_role("button", name="Look for its way").click()
    await tab.sees("not shown: ")
    await tab.sees("an error of a way <U+202E>evil")
    await tab.sees("2030-01-01T04:00:00Z to 2030-01-01T05:00:00Z")
    await tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await tab.page.get_by_role("button", name="Copy the whole").first.click()
    await tab.sees("Copied")
    assert await tab.page.evaluate("() => navigator.clipboard.readText()") == "k" * (1 << 20)


async def test_a_row_of_letters_without_a_topic_leads_to_these_alone(
    tab: Tab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It led to the letters of all topics, with a button that drops them."""
    said: list[list[str]] = []

    async def run(_runner: CommandRunner, words: list[str], **_how: Any) -> Any:
        said.append(words)
        count = {"topic": "", "reason": "EXPIRED", "waiting": 1, "replayed": 0, "dropped": 0}
        rest = {**count, "topic": "(others)", "reason": "(others)"}
        return {"topic": "dead", "letters": [], "counts": [count, rest], "complete": True}

    monkeypatch.setattr(CommandRunner, "run", run)
    await tab.go("dead")
    await tab.page.get_by_role("link", name="EXPIRED").click()
    await tab.page.wait_for_url("**/#dead?topic=&reason=EXPIRED")
    async with asyncio.timeout(30):
        while len(said) < 2:  # noqa: ASYNC110 - the page asks when it likes
            await asyncio.sleep(0.01)
    assert said[1][-2:] == ["--topic=", "--reason=EXPIRED"]
    assert await tab.page.get_by_role("link", name="others").count() == 0


def _prints_hostile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has letters and ways say what nobody should."""
    letter = {
        **dict.fromkeys(("id", "due_ms", "settled")),
        "place": "0:7",
        "timestamp_ms": 1,
        "state": "waiting",
        "reason": HOSTILE,
        "detail": f"a dead letter's error {HOSTILE}",
        "topic": TOPIC,
        "length_bytes": 1,
        "key": None,
        "value": "/w==",
        "headers": [{"name": HOSTILE, "value": "/w=="}],
    }
    count = {"topic": HOSTILE, "reason": HOSTILE, "waiting": 1, "replayed": 0, "dropped": 0}
    step = {
        "step": "processed",
        "time": None,
        "why": "an error of a way \u202eevil",
        "tags": HOSTILE,
    }
    index = {
        **NEWEST,
        "index": HOSTILE,
        "gaps": [{"from": "2030-01-01T04:00:00Z", "to": "2030-01-01T05:00:00Z"}],
        "dropped": 3,
        "shares": [],
    }
    printed: dict[str, Any] = {
        "list": {"topic": HOSTILE, "letters": [letter], "counts": [count], "complete": True},
        "show": letter,
        "trace": {
            "ways": [{"root": "r", "topic": TOPIC, "clocks_differ": None, "steps": [step]}],
            "nothing": None,
            "searched": [index],
            "missing": [{"part": "index", "reason": "X", "message": HOSTILE}],
        },
    }

    async def run(_runner: CommandRunner, words: list[str], **_how: Any) -> Any:
        return deepcopy(printed[words[1] if words[0] == "dead" else words[0]])

    monkeypatch.setattr(CommandRunner, "run", run)


async def test_without_kafka_letters_say_what_is_lacking_and_the_rest_works(
    node: ScriptedNode, tab: Tab
) -> None:
    described = describe_cluster()
    described.kafka = ""
    node.describe = answer(described)
    await tab.go("dead")
    await tab.sees("start the page with --config FILE")
    described.kafka = "127.0.0.1:1"
    await tab.go("dead?reason=x")
    await tab.sees("not known: KAFKA_UNREACHABLE")
    await tab.sees("was started without --config")
    await tab.go("now")
    await tab.sees("Nodes")


async def test_without_javascript_it_says_what_to_do(tab: Tab) -> None:
    context = await tab.page.context.browser.new_context(java_script_enabled=False)
    opened = await context.new_page()
    await opened.goto(tab.user.address)
    assert "delaywheel status" in await opened.locator("noscript").inner_text()
    await context.close()
