"""Requests and JSON output of slots, slot, search and get; the JSON is stable."""

from __future__ import annotations

import pytest

from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from support.clients.command import Command
from support.clients.fake_service import abort, answer
from support.clients.scripted_node import ScriptedNode
from support.clients.stored import CONTENT, DUE_MS, HANDLE, ID, STORED, stored


def slots_of(*slots: int) -> list[pb.SlotRow]:
    return [
        pb.SlotRow(slot=slot, messages=3, length_bytes=500, frames=2, cancels=1, wheels=1, copies=2)
        for slot in slots
    ]


def test_what_is_pending_comes_first_and_ends_with_its_second(
    command: Command, node: ScriptedNode
) -> None:
    """Messages that were cancelled or delivered are no pending ones, though still on the disk."""
    node.list_slots = answer(
        pb.ListSlotsResponse(
            slots=slots_of(1_900_000_000, 1_900_000_001, 1_900_000_002),
            counted_by=["n1"],
            progress=pb.Progress(due_ms=1_900_000_001_998),
        )
    )
    out = command("slots").out.splitlines()
    assert out[0].split()[:4] == ["second", "due", "pending", "written"]
    assert [line.split()[2:4] for line in out[1:4]] == [["0", "3"], ["2", "3"], ["2", "3"]]
    assert out[5] == "pending: 4 messages in 2 seconds, each counted once, by n1"
    node.list_slots = answer(pb.ListSlotsResponse(counted_by=["n1"]))
    assert command("slots").out.startswith("no second holds messages\n\npending: 0 messages")


def test_slots_as_json(command: Command, node: ScriptedNode) -> None:
    node.list_slots = answer(
        pb.ListSlotsResponse(
            slots=slots_of(1_900_000_000),
            node="n1",
            counted_by=["n1", "n2"],
            silent=[pb.Silence(node="n3", why="no answer")],
            wheels=[pb.WheelStatus(wheel="n1.3", node="n1", state=pb.WHEEL_STATE_SPARE)],
            progress=pb.Progress(due_ms=5, position="n1.3/1/2", set_backs=1, ahead_ms=8),
        )
    )
    document = command("slots", "--json").document
    assert document.pop("wheels")[0]["state"] == "spare"
    assert document == {
        "node": "n1",
        "counted_by": ["n1", "n2"],
        "silent": [{"node": "n3", "why": "no answer"}],
        "progress": {"due_ms": 5, "position": "n1.3/1/2", "set_backs": 1, "ahead_ms": 8},
        "slots": [
            {
                "slot": 1_900_000_000,
                "pending": 2,
                "messages": 3,
                "length_bytes": 500,
                "frames": 2,
                "cancels": 1,
                "wheels": 1,
                "copies": 2,
            }
        ],
        "next_slot": None,
    }
    ended = command("slots")
    assert "pending: 2 messages in 1 second, each counted once, by n1, n2\n" in ended.out
    assert ended.err == "not counted by n3: no answer\n"
    assert node.asked[-1].all_members


def test_slots_asks_page_after_page(command: Command, node: ScriptedNode) -> None:
    def page(_node: object, request: pb.ListSlotsRequest, _context: object) -> object:
        end = min(request.from_slot + 2, request.to_slot)
        rows = slots_of(*range(request.from_slot, end))
        following = end if end < request.to_slot else None
        return pb.ListSlotsResponse(node="n1", slots=rows, next_slot=following)

    node.list_slots = page
    document = command("slots", "--from", "100", "--to", "105", "--json").document
    assert [row["slot"] for row in document["slots"]] == [100, 101, 102, 103, 104]
    assert document["next_slot"] is None
    document = command("slots", "--from", "100", "--to", "105", "--limit", "3", "--json").document
    assert [row["slot"] for row in document["slots"]] == [100, 101, 102]
    assert document["next_slot"] == 103
    assert "--from 103" in command("slots", "--from", "100", "--to", "105", "--limit", "3").err


def test_who_missed_a_page_has_not_counted(command: Command, node: ScriptedNode) -> None:
    def page(_node: object, request: pb.ListSlotsRequest, _context: object) -> object:
        is_first = request.from_slot == 100
        return pb.ListSlotsResponse(
            node="n1",
            slots=slots_of(request.from_slot),
            counted_by=["n1", "n2"] if is_first else ["n1"],
            silent=[] if is_first else [pb.Silence(node="n2", why="died")],
            next_slot=101 if is_first else None,
        )

    node.list_slots = page
    document = command("slots", "--from", "100", "--json").document
    assert [row["slot"] for row in document["slots"]] == [100, 101]
    assert document["counted_by"] == ["n1"]
    assert document["silent"] == [{"node": "n2", "why": "died"}]


