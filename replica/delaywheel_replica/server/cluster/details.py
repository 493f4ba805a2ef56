"""The parts of a cluster description that require reading this node's disk.

How much of each wheel each node holds (replicas.py), what the node reports about itself since its
processes started, and how many messages are pending, each counted once.
"""

import heapq
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Final

from delaywheel.identity import WheelId
from delaywheel.ingress import HalfAnswer
from delaywheel.storage.files.undeletable import Undeletable
from delaywheel.storage.folder.disk import Disk
from delaywheel.storage.writing.dial import DialView
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.protocol.heartbeat import Heartbeat
from delaywheel_replica.core.protocol.status_files import (
    CleanerStatus,
    IngressStatus,
    ServerStatus,
    UnavailableTopic,
)
from delaywheel_replica.process.memory_kills import last_kill
from delaywheel_replica.server.access.callers import Access
from delaywheel_replica.server.certificates import NodeCertificates
from delaywheel_replica.server.cluster.merging import counted_once
from delaywheel_replica.server.cluster.pending import PendingCount
from delaywheel_replica.server.cluster.replicas import Lags, replicas_of
from delaywheel_replica.server.ledger.publisher import BooksState
from delaywheel_replica.server.node.alone import alone_messages
from delaywheel_replica.server.node.counts import NodeCounts
from delaywheel_replica.server.node.node_view import (
    NodeView,
    done_slot,
    ledger_lag_frames,
    missing_frames,
    wall_ms,
)
from delaywheel_replica.server.node.pulse import Pulse
from delaywheel_replica.server.node.same_access import SameAccess

_REFUSED_AT_MOST: Final = 20
_NAME_AT_MOST: Final = 200


@dataclass(frozen=True, slots=True)
class OwnReport:
    """A node's report about itself.

    Attributes:
        started_ms: When its server started, Unix milliseconds.
        certificates: What callers are shown; None: nothing.
        waiting: Returns, by call, how many wait for an answer, and the first of them how long (ms).
        insecure: What its ports lack that other machines reach, for people.
        unchecked: What of Kafka is checked by hand, for people.
        disk_reserve_bytes: With less free space, it accepts no messages.
    """

    started_ms: int
    pulse: Pulse
    books: Callable[[], BooksState]
    undeletable: Undeletable
    access: Access
    same_access: SameAccess
    certificates: NodeCertificates | None = None
    waiting: Callable[[], Mapping[str, tuple[int, int]]] = dict
    insecure: str = ""
    unchecked: str = ""
    counts: NodeCounts = field(default_factory=NodeCounts)
    disk_reserve_bytes: int = 0


