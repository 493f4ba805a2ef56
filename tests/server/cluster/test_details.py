"""A node's report: since its processes started, about its ledger, about pending messages."""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from delaywheel.identity import WheelId
from delaywheel.reasons import Reason
from delaywheel.storage.files.undeletable import Undeletable
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.writing.dial import Dial
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.protocol.control import NodeRecord, WheelRecord
from delaywheel_replica.core.protocol.frames import NO_FRAMES, FrameSet
from delaywheel_replica.core.protocol.histogram import Histogram
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.status_files import (
    CleanerStatus,
    FloorWait,
    IngressStatus,
    KnownPeer,
    Role,
    ServerStatus,
    Standstill,
    UnavailableTopic,
)
from delaywheel_replica.server.access.callers import Access
from delaywheel_replica.server.cluster.details import Details, OwnReport
from delaywheel_replica.server.ledger.publisher import BooksState
from delaywheel_replica.server.node.alone import alone_messages
from delaywheel_replica.server.node.counts import NodeCounts
from delaywheel_replica.server.node.node_view import CleanerView, monotonic_ms
from delaywheel_replica.server.node.pulse import Pulse
from delaywheel_replica.server.node.same_access import SameAccess
from support.core.values import heartbeat, wheel_heartbeat
from support.server.server_process import config_for
from support.server.views import node_view
from support.server.well import cleaner_status, server_status, undeletable
from support.wheels.messages import columns_of, message
from support.wheels.wheels import ACCEPTED_AT_MS, new_wheel

NOW_SLOT = int(time.time())


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    """Three messages, due 3 s ago, now and far ahead; the dial lives as long as its process."""
    disk = PosixDisk()
    wheel = new_wheel(disk, tmp_path, dial=Dial(disk, tmp_path, 10_000))
    for number, slot in enumerate((NOW_SLOT - 3, NOW_SLOT, NOW_SLOT + 5_000)):
        wheel.append(columns_of([message(number, slot=slot)]), accepted_at_ms=ACCEPTED_AT_MS)
    yield tmp_path
    wheel.close()


def own_report(state: BooksState, undeletable: Undeletable | None = None) -> OwnReport:
    pulse = Pulse(frozenset)
    pulse.in_sync_changes = 4
    undeletable = undeletable or Undeletable()
    return OwnReport(
        started_ms=5,
        pulse=pulse,
        books=lambda: state,
        undeletable=undeletable,
        access=Access(config_for(Path("/nowhere"))),
        same_access=SameAccess(str, dict),
        waiting=lambda: {"cancel": (7, 1_500)},
        counts=NodeCounts(messages=9, refused=Counter({Reason.SLOT_FULL: 2, Reason.DRAINING: 0})),
        disk_reserve_bytes=7,
    )


def described(
    data: Path,
    cleaner: CleanerStatus | None,
    books: BooksState | None = None,
    undeletable: Undeletable | None = None,
) -> pb.DescribeClusterResponse:
    """Node a, with details."""
    state = books or BooksState("/books")
    view = node_view(server_status, in_sync=frozenset("ab"), cleaner=CleanerView(cleaner))
    said = own_report(state, undeletable)
    answer = pb.DescribeClusterResponse(
        node="a",
        members=[pb.Member(node="a"), pb.Member(node="b")],
        wheels=[pb.WheelStatus(wheel="a.2", node="a", applied_seq=20)],
    )
    Details(PosixDisk(), data, view, said).add_to(answer, server_status())
    assert not answer.members[1].HasField("report"), "b has to say it itself"
    return answer


def test_who_was_refused_for_a_quota_is_bounded(data: Path) -> None:
    said = own_report(BooksState("/books"))
    for number in range(300):
        said.access.spending.refused.add_one(f"token:{number:03}" + "x" * 9_000, number + 1)
    view = node_view(server_status, in_sync=frozenset("ab"), cleaner=CleanerView(None))
    answer = pb.DescribeClusterResponse(node="a", members=[pb.Member(node="a")])
    Details(PosixDisk(), data, view, said).add_to(answer, server_status())
    told = answer.members[0].report.quota_refusals
    assert [each.messages for each in told][:3] == [sum(range(101, 301)), 100, 99]
    assert told[0].principal == "(others)"
    assert len(told) == 20
    assert max(len(each.principal) for each in told) == 200


