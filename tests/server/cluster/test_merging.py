"""Several nodes' reports in one answer: which report counts, and every message counted once."""

from __future__ import annotations

import pytest

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.server.cluster.merging import joined, slots_joined
from delaywheel_replica.server.node.calls_to_nodes import Silent

NODES = ("n1", "n2", "n3")
OPEN, SPARE = pb.WHEEL_STATE_OPEN, pb.WHEEL_STATE_SPARE
FENCED, CLOSED = pb.WHEEL_STATE_FENCED, pb.WHEEL_STATE_CLOSED


def wheel(name: str, state: pb.WheelState.ValueType, applied: int, *in_sync: str) -> pb.WheelStatus:
    """A row; members that are not in sync are behind."""
    replicas = [
        pb.Replica(
            node=node,
            state=pb.REPLICA_STATE_IN_SYNC if node in in_sync else pb.REPLICA_STATE_BEHIND,
        )
        for node in NODES
    ]
    return pb.WheelStatus(
        wheel=name,
        node=name.partition(".")[0],
        state=state,
        applied_seq=applied,
        replicas=replicas,
    )


def said(
    node: str,
    *wheels: pb.WheelStatus,
    accepting: bool = True,
    pending: int = 0,
    epoch: int | None = None,
    leader: str = "n1",
    elections: int = 0,
    complete: bool = True,
) -> pb.DescribeClusterResponse:
    """A node's own answer with details; about the others it reports what it hears."""
    answer = pb.DescribeClusterResponse(
        cluster_id="c",
        node=node,
        members=[
            pb.Member(node=each, address=f"old:{each}", reachable=True, accepting=True)
            for each in NODES
        ],
        wheels=wheels,
        pending=pb.Pending(messages=pending, node=node),
        lateness_ms=int(node[1:]),
    )
    if epoch is not None:
        answer.leader.CopyFrom(pb.Leader(node=leader, epoch=epoch))
    for member in answer.members:
        if member.node == node:
            member.address, member.accepting = f"new:{node}", accepting
            member.report.elections, member.complete = elections, complete
    return answer


def members_of(answer: pb.DescribeClusterResponse) -> dict[str, pb.Member]:
    return {member.node: member for member in answer.members}


def test_of_a_node_its_own_word_counts() -> None:
    others = {"n2": said("n2", accepting=False, elections=3), "n3": said("n3")}
    members = members_of(joined(said("n1"), others))
    assert [(m.accepting, m.address) for m in members.values()] == [
        (True, "new:n1"),
        (False, "new:n2"),
        (True, "new:n3"),
    ]
    assert members["n2"].report.elections == 3


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (Silent("no answer"), "no answer"),
        (said("n3"), "at its address answers n3 of cluster c"),
        (pb.DescribeClusterResponse(cluster_id="d", node="n2"), "answers n2 of cluster d"),
    ],
)
def test_of_a_silent_node_the_reason_is_reported(
    answer: pb.DescribeClusterResponse | Silent, why: str
) -> None:
    member = members_of(joined(said("n1"), {"n2": answer}))["n2"]
    assert why in member.silent
    assert (member.accepting, member.HasField("report")) == (False, False)


def test_of_a_wheel_in_use_its_own_nodes_word_counts() -> None:
    """Whatever the leader or the answering node hears from it."""
    others = {
        "n2": said("n2", wheel("n2.1", OPEN, 9, "n2", "n3"), wheel("n2.2", SPARE, 0, *NODES)),
        "n3": said("n3", wheel("n2.1", OPEN, 8, *NODES), epoch=5, leader="n3"),
    }
    own = said("n1", wheel("n2.1", FENCED, 7, *NODES), epoch=4)
    answer = joined(own, others)
    assert [(row.wheel, row.told_by, row.applied_seq) for row in answer.wheels] == [
        ("n2.1", "n2", 9),
        ("n2.2", "n2", 0),
    ]
    states = {row.node: row.state for row in answer.wheels[0].replicas}
    assert states["n1"] == pb.REPLICA_STATE_BEHIND
    assert (answer.leader.node, answer.leader.epoch, answer.lateness_ms) == ("n3", 5, 3)


