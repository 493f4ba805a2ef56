"""Whether a cluster works, in one line: the first of `delaywheel status`.

| verdict | exit code with `--check` | when |
|---|---|---|
| `OK` | 0 | none of the others |
| `DEGRADED` | 1 | messages are taken and forwarded, and something is wrong |
| `DOWN` | 3 | no node takes messages, or nothing is forwarded: no node leads, the leader rests, |
|   | | or progress has not moved for ten seconds |

A cause stands before what it brings about: the line has room for two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.cli.failures import ExitCode
from delaywheel_replica.cli.printing import shapes
from delaywheel_replica.cli.values import iso
from delaywheel_replica.quantities import about, counted

LATE_MS: Final = 1_000
"""A message that is overdue for longer is worth a look."""

SLOW_MS: Final = defaultdict(
    lambda: 1_000, {"cancel": 1_000, "reschedule": 2_000, "get": 1_000, "search": 30_000}
)
"""A call that has waited for longer is worth a look: ten times what it takes if nothing is wrong.
A page of a search may read a million messages.
"""

_SOON_MS: Final = 14 * 86_400_000
"""A certificate that expires sooner is worth a look."""

_NAMED: Final = 2
"""So many causes stand in the first line, the others follow below the members; and so many topics
stand in a cause.
"""


class ClusterState(StrEnum):
    """Whether the cluster works."""

    OK = "OK"
    DEGRADED = "DEGRADED"
    DOWN = "DOWN"

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of `delaywheel status --check`."""
        return {
            ClusterState.OK: ExitCode.DONE,
            ClusterState.DEGRADED: ExitCode.REFUSED,
            ClusterState.DOWN: ExitCode.UNAVAILABLE,
        }[self]


@dataclass(frozen=True, slots=True)
class ClusterVerdict:
    """The state of a cluster, and what is wrong with it.

    Attributes:
        state: Whether it does its work.
        down: What keeps it from that.
        troubles: What is wrong besides.
    """

    state: ClusterState
    down: tuple[str, ...] = ()
    troubles: tuple[str, ...] = ()

    @property
    def causes(self) -> tuple[str, ...]:
        """All causes."""
        return self.down + self.troubles

    @property
    def unnamed(self) -> tuple[str, ...]:
        """The causes for which the line has no room."""
        return self.causes[_NAMED:]

    @property
    def line(self) -> str:
        """The verdict as one line."""
        if not self.causes:
            return self.state
        more = len(self.unnamed)
        named = "; ".join(self.causes[:_NAMED])
        return f"{self.state}: {named}{f'; and {more} more' if more > 0 else ''}"


def verdict(answer: pb.DescribeClusterResponse) -> ClusterVerdict:
    """Derives the verdict from the description of a cluster by all its members."""
    down = tuple(_down(answer))
    troubles = tuple(_troubles(answer))
    state = ClusterState.DOWN if down else ClusterState.DEGRADED if troubles else ClusterState.OK
    return ClusterVerdict(state, down, troubles)


def _down(answer: pb.DescribeClusterResponse) -> Iterator[str]:
    yield from _not_forwarding(answer)
    if not any(member.accepting for member in answer.members):
        why = answer.refusing.reason
        yield f"no node takes messages{f' ({answer.node}: {why})' if why else ''}"


def _not_forwarding(answer: pb.DescribeClusterResponse) -> Iterator[str]:
    if not answer.HasField("leader"):
        yield from _of_kafka(answer)
        yield "no node leads, so nothing is forwarded"
        return
    leader = answer.leader.node
    reports = {member.node: member.report for member in answer.members}
    if leader in reports and reports[leader].role == "resting":
        yield f"{leader} leads and rests{_until(answer, reports[leader])}, so nothing is forwarded"
    elif leader in reports and reports[leader].HasField("standstill"):
        standstill = reports[leader].standstill
        yield f"{leader} forwards nothing since {iso(standstill.since_ms)}: {standstill.cause}"


def _until(answer: pb.DescribeClusterResponse, report: pb.MemberReport) -> str:
    """Returns how long a leader rests after its clock was ahead."""
    ahead_ms = answer.progress.due_ms - report.now_ms
    if ahead_ms < LATE_MS:
        return ""
    return f" until {iso(answer.progress.due_ms)} ({about(ahead_ms)}: delaywheel clock set-back)"


