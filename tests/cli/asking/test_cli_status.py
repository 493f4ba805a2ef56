"""The output of `delaywheel status`; its JSON is stable."""

from __future__ import annotations

import json
from typing import Any

import pytest

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from support.clients.command import Command
from support.clients.fake_service import answer
from support.clients.scripted_node import ScriptedNode
from support.clients.stored import DUE_MS


@pytest.mark.usefixtures("node")
def test_status_as_json(command: Command) -> None:
    assert command("status", "--json").document == {
        "verdict": "OK",
        "causes": [],
        "cluster": "c1",
        "node": "n1",
        "version": "0.1.0",
        "now_ms": 1_900_000_000_200,
        "kafka": "kafka:9092",
        "leader": {"node": "n1", "epoch": 17},
        "members": [
            {
                "node": "n1",
                "address": "127.0.0.1:7420",
                "reachable": True,
                "accepting": True,
                "complete": True,
                "storage_replaced": False,
                "settings_differ": None,
                "silent": None,
                "report": None,
            }
        ],
        "min_insync": 1,
        "wheels": [
            {
                "wheel": "n1.3",
                "node": "n1",
                "state": "open",
                "applied_seq": 12,
                "high_watermark": 12,
                "in_sync": ["n1"],
                "final_seq": None,
                "progress_seq": 9,
                "ledger_seq": 0,
                "told_by": None,
                "replicas": [],
            },
            {
                "wheel": "n1.2",
                "node": "n1",
                "state": "closed",
                "applied_seq": 0,
                "high_watermark": 0,
                "in_sync": [],
                "final_seq": 4,
                "progress_seq": 0,
                "ledger_seq": 0,
                "told_by": None,
                "replicas": [],
            },
        ],
        "progress": {
            "due_ms": 1_900_000_000_123,
            "position": None,
            "set_backs": 0,
            "ahead_ms": None,
        },
        "floor": 1_899_999_000,
        "lateness_ms": 0,
        "pending": None,
        "refusing": None,
        "levels": {"5s": 5_000},
        "limits": {
            "span_seconds": 7200,
            "late_window_seconds": 120,
            "max_message_bytes": 1_000_000,
            "max_request_messages": 10_000,
            "max_request_bytes": 16_777_216,
        },
    }


def test_status_before_the_first_leader(command: Command, node: ScriptedNode) -> None:
    node.describe = answer(pb.DescribeClusterResponse(cluster_id="c1", node="n1"))
    document = command("status", "--json").document
    assert (document["leader"], document["progress"], document["floor"]) == (None, None, None)
    assert document["lateness_ms"] is None
    reported = command("status").out
    assert reported.startswith(
        "DOWN: no node leads, so nothing is forwarded; no node takes messages\n"
    )
    assert "unknown" in reported


def test_status_says_why_the_node_takes_no_messages(command: Command, node: ScriptedNode) -> None:
    refused = pb.DescribeClusterResponse(
        node="n1",
        members=[pb.Member(node="n1", storage_replaced=True)],
        refusing=pb.Error(reason="NO_WHEEL", message="STORAGE_REPLACED: why"),
    )
    node.describe = answer(refused)
    document = command("status", "--json").document
    assert document["refusing"] == {"reason": "NO_WHEEL", "message": "STORAGE_REPLACED: why"}
    assert document["members"][0]["storage_replaced"] is True
    reported = command("status", "--check").out
    assert reported.splitlines()[0].startswith(
        "DOWN: no node leads, so nothing is forwarded; no node takes messages (n1: NO_WHEEL)"
    )
    assert "NO_WHEEL: STORAGE_REPLACED: why" in reported


