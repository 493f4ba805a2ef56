"""`delaywheel clock set-back`: asks, shows the cost, confirms, does exactly that."""

from __future__ import annotations

import time

import pytest

from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from support.clients.command import Command, say
from support.clients.fake_service import abort, answer
from support.clients.scripted_node import ScriptedNode

LONG_AGO_MS = 1_900_000_000_000
"""Not what the clock here says."""


def reported(**changes: int) -> pb.SetBackResponse:
    fields = {
        "set_backs": 2,
        "forwarded_to_ms": LONG_AGO_MS + 86_400_000,
        "goes_on_from_ms": LONG_AGO_MS,
        "floor": LONG_AGO_MS // 1000 - 120,
        **changes,
    }
    return pb.SetBackResponse(node="n2", **fields)


@pytest.fixture
def scripted(node: ScriptedNode) -> ScriptedNode:
    node.set_back = answer(reported())
    return node


def test_it_does_what_was_shown_and_confirmed(
    command: Command, scripted: ScriptedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    say("y\n", monkeypatch)
    ended = command("clock", "set-back")
    assert (ended.code, ended.out) == (0, "forwarding continues from 2030-03-17T17:46:40.000Z\n")
    for part in (
        "due up to 2030-03-18T17:46:40.000Z was forwarded, up to 24 h early",
        "Node n2 leads, and its clock says 2030-03-17T17:46:40.000Z",
        "the clock here: see which one is right",
        "it is not forwarded again",
        "is forwarded at its due",
        "It cannot be undone",
    ):
        assert part in ended.err
    assert "are deleted" not in ended.err
    assert scripted.asked == [pb.SetBackRequest(dry_run=True), pb.SetBackRequest(set_backs=2)]


def test_a_clock_that_is_right_is_not_doubted(command: Command, node: ScriptedNode) -> None:
    now_ms = time.time_ns() // 1_000_000
    node.set_back = answer(reported(goes_on_from_ms=now_ms, forwarded_to_ms=now_ms + 3_600_000))
    assert "the clock here" not in command("clock", "set-back", "--yes").err


def test_it_names_seconds_that_are_deleted(command: Command, node: ScriptedNode) -> None:
    node.set_back = answer(reported(floor=LONG_AGO_MS // 1000 + 60))
    ended = command("clock", "set-back", "--yes")
    assert "Seconds below 2030-03-17T17:47:40Z are deleted" in ended.err


@pytest.mark.parametrize("said", ["n\n", "\n", ""], ids=["no", "nothing", "no terminal"])
def test_nothing_is_done_without_a_yes(
    said: str, command: Command, scripted: ScriptedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(said, monkeypatch)
    ended = command("clock", "set-back")
    assert (ended.code, ended.out) == (1, "")
    assert "error: NOT_CONFIRMED: nothing was changed" in ended.err
    assert scripted.asked == [pb.SetBackRequest(dry_run=True)]


@pytest.mark.usefixtures("scripted")
def test_as_json(command: Command) -> None:
    assert command("clock", "set-back", "--yes", "--json").document == {
        "node": "n2",
        "set_backs": 2,
        "forwarded_to_ms": LONG_AGO_MS + 86_400_000,
        "goes_on_from_ms": LONG_AGO_MS,
        "floor": LONG_AGO_MS // 1000 - 120,
    }


def test_a_refusal_ends_it_by_name(command: Command, node: ScriptedNode) -> None:
    node.set_back = abort(Reason.NOTHING_TO_SET_BACK)
    ended = command("clock", "set-back", "--yes")
    assert ended.code == 1
    assert ended.err.startswith("error: NOTHING_TO_SET_BACK")