def test_progress_that_was_set_back_is_newer() -> None:
    own, other = said("n1"), said("n2")
    own.progress.CopyFrom(pb.Progress(due_ms=9))
    other.progress.CopyFrom(pb.Progress(due_ms=5, set_backs=1))
    assert joined(own, {"n2": other}).progress == other.progress


def test_while_nobody_leads_the_lateness_is_of_who_knows_most_to_be_done() -> None:
    answer = joined(said("n3"), {"n1": Silent("dead"), "n2": said("n2")})
    assert not answer.HasField("leader")
    assert answer.lateness_ms == 2


def test_an_unknown_lateness_is_not_reported_as_none() -> None:
    own = said("n1")
    own.ClearField("lateness_ms")
    assert not joined(own, {"n2": Silent("dead")}).HasField("lateness_ms")


@pytest.mark.parametrize("state", [FENCED, OPEN], ids=["left", "its node is silent"])
def test_of_any_other_wheel_the_leaders_nodes_word_counts(state: pb.WheelState.ValueType) -> None:
    others: dict[str, pb.DescribeClusterResponse | Silent] = {
        "n2": Silent("dead"),
        "n3": said("n3", wheel("n2.1", state, 8), epoch=5, leader="n3"),
    }
    (row,) = joined(said("n1", wheel("n2.1", FENCED, 7)), others).wheels
    assert (row.told_by, row.applied_seq) == ("n3", 8)
    others["n2"] = said("n2", wheel("n2.1", FENCED, 9))
    (row,) = joined(said("n1", wheel("n2.1", FENCED, 7)), others).wheels
    assert row.told_by == "n3", "it uses the wheel no more"
    others["n2"] = others["n3"] = Silent("dead as well")
    (row,) = joined(said("n1", wheel("n2.1", FENCED, 7)), others).wheels
    assert row.told_by == "n1"


def test_what_is_closed_is_closed_whatever_its_node_believes() -> None:
    others = {"n2": said("n2", wheel("n2.1", OPEN, 9)), "n3": said("n3", wheel("n2.1", CLOSED, 8))}
    (row,) = joined(said("n1", wheel("n2.1", FENCED, 7), epoch=4), others).wheels
    assert (row.state, row.told_by) == (CLOSED, "n3")


def test_a_node_on_another_folder_has_no_word_on_its_wheels() -> None:
    own = said("n1", wheel("n2.1", FENCED, 7), epoch=4)
    members_of(own)["n2"].storage_replaced = True
    others = {"n2": said("n2", wheel("n2.1", OPEN, 0))}
    (row,) = joined(own, others).wheels
    assert row.told_by == "n1"


def test_wheels_are_in_the_order_of_their_numbers() -> None:
    rows = [wheel(name, FENCED, 1) for name in ("n1.10", "n1.9", "a-b.2")]
    assert [row.wheel for row in joined(said("n1", *rows), {}).wheels] == ["a-b.2", "n1.9", "n1.10"]


def test_pending_messages_are_those_of_a_node_that_holds_all() -> None:
    """n2 has the most; frames of n1's wheel that it is missing do not count, and others not yet."""
    wheels = [wheel("n1.1", OPEN, 9, "n1", "n3"), wheel("n2.1", OPEN, 9, *NODES)]
    others = {"n2": said("n2", *wheels, pending=90), "n3": said("n3", *wheels, pending=70)}
    pending = joined(said("n1", *wheels, pending=60), others).pending
    assert (pending.node, pending.messages, pending.at_least) == ("n3", 70, False)


