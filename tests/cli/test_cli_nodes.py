"""`delaywheel node replace` and `node remove`: they ask, show, confirm, do exactly that."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.cli.doing import nodes
from delaywheel_replica.cli.printing.copies import unsafe
from support.clients.command import Command, say
from support.clients.fake_service import Behaviour, abort, abort_bare, answer
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
    assert "1,204 pending messages will be on 1 node only, n1, until copied" in shown
    assert "Touch no other disk before `delaywheel node wait` says that you may." in shown
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


# --- until it is safe


def cluster(state: pb.ReplicaState.ValueType, **changes: Any) -> pb.DescribeClusterResponse:
    """Three nodes; n2's copy of a closed wheel is in a state."""
    members = [
        pb.Member(node=node, accepting=True, report=pb.MemberReport())
        for node in ("n1", "n2", "n3")
    ]
    copies = [
        pb.Replica(node="n1", state=pb.REPLICA_STATE_IN_SYNC),
        pb.Replica(node="n2", state=state, lag_frames=1_204),
        pb.Replica(node="n4", state=pb.REPLICA_STATE_GONE),
    ]
    wheel = pb.WheelStatus(wheel="n1.7", state=pb.WHEEL_STATE_CLOSED, replicas=copies)
    leader = pb.Leader(node="n1", epoch=3)
    answer = pb.DescribeClusterResponse(
        node="n1", members=members, wheels=[wheel], leader=leader, min_insync=2
    )
    for name, value in changes.items():
        setattr(answer.members[1].report, name, value)
    return answer


WHOLE = cluster(pb.REPLICA_STATE_IN_SYNC)
BEHIND = cluster(pb.REPLICA_STATE_BEHIND, alone_messages=38)


def test_a_node_may_be_stopped_where_all_copies_but_its_own_are_complete() -> None:
    assert list(unsafe(WHOLE)) == []
    behind = cluster(pb.REPLICA_STATE_BEHIND)
    assert list(unsafe(behind)) == ["n1.7 on n2 is behind by 1,204 frames"]
    assert list(unsafe(behind, "n2")) == []
    assert list(unsafe(behind, "n1")) == ["n1.7 on n2 is behind by 1,204 frames"]
    assert list(unsafe(BEHIND, "n2")) == ["38 messages on 1 node only, n2"]


def test_what_is_not_known_is_not_safe() -> None:
    verifying = cluster(pb.REPLICA_STATE_IN_SYNC, verifying_wheels=3)
    assert list(unsafe(verifying, "n1")) == ["n2 verifies 3 wheels"]
    assert list(unsafe(verifying, "n2")) == []
    silent = cluster(pb.REPLICA_STATE_IN_SYNC)
    silent.members[2].silent, silent.members[2].accepting = "no answer", False
    silent.ClearField("leader")
    assert list(unsafe(silent)) == [
        "no node leads", "n3 is silent: no answer", "messages are taken by 2 of 3 nodes",
    ]  # fmt: skip
    assert list(unsafe(silent, "n1"))[-1] == "messages are taken by 1 of 2 nodes besides n1"


def test_a_wheel_that_counts_on_a_disk_that_is_gone_has_to_be_closed_first() -> None:
    answer = cluster(pb.REPLICA_STATE_IN_SYNC)
    answer.wheels[0].state = pb.WHEEL_STATE_FENCED
    assert list(unsafe(answer)) == ["n1.7 is not closed"]
    answer.wheels[0].state = pb.WHEEL_STATE_SPARE
    assert list(unsafe(answer)) == []


def test_a_node_alone_waits_for_no_other() -> None:
    alone = pb.DescribeClusterResponse(
        node="n1",
        members=[pb.Member(node="n1", accepting=True)],
        leader=pb.Leader(node="n1"),
        min_insync=1,
    )
    assert list(unsafe(alone, "n1")) == []


def in_turn(node: ScriptedNode, *behaviours: Behaviour) -> Behaviour:
    """Does each of them once when it is asked to describe the cluster."""

    def behave(service: Any, request: Any, context: Any) -> Any:
        return behaviours[node.describes - 1](service, request, context)

    return behave


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "LOOK_S", 0.01)
    monkeypatch.setattr(nodes, "SAY_S", 0.0)


@pytest.mark.usefixtures("looks_often")
def test_waiting_shows_each_change_and_ends_when_it_is_safe_twice(
    command: Command, scripted: ScriptedNode
) -> None:
    answers = [BEHIND, BEHIND, WHOLE, cluster(pb.REPLICA_STATE_AWAY), WHOLE, WHOLE, BEHIND]
    scripted.describe = in_turn(scripted, *map(answer, answers))
    ended = command("node", "replace", "b", "--yes", "--wait", "1m")
    assert (ended.code, ended.out) == (0, "node b stands for storage new\n")
    said = [line.partition(": ")[2] for line in ended.err.splitlines() if line.startswith("after")]
    assert said == [
        "38 messages on 1 node only, n2; n1.7 on n2 is behind by 1,204 frames",
        "n1.7 on n2 is away by 1,204 frames",
    ]
    assert ended.err.endswith("Everything is copied: another node may be touched.\n")
    assert len(scripted.described) == 6


@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize("what", [("remove", "b", "--yes", "--wait"), ("wait", "n1", "--up-to")])
def test_waiting_ends_with_what_is_still_missing(
    what: tuple[str, ...], command: Command, scripted: ScriptedNode
) -> None:
    scripted.describe = answer(BEHIND)
    ended = command("node", *what, "50ms")
    assert ended.code == 1
    assert "error: NOT_SAFE_YET: after " in ended.err
    assert "n1.7 on n2 is behind by 1,204 frames; touch no other node" in ended.err
    ended = command("node", "wait", "n2", "--up-to", "1ms", "--json")
    causes = ["38 messages on 1 node only, n2"]
    assert (ended.code, ended.document) == (
        1, {"node": "n2", "is_safe": False, "causes": causes},
    )  # fmt: skip


@pytest.mark.usefixtures("looks_often")
def test_a_node_that_does_not_answer_is_asked_again(
    command: Command, scripted: ScriptedNode
) -> None:
    silent = abort_bare(grpc.StatusCode.UNAVAILABLE)
    scripted.describe = in_turn(scripted, silent, answer(WHOLE), answer(WHOLE))
    ended = command("node", "wait", "n2")
    assert (ended.code, ended.out) == (0, "node n2 may be stopped\n")
    assert "UNAVAILABLE" in ended.err
    scripted.describe = answer(WHOLE)
    assert command("node", "wait").out == "any node may be stopped\n"