def test_slots_takes_times(command: Command, node: ScriptedNode) -> None:
    command("slots", "--from", "2030-03-17T17:46:40Z", "--to", "2030-03-17T17:46:41.5Z")
    request = node.asked[-1]
    assert (request.from_slot, request.to_slot) == (1_900_000_000, 1_900_000_001)


def test_slot_as_json(command: Command, node: ScriptedNode) -> None:
    node.get_slot = answer(pb.GetSlotResponse(messages=[stored(with_content=False)]))
    assert command("slot", "1900000000", "--json").document == {
        "slot": 1_900_000_000,
        "messages": [STORED],
        "complete": True,
        "silent": [],
    }


def test_slot_says_who_has_not_listed_all(command: Command, node: ScriptedNode) -> None:
    why = "it has still to verify 1 wheel"
    node.get_slot = answer(pb.GetSlotResponse(silent=[pb.Silence(node="n1", why=why)]))
    document = command("slot", "1900000000", "--json").document
    assert (document["complete"], document["silent"]) == (False, [{"node": "n1", "why": why}])
    assert f"not all is listed by n1: {why}" in command("slot", "1900000000").err


def test_slot_with_content(command: Command, node: ScriptedNode) -> None:
    node.get_slot = answer(pb.GetSlotResponse(messages=[stored()]))
    document = command("slot", "1900000000", "--content", "--json").document
    assert document["messages"] == [STORED | CONTENT]
    assert node.asked[-1].with_content
    assert "0xff00" in command("slot", "1900000000", "--content").out


def test_slot_asks_page_after_page_up_to_the_limit(command: Command, node: ScriptedNode) -> None:
    def page(_node: object, request: pb.GetSlotRequest, _context: object) -> object:
        number = int(request.page_token or 0)
        return pb.GetSlotResponse(messages=[stored()] * 2, next_page_token=str(number + 1))

    node.get_slot = page
    document = command("slot", "1900000000", "--limit", "5", "--json").document
    assert (len(document["messages"]), document["complete"]) == (5, False)
    assert [request.page_token for request in node.asked] == ["", "1", "2"]


def test_search_asks_page_after_page_up_to_the_limit(command: Command, node: ScriptedNode) -> None:
    def page(_node: object, request: pb.SearchRequest, _context: object) -> object:
        number = int(request.page_token or 0)
        looked = pb.Looked(node="n1", messages=10, length_bytes=100, to_slot=1_900_000_000 + number)
        found = [stored()] * (2 if number else 0)  # the first call finds nothing in what it reads
        return pb.SearchResponse(messages=found, next_page_token=str(number + 1), looked=looked)

    node.search = page
    asked = ("--topic", "orders", "--key", "42", "--header", "trip=7", "--from", "1900000000000")
    ended = command("search", *asked, "--limit", "3", "--content", "--json")
    assert ended.document["messages"] == [STORED | CONTENT] * 4
    assert ended.document["looked"] == {
        "node": "n1",
        "messages": 30,
        "length_bytes": 300,
        "to_slot": 1_900_000_002,
        "incomplete": False,
    }
    assert [(each.page_token, each.page_size) for each in node.asked] == [
        ("", 3),
        ("1", 3),
        ("2", 1),
    ]
    wanted = node.asked[0].filter
    assert (wanted.topic, wanted.key, wanted.from_ms) == ("orders", b"42", 1_900_000_000_000)
    assert (wanted.header.name, wanted.header.value) == ("trip", b"7")
    assert not wanted.HasField("to_ms")


def test_search_reports_what_was_not_looked_at(command: Command, node: ScriptedNode) -> None:
    looked = pb.Looked(node="n1", messages=1, length_bytes=1, to_slot=1_900_000_000)
    looked.incomplete = True
    node.search = answer(pb.SearchResponse(messages=[stored()], looked=looked, next_page_token="x"))
    ended = command("search", "--limit", "1")
    assert HANDLE in ended.out
    assert "examined 1 message, 1 B, on n1" in ended.err
    assert "not examined: messages due from 2030-03-17T17:46:40Z on" in ended.err
    assert "n1 is missing frames" in ended.err