class Details:
    """Adds the details. It reads files: for any thread but the event loop's."""

    def __init__(self, disk: Disk, data: Path, view: NodeView, own_report: OwnReport) -> None:
        self._view = view
        self._own_report = own_report
        self._disk = disk
        self._data = data
        self._pending = PendingCount(DialView(disk, data))
        self._lags = Lags(disk, data, wall_ms=wall_ms)

    def add_to(self, answer: pb.DescribeClusterResponse, status: ServerStatus) -> None:
        """Completes a description, made from this status, with details of this node."""
        self._add_replicas(answer.wheels, status)
        report = self._report(answer, status)
        for member in answer.members:
            if member.node == answer.node:
                member.report.CopyFrom(report)
        pending = pb.Pending(
            messages=report.pending_messages, length_bytes=report.pending_bytes, node=answer.node
        )
        answer.pending.CopyFrom(counted_once(answer, {answer.node: pending}))

    def _add_replicas(self, rows: Collection[pb.WheelStatus], status: ServerStatus) -> None:
        cleaner = self._view.cleaner.status
        if cleaner is None:
            return
        known = replicas_of(cleaner.control, status, self._view.in_sync())
        for row in rows:
            wheel = WheelId.parse(row.wheel)
            replicas = known.get(wheel, [])
            self._lags.add_lags(wheel, replicas, cleaner.floor or 0)
            row.replicas.extend(replicas)

    def _add_security(self, report: pb.MemberReport) -> None:
        own = self._own_report
        report.insecure = own.insecure
        report.unchecked = own.unchecked
        report.access_differs.extend(own.same_access.differing)
        report.access_fault = own.access.refused or ""
        if own.certificates is not None:
            report.certificate_expires_ms = int(own.certificates.current.not_after_s * 1000)
            report.certificate_fault = own.certificates.refused or ""

    def _add_refused(self, report: pb.MemberReport) -> None:
        refused = self._own_report.access.spending.refused.read()
        most = heapq.nlargest(_REFUSED_AT_MOST, refused.items(), key=itemgetter(1))
        for principal, messages in most:
            report.quota_refusals.add(principal=principal[:_NAME_AT_MOST], messages=messages)

    def _report(self, answer: pb.DescribeClusterResponse, status: ServerStatus) -> pb.MemberReport:
        heartbeat = status.heartbeat
        report = pb.MemberReport(
            version=answer.version,
            now_ms=wall_ms(),
            server_started_ms=self._own_report.started_ms,
            in_sync_changes=self._own_report.pulse.in_sync_changes,
            ledger=self._ledger(heartbeat),
            verifying_wheels=len(heartbeat.verifying),
            wheels=len(heartbeat.verifying | (heartbeat.wheels.keys() - {heartbeat.spare})),
        )
        with suppress(OSError):  # the disk's trouble is reported elsewhere
            report.disk.free_bytes = self._disk.free_bytes(self._data)
            report.disk.reserve_bytes = self._own_report.disk_reserve_bytes
        self._add_security(report)
        self._add_refused(report)
        if (kill := last_kill(self._data)) is not None:
            report.memory_kill.process, report.memory_kill.at_ms = kill
        report.counts.CopyFrom(_counted(self._own_report.counts, self._view.cleaner.status))
        for call, (count, longest_ms) in self._own_report.waiting().items():
            report.waiting_calls.add(call=call, count=count, longest_ms=longest_ms)
        if answer.HasField("refusing"):
            report.refusing.CopyFrom(answer.refusing)
        cleaner = self._view.cleaner.status
        if cleaner is not None:
            report.cleaner_started_ms = cleaner.started_ms
            report.elections = cleaner.counters.get("elections", 0)
            report.dead_letters = cleaner.counters.get("dead_lettered", 0)
        fresh = self._view.cleaner.fresh()
        if fresh is not None:
            report.role, report.kafka_error = fresh.role.value, _of_kafka(fresh)
            report.unavailable_topics.extend(each.topic for each in fresh.unavailable)
            report.unavailable.extend(map(_unavailable, fresh.unavailable))
            for each in fresh.unanswered:
                report.unanswered_halves.add(
                    group=each.group, letters=each.letters, oldest_ms=each.oldest_ms
                )
            wait = fresh.floor_wait
            if wait is not None:
                report.floor_wait.behind_seconds = wait.behind_s
                report.floor_wait.causes.extend(wait.causes)
            if fresh.standstill is not None:
                report.standstill.since_ms = fresh.standstill.since_ms
                report.standstill.cause = fresh.standstill.cause
            report.unreadable_frames = len(fresh.unreadable)
            if fresh.ingress is not None:
                report.ingress_lag = fresh.ingress.lag
                report.ingress_faults.extend(_of_ingress(fresh.ingress))
        progress = None if cleaner is None else cleaner.progress
        now_ms = wall_ms()
        slot = done_slot(progress, now_ms)
        undeletable = self._own_report.undeletable.paths
        report.undeletable_files = len(undeletable)
        report.undeletable_file = str(undeletable[0]) if undeletable else ""
        report.missing_frames = missing_frames(heartbeat)
        report.alone_messages = alone_messages(self._disk, self._data, cleaner, status)
        report.pending_messages, report.pending_bytes = self._pending.read(now_ms // 1000, slot)
        return report

    def _ledger(self, heartbeat: Heartbeat) -> pb.LedgerReport:
        state = self._own_report.books()
        return pb.LedgerReport(
            place=state.place,
            lag_frames=ledger_lag_frames(heartbeat),
            failure=state.failure or "",
            failing_since_ms=state.failing_since_ms,
            gaps=state.gaps,
            gap_messages=state.gap_messages,
        )


def _counted(counts: NodeCounts, cleaner: CleanerStatus | None) -> pb.MemberCounts:
    counted = pb.MemberCounts(
        accepted_messages=counts.messages,
        acknowledged_messages=counts.acknowledged,
        accepted_cancels=counts.cancels,
        refused_messages=_by_reason(
            {reason.value: messages for reason, messages in counts.refused.copy().items()}
        ),
    )
    if cleaner is not None:
        counted.forwarded_messages = cleaner.counters.get("forwarded", 0)
        counted.dead_letters.extend(_by_reason(cleaner.dead_by_reason))
        counted.halves.CopyFrom(_halves(cleaner.counters))
    if cleaner is not None and cleaner.lateness is not None:
        late = cleaner.lateness
        told = pb.LatenessHistogram(
            bounds_us=late.bounds_us, counts=late.counts, sum_us=late.sum_us
        )
        counted.lateness.CopyFrom(told)
    return counted


def _halves(counters: Mapping[str, int]) -> pb.HalfCounts:
    answers = {each.name.lower() for each in HalfAnswer}
    answered = {name: counters.get(f"halves_answered_{name}", 0) for name in answers}
    return pb.HalfCounts(asked=counters.get("halves_asked", 0), **answered)


def _by_reason(counts: Mapping[str, int]) -> list[pb.ReasonCount]:
    return [pb.ReasonCount(reason=reason, messages=n) for reason, n in counts.items() if n]


def _unavailable(topic: UnavailableTopic) -> pb.UnavailableTopic:
    return pb.UnavailableTopic(
        topic=topic.topic,
        partitions=topic.partitions,
        since_ms=topic.since_ms,
        cause=topic.cause,
        deferred_messages=topic.deferred,
    )


def _of_kafka(cleaner: CleanerStatus) -> str:
    """Returns what keeps the cleaner from working, or else what endangers its work."""
    throttled = () if cleaner.throttled is None else (cleaner.throttled,)
    return cleaner.kafka_error or "; ".join((*cleaner.kafka_warnings, *throttled))


def _of_ingress(ingress: IngressStatus) -> Iterator[str]:
    """Yields why records are not taken."""
    yield from ingress.faults
    for partition in ingress.cut_off:
        yield f"{partition} ends before what was read of it, and is not read any more"