def three_nodes() -> pb.DescribeClusterResponse:
    """n1 leads and is on its own: n2 has no disk left, n3 is away."""
    reports = {
        "n1": pb.MemberReport(
            version="0.1.0",
            now_ms=DUE_MS,
            role="leading",
            kafka_error="topic orders takes nothing",
            server_started_ms=DUE_MS - 7_200_000,
            cleaner_started_ms=DUE_MS - 90_000,
            elections=2,
            counts=pb.MemberCounts(
                accepted_messages=9,
                acknowledged_messages=8,
                accepted_cancels=1,
                refused_messages=[pb.ReasonCount(reason="SLOT_FULL", messages=2)],
                forwarded_messages=7,
                lateness=pb.LatenessHistogram(bounds_us=[5_000], counts=[6, 1], sum_us=17_000),
                halves=pb.HalfCounts(asked=4, rolled_back=1),
            ),
            disk=pb.DiskSpace(free_bytes=70, reserve_bytes=7),
            in_sync_changes=1_234,
            ledger=pb.LedgerReport(
                place="s3://books/n1",
                lag_frames=4_321,
                failure="AccessDenied",
                failing_since_ms=DUE_MS - 60_000,
                gaps=1,
                gap_messages=77,
            ),
            pending_messages=5,
            pending_bytes=500,
            dead_letters=1_017,
            verifying_wheels=3,
            wheels=7,
            alone_messages=1_204,
            floor_wait=pb.FloorWait(behind_seconds=1_500, causes=["the ledger of n1.1", "n2.3"]),
            unreadable_frames=2,
            missing_frames=12,
            undeletable_files=1_205,
            undeletable_file="/data/1763700001.slot",
            certificate_expires_ms=DUE_MS + 9 * 86_400_000,
            certificate_fault="tls_cert /c.pem: expired",
            access_differs=["n3"],
            memory_kill=pb.MemoryKill(process="cleaner", at_ms=DUE_MS - 120_000),
            quota_refusals=[pb.QuotaRefusals(principal="token:a", messages=7)],
            waiting_calls=[
                pb.WaitingCalls(call="cancel", count=1_700, longest_ms=2_500),
                pb.WaitingCalls(call="search", count=1, longest_ms=2_500),
            ],
        ),
        "n2": pb.MemberReport(now_ms=DUE_MS, refusing=pb.Error(reason="DISK_FULL", message="why")),
    }
    members = [
        pb.Member(node=node, address=f"{node}:7420", reachable=node != "n3", report=report)
        for node, report in (*reports.items(), ("n3", None))
    ]
    members[1].settings_differ = "min_insync is 2 at n1, 3 at n2"
    members[2].silent = "no answer from n3:7420 within 2.0 s"
    replicas = [
        pb.Replica(node="n1", state=pb.REPLICA_STATE_IN_SYNC, held_seq=9, lag_frames=0, lag_ms=0),
        pb.Replica(
            node="n2",
            state=pb.REPLICA_STATE_INCOMPLETE,
            held_seq=4,
            lag_frames=5,
            lag_ms=850,
            told_ago_ms=70,
        ),
        pb.Replica(node="n3", state=pb.REPLICA_STATE_AWAY, told_ago_ms=65_000),
    ]
    wheel = pb.WheelStatus(
        wheel="n1.1", node="n1", state=pb.WHEEL_STATE_OPEN, told_by="n1", replicas=replicas
    )
    pending = pb.Pending(messages=123_456, length_bytes=7, node="n1", at_least=True)
    return pb.DescribeClusterResponse(node="n1", members=members, wheels=[wheel], pending=pending)


