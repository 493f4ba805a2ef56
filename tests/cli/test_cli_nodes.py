"""`delaywheel node replace` and `node remove`: they ask, show, confirm, do exactly that."""

from __future__ import annotations

import grpc
import pytest

from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from support.clients.command import Command, say
from support.clients.fake_service import abort, abort_bare, answer
from support.clients.scripted_node import ScriptedNode

WHEELS = [
    pb.WheelAtRisk(wheel="b.1", frames=1_234),
    pb.WheelAtRisk(wheel="a.1", alone_messages=1_204, alone_on="n1"),
]
REPLACED = pb.NodeChange(node="b", storage_before="old", storage="new", wheels=WHEELS)
REMOVED = pb.NodeChange(node="b", storage_before="old", wheels=WHEELS)
DOCUMENT = {
    "node": "b",
    "storage_before": "old",
    "storage": "new",
    "wheels": [
        {"wheel": "b.1", "frames_at_risk": 1_234, "alone_messages": 0, "alone_on": None},
        {"wheel": "a.1", "frames_at_risk": 0, "alone_messages": 1_204, "alone_on": "n1"},
    ],
}


@pytest.fixture
def scripted(node: ScriptedNode) -> ScriptedNode:
    node.replace_node = answer(pb.ReplaceNodeResponse(change=REPLACED))
    node.remove_node = answer(pb.RemoveNodeResponse(change=REMOVED))
    return node


def test_replace_does_what_was_shown_and_confirmed(
    command: Command, scripted: ScriptedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    say("y\n", monkeypatch)
    ended = command("node", "replace", "b")
    assert (ended.code, ended.out) == (0, "node b stands for storage new\n")
    for part in ("storage new instead of old", "b.1: 1,234 frames", "a.1: others hold all", "lost"):
        assert part in ended.err
    shown = " ".join(ended.err.split())
    assert "1,204 pending messages will be on 1 node only, n1, until they are copied" in shown
    assert "Touch no other disk until `delaywheel status` says that no more." in shown
    assert scripted.asked == [
        pb.ReplaceNodeRequest(node="b", dry_run=True),
        pb.ReplaceNodeRequest(node="b", storage="new"),
    ]


def test_remove_does_what_was_confirmed(
    command: Command, scripted: ScriptedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    say("y\n", monkeypatch)
    ended = command("node", "remove", "b")
    assert (ended.code, ended.out) == (0, "node b is taken out\n")
    assert "no storage instead of old" in ended.err
    assert scripted.asked == [
        pb.RemoveNodeRequest(node="b", dry_run=True),
        pb.RemoveNodeRequest(node="b"),
    ]


@pytest.mark.parametrize("what", ["replace", "remove"])
@pytest.mark.parametrize("said", ["n\n", "\n", ""], ids=["no", "nothing", "no terminal"])
def test_nothing_is_done_without_a_yes(
    what: str,
    said: str,
    command: Command,
    scripted: ScriptedNode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    say(said, monkeypatch)
    ended = command("node", what, "b")
    assert (ended.code, ended.out) == (1, "")
    assert "error: NOT_CONFIRMED: nothing was changed" in ended.err
    assert [request.dry_run for request in scripted.asked] == [True]


@pytest.mark.usefixtures("scripted")
def test_as_json(command: Command) -> None:
    ended = command("node", "replace", "b", "--yes", "--json")
    assert ended.document == DOCUMENT
    ended = command("node", "remove", "b", "--yes", "--json")
    assert ended.document == {**DOCUMENT, "storage": None}


def test_an_explicit_storage_is_asked_for(command: Command, scripted: ScriptedNode) -> None:
    assert command("node", "replace", "b", "--storage", "new", "--yes").code == 0
    assert [request.storage for request in scripted.asked] == ["new", "new"]


def test_a_node_that_is_taken_out_already_needs_no_yes(
    command: Command, scripted: ScriptedNode
) -> None:
    scripted.remove_node = answer(pb.RemoveNodeResponse(change=pb.NodeChange(node="b")))
    ended = command("node", "remove", "b")
    assert (ended.code, ended.out) == (0, "node b is taken out\n")
    assert len(scripted.asked) == 1


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (Reason.NODE_UNKNOWN, 1),
        (Reason.NOTHING_TO_REPLACE, 1),
        (Reason.NODE_NOT_HEARD, 3),
        (Reason.NO_LEADER, 3),
    ],
)
def test_a_refusal_is_named(
    reason: Reason, code: int, command: Command, scripted: ScriptedNode
) -> None:
    scripted.replace_node = abort(reason)
    ended = command("node", "replace", "b", "--yes")
    assert (ended.code, ended.out) == (code, "")
    assert ended.err.startswith(f"error: {reason}: ")
    assert len(scripted.asked) == 1


@pytest.mark.parametrize(
    ("reason", "code"), [(Reason.NODE_CHANGE_UNKNOWN, 4), (Reason.NO_LEADER, 3)]
)
def test_a_change_that_may_have_been_done_is_distinguished(
    reason: Reason, code: int, command: Command, scripted: ScriptedNode
) -> None:
    dry = answer(pb.RemoveNodeResponse(change=REMOVED))
    scripted.remove_node = lambda service, request, context: (
        dry if request.dry_run else abort(reason)
    )(service, request, context)
    ended = command("node", "remove", "b", "--yes")
    assert ended.code == code
    assert f"error: {reason}: " in ended.err


def test_a_question_that_got_no_answer_changed_nothing(
    command: Command, scripted: ScriptedNode
) -> None:
    scripted.remove_node = abort_bare(grpc.StatusCode.UNAVAILABLE)
    assert command("node", "remove", "b", "--yes").code == 3


def test_what_is_done_already_when_it_is_asked_for_again_is_done(
    command: Command, scripted: ScriptedNode
) -> None:
    dry = answer(pb.ReplaceNodeResponse(change=REPLACED))
    scripted.replace_node = lambda service, request, context: (
        dry if request.dry_run else abort(Reason.NOTHING_TO_REPLACE)
    )(service, request, context)
    assert command("node", "replace", "b", "--yes", "--json").document == DOCUMENT
