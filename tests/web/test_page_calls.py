"""Calls as JSON: what is passed, what comes back, which node answers, and the log of acts."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from grpc import StatusCode

from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.server.access.needs import NEEDS
from delaywheel_replica.web.calls import METHODS, READS
from support.clients.fake_service import abort, abort_bare, answer
from support.clients.page_user import PageUser, knows, page, who
from support.clients.scripted_node import ScriptedNode


def test_every_call_of_the_nodes_can_be_made_but_the_stream() -> None:
    made = {name.partition("/")[2] for name in METHODS}
    assert made == {*NEEDS} - {"DelayProduceStream"}
    acts = {name for name, need in NEEDS.items() if need.right in _CHANGING}
    assert made - READS == acts - {"DelayProduceStream"}


_CHANGING = {"produce", "change", "operate", "half"}


async def test_the_request_and_the_answer_are_the_protocols(
    node: ScriptedNode, user: PageUser
) -> None:
    node.search = answer(
        pb.SearchResponse(
            messages=[pb.StoredMessage(topic="orders", key=b"\xff", due_ms=2**60)],
            looked=pb.Looked(node="n1", messages=7),
        )
    )
    await user.sign_in()
    key = base64.b64encode(b"42").decode()
    status, found = await user.post(
        "DelayWheel/Search", {"filter": {"topic": "orders", "key": key}, "pageSize": 5}
    )
    assert status == 200
    asked = pb.SearchRequest(filter=pb.Filter(topic="orders", key=b"42"), page_size=5)
    assert node.asked == [asked]
    assert found == {
        "messages": [{"topic": "orders", "key": "/w==", "due_ms": str(2**60)}],
        "looked": {"node": "n1", "messages": "7"},
    }


@pytest.mark.parametrize(
    ("behaviour", "status", "reason"),
    [
        (abort(Reason.SLOT_INVALID), 400, "SLOT_INVALID"),
        (abort(Reason.FORBIDDEN), 403, "FORBIDDEN"),
        (abort(Reason.QUOTA_EXCEEDED, delay_s=2), 429, "QUOTA_EXCEEDED"),
        (abort_bare(StatusCode.UNIMPLEMENTED), 501, "UNIMPLEMENTED"),
    ],
)
async def test_a_nodes_refusal_is_passed_on(
    node: ScriptedNode, user: PageUser, behaviour: Any, status: int, reason: str
) -> None:
    node.get_slot = behaviour
    await user.sign_in()
    got, said = await user.post("DelayWheel/GetSlot", {"slot": 1})
    assert (got, said["reason"], said["message"]) == (status, reason, "scripted")
    assert said.get("retry_delay_ms") == (2_000 if status == 429 else None)


async def test_another_node_answers_while_one_is_away() -> None:
    with ScriptedNode() as first, ScriptedNode() as second:
        second.get_slot = answer(pb.GetSlotResponse(next_page_token="second"))
        first.get_slot = abort_bare(StatusCode.UNAVAILABLE)
        async with page([first.address, second.address]) as user:
            await user.sign_in()
            status, said = await user.post("DelayWheel/GetSlot", {"slot": 1})
            assert (status, said) == (200, {"next_page_token": "second"})
            second.get_slot = abort_bare(StatusCode.UNAVAILABLE)
            assert (await user.post("DelayWheel/GetSlot", {"slot": 1}))[0] == 503


async def test_read_only_changes_nothing(node: ScriptedNode) -> None:
    async with page([node.address], read_only=True) as user:
        await user.sign_in()
        assert (await user.get("page"))[1]["read_only"] is True
        for name in METHODS:
            status, said = await user.post(name, {})
            refused = said.get("reason") == "READ_ONLY"
            assert refused == (name.partition("/")[2] not in READS), name
            assert status == 403 or not refused


async def test_acts_are_logged_for_who_made_them_and_for_operators(
    node: ScriptedNode, user: PageUser
) -> None:
    node.who_am_i = knows(
        {"ann": who("ann", "change"), "bob": who("bob", "change"), "ops": who("ops", "operate")}
    )
    node.remove_node = answer(pb.RemoveNodeResponse())
    await user.sign_in("ann")
    assert (await user.post("DelayWheelAdmin/RemoveNode", {"node": "n3"}))[0] == 200
    await user.post("DelayWheelAdmin/RemoveNode", {"node": "n4", "dry_run": True})
    node.remove_node = abort(Reason.FORBIDDEN)
    await user.post("DelayWheelAdmin/RemoveNode", {"node": "n3"})
    _, said = await user.get("acts")
    assert [(act["who"], act["what"], act["outcome"]) for act in said["acts"]] == [
        (None, {"node": "n3"}, {"FORBIDDEN": 1}),
        ("token:ann", {"node": "n3"}, {"DONE": 1}),
    ]
    await user.sign_in("bob")
    assert (await user.get("acts"))[1] == {"acts": []}
    await user.sign_in("ops")
    assert len((await user.get("acts"))[1]["acts"]) == 2