def test_status_of_all_nodes_as_json(command: Command, node: ScriptedNode) -> None:
    node.describe = answer(three_nodes())
    document = command("status", "--json").document
    reports = [member["report"] for member in document["members"]]
    assert reports[0] == {
        "version": "0.1.0",
        "now_ms": DUE_MS,
        "refusing": None,
        "role": "leading",
        "kafka_error": "topic orders takes nothing",
        "server_started_ms": DUE_MS - 7_200_000,
        "cleaner_started_ms": DUE_MS - 90_000,
        "elections": 2,
        "in_sync_changes": 1_234,
        "ledger": {
            "place": "s3://books/n1",
            "lag_frames": 4_321,
            "failure": "AccessDenied",
            "failing_since_ms": DUE_MS - 60_000,
            "gaps": 1,
            "gap_messages": 77,
        },
        "pending_messages": 5,
        "pending_bytes": 500,
        "dead_letters": 1_017,
        "unavailable_topics": [],
        "unavailable": [],
        "verifying_wheels": 3,
        "wheels": 7,
        "unanswered_halves": [],
        "ingress_lag": None,
        "ingress_faults": [],
        "alone_messages": 1_204,
        "floor_wait": {"behind_seconds": 1_500, "causes": ["the ledger of n1.1", "n2.3"]},
        "standstill": None,
        "unreadable_frames": 2,
        "missing_frames": 12,
        "undeletable_files": 1_205,
        "undeletable_file": "/data/1763700001.slot",
        "certificate_expires_ms": DUE_MS + 9 * 86_400_000,
        "certificate_fault": "tls_cert /c.pem: expired",
        "insecure": None,
        "unchecked": None,
        "access_fault": None,
        "access_differs": ["n3"],
        "waiting_calls": {
            "cancel": {"count": 1_700, "longest_ms": 2_500},
            "search": {"count": 1, "longest_ms": 2_500},
        },
        "counts": {
            "accepted_messages": 9,
            "acknowledged_messages": 8,
            "accepted_cancels": 1,
            "refused_messages": {"SLOT_FULL": 2},
            "forwarded_messages": 7,
            "dead_letters": {},
            "lateness": {"bounds_us": [5_000], "counts": [6, 1], "sum_us": 17_000},
            "halves": {"asked": 4, "committed": 0, "rolled_back": 1, "undecided": 0},
        },
        "memory_kill": {"process": "cleaner", "at_ms": DUE_MS - 120_000},
        "quota_refusals": {"token:a": 7},
        "disk": {"free_bytes": 70, "reserve_bytes": 7},
    }
    assert reports[1]["refusing"] == {"reason": "DISK_FULL", "message": "why"}
    assert (reports[1]["role"], reports[1]["cleaner_started_ms"], reports[2]) == (None, None, None)
    assert document["members"][1]["settings_differ"] == "min_insync is 2 at n1, 3 at n2"
    assert document["members"][2]["silent"] == "no answer from n3:7420 within 2.0 s"
    assert document["wheels"][0]["told_by"] == "n1"
    assert document["wheels"][0]["replicas"][1:] == [
        {
            "node": "n2",
            "state": "incomplete",
            "held_seq": 4,
            "lag_frames": 5,
            "lag_ms": 850,
            "told_ago_ms": 70,
        },
        {
            "node": "n3",
            "state": "away",
            "held_seq": None,
            "lag_frames": None,
            "lag_ms": None,
            "told_ago_ms": 65_000,
        },
    ]
    assert document["pending"] == {
        "messages": 123_456,
        "length_bytes": 7,
        "node": "n1",
        "at_least": True,
    }


def test_status_of_all_nodes_for_people(command: Command, node: ScriptedNode) -> None:
    node.describe = answer(three_nodes())
    reported = command("status").out
    for part in (
        "the certificate of n1 expires in 9 d",
        "n1 keeps its earlier certificate: tls_cert /c.pem: expired",
        "at least 123,456 messages, 7 B, each once, by n1",
        "2 in 90 s",
        "1,234 in 2 h",
        "1,017 since 2030-03-17T17:45:10.250Z",
        "n3 is away: no answer from n3:7420 within 2.0 s",
        "n2 has other settings: min_insync is 2 at n1, 3 at n2",
        "n2 takes no messages: DISK_FULL: why",
        "Kafka, as seen by n1: topic orders takes nothing",
        "n1 is verifying its wheels: 4 of 7 are done",
        "n1 waits for 2 frames that it cannot read",
        "n1 answers cancel slowly: 1,700 wait for up to 2 s",
        "n1 was out of memory: its cleaner was killed at 2030-03-17T17:44:",
        "1,204 messages are on 1 node only, n1: wait until they are copied",
        "n1 lacks 12 frames that it should have: its disk lost them or returns an error",
        "the disk of n1 does not delete /data/1763700001.slot and 1,204 more",
        "deleting is 25 min behind: the floor waits for the ledger of n1.1, n2.3",
        "n1 has not published its ledger since 2030-03-17T17:45:40.250Z: AccessDenied",
        "incomplete 5, 850 ms",
        "away, reported 65 s ago",
        "s3://books/n1",
        "4,321",
    ):
        assert part in reported
    assert node.described[-1].all_members


def test_one_fact_is_told_once(command: Command, node: ScriptedNode) -> None:
    """A node that is away does not answer, is not heard, and its copies are behind."""
    node.describe = answer(
        healthy(
            members=[pb.Member(node="n2", silent="no node is reached at n2:7420")],
            wheels=[LAGGING],
        )
    )
    line, *rest = command("status").out.splitlines()
    assert line == "DEGRADED: n2 is away: no node is reached at n2:7420"
    assert not any("n2 is" in each for each in rest)


def test_one_line(command: Command, node: ScriptedNode) -> None:
    node.describe = answer(healthy(cluster_id="shop", pending=pb.Pending(messages=2_000)))
    line = "OK (cluster shop, led by n1, 2,000 pending, 12 ms late)\n"
    assert command("status", "--short") == (0, line, "")


