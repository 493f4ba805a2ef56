"""The operator's page in Chromium, as users start it, on real nodes: also while a leader dies."""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from delaywheel import Client, MessageState
from local.loopback.beside import PageProcess
from local.loopback.kafka import KafkaBroker
from local.viewing.viewers import look
from support.kafka.read_committed import CommittedReader, set_topic
from support.services.trio import Trio

CHROMIUM = shutil.which("chromium")
playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
pytestmark = [
    pytest.mark.kafka,
    pytest.mark.skipif(CHROMIUM is None, reason="apt-get install chromium"),
]
PATIENCE_MS = 60_000


@pytest.fixture
def tab(trio: Trio, tmp_path: Path) -> Iterator[Any]:
    """A browser's tab, by the printed link."""
    with (
        PageProcess([node.address for node in trio.nodes], tmp_path) as page,
        playwright.sync_playwright() as driver,
    ):
        link = trio.wait("the page listens", lambda: page.link)
        never_reads = look(link)
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened = browser.new_context().new_page()
        opened.context.set_default_timeout(PATIENCE_MS)
        complaints: list[str] = []
        opened.on("pageerror", lambda error: complaints.extend([str(error)]))
        opened.on("console", lambda said: complaints.extend(_of_policy(said.text)))
        opened.goto(link)
        try:
            yield opened
        finally:
            browser.close()
            never_reads.close()
        assert complaints == []


def _replays_letters_and_drops_one(trio: Trio, kafka: str, topic: str, tab: Any) -> None:
    """Of two letters the topic takes one by now."""
    base = tab.url.partition("#")[0]

    def listed() -> bool:
        tab.goto(f"{base}#dead?topic={topic}&{uuid.uuid4().hex}=")  # looks anew
        tab.get_by_text(re.compile(r"Waiting in|not known")).wait_for()
        return bool(tab.get_by_text(": 2 letters").count())

    trio.wait("the letters are listed", listed)
    places = {*tab.locator("a[href^='#letter?place=']").all_inner_texts()}
    set_topic(kafka, topic, "message.timestamp.after.max.ms", str(7 * 86_400_000))
    tab.get_by_role("button", name="Replay: count first").click()
    tab.get_by_text("Each is sent to the topic where it was to go, at once.").wait_for()
    yes = tab.get_by_role("button", name="Do it")
    assert yes.is_disabled(), "the count has to be typed"
    tab.locator("#count").fill("2")
    yes.click()
    tab.get_by_text("1 letter sent again").wait_for()
    refused = tab.get_by_role("row").filter(has_text="INVALID_TIMESTAMP").last
    place = refused.locator("td").first.inner_text()
    (taken,) = places - {place}
    tab.goto(f"{base}#letter?place={taken}")
    tab.get_by_text("replayed at").wait_for()
    with CommittedReader(kafka, topic) as reader:
        assert b"3 days ahead" in [message.value() for message in reader.read_to_end()]
    tab.goto(f"{base}#letter?place={place}")
    tab.get_by_role("button", name="Drop: count first").click()
    tab.get_by_role("button", name="Do it").click()
    tab.get_by_text("1 letter dropped").wait_for()
    tab.get_by_role("link", name="Acts").click()
    tab.get_by_text("dead/replay").wait_for()
    tab.get_by_text("dead/drop").wait_for()


def _cancels_many(client: Client, topic: str, tab: Any) -> None:
    for number in range(3):
        client.produce(topic, b"%d" % number, key=b"many", delay="30m")
    tab.goto(f"{tab.url.partition('#')[0]}#search?topic={topic}&key=many")
    tab.get_by_role("button", name="Cancel all that match").click()
    yes = tab.get_by_role("button", name="Do it")
    tab.locator("#count").fill("2")
    assert yes.is_disabled(), "the count has to be typed"
    tab.locator("#count").fill("3")
    yes.click()
    tab.get_by_role("cell", name="cancelled: it is never delivered").nth(3).wait_for()


def _of_policy(text: str) -> list[str]:
    return [text] if "Content Security Policy" in text else []


def test_one_looks_acts_and_sees_the_leader_die(
    kafka: KafkaBroker, trio: Trio, topic: str, tab: Any
) -> None:
    with trio.client() as client:
        first, second = (client.produce(topic, b"%d" % n, key=b"42", delay="50s") for n in (1, 2))
        tab.locator("h1.ok").wait_for()
        tab.get_by_role("cell", name=re.compile("B, reserve ")).nth(2).wait_for()
        tab.get_by_text("3 of 3 nodes, for all groups").wait_for()
        tab.get_by_role("link", name="The wheel").click()
        tab.locator("canvas[aria-label^='2 messages pending']").first.wait_for()
        tab.locator("summary").first.click()
        tab.locator("section a").first.click()
        tab.get_by_role("link", name=str(first)).click()
        other = tab.context.new_page()
        other.goto(tab.url)
        other.locator("#due").fill("2000-01-01T00:00:00Z")
        tab.get_by_role("button", name="Cancel it").click()
        tab.get_by_role("button", name="Do it").click()
        tab.get_by_text("cancelled: it is never delivered").wait_for()
        # Whoever looks at it still sees a message that waits, and is told what became of it.
        other.get_by_role("button", name="Reschedule it").click()
        other.get_by_role("button", name="Do it").click()
        other.get_by_text("cancelled: it is never delivered").wait_for()
        other.close()
        found = client.get(first)
        assert found is not None
        assert found.state is MessageState.CANCELLED
        tab.goto(f"{tab.url.partition('#')[0]}#message?handle={second}")
        tab.locator("#due").fill("2000-01-01T00:00:00Z")
        tab.get_by_role("button", name="Reschedule it").click()
        tab.get_by_role("button", name="Do it").click()
        tab.get_by_text(re.compile("^rescheduled; due|delivered")).first.wait_for()
        tab.reload()  # the act has it looked up again, which would take away what is found
        tab.get_by_role("button", name="Look for its way").click()
        tab.get_by_text("No index of traces was searched").wait_for()
        _cancels_many(client, topic, tab)
        for days in (3, 30):  # which Kafka takes from nobody
            ahead = datetime.now(UTC) + timedelta(days=days)
            client.produce(topic, b"%d days ahead" % days, timestamp=ahead, delay="1s")
    _replays_letters_and_drops_one(trio, kafka.address, topic, tab)
    tab.get_by_role("link", name="Now").click()
    leader = trio.leader()
    trio.kill(leader)
    tab.locator("h1.degraded").wait_for()
    new = trio.await_leader(trio.others(leader))
    tab.locator("dd", has_text=new.id).first.wait_for()
    trio.start(leader)
    tab.locator("h1.ok").wait_for()
