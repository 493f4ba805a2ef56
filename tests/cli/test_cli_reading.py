"""What status, slots, slot, get and cancel ask, and the JSON that they print: it is stable."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from typing import Any

import pytest

from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from support.clients.command import Command
from support.clients.fake_service import abort, answer
from support.clients.scripted_node import ScriptedNode

ID = bytes(range(16))
DUE_MS = 1_900_000_000_250
HANDLE = f"n1.3:1900000000:{ID.hex()}"


def stored(*, with_content: bool = True) -> pb.StoredMessage:
    message = pb.StoredMessage(
        handle=HANDLE,
        id=ID,
        due_ms=DUE_MS,
        topic="orders",
        accepted_at_ms=1_899_999_000_000,
        wheel="n1.3",
        seq=7,
        state=pb.MESSAGE_STATE_PENDING,
        key_length_bytes=-1,
        value_length_bytes=2,
        headers_length_bytes=19,
    )
    if with_content:
        message.value = b"\xff\x00"
        message.headers.add(name="a", value=b"x")
        message.headers.add(name="a")
    return message


STORED = {
    "handle": HANDLE,
    "id": ID.hex(),
    "due_ms": DUE_MS,
    "due": "2030-03-17T17:46:40.250Z",
    "topic": "orders",
    "partition": None,
    "timestamp_ms": None,
    "accepted_at_ms": 1_899_999_000_000,
    "wheel": "n1.3",
    "seq": 7,
    "state": "pending",
    "dead_reason": None,
    "rescheduled_to_ms": None,
    "place": None,
    "key_length_bytes": -1,
    "value_length_bytes": 2,
    "headers_length_bytes": 19,
}
CONTENT = {
    "key": None,
    "value": "/wA=",
    "headers": [{"name": "a", "value": "eA=="}, {"name": "a", "value": None}],
}


@pytest.mark.usefixtures("node")
def test_status_as_json(command: Command) -> None:
    assert command("status", "--json").document == {
        "verdict": "OK",
        "causes": [],
        "cluster": "c1",
        "node": "n1",
        "version": "0.1.0",
        "now_ms": 1_900_000_000_200,
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
        "DOWN: no node takes messages; nobody leads, so nothing is forwarded\n"
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
        "DOWN: no node takes messages (n1: NO_WHEEL); nobody"
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
        "verifying_wheels": 3,
        "wheels": 7,
        "ingress_lag": None,
        "ingress_faults": [],
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
        "at least 123,456 messages, 7 bytes, each once, by n1",
        "2 in 90 s",
        "1,234 in 2 h",
        "1,017 since 2030-03-17T17:45:10.250Z",
        "n3 is silent: no answer from n3:7420 within 2.0 s",
        "n3 is not heard by n1",
        "n2 has other settings: min_insync is 2 at n1, 3 at n2",
        "n2 takes no messages: DISK_FULL: why",
        "n1 and Kafka: topic orders takes nothing",
        "n1 is verifying its wheels: 4 of 7 are done",
        "n1 does not publish its ledger since 2030-03-17T17:45:40.250Z: AccessDenied",
        "incomplete 5, 850 ms",
        "away, reported 65 s ago",
        "s3://books/n1",
        "4,321",
    ):
        assert part in reported
    assert node.described[-1].all_members


@pytest.mark.usefixtures("node")
def test_status_for_people(command: Command) -> None:
    reported = command("status").out
    for part in ("c1", "n1 (epoch 17)", "2030-03-17T17:46:40.123Z", "n1.3", "open", "closed"):
        assert part in reported


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
TROUBLED = pb.MemberReport(dead_letters=17, unavailable_topics="abc")
CUT_OFF = pb.MemberReport(ingress_faults=["in/0 ends before it began"])


@pytest.mark.parametrize(
    ("described", "first_line", "exit_code"),
    [
        (healthy(), "OK", 0),
        (healthy(lateness_ms=61_000), "DEGRADED: messages are late by up to 61 s", 1),
        (healthy(wheels=[LAGGING]), "DEGRADED: the copy of n1.1 on n2 is behind", 1),
        (
            healthy(members=[pb.Member(node="n2", silent="why")]),
            "DEGRADED: n2 is silent: why; n2 is not heard by n1",
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
            "DEGRADED: messages for a, b and 1 more topics become dead letters",
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


@pytest.mark.parametrize(
    ("changed", "first_line"),
    [
        ("leader", "DOWN: nobody leads, so nothing is forwarded"),
        ("accepting", "DOWN: no node takes messages"),
        ("role", "DOWN: n1 leads and rests, so nothing is forwarded"),
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
    else:
        described.members[0].report.role = "resting"
    node.describe = answer(described)
    ended = command("status", "--check")
    assert (ended.code, ended.out.splitlines()[0]) == (3, first_line)
    assert ("up to 12 ms: nobody leads" in ended.out) == (changed == "leader")


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


def test_nobody_answering_is_down(command: Command) -> None:
    reported = command("status", "--server", "127.0.0.1:1")
    assert reported.code == 3
    assert reported.out == "DOWN: no node that was asked answers\n"


def slots_of(*slots: int) -> list[pb.SlotRow]:
    return [
        pb.SlotRow(slot=slot, messages=3, length_bytes=500, frames=2, cancels=1, wheels=1, copies=2)
        for slot in slots
    ]


def test_slots_as_json(command: Command, node: ScriptedNode) -> None:
    node.list_slots = answer(
        pb.ListSlotsResponse(
            slots=slots_of(1_900_000_000),
            node="n1",
            counted_by=["n1", "n2"],
            silent=[pb.Silence(node="n3", why="no answer")],
            wheels=[pb.WheelStatus(wheel="n1.3", node="n1", state=pb.WHEEL_STATE_SPARE)],
            progress=pb.Progress(due_ms=5, position="n1.3/1/2", set_backs=1, ahead_ms=8),
        )
    )
    document = command("slots", "--json").document
    assert document.pop("wheels")[0]["state"] == "spare"
    assert document == {
        "node": "n1",
        "counted_by": ["n1", "n2"],
        "silent": [{"node": "n3", "why": "no answer"}],
        "progress": {"due_ms": 5, "position": "n1.3/1/2", "set_backs": 1, "ahead_ms": 8},
        "slots": [
            {
                "slot": 1_900_000_000,
                "messages": 3,
                "length_bytes": 500,
                "frames": 2,
                "cancels": 1,
                "wheels": 1,
                "copies": 2,
            }
        ],
        "next_slot": None,
    }
    ended = command("slots")
    assert "3 messages in 1 second, each counted once, by n1, n2\n" in ended.out
    assert ended.err == "not counted by n3: no answer\n"
    assert node.asked[-1].all_members


def test_slots_asks_page_after_page(command: Command, node: ScriptedNode) -> None:
    def page(_node: object, request: pb.ListSlotsRequest, _context: object) -> object:
        end = min(request.from_slot + 2, request.to_slot)
        rows = slots_of(*range(request.from_slot, end))
        following = end if end < request.to_slot else None
        return pb.ListSlotsResponse(node="n1", slots=rows, next_slot=following)

    node.list_slots = page
    document = command("slots", "--from", "100", "--to", "105", "--json").document
    assert [row["slot"] for row in document["slots"]] == [100, 101, 102, 103, 104]
    assert document["next_slot"] is None
    document = command("slots", "--from", "100", "--to", "105", "--limit", "3", "--json").document
    assert [row["slot"] for row in document["slots"]] == [100, 101, 102]
    assert document["next_slot"] == 103
    assert "--from 103" in command("slots", "--from", "100", "--to", "105", "--limit", "3").err


def test_who_missed_a_page_has_not_counted(command: Command, node: ScriptedNode) -> None:
    def page(_node: object, request: pb.ListSlotsRequest, _context: object) -> object:
        is_first = request.from_slot == 100
        return pb.ListSlotsResponse(
            node="n1",
            slots=slots_of(request.from_slot),
            counted_by=["n1", "n2"] if is_first else ["n1"],
            silent=[] if is_first else [pb.Silence(node="n2", why="died")],
            next_slot=101 if is_first else None,
        )

    node.list_slots = page
    document = command("slots", "--from", "100", "--json").document
    assert [row["slot"] for row in document["slots"]] == [100, 101]
    assert document["counted_by"] == ["n1"]
    assert document["silent"] == [{"node": "n2", "why": "died"}]


def test_slots_takes_times(command: Command, node: ScriptedNode) -> None:
    command("slots", "--from", "2030-03-17T17:46:40Z", "--to", "2030-03-17T17:46:41.5Z")
    request = node.asked[-1]
    assert (request.from_slot, request.to_slot) == (1_900_000_000, 1_900_000_001)


def test_slot_as_json(command: Command, node: ScriptedNode) -> None:
    node.get_slot = answer(pb.GetSlotResponse(messages=[stored(with_content=False)]))
    assert command("slot", "1900000000", "--json").document == {
        "slot": 1_900_000_000,
        "messages": [STORED],
        "complete": True,
    }


def test_slot_with_content(command: Command, node: ScriptedNode) -> None:
    node.get_slot = answer(pb.GetSlotResponse(messages=[stored()]))
    document = command("slot", "1900000000", "--content", "--json").document
    assert document["messages"] == [STORED | CONTENT]
    assert node.asked[-1].with_content
    assert "0xff00" in command("slot", "1900000000", "--content").out


def test_slot_asks_page_after_page_up_to_the_limit(command: Command, node: ScriptedNode) -> None:
    def page(_node: object, request: pb.GetSlotRequest, _context: object) -> object:
        number = int(request.page_token or 0)
        return pb.GetSlotResponse(messages=[stored()] * 2, next_page_token=str(number + 1))

    node.get_slot = page
    document = command("slot", "1900000000", "--limit", "5", "--json").document
    assert (len(document["messages"]), document["complete"]) == (5, False)
    assert [request.page_token for request in node.asked] == ["", "1", "2"]


def test_search_asks_page_after_page_up_to_the_limit(command: Command, node: ScriptedNode) -> None:
    def page(_node: object, request: pb.SearchRequest, _context: object) -> object:
        number = int(request.page_token or 0)
        looked = pb.Looked(node="n1", messages=10, length_bytes=100, to_slot=1_900_000_000 + number)
        found = [stored()] * (2 if number else 0)  # the first call finds nothing in what it reads
        return pb.SearchResponse(messages=found, next_page_token=str(number + 1), looked=looked)

    node.search = page
    asked = ("--topic", "orders", "--key", "42", "--header", "trip=7", "--from", "1900000000000")
    ended = command("search", *asked, "--limit", "3", "--content", "--json")
    assert ended.document["messages"] == [STORED | CONTENT] * 4
    assert ended.document["looked"] == {
        "node": "n1",
        "messages": 30,
        "length_bytes": 300,
        "to_slot": 1_900_000_002,
        "incomplete": False,
    }
    assert [(each.page_token, each.page_size) for each in node.asked] == [
        ("", 3),
        ("1", 3),
        ("2", 1),
    ]
    wanted = node.asked[0].filter
    assert (wanted.topic, wanted.key, wanted.from_ms) == ("orders", b"42", 1_900_000_000_000)
    assert (wanted.header.name, wanted.header.value) == ("trip", b"7")
    assert not wanted.HasField("to_ms")


def test_cancel_of_many_lists_asks_and_reports(
    command: Command, node: ScriptedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def behave(_node: object, request: pb.CancelManyRequest, _context: object) -> object:
        cancelled, late = pb.CANCEL_OUTCOME_CANCELLED, pb.CANCEL_OUTCOME_TOO_LATE
        pending = pb.CANCEL_OUTCOME_UNSPECIFIED
        outcomes = [pending, pending] if request.dry_run else [cancelled, late]
        results = [
            pb.CancelResult(handle=HANDLE, due_ms=1_900_000_000_000, topic="t", outcome=outcome)
            for outcome in outcomes
        ]
        looked = pb.Looked(node="n1", messages=9, length_bytes=99)
        return pb.CancelManyResponse(results=results, looked=looked)

    node.otherwise_many = behave
    monkeypatch.setattr("sys.stdin", io.StringIO("n\ny\n"))
    refused = command("cancel", "--topic", "t")
    assert refused.code == 1
    assert "Withdraw 2 messages? [y/N]" in refused.err
    assert HANDLE in refused.err
    assert [each.dry_run for each in node.many] == [True]
    ended = command("cancel", "--topic", "t")
    assert ended.code == 1
    assert ended.out == "1 CANCELLED\n1 too late: nothing was done\n"
    assert "NOT_ALL_CANCELLED: 1 message of 2 may be delivered" in ended.err
    assert [each.dry_run for each in node.many] == [True, True, False]
    dry = command("cancel", "--topic", "t", "--dry-run", "--json")
    assert dry.code == 0
    assert dry.document["messages"][0]["outcome"] == "pending"
    assert dry.document["looked"]["messages"] == 9


def test_of_many_that_were_rescheduled_those_found_elsewhere_are_done(
    command: Command, node: ScriptedNode
) -> None:
    moved, done = pb.CANCEL_OUTCOME_RESCHEDULED, pb.CANCEL_OUTCOME_CANCELLED
    rows = [(17, 1, moved), (19, 1, done)]

    def behave(_node: object, _request: pb.CancelManyRequest, _context: object) -> object:
        results = [
            pb.CancelResult(
                handle=f"n1.7:{slot}:{number:032x}", due_ms=slot * 1000, outcome=outcome
            )
            for slot, number, outcome in rows
        ]
        return pb.CancelManyResponse(results=results)

    node.otherwise_many = behave
    assert command("cancel", "--topic", "t", "--yes").out == "1 CANCELLED\n"
    rows.append((17, 2, moved))
    ended = command("cancel", "--topic", "t", "--yes")
    assert ended.out == "1 CANCELLED\n1 with another due by now: look again\n"
    assert "NOT_ALL_CANCELLED: 1 message of 3 may be delivered" in ended.err
    # Only what would be withdrawn is listed.
    rows.append((18, 3, pb.CANCEL_OUTCOME_UNSPECIFIED))
    listed = command("cancel", "--topic", "t", "--dry-run").err
    assert f"n1.7:18:{3:032x}  " in listed
    assert "n1.7:17:" not in listed


@pytest.mark.parametrize("more", [("--topic", "t"), ("--dry-run",), ("--from", "now")])
def test_cancel_means_one_message_or_what_many_have(
    command: Command, more: tuple[str, ...]
) -> None:
    ended = command("cancel", HANDLE, *more)
    assert ended.code == 2
    assert "HANDLE_AMBIGUOUS" in ended.err


def test_search_reports_what_was_not_looked_at(command: Command, node: ScriptedNode) -> None:
    looked = pb.Looked(node="n1", messages=1, length_bytes=1, to_slot=1_900_000_000)
    looked.incomplete = True
    node.search = answer(pb.SearchResponse(messages=[stored()], looked=looked, next_page_token="x"))
    ended = command("search", "--limit", "1")
    assert HANDLE in ended.out
    assert "looked at 1 message, 1 byte, on n1" in ended.err
    assert "not looked at: what is due from 2030-03-17T17:46:40Z on" in ended.err
    assert "n1 lacks something" in ended.err


def test_get_as_json(command: Command, node: ScriptedNode) -> None:
    node.script.append(answer(pb.GetMessageResponse(message=stored())))
    assert command("get", HANDLE, "--json").document == STORED | CONTENT
    assert node.gets[-1].message.handle == HANDLE


def test_get_for_people(command: Command, node: ScriptedNode) -> None:
    node.script.append(answer(pb.GetMessageResponse(message=stored())))
    reported = command("get", HANDLE).out
    for part in (HANDLE, "pending", "orders", "0xff00", '"x"', "null"):
        assert part in reported


@pytest.mark.parametrize(
    ("state", "reason", "reported"),
    [
        (pb.MESSAGE_STATE_DEAD_LETTERED, "KEY_MISSING", "a dead letter: KEY_MISSING"),
        (pb.MESSAGE_STATE_DELIVERED, "", "delivered"),
        (pb.MESSAGE_STATE_DONE, "", "delivered or a dead letter, which is not known here"),
    ],
)
def test_get_of_what_is_done(
    command: Command, node: ScriptedNode, state: int, reason: str, reported: str
) -> None:
    message = stored()
    message.state, message.dead_reason = state, reason  # type: ignore[assignment]
    node.script += [answer(pb.GetMessageResponse(message=message))] * 2
    assert reported in command("get", HANDLE).out
    assert command("get", HANDLE, "--json").document["dead_reason"] == (reason or None)


@pytest.mark.parametrize("at", [str(DUE_MS), "2030-03-17T17:46:40.250Z"])
def test_message_is_named_by_id_and_due(command: Command, node: ScriptedNode, at: str) -> None:
    command("get", "--id", ID.hex(), "--at", at)
    command("cancel", "--id", ID.hex(), "--at", at)
    for ref in (node.gets[-1].message, node.cancels[-1].message):
        assert (ref.id_and_due.id, ref.id_and_due.due_ms) == (ID, DUE_MS)


@pytest.mark.usefixtures("node")
@pytest.mark.parametrize(
    "named",
    [(), ("--id", ID.hex()), ("--at", str(DUE_MS)), (HANDLE, "--id", ID.hex()), ("nonsense",)],
)
@pytest.mark.parametrize("name", ["get", "cancel"])
def test_message_must_be_named_in_one_way(
    command: Command, name: str, named: tuple[str, ...]
) -> None:
    if (name, named) == ("cancel", ("--id", ID.hex())):
        return  # all that have it
    ended = command(name, *named)
    assert ended.code == 2
    assert "HANDLE_" in ended.err


def test_get_of_what_is_not_there(command: Command, node: ScriptedNode) -> None:
    node.script.append(abort(Reason.MESSAGE_NOT_FOUND))
    ended = command("get", HANDLE)
    assert ended.code == 1
    assert ended.err.startswith("error: MESSAGE_NOT_FOUND: ")


@pytest.mark.usefixtures("node")
def test_cancelled_is_exit_code_0(command: Command) -> None:
    ended = command("cancel", HANDLE, "--json")
    assert (ended.code, ended.document) == (
        0,
        {"outcome": "CANCELLED", "rescheduled_to_ms": None},
    )
    assert command("cancel", HANDLE).out.startswith("CANCELLED")


@pytest.mark.parametrize("outcome", ["ALREADY_DELIVERED", "TOO_LATE", "NOT_FOUND"])
def test_not_cancelled_is_exit_code_1_and_named(
    command: Command, node: ScriptedNode, outcome: str
) -> None:
    number = pb.CancelOutcome.Value(f"CANCEL_OUTCOME_{outcome}")
    node.script.append(answer(pb.CancelResponse(outcome=number)))
    ended = command("cancel", HANDLE, "--json")
    assert (ended.code, ended.document) == (1, {"outcome": outcome, "rescheduled_to_ms": None})
    assert f"error: {outcome}" in ended.err


def test_what_was_rescheduled_is_reported_with_its_due(
    command: Command, node: ScriptedNode
) -> None:
    outcome = pb.CANCEL_OUTCOME_RESCHEDULED
    moved = stored()
    moved.state, moved.rescheduled_to_ms = pb.MESSAGE_STATE_CANCELLED, 1_900_000_060_000
    reported = [
        answer(pb.CancelResponse(outcome=outcome, due_ms=moved.rescheduled_to_ms)),
        answer(pb.GetMessageResponse(message=moved)),
    ]
    node.script += reported[:1]
    ended = command("cancel", HANDLE)
    assert ended.code == 1
    assert "RESCHEDULED: the message was not withdrawn: it is due 2030-03-17T17:47:40" in ended.err
    node.script += reported[:1]
    document = command("cancel", HANDLE, "--json").document
    assert document == {"outcome": "RESCHEDULED", "rescheduled_to_ms": moved.rescheduled_to_ms}
    node.script += reported[1:]
    assert command("get", HANDLE, "--json").document["rescheduled_to_ms"] == 1_900_000_060_000


def test_next_address_is_asked_when_one_does_not_answer(
    command: Command, node: ScriptedNode
) -> None:
    ended = command("status", "--server", f"127.0.0.1:1,{node.address}", "--json")
    assert ended.document["node"] == "n1"


def test_produce_sends_all_that_was_given(command: Command, node: ScriptedNode) -> None:
    due = datetime.fromtimestamp(DUE_MS // 1000, UTC)
    ended = command(
        *("produce", "orders", "hello", "--key", "k", "--at", due.isoformat()),
        *("--header", "a=1", "--header", "a", "--id", ID.hex()),
        *("--partition", "2", "--timestamp", "1700000000000", "--json"),
    )
    assert ended.document == {
        "handle": f"fake.1:1900000000:{ID.hex()}",
        "id": ID.hex(),
        "due_ms": DUE_MS // 1000 * 1000,
    }
    [[row]] = node.sent
    assert (row.topic, row.key, row.value) == ("orders", b"k", b"hello")
    assert row.headers == (("a", b"1"), ("a", None))
    assert (row.partition, row.timestamp_ms) == (2, 1_700_000_000_000)


@pytest.mark.parametrize(
    ("at", "reported"),
    [
        ("1795337599", "seconds"),
        ("2020-01-01T00:00:00Z", "--past-ok"),
        ("1577836800000", "--past-ok"),
    ],
)
def test_a_due_that_cannot_be_meant_is_not_sent(
    command: Command, node: ScriptedNode, at: str, reported: str
) -> None:
    ended = command("produce", "orders", "x", "--at", at)
    assert ended.code == 2
    assert reported in ended.err
    assert node.sent == []


def test_who_means_a_past_due_says_so(command: Command, node: ScriptedNode) -> None:
    ended = command("produce", "orders", "x", "--at", "2020-01-01T00:00:00Z", "--past-ok", "--json")
    assert ended.code == 0
    assert ended.document["due_ms"] > DUE_MS - 10 * 365 * 86_400_000
    assert len(node.sent) == 1


def test_produce_with_a_level(command: Command, node: ScriptedNode) -> None:
    ended = command("produce", "orders", "--level", "5s")
    [[row]] = node.sent
    assert row.value is None
    assert (ended.code, ended.out) == (0, f"fake.1:{row.due_ms // 1_000}:{row.id.hex()}\n")
    assert ended.err.startswith("due 20")


@pytest.mark.usefixtures("node")
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("orders", "v"), "DUE_MISSING"),
        (("orders", "v", "--delay", "5s", "--level", "5s"), "DUE_AMBIGUOUS"),
        (("or ders", "v", "--delay", "5s"), "TOPIC_INVALID"),
        (("orders", "v", "--delay", "5s", "--header", "dw-id=1"), "HEADER_RESERVED"),
    ],
)
def test_message_that_cannot_be_is_wrong_usage(
    command: Command, arguments: tuple[str, ...], reason: str
) -> None:
    ended = command("produce", *arguments)
    assert ended.code == 2
    assert ended.err.startswith(f"error: {reason}: ")


def test_refused_message_is_exit_code_1(command: Command, node: ScriptedNode) -> None:
    node.script.append(abort(Reason.DUE_BEYOND_SPAN))
    ended = command("produce", "orders", "v", "--delay", "30d")
    assert ended.code == 1
    assert ended.err.startswith("error: DUE_BEYOND_SPAN: ")


def test_reschedule_prints_the_handle_from_now_on(command: Command, node: ScriptedNode) -> None:
    ended = command("reschedule", HANDLE, "--to", "1900000060000")
    assert (ended.code, ended.out) == (0, f"a.1:1900000060:{'0' * 32}\n")
    assert "due 2030-03-17T17:47:40.000Z" in ended.err
    assert node.reschedules[-1].deliver_at_ms == 1_900_000_060_000
    late = pb.RescheduleResponse(outcome=pb.RESCHEDULE_OUTCOME_TOO_LATE)
    node.script.append(answer(late))
    ended = command("reschedule", HANDLE, "--to", "1900000060000", "--json")
    assert ended.code == 1
    assert ended.document == {"outcome": "TOO_LATE", "handle": None, "due_ms": None}
    assert "TOO_LATE: the message has no other due" in ended.err