def test_where_no_node_holds_all_there_may_be_more() -> None:
    wheels = [wheel("n1.1", OPEN, 9, "n1"), wheel("n2.1", OPEN, 9, "n2")]
    others = {"n2": said("n2", *wheels, pending=90)}
    pending = joined(said("n1", *wheels, pending=60), others).pending
    assert (pending.node, pending.messages, pending.at_least) == ("n2", 90, True)
    # Nothing was ever written to a spare, and unregistered wheels are finished.
    wheels = [wheel("n1.1", SPARE, 0), pb.WheelStatus(wheel="n2.1", node="n2", applied_seq=9)]
    wheels.append(wheel("n1.2", OPEN, 4, "n1"))
    assert not joined(said("n1", *wheels), {}).pending.at_least


def test_who_does_not_know_yet_what_a_wheel_holds_has_not_counted_all() -> None:
    """Nobody else has it: it looks like one to which nothing was ever written."""
    wheels = [wheel("n1.1", FENCED, 0, "n1"), wheel("n1.2", OPEN, 4, "n1")]
    for complete in (True, False):
        told = joined(said("n1", *wheels, complete=complete), {}).pending
        assert told.at_least is not complete


def slots(
    node: str, *rows: tuple[int, int, int], next_slot: int | None = None
) -> pb.ListSlotsResponse:
    """The slot, frames and messages of each row."""
    return pb.ListSlotsResponse(
        node=node,
        slots=[pb.SlotRow(slot=slot, frames=f, messages=m, copies=1) for slot, f, m in rows],
        next_slot=next_slot,
    )


def counted(answer: pb.ListSlotsResponse) -> list[tuple[int, int, int]]:
    return [(row.slot, row.messages, row.copies) for row in answer.slots]


def test_each_message_is_counted_once_and_so_are_the_copies() -> None:
    own = slots("n1", (10, 2, 20), (11, 1, 5))
    others: dict[str, pb.ListSlotsResponse | Silent] = {
        "n2": slots("n2", (10, 2, 20), (11, 3, 7), (13, 1, 1)),
        "n3": Silent("dead"),
    }
    answer = slots_joined(own, others, 100)
    assert counted(answer) == [(10, 20, 2), (11, 7, 1), (13, 1, 1)]
    assert list(answer.counted_by) == ["n1", "n2"]
    assert [(row.node, row.why) for row in answer.silent] == [("n3", "dead")]
    assert not answer.HasField("next_slot")


def test_a_page_ends_where_the_first_of_the_nodes_pages_does() -> None:
    """Beyond the limit, a node with more seconds would be missing from the count."""
    own = slots("n1", (10, 1, 1), (30, 1, 1), next_slot=40)
    others = {"n2": slots("n2", (10, 1, 1), (20, 1, 1), next_slot=25)}
    answer = slots_joined(own, others, 100)
    assert counted(answer) == [(10, 1, 2), (20, 1, 1)]
    assert answer.next_slot == 25
    answer = slots_joined(own, others, 1)
    assert (counted(answer), answer.next_slot) == ([(10, 1, 2)], 20)


def test_who_has_not_counted_all_is_named() -> None:
    own, other = slots("n1", (10, 1, 1)), slots("n2", (10, 2, 2))
    own.silent.add(node="n1", why="verifies")
    other.silent.add(node="n2", why="verifies too")
    answer = slots_joined(own, {"n2": other, "n3": Silent("dead")}, 100)
    assert {row.node: row.why for row in answer.silent} == {
        "n1": "verifies",
        "n2": "verifies too",
        "n3": "dead",
    }
    assert counted(answer) == [(10, 2, 1)]


def test_a_member_that_knows_no_sums_is_not_counted() -> None:
    own = slots("n1", (60, 2, 20))
    own.bucket_seconds = 60
    answer = slots_joined(own, {"n2": slots("n2", (61, 3, 25))}, 100)
    assert counted(answer) == [(60, 20, 1)]
    assert answer.bucket_seconds == 60
    assert [row.node for row in answer.silent] == ["n2"]
