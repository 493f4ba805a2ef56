"""Combines the answers of a cluster's nodes into one.

| of | whose report counts |
|---|---|
| a node | its own; if it gave none, the reason is shown |
| a wheel that some node knows to be closed | of those nodes the leader's, or the next below |
| a wheel that its own node uses | its own node's: only that node knows whom it waits for |
| any other wheel | the leader's node's, else the answering one's, else any |
| leader, floor, progress | the newest |
| lateness | the leader's; without a leader, that of the node that knows most to be done |

A row is taken as a whole, never mixed: its numbers are of one moment and one view, and it says
whose. What a node reports about its wheels from a folder other than the registered one is ignored.
"""

from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import TypeAlias

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.server.node.calls_to_nodes import Silent

_Answer: TypeAlias = pb.DescribeClusterResponse | pb.ListSlotsResponse
_IN_USE = frozenset({pb.WHEEL_STATE_OPEN, pb.WHEEL_STATE_SPARE})


def joined(
    own: pb.DescribeClusterResponse, others: Mapping[str, pb.DescribeClusterResponse | Silent]
) -> pb.DescribeClusterResponse:
    """Combines all members' descriptions of the cluster, with details, or why there is none."""
    answers: dict[str, pb.DescribeClusterResponse] = {own.node: own}
    silent: dict[str, str] = {}
    for node, other in others.items():
        if isinstance(other, Silent):
            silent[node] = other.why
        elif (other.cluster_id, other.node) != (own.cluster_id, node):
            silent[node] = f"at its address answers {other.node} of cluster {other.cluster_id}"
        else:
            answers[node] = other
    answer = pb.DescribeClusterResponse()
    answer.CopyFrom(own)
    _join_leader(answer, answers)
    _join_members(answer, answers, silent)
    _join_wheels(answer, answers)
    pending = {node: each.pending for node, each in answers.items() if each.HasField("pending")}
    if pending:
        answer.pending.CopyFrom(counted_once(answer, pending))
    return answer


def _join_leader(
    answer: pb.DescribeClusterResponse, answers: Mapping[str, pb.DescribeClusterResponse]
) -> None:
    leaders = [each.leader for each in answers.values() if each.HasField("leader")]
    if leaders:
        answer.leader.CopyFrom(max(leaders, key=lambda leader: leader.epoch))
    known = {
        node: each.lateness_ms for node, each in answers.items() if each.HasField("lateness_ms")
    }
    if answer.HasField("leader") and answer.leader.node in known:
        answer.lateness_ms = known[answer.leader.node]
    elif known:  # that of the node which knows of most done
        answer.lateness_ms = min(known.values())
    floors = [each.floor for each in answers.values() if each.HasField("floor")]
    if floors:
        answer.floor = max(floors)
    _join_progress(answer, answers.values())


def _join_progress(answer: _Answer, answers: Iterable[_Answer]) -> None:
    """Puts in the newest progress, if any has one; it decreases only if w was set back."""
    done = [each.progress for each in answers if each.HasField("progress")]
    if done:
        newest = max(done, key=lambda progress: (progress.set_backs, progress.due_ms))
        answer.progress.CopyFrom(newest)


def _join_members(
    answer: pb.DescribeClusterResponse,
    answers: Mapping[str, pb.DescribeClusterResponse],
    silent: Mapping[str, str],
) -> None:
    for member in answer.members:
        if member.node == answer.node:
            continue
        rows = answers[member.node].members if member.node in answers else ()
        said = next((row for row in rows if row.node == member.node), None)
        if said is None:
            member.accepting = False
            member.silent = silent.get(member.node, "it was not asked")
            continue
        member.address = said.address
        member.accepting, member.complete = said.accepting, said.complete
        if said.HasField("report"):
            member.report.CopyFrom(said.report)


def _join_wheels(
    answer: pb.DescribeClusterResponse, answers: Mapping[str, pb.DescribeClusterResponse]
) -> None:
    leader = answer.leader.node
    order = [node for node in (leader, answer.node, *answers) if node in answers]
    rows: dict[str, dict[str, pb.WheelStatus]] = {}
    for node in dict.fromkeys(order):
        for row in answers[node].wheels:
            rows.setdefault(row.wheel, {})[node] = row
    replaced = {
        member.node
        for member in chain(answer.members, answers[order[0]].members)
        if member.storage_replaced
    }
    del answer.wheels[:]
    for wheel in sorted(rows, key=_by_number):
        reporter = _reporter(rows[wheel], replaced)
        row = answer.wheels.add(told_by=reporter)
        row.MergeFrom(rows[wheel][reporter])


