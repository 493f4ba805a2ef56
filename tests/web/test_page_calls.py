"""Calls as JSON: what is passed, what comes back, which node answers, and the log of acts."""

from __future__ import annotations

import base64
import json
import random
from collections import Counter
from typing import Any

import pytest
from grpc import StatusCode

from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.server.access.needs import NEEDS
from delaywheel_replica.web.calls import METHODS, READS
from delaywheel_replica.web.commands.letters import COMMANDS
from delaywheel_replica.web.commands.traces import FIELDS
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


async def test_what_is_malformed_is_refused_and_nothing_worse(
    node: ScriptedNode, user: PageUser
) -> None:
    """Wrong types, unknown names, broken texts, and bytes that are no JSON, for every path."""
    await user.sign_in()
    node.who_am_i = abort(Reason.FORBIDDEN)  # what is well-formed is judged there
    chance, seen = random.Random(4), Counter[int]()
    paths = [*METHODS, *(f"dead/{command}" for command in COMMANDS), "trace"]
    for path in paths * 30:
        status, said = await user.post(path, _garbled(chance, path))
        assert (status, said["reason"]) in {(400, "REQUEST_MALFORMED"), (403, "FORBIDDEN")}, said
        assert said["message"]
        seen[status] += 1
    assert seen[400] > 10 * len(paths)
    assert seen[403] > len(paths)


_WRONG: list[Any] = [None, True, -1, 1 << 70, 1e308, "x", "\ud800", "AAA", "", [], {}, [[]]]


def _garbled(chance: random.Random, path: str) -> bytes:
    """A request with what may be in it, and what may not; often cut, or with another byte."""
    fields = (
        METHODS[path].request.DESCRIPTOR.fields_by_name
        if path in METHODS
        else COMMANDS.get(path.partition("/")[2], FIELDS)
    )
    names = [*fields, *(["no_such_field"] if chance.random() < 0.2 else [])]

    def value(depth: int) -> Any:
        if depth and chance.random() < 0.5:
            inner = chance.choice(["topic", "id", "key", "handle", "slot", *names, "x"])
            return chance.choice([{inner: value(depth - 1)}, [value(depth - 1)] * 2])
        return chance.choice(_WRONG)

    chosen = chance.sample(names, chance.randrange(min(4, len(names)) + 1))
    body = bytearray(json.dumps({name: value(3) for name in chosen}).encode())
    if chance.random() < 0.3:
        del body[chance.randrange(len(body)) :]
    if body and chance.random() < 0.2:
        body[chance.randrange(len(body))] = chance.randrange(256)
    return bytes(body)