def test_get_as_json(command: Command, node: ScriptedNode) -> None:
    node.script.append(answer(pb.GetMessageResponse(message=stored())))
    assert command("get", HANDLE, "--json").document == STORED | CONTENT
    assert node.gets[-1].message.handle == HANDLE


@pytest.mark.parametrize(
    ("own_due", "shown"), [(b"1900000060000", "2030-03-17T17:47:40.000Z"), (None, "at its commit")]
)
def test_get_of_a_half_shows_its_hold_and_its_own_due(
    command: Command, node: ScriptedNode, own_due: bytes | None, shown: str
) -> None:
    message = stored()
    message.state = pb.MESSAGE_STATE_HELD
    message.headers.add(name="dw-half", value=b"shop")
    if own_due is not None:
        message.headers.add(name="dw-half-deliver-at", value=own_due)
    node.script += [answer(pb.GetMessageResponse(message=message))] * 2
    lines = [" ".join(line.split()) for line in command("get", HANDLE).out.splitlines()]
    assert f"due {shown}" in lines
    assert "hold ends 2030-03-17T17:46:40.250Z" in lines
    half = {"group": "shop", "deliver_at_ms": None if own_due is None else int(own_due)}
    assert command("get", HANDLE, "--json").document["half"] == half
    message.state = pb.MESSAGE_STATE_DONE
    node.script.append(answer(pb.GetMessageResponse(message=message)))
    is_pointed_at = "its topic, id and own due find it" in command("get", HANDLE).out
    assert is_pointed_at is (own_due is not None)


@pytest.mark.parametrize(
    ("state", "reason", "reported"),
    [
        (pb.MESSAGE_STATE_DEAD_LETTERED, "KEY_MISSING", "a dead letter: KEY_MISSING"),
        (pb.MESSAGE_STATE_DELIVERED, "", "delivered"),
        (pb.MESSAGE_STATE_DONE, "", "delivered, deferred or a dead letter, which is not known"),
    ],
)
def test_get_of_what_is_done(
    command: Command, node: ScriptedNode, state: int, reason: str, reported: str
) -> None:
    message = stored()
    message.state, message.dead_reason = state, reason  # type: ignore[assignment]
    node.script += [answer(pb.GetMessageResponse(message=message))] * 2
    assert reported in command("get", HANDLE).out
    assert command("get", HANDLE, "--json").document["dead_reason"] == (reason or None)


@pytest.mark.parametrize("at", [str(DUE_MS), "2030-03-17T17:46:40.250Z"])
def test_message_is_named_by_topic_id_and_due(
    command: Command, node: ScriptedNode, at: str
) -> None:
    command("get", "--topic", "orders", "--id", ID.hex(), "--due", at)
    command("cancel", "--topic", "orders", "--id", ID.hex(), "--due", at)
    for ref in (node.gets[-1].message, node.cancels[-1].messages[0]):
        named = ref.id_and_due
        assert (named.topic, named.id, named.due_ms) == ("orders", ID, DUE_MS)


@pytest.mark.usefixtures("node")
@pytest.mark.parametrize(
    "named",
    [(), ("--id", ID.hex()), ("--due", str(DUE_MS)), (HANDLE, "--id", ID.hex()), ("nonsense",)],
)
@pytest.mark.parametrize("name", ["get", "cancel"])
def test_message_must_be_named_in_one_way(
    command: Command, name: str, named: tuple[str, ...]
) -> None:
    if (name, named) == ("cancel", ("--id", ID.hex())):
        return  # all that have it
    ended = command(name, *named)
    assert ended.code == 2
    assert "HANDLE_" in ended.err


def test_get_of_what_is_not_there(command: Command, node: ScriptedNode) -> None:
    node.script.append(abort(Reason.MESSAGE_NOT_FOUND))
    ended = command("get", HANDLE)
    assert ended.code == 1
    assert ended.err.startswith("error: MESSAGE_NOT_FOUND: ")


def test_next_address_is_asked_when_one_does_not_answer(
    command: Command, node: ScriptedNode
) -> None:
    ended = command("status", "--server", f"127.0.0.1:1,{node.address}", "--json")
    assert ended.document["node"] == "n1"