def _reporter(rows: Mapping[str, pb.WheelStatus], replaced: Collection[str]) -> str:
    """Returns the node whose report of a wheel counts; rows come in order of preference."""
    for node, row in rows.items():
        if row.state == pb.WHEEL_STATE_CLOSED:
            return node
    first, row = next(iter(rows.items()))
    own = rows.get(row.node)
    if own is not None and own.state in _IN_USE and row.node not in replaced:
        return row.node
    return first


def _by_number(wheel: str) -> tuple[str, int]:
    node, _, number = wheel.rpartition(".")
    return node, int(number)


def counted_once(answer: pb.DescribeClusterResponse, held: Mapping[str, pb.Pending]) -> pb.Pending:
    """Returns the cluster's pending messages, as counted by one node with every acknowledged frame.

    A node's disk has each message once, its own or a copy. A node that is in sync with every
    wheel has all acknowledged messages, unless it may have lost some, or has not looked yet what
    its wheels hold: then it is not complete.
    """
    registered = [row for row in answer.wheels if row.replicas]
    whole = {
        member.node
        for member in answer.members
        if member.node in held
        and member.complete
        and registered
        and all(_has(row, member.node) for row in registered)
    }
    fullest = max(whole or held, key=lambda node: (held[node].messages, node))
    found = held[fullest]
    return pb.Pending(
        messages=found.messages,
        length_bytes=found.length_bytes,
        node=fullest,
        at_least=not whole,
    )


def _has(row: pb.WheelStatus, node: str) -> bool:
    """Whether a node has all frames of a wheel that matter; some wheels have none left."""
    if not row.applied_seq and not row.final_seq:
        return True
    states = {replica.node: replica.state for replica in row.replicas}
    return states.get(node) == pb.REPLICA_STATE_IN_SYNC


def slots_joined(
    own: pb.ListSlotsResponse, others: Mapping[str, pb.ListSlotsResponse | Silent], limit: int
) -> pb.ListSlotsResponse:
    """Combines the seconds of a cluster, taking the highest count of each.

    A node's count has each message once, its own or a copy; a node that holds a second
    completely has the greatest count. So nothing is counted twice, and counts are too low only by
    what no single node holds: frames under way between two of them. Sums of seconds likewise: to
    join their seconds, nodes would send each other up to 10,000 of them a page.
    """
    answers = {own.node: own}
    answer = pb.ListSlotsResponse(
        node=own.node, wheels=own.wheels, bucket_seconds=own.bucket_seconds
    )
    for node, other in others.items():
        if isinstance(other, Silent):
            answer.silent.add(node=node, why=other.why)
        elif other.bucket_seconds != own.bucket_seconds:
            answer.silent.add(node=node, why="its release knows no sums of seconds")
        else:
            answers[node] = other
    answer.counted_by.extend(answers)
    answer.silent.extend(chain.from_iterable(each.silent for each in answers.values()))
    _join_progress(answer, answers.values())
    # Beyond the first page that ends, not all nodes have reported what there is.
    ends = [each.next_slot for each in answers.values() if each.HasField("next_slot")]
    found: dict[int, list[pb.SlotRow]] = {}
    for row in chain.from_iterable(each.slots for each in answers.values()):
        if not ends or row.slot < min(ends):
            found.setdefault(row.slot, []).append(row)
    slots = sorted(found)
    answer.slots.extend(_fullest(found[slot]) for slot in slots[:limit])
    ends += slots[limit : limit + 1]
    if ends:
        answer.next_slot = min(ends)
    return answer


def _fullest(rows: list[pb.SlotRow]) -> pb.SlotRow:
    counts = [(row.frames, row.messages, row.cancels, row.length_bytes, row.wheels) for row in rows]
    row = pb.SlotRow()
    row.CopyFrom(rows[counts.index(max(counts))])
    row.copies = counts.count(max(counts))
    return row