def _troubles(answer: pb.DescribeClusterResponse) -> Iterator[str]:
    """Returns the troubles, one a line."""
    if answer.HasField("leader"):
        yield from _of_kafka(answer)
    for member in answer.members:
        yield from _troubles_of(answer, member)
    if answer.lateness_ms > LATE_MS:
        yield f"messages are late by up to {about(answer.lateness_ms)}"
    # That the copies of a node that is away are behind is no news.
    away = {m.node for m in answer.members if m.silent or not m.reachable}
    for wheel in answer.wheels:
        for copy in wheel.replicas if wheel.state == pb.WHEEL_STATE_OPEN else ():
            if copy.state != pb.REPLICA_STATE_IN_SYNC and copy.node not in away:
                yield f"the copy of {wheel.wheel} on {copy.node} is {shapes.replica_state(copy)}"


def _of_kafka(answer: pb.DescribeClusterResponse) -> Iterator[str]:
    """Returns what nodes have against Kafka; several say the same when it is away."""
    nodes = defaultdict[str, list[str]](list)
    for member in answer.members:
        if member.report.kafka_error:
            nodes[member.report.kafka_error].append(member.node)
    for error, hit in nodes.items():
        yield f"Kafka, as seen by {', '.join(hit)}: {error}"


def _troubles_of(answer: pb.DescribeClusterResponse, member: pb.Member) -> Iterator[str]:
    node, report = member.node, member.report
    if not member.reachable:
        yield f"{node} is away: {member.silent or f'{answer.node} does not hear it'}"
    elif member.silent:
        yield f"{node} does not answer: {member.silent}"
    if member.storage_replaced:
        yield f"{node} runs on another folder than the registered one, or was taken out"
    if member.settings_differ:
        yield f"{node} has other settings: {member.settings_differ}"
    refused = answer.refusing if node == answer.node else report.refusing
    if refused.reason:
        yield f"{node} takes no messages: {refused.reason}: {refused.message}"
    if report.unavailable_topics:
        topics = _named(report.unavailable_topics)
        yield f"messages for {topics} are deferred, or become dead letters"
    if report.unreadable_frames:
        yield f"{node} waits for {counted(report.unreadable_frames, 'frame')} that it cannot read"
    yield from _about_ingress(report)
    yield from _about_calls(node, report)
    yield from _about_disks(node, report)
    yield from _about_certificates(node, report)


def _about_calls(node: str, report: pb.MemberReport) -> Iterator[str]:
    """Yields which calls wait for long."""
    for each in report.waiting_calls:
        if each.longest_ms > SLOW_MS[each.call]:
            longest = about(each.longest_ms)
            yield f"{node} answers {each.call} slowly: {each.count:,} wait for up to {longest}"


def _about_certificates(node: str, report: pb.MemberReport) -> Iterator[str]:
    """Yields what will keep callers out."""
    if report.certificate_fault:
        yield f"{node} keeps its earlier certificate: {report.certificate_fault}"
    if report.access_fault:
        yield f"{node} keeps earlier rights: {report.access_fault}"
    if report.access_differs:
        others = ", ".join(report.access_differs)
        yield f"{node} has other grants or tokens than {others}: see that all have the same files"
    if report.HasField("certificate_expires_ms"):
        left_ms = report.certificate_expires_ms - report.now_ms
        if left_ms <= 0:
            yield f"the certificate of {node} has expired: no caller accepts it"
        elif left_ms < _SOON_MS:
            yield f"the certificate of {node} expires in {about(left_ms)}"


def _about_ingress(report: pb.MemberReport) -> Iterator[str]:
    for fault in report.ingress_faults:
        yield f"ingress: {fault}"


def _about_disks(node: str, report: pb.MemberReport) -> Iterator[str]:
    """Yields what has too few copies, and what keeps finished messages on the disks."""
    if report.alone_messages:
        one = report.alone_messages == 1
        are = f"{counted(report.alone_messages, 'message')} {'is' if one else 'are'}"
        yield f"{are} on 1 node only, {node}: wait until {'it is' if one else 'they are'} copied"
    if report.HasField("floor_wait"):
        wait = report.floor_wait
        behind = about(wait.behind_seconds * 1000)
        yield f"deleting is {behind} behind: the floor waits for {', '.join(wait.causes)}"
    if report.missing_frames:
        missing = counted(report.missing_frames, "frame")
        yield f"{node} lacks {missing} that it should have: its disk lost them or returns an error"
    if report.undeletable_files:
        more = report.undeletable_files - 1
        others = f" and {more:,} more" if more else ""
        yield f"the disk of {node} does not delete {report.undeletable_file}{others}"
    if report.ledger.failure:
        since = iso(report.ledger.failing_since_ms)
        yield f"{node} does not publish its ledger since {since}: {report.ledger.failure}"


def _named(topics: Sequence[str]) -> str:
    """Returns the names of the first topics that accept nothing."""
    more = len(topics) - _NAMED
    named = ", ".join(topics[:_NAMED])
    return f"{named} and {counted(more, 'more topic')}" if more > 0 else named
