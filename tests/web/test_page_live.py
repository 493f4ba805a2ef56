"""The stream: what viewers see, that nobody costs anything, and who is closed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from grpc import StatusCode

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.web import live
from delaywheel_replica.web.nodes import Viewer
from delaywheel_replica.web.refusals import PageRefusal
from support.clients.fake_service import abort_bare, answer
from support.clients.page_user import OF_THE_PAGE, PageUser, knows, who
from support.clients.scripted_node import ScriptedNode, describe_cluster


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_EVERY_S", 0.02)
    monkeypatch.setattr(live, "_RIGHT_EVERY_S", 0.05)


async def events(user: PageUser) -> AsyncGenerator[tuple[str, Any]]:
    url = f"{user.address}api/v1/live"
    async with user.session.get(url, headers=OF_THE_PAGE) as answered:
        assert answered.status == 200, await answered.text()
        assert answered.content_type == "text/event-stream"
        name = ""
        async for line in answered.content:
            field, _, value = line.decode().rstrip("\n").partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                yield name, json.loads(value)


async def until(user: PageUser, *wanted: str) -> dict[str, Any]:
    """The first event of each of these names."""
    found: dict[str, Any] = {}
    async with asyncio.timeout(20):
        async for name, data in events(user):
            found.setdefault(name, data)
            if {*wanted} <= {*found}:
                return found
    raise AssertionError(f"only {[*found]}")


async def test_a_viewer_sees_all_events(node: ScriptedNode, user: PageUser) -> None:
    described = describe_cluster()
    described.members[0].accepting = False
    node.describe = answer(described)
    node.list_slots = answer(
        pb.ListSlotsResponse(node="n1", slots=[pb.SlotRow(slot=1, messages=7)], bucket_seconds=60)
    )
    await user.sign_in()
    found = await until(user, "cluster", "minute", "hour", "span")
    assert found["cluster"]["verdict"] == "DOWN"
    assert found["cluster"]["causes"][0]["is_down"] is True
    assert found["cluster"]["causes"][0]["section"] == "A node takes no messages"
    assert found["cluster"]["status"]["cluster_id"] == "c1"
    assert found["hour"]["bucket_s"] == 60
    assert found["hour"]["slots"]["slots"] == [{"slot": "1", "messages": "7"}]
    asked = [each for each in node.asked if isinstance(each, pb.ListSlotsRequest)]
    assert {each.bucket_seconds for each in asked} == {1, 60, 3600}
    assert all(each.all_members and each.to_slot > each.from_slot > 0 for each in asked)


async def test_nobody_looks_and_nobody_is_asked(node: ScriptedNode, user: PageUser) -> None:
    await user.sign_in()
    assert node.asked == []
    await until(user, "minute")
    async with asyncio.timeout(10):
        while user.site._live._making is not None:  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.01)
    assert user.site._live._newest == {}


async def test_nodes_that_do_not_answer_are_told_of(node: ScriptedNode, user: PageUser) -> None:
    await user.sign_in()
    seen: list[str] = []
    async with asyncio.timeout(20):
        async for name, data in events(user):
            if name == "minute":
                node.describe = abort_bare(StatusCode.UNAVAILABLE)
            if name == "away":
                assert data["reason"] == "UNAVAILABLE"
                assert data["since_ms"] <= data["at_ms"]
                node.describe = answer(describe_cluster())
                seen.append(name)
            if seen and name == "cluster":
                return


async def test_a_revoked_token_ends_the_stream_of_its_viewer_alone(
    node: ScriptedNode, user: PageUser
) -> None:
    both = {"ann": who("ann", "inspect"), "bob": who("bob", "inspect")}
    node.who_am_i = knows(both)
    await user.sign_in("ann")
    ann = events(user)
    await anext(ann)
    await user.sign_in("bob")
    bob = events(user)
    await anext(bob)
    node.who_am_i = knows({"bob": both["bob"]})
    async with asyncio.timeout(20):
        told = [(name, data) async for name, data in ann][-1]
    assert (told[0], told[1]["reason"]) == ("end", "TOKEN_UNKNOWN")
    async with asyncio.timeout(20):
        for _ in range(10):
            assert (await anext(bob))[0] != "end"
    await bob.aclose()


async def test_names_of_other_callers_are_not_for_all_viewers(
    node: ScriptedNode, user: PageUser
) -> None:
    described = describe_cluster()
    described.members[0].report.quota_refusals.add(principal="token:bob", messages=7)
    described.members.add(node="n2", silent="away")
    node.describe = answer(described)
    await user.sign_in()
    told = str(await until(user, "cluster"))
    assert "bob" not in told
    assert told.count("'report'") == 1, "who is silent has none"
    _, told = await user.post("DelayWheel/DescribeCluster", {"all_members": True})
    assert "bob" in str(told)


async def test_nothing_comes_after_the_end() -> None:
    watching = live._Watching(Viewer("t", "10.0.0.1", by_link=False))
    watching.tell("cluster", b"old ")
    watching.end(PageRefusal(401, "TOKEN_UNKNOWN", "revoked"))
    watching.tell("minute", b"new")
    events = await watching.next(1)
    assert events.startswith(b"old id: 0\nevent: end\n")
    assert b"new" not in events


async def test_who_may_not_inspect_sees_nothing(node: ScriptedNode, user: PageUser) -> None:
    node.who_am_i = knows({"t": who("ann", "produce")})
    await user.sign_in("t")
    assert await user.get("live") == (
        403,
        {"reason": "FORBIDDEN", "message": "you have no right 'inspect'"},
    )


async def test_one_viewer_too_many_is_told_so(
    monkeypatch: pytest.MonkeyPatch, user: PageUser
) -> None:
    monkeypatch.setattr(live, "VIEWERS_AT_MOST", 1)
    await user.sign_in()
    first = events(user)
    await anext(first)
    status, said = await user.get("live")
    assert (status, said["reason"]) == (503, "LIVE_FULL")
    await first.aclose()


async def test_who_reads_nothing_is_closed_and_costs_little(
    monkeypatch: pytest.MonkeyPatch, node: ScriptedNode, user: PageUser
) -> None:
    monkeypatch.setattr(live, "_UNREAD_S", 0.3)
    described = describe_cluster()
    described.kafka = "x" * 500_000  # more than the kernel keeps
    node.describe = answer(described)
    await user.sign_in()
    host, port = user.address.split("//")[1].rstrip("/").split(":")
    _reader, writer = await asyncio.open_connection(host, int(port), limit=1)
    bearer = f"Authorization: Bearer {user.site.sessions.secret}"
    writer.write(f"GET /api/v1/live HTTP/1.1\r\nHost: {host}:{port}\r\n{bearer}\r\n\r\n".encode())
    watching = user.site._live._watching
    async with asyncio.timeout(20):
        while not watching:  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.01)
        while watching:
            unsent = watching[0]._unsent
            assert sorted(unsent) == sorted({*unsent} & {"cluster", "minute", "hour", "span"})
            await asyncio.sleep(0.01)
    writer.close()


async def test_signing_out_ends_the_streams_of_that_session(user: PageUser) -> None:
    """In another tab it went on, until its next call."""
    await user.sign_in()
    stream = events(user)
    await anext(stream)
    async with user.session.delete(f"{user.address}api/v1/session", headers=OF_THE_PAGE):
        pass
    async with asyncio.timeout(20):
        told = [(name, data) async for name, data in stream][-1]
    assert (told[0], told[1]["reason"]) == ("end", "SIGN_IN")


async def test_who_may_not_look_takes_nobodys_room(
    monkeypatch: pytest.MonkeyPatch, node: ScriptedNode, user: PageUser
) -> None:
    monkeypatch.setattr(live, "VIEWERS_AT_MOST", 0)
    node.who_am_i = knows({"bob": who("bob", "produce")})
    await user.sign_in("bob")
    assert (await user.get("live"))[0] == 403
