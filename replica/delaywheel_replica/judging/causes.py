"""What is wrong with a cluster, one cause a line, each with the section of the runbook for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.judging.sections import Section, of_kafka, of_refusal
from delaywheel_replica.quantities import about, counted, iso

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

_RECENT_MS: Final = 3_600_000
"""That a process was killed for want of memory is told for so long."""

_NAMED: Final = 2
"""So many topics stand in a cause."""


class Cause(NamedTuple):
    """One thing that is wrong, for people, and where the runbook says what to do."""

    text: str
    section: Section


def causes_of_down(answer: pb.DescribeClusterResponse) -> Iterator[Cause]:
    """Yields what keeps the cluster from its work."""
    yield from _not_forwarding(answer)
    if not any(member.accepting for member in answer.members):
        why = answer.refusing.reason
        yield Cause(
            f"no node takes messages{f' ({answer.node}: {why})' if why else ''}",
            Section.NO_MESSAGES_TAKEN,
        )


def _not_forwarding(answer: pb.DescribeClusterResponse) -> Iterator[Cause]:
    if not answer.HasField("leader"):
        yield from _of_kafka(answer)
        yield Cause("no node leads, so nothing is forwarded", Section.NOTHING_FORWARDED)
        return
    leader = answer.leader.node
    reports = {member.node: member.report for member in answer.members}
    if leader in reports and reports[leader].role == "resting":
        yield Cause(
            f"{leader} leads and rests{_until(answer, reports[leader])}, so nothing is forwarded",
            Section.CLOCK_AHEAD,
        )
    elif leader in reports and reports[leader].HasField("standstill"):
        standstill = reports[leader].standstill
        yield Cause(
            f"{leader} has forwarded nothing since {iso(standstill.since_ms)}: {standstill.cause}",
            Section.NOTHING_FORWARDED,
        )


def _until(answer: pb.DescribeClusterResponse, report: pb.MemberReport) -> str:
    """Returns how long a leader rests after its clock was ahead."""
    ahead_ms = answer.progress.due_ms - report.now_ms
    if ahead_ms < LATE_MS:
        return ""
    return f" until {iso(answer.progress.due_ms)} ({about(ahead_ms)}: delaywheel clock set-back)"


def troubles(answer: pb.DescribeClusterResponse) -> Iterator[Cause]:
    """Returns the troubles, one a line."""
    if answer.HasField("leader"):
        yield from _of_kafka(answer)
    for member in answer.members:
        yield from _troubles_of(answer, member)
    if answer.lateness_ms > LATE_MS:
        yield Cause(f"messages are late by up to {about(answer.lateness_ms)}", Section.LATE)
    # That the copies of a node that is away are behind is no news.
    away = {m.node for m in answer.members if m.silent or not m.reachable}
    for wheel in answer.wheels:
        for copy in wheel.replicas if wheel.state == pb.WHEEL_STATE_OPEN else ():
            if copy.state != pb.REPLICA_STATE_IN_SYNC and copy.node not in away:
                state = pb.ReplicaState.Name(copy.state).removeprefix("REPLICA_STATE_").lower()
                yield Cause(
                    f"the copy of {wheel.wheel} on {copy.node} is {state}", Section.COPIES_MISSING
                )


def _of_kafka(answer: pb.DescribeClusterResponse) -> Iterator[Cause]:
    """Returns what nodes have against Kafka; several say the same when it is away."""
    nodes = defaultdict[str, list[str]](list)
    for member in answer.members:
        if member.report.kafka_error:
            nodes[member.report.kafka_error].append(member.node)
    for error, hit in nodes.items():
        yield Cause(f"Kafka, as seen by {', '.join(hit)}: {error}", of_kafka(error))


def _troubles_of(answer: pb.DescribeClusterResponse, member: pb.Member) -> Iterator[Cause]:
    node, report = member.node, member.report
    if not member.reachable:
        yield Cause(
            f"{node} is away: {member.silent or f'{answer.node} does not hear it'}",
            Section.NODE_SILENT,
        )
    elif member.silent:
        yield Cause(f"{node} does not answer: {member.silent}", Section.NODE_SILENT)
    if member.storage_replaced:
        yield Cause(
            f"{node} runs on another folder than the registered one, or was taken out",
            Section.NODE_REPLACED,
        )
    if member.settings_differ:
        yield Cause(f"{node} has other settings: {member.settings_differ}", Section.NODES_DIFFER)
    refused = answer.refusing if node == answer.node else report.refusing
    if refused.reason:
        yield Cause(
            f"{node} takes no messages: {refused.reason}: {refused.message}",
            of_refusal(refused.reason, refused.message),
        )
    if report.unavailable_topics:
        topics = _named(report.unavailable_topics)
        yield Cause(
            f"messages for {topics} are deferred, or become dead letters", Section.DEAD_LETTERS
        )
    if report.unreadable_frames:
        yield Cause(
            f"{node} waits for {counted(report.unreadable_frames, 'frame')} that it cannot read",
            Section.COPIES_MISSING,
        )
    kill = report.memory_kill
    if kill.at_ms and report.now_ms - kill.at_ms < _RECENT_MS:
        yield Cause(
            f"{node} was out of memory: its {kill.process} was killed at {iso(kill.at_ms)}",
            Section.OUT_OF_MEMORY,
        )
    for fault in report.ingress_faults:
        yield Cause(f"ingress: {fault}", Section.INGRESS)
    yield from _about_calls(node, report)
    yield from _about_disks(node, report)
    yield from _about_certificates(node, report)


def _about_calls(node: str, report: pb.MemberReport) -> Iterator[Cause]:
    for each in report.waiting_calls:
        if each.longest_ms > SLOW_MS[each.call]:
            longest = about(each.longest_ms)
            yield Cause(
                f"{node} answers {each.call} slowly: {each.count:,} wait for up to {longest}",
                Section.SLOW_CANCELS,
            )


def _about_certificates(node: str, report: pb.MemberReport) -> Iterator[Cause]:
    if report.certificate_fault:
        yield Cause(
            f"{node} keeps its earlier certificate: {report.certificate_fault}",
            Section.FILES_REFUSED,
        )
    if report.access_fault:
        yield Cause(f"{node} keeps earlier rights: {report.access_fault}", Section.FILES_REFUSED)
    if report.access_differs:
        others = ", ".join(report.access_differs)
        yield Cause(
            f"{node} has other grants or tokens than {others}: see that all have the same files",
            Section.FILES_REFUSED,
        )
    if report.HasField("certificate_expires_ms"):
        left_ms = report.certificate_expires_ms - report.now_ms
        if left_ms <= 0:
            yield Cause(
                f"the certificate of {node} has expired: no caller accepts it",
                Section.FILES_REFUSED,
            )
        elif left_ms < _SOON_MS:
            yield Cause(
                f"the certificate of {node} expires in {about(left_ms)}", Section.FILES_REFUSED
            )


def _about_disks(node: str, report: pb.MemberReport) -> Iterator[Cause]:
    """Yields what has too few copies, and what keeps finished messages on the disks."""
    if report.alone_messages:
        one = report.alone_messages == 1
        are = f"{counted(report.alone_messages, 'message')} {'is' if one else 'are'}"
        yield Cause(
            f"{are} on 1 node only, {node}: wait until {'it is' if one else 'they are'} copied",
            Section.COPIES_MISSING,
        )
    if report.HasField("floor_wait"):
        wait = report.floor_wait
        behind = about(wait.behind_seconds * 1000)
        yield Cause(
            f"deleting is {behind} behind: the floor waits for {', '.join(wait.causes)}",
            Section.NOTHING_DELETED,
        )
    if report.missing_frames:
        missing = counted(report.missing_frames, "frame")
        yield Cause(
            f"{node} lacks {missing} that it should have: its disk lost them or returns an error",
            Section.COPIES_MISSING,
        )
    if report.undeletable_files:
        more = report.undeletable_files - 1
        others = f" and {more:,} more" if more else ""
        yield Cause(
            f"the disk of {node} does not delete {report.undeletable_file}{others}",
            Section.NOTHING_DELETED,
        )
    if report.ledger.failure:
        since = iso(report.ledger.failing_since_ms)
        yield Cause(
            f"{node} has not published its ledger since {since}: {report.ledger.failure}",
            Section.LEDGER,
        )


def _named(topics: Sequence[str]) -> str:
    """Returns the names of the first topics that accept nothing."""
    more = len(topics) - _NAMED
    named = ", ".join(topics[:_NAMED])
    return f"{named} and {counted(more, 'more topic')}" if more > 0 else named