def test_waiting_until_all_is_well(command: Command, node: ScriptedNode) -> None:
    """The first answers are worse; what never gets better ends with the last verdict's code."""
    worse = [pb.DescribeClusterResponse(node="n1"), healthy(wheels=[LAGGING])]
    answers = iter([*worse, healthy(), *worse, *worse, *worse])
    node.describe = lambda *_: next(answers)
    ended = command("status", "--wait", "ok", "--timeout", "30", "--short")
    assert (ended.code, ended.out[:2]) == (0, "OK")
    assert len(node.described) == 3
    ended = command("status", "--wait", "degraded", "--timeout", "30", "--short")
    assert (ended.code, ended.out[:8]) == (0, "DEGRADED")
    node.describe = answer(healthy(wheels=[LAGGING]))
    ended = command("status", "--wait", "ok", "--timeout", "1")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == (
        "error: NOT_REACHED: after 1 s: DEGRADED: the copy of n1.1 on n2 is behind\n"
    )
    ended = command("status", "--wait", "ok", "--timeout", "1", "--server", "127.0.0.1:1")
    assert ended.code == 3
    assert command("status", "--watch", "--check").code == 2


def test_watching_goes_on_until_it_is_interrupted(
    command: Command, node: ScriptedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It outlives a cluster that does not answer for a while."""
    naps = iter([0, None])

    def sleep(_: float) -> None:
        if next(naps) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr("delaywheel_replica.cli.doing.status.time.sleep", sleep)
    node.describe = answer(healthy())
    ended = command("status", "--watch", "--json")
    assert (ended.code, ended.err) == (0, "")
    assert [json.loads(line)["verdict"] for line in ended.out.splitlines()] == ["OK", "OK"]
    naps = iter([0, None])
    down = command("status", "--watch", "--short", "--server", "127.0.0.1:1", "--timeout", "1")
    assert down.out == 2 * "DOWN: no node that was asked answers\n"


def test_an_only_node_is_one_node(command: Command, node: ScriptedNode) -> None:
    node.describe = answer(healthy(min_insync=1))
    assert "acknowledged    when the node has the message\n" in command("status").out


def healthy(**changes: Any) -> pb.DescribeClusterResponse:
    report = pb.MemberReport(role="leading")
    described = pb.DescribeClusterResponse(
        node="n1",
        leader=pb.Leader(node="n1", epoch=3),
        members=[pb.Member(node="n1", reachable=True, accepting=True, report=report)],
        lateness_ms=12,
    )
    described.MergeFrom(pb.DescribeClusterResponse(**changes))
    return described


LAGGING = pb.WheelStatus(
    wheel="n1.1",
    state=pb.WHEEL_STATE_OPEN,
    replicas=[pb.Replica(node="n2", state=pb.REPLICA_STATE_BEHIND)],
)


AT_ITS_RESERVE = pb.MemberReport(refusing=pb.Error(reason="DISK_FULL", message="3 bytes free"))
LETTERS = pb.MemberReport(dead_letters=17)
TROUBLED = pb.MemberReport(
    dead_letters=17,
    unavailable_topics="abc",
    now_ms=60_000,
    unavailable=[
        pb.UnavailableTopic(
            topic="a",
            partitions=[1, 4],
            since_ms=29_000,
            cause="leaderless",
            deferred_messages=1_312,
        )
    ],
)
CUT_OFF = pb.MemberReport(ingress_faults=["in/0 ends before it began"])


@pytest.mark.parametrize(
    ("described", "first_line", "exit_code"),
    [
        (healthy(), "OK", 0),
        (healthy(lateness_ms=61_000), "DEGRADED: messages are late by up to 61 s", 1),
        (healthy(wheels=[LAGGING]), "DEGRADED: the copy of n1.1 on n2 is behind", 1),
        (
            healthy(members=[pb.Member(node="n2", silent="why")]),
            "DEGRADED: n2 is away: why",
            1,
        ),
        (
            healthy(members=[pb.Member(node="n2", reachable=True, report=AT_ITS_RESERVE)]),
            "DEGRADED: n2 takes no messages: DISK_FULL: 3 bytes free",
            1,
        ),
        (healthy(members=[pb.Member(node="n2", reachable=True, report=LETTERS)]), "OK", 0),
        (
            healthy(members=[pb.Member(node="n2", reachable=True, report=TROUBLED)]),
            "DEGRADED: messages for a, b and 1 more topic are deferred, or become dead letters",
            1,
        ),
        (
            healthy(members=[pb.Member(node="n2", reachable=True, report=CUT_OFF)]),
            "DEGRADED: ingress: in/0 ends before it began",
            1,
        ),
    ],
)
def test_the_first_line_is_the_verdict_and_check_exits_with_it(
    command: Command,
    node: ScriptedNode,
    described: pb.DescribeClusterResponse,
    first_line: str,
    exit_code: int,
) -> None:
    node.describe = answer(described)
    for arguments, code in ((("--check",), exit_code), ((), 0)):
        ended = command("status", *arguments)
        assert (ended.code, ended.out.splitlines()[0]) == (code, first_line)
    ended = command("status", "--json", "--check")
    assert (ended.code, ended.document["verdict"]) == (exit_code, first_line.partition(":")[0])


STANDSTILL = pb.Standstill(since_ms=1_900_000_000_000, cause="a cause")


@pytest.mark.parametrize(
    ("changed", "first_line"),
    [
        ("leader", "DOWN: no node leads, so nothing is forwarded"),
        ("accepting", "DOWN: no node takes messages"),
        ("role", "DOWN: n1 leads and rests, so nothing is forwarded"),
        ("standstill", "DOWN: n1 has forwarded nothing since 2030-03-17T17:46:40.000Z: a cause"),
    ],
)
def test_a_cluster_that_takes_or_forwards_nothing_is_down(
    command: Command, node: ScriptedNode, changed: str, first_line: str
) -> None:
    described = healthy()
    if changed == "leader":
        described.ClearField("leader")
    elif changed == "accepting":
        described.members[0].accepting = False
    elif changed == "standstill":
        described.members[0].report.standstill.CopyFrom(STANDSTILL)
    else:
        described.members[0].report.role = "resting"
    node.describe = answer(described)
    ended = command("status", "--check")
    assert (ended.code, ended.out.splitlines()[0]) == (3, first_line)
    assert ("up to 12 ms: no node leads" in ended.out) == (changed == "leader")


@pytest.mark.parametrize(
    ("is_led", "first_line"),
    [
        (True, "DEGRADED: Kafka, as seen by n1, n2: away; messages are late by up to 61 s"),
        (False, "DOWN: Kafka, as seen by n1, n2: away; no node leads, so nothing is forwarded; "),
    ],
)
def test_that_kafka_is_away_stands_before_what_it_brings_about(
    command: Command, node: ScriptedNode, *, is_led: bool, first_line: str
) -> None:
    described = healthy(lateness_ms=61_000)
    described.members[0].report.kafka_error = "away"
    described.members.add().CopyFrom(described.members[0])
    described.members[1].node = "n2"
    if not is_led:
        described.ClearField("leader")
    node.describe = answer(described)
    assert command("status", "--short").out.startswith(first_line)


def test_a_node_alone_at_its_reserve_is_down(command: Command, node: ScriptedNode) -> None:
    described = healthy(refusing=AT_ITS_RESERVE.refusing)
    described.members[0].accepting = False
    node.describe = answer(described)
    ended = command("status", "--check")
    first_line = "DOWN: no node takes messages (n1: DISK_FULL); n1 takes no messages: DISK_FULL: "
    assert (ended.code, ended.out.splitlines()[0]) == (3, f"{first_line}3 bytes free")


def test_for_a_leader_that_was_ahead_it_says_what_to_do(
    command: Command, node: ScriptedNode
) -> None:
    progress = pb.Progress(due_ms=1_900_086_400_000)
    described = healthy(progress=progress)
    described.members[0].report.role = "resting"
    described.members[0].report.now_ms = 1_900_000_000_000
    node.describe = answer(described)
    assert command("status").out.splitlines()[0] == (
        "DOWN: n1 leads and rests until 2030-03-18T17:46:40.000Z (24 h: delaywheel clock set-back),"
        " so nothing is forwarded"
    )


def test_what_was_forwarded_early_is_reported(command: Command, node: ScriptedNode) -> None:
    ahead_ms = 1_900_086_400_000
    node.describe = answer(
        healthy(progress=pb.Progress(due_ms=1_900_000_000_000, set_backs=1, ahead_ms=ahead_ms))
    )
    reported = command("status").out
    assert "set back, so some of what is due up to 2030-03-18T17:46:40.000Z is done" in reported


def test_what_takes_nothing_is_shown_by_partition(command: Command, node: ScriptedNode) -> None:
    troubled = pb.Member(node="n2", reachable=True, report=TROUBLED)
    node.describe = answer(healthy(members=[troubled]))
    assert "a [1, 4] for 31 s, leaderless: 1,312 deferred" in command("status").out