def test_what_its_processes_have_counted(data: Path) -> None:
    cleaner = cleaner_status(
        monotonic_ms=monotonic_ms() + 60_000,  # it stays fresh
        kafka_error="Timed out",
        unavailable=(UnavailableTopic("orders", (1, 4), 17, "leaderless", 3),),
        floor_wait=FloorWait(901, ("a.1",)),
        standstill=Standstill(17, "a cause"),
        unreadable=FrameSet.of([(WheelId("a", 1), 3), (WheelId("a", 1), 4)]),
        ingress=IngressStatus(2, 17, cut_off=("in/1",), faults=("in2 is compacted",)),
        progress=Progress((NOW_SLOT - 2) * 1000, None, {}, 0),
        counters={
            "elections": 1,
            "forwarded": 12,
            "halves_asked": 6,
            "halves_answered_committed": 3,
            "halves_answered_rolled_back": 2,
            "halves_answered_undecided": 1,
        },
        dead_by_reason={"EXPIRED": 1},
        lateness=Histogram((5_000,), (3, 9), 17),
    )
    report = described(data, cleaner).members[0].report
    assert (report.elections, report.cleaner_started_ms) == (1, cleaner.started_ms)
    counts = report.counts
    assert (counts.accepted_messages, counts.forwarded_messages) == (9, 12)
    assert [(each.reason, each.messages) for each in counts.refused_messages] == [("SLOT_FULL", 2)]
    assert [(each.reason, each.messages) for each in counts.dead_letters] == [("EXPIRED", 1)]
    assert (list(counts.lateness.counts), counts.lateness.sum_us) == ([3, 9], 17)
    assert counts.halves == pb.HalfCounts(asked=6, committed=3, rolled_back=2, undecided=1)
    assert (report.in_sync_changes, report.server_started_ms) == (4, 5)
    waiting = pb.WaitingCalls(call="cancel", count=7, longest_ms=1_500)
    assert list(report.waiting_calls) == [waiting]
    assert (report.role, report.kafka_error) == ("leading", "Timed out")
    assert list(report.unavailable_topics) == ["orders"]
    assert list(report.unavailable) == [
        pb.UnavailableTopic(
            topic="orders", partitions=[1, 4], since_ms=17, cause="leaderless", deferred_messages=3
        )
    ]
    assert (report.standstill.since_ms, report.standstill.cause) == (17, "a cause")
    assert report.unreadable_frames == 2
    assert (report.floor_wait.behind_seconds, [*report.floor_wait.causes]) == (901, ["a.1"])
    assert report.ingress_lag == 17
    assert list(report.ingress_faults) == [
        "in2 is compacted",
        "in/1 ends before what was read of it, and is not read any more",
    ]
    assert report.pending_messages == 2, "the first is done"
    assert report.pending_bytes > 2 * len(b"value")


def test_what_only_this_node_holds_is_counted_as_far_as_it_is_pending(data: Path) -> None:
    """Node b runs on a new disk, and has copied the first of three frames."""
    wheel = WheelId("node-1", 1)
    closed = WheelRecord({"a": "disk-a", "b": "before"}, 1, 0, closed_at=3)
    nodes = {"a": NodeRecord("disk-a", 2), "b": NodeRecord("disk-b", 2)}
    cleaner = cleaner_status(
        node="a",
        wheels={wheel: closed},
        nodes=nodes,
        lost=NO_FRAMES,
        progress=Progress((NOW_SLOT - 2) * 1000, None, {}, 0),
    )
    own = heartbeat("a", wheels={wheel: wheel_heartbeat(3)})
    for of_b, messages in ((0, 2), (1, 2), (2, 1), (3, 0)):
        other = heartbeat("b", wheels={wheel: wheel_heartbeat(of_b)})
        status = ServerStatus(own, 1, 50_000, peers={"b": KnownPeer(other, None)})
        assert alone_messages(PosixDisk(), data, cleaner, status) == messages


def test_how_many_wheels_are_not_looked_through_yet(data: Path) -> None:
    status = server_status()
    heartbeat = replace(status.heartbeat, verifying=frozenset({WheelId("a", 1), WheelId("b", 7)}))
    view = node_view(server_status, in_sync=frozenset("ab"), cleaner=CleanerView(None))
    said = own_report(BooksState("/books"))
    answer = pb.DescribeClusterResponse(node="a", members=[pb.Member(node="a")])
    Details(PosixDisk(), data, view, said).add_to(answer, replace(status, heartbeat=heartbeat))
    report = answer.members[0].report
    of_others = heartbeat.wheels.keys() - {heartbeat.spare} - heartbeat.verifying
    assert of_others
    assert (report.verifying_wheels, report.wheels) == (2, 2 + len(of_others))


def test_what_a_silent_cleaner_did_last_says_nothing_of_now(data: Path) -> None:
    silent = cleaner_status(monotonic_ms=monotonic_ms() - 60_000, role=Role.LEADING)
    report = described(data, silent).members[0].report
    assert (report.role, report.elections) == ("", 1)
    report = described(data, None).members[0].report
    assert not report.HasField("cleaner_started_ms")
    assert report.pending_messages == 3, "nothing is known to be done"
    assert not report.counts.HasField("halves")


def test_how_many_frames_it_lacks(data: Path) -> None:
    assert described(data, None).members[0].report.missing_frames == 2


def test_how_much_of_its_disk_is_free(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = PosixDisk().free_bytes(data)
    disk = described(data, None).members[0].report.disk
    assert disk.reserve_bytes == 7
    assert disk.free_bytes == pytest.approx(free, abs=1 << 30)

    def fails(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(PosixDisk, "free_bytes", fails)
    assert not described(data, None).members[0].report.HasField("disk")


def test_which_files_its_disk_does_not_delete(data: Path) -> None:
    report = described(data, None, undeletable=undeletable(2)).members[0].report
    assert (report.undeletable_files, report.undeletable_file) == (2, "/data/1.slot")
    report = described(data, None).members[0].report
    assert (report.undeletable_files, report.undeletable_file) == (0, "")


def test_how_the_ledger_stands(data: Path) -> None:
    report = described(data, None).members[0].report
    assert report.ledger == pb.LedgerReport(place="/books", lag_frames=5)
    failed = BooksState("/books", "gone", 7, 1, 20)
    ledger = described(data, None, failed).members[0].report.ledger
    assert (ledger.failure, ledger.failing_since_ms) == ("gone", 7)
    assert (ledger.gaps, ledger.gap_messages) == (1, 20)


def test_holders_are_reported_once_the_wheel_is_known_to_be_registered(data: Path) -> None:
    answer = described(data, cleaner_status())
    assert [replica.node for replica in answer.wheels[0].replicas] == ["a"]
    assert described(data, None).wheels[0].replicas == []
    assert described(data, None).pending.at_least
