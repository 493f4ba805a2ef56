"""Requests and JSON output of produce, cancel and reschedule; the JSON is stable."""

from __future__ import annotations

import io
from datetime import UTC, datetime

import pytest

from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from support.clients.command import Command
from support.clients.fake_service import abort, answer, cancelled, rescheduled
from support.clients.scripted_node import ScriptedNode
from support.clients.stored import DUE_MS, HANDLE, ID, stored


def test_cancel_of_many_lists_asks_and_reports(
    command: Command, node: ScriptedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def behave(_node: object, request: pb.CancelManyRequest, _context: object) -> object:
        cancelled, late = pb.CANCEL_OUTCOME_CANCELLED, pb.CANCEL_OUTCOME_TOO_LATE
        pending = pb.CANCEL_OUTCOME_UNSPECIFIED
        deferred = pb.CANCEL_OUTCOME_ALREADY_DELIVERED
        outcomes = [pending] * 3 if request.dry_run else [cancelled, late, deferred]
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
    assert "Cancel 3 messages? [y/N] \nerror: NOT_CONFIRMED: " in refused.err
    assert HANDLE in refused.err
    assert [each.dry_run for each in node.many] == [True]
    ended = command("cancel", "--topic", "t")
    assert ended.code == 1
    assert ended.out == (
        "1 CANCELLED\n1 too late: nothing was done\n1 delivered, deferred or a dead letter before\n"
    )
    assert "NOT_ALL_CANCELLED: 2 messages of 3 may be delivered" in ended.err
    assert [each.dry_run for each in node.many] == [True, True, False]
    dry = command("cancel", "--topic", "t", "--dry-run", "--json")
    assert dry.code == 0
    assert dry.document["messages"][0]["outcome"] == "pending"
    assert dry.document["looked"]["messages"] == 9


def test_all_are_cancelled_unless_a_limit_is_given(command: Command, node: ScriptedNode) -> None:
    """Exit code 0 means that nothing was left out, or no more was asked for."""

    def behave(_node: object, request: pb.CancelManyRequest, _context: object) -> object:
        first = int(request.page_token or 0)
        results = [
            pb.CancelResult(
                handle=f"n1.7:17:{number:032x}:orders",
                due_ms=17_000,
                topic="t",
                outcome=pb.CANCEL_OUTCOME_CANCELLED,
                cancelled_before=number < 5,
            )
            for number in range(first, min(first + request.limit, 1_500))
        ]
        end = first + len(results)
        looked = pb.Looked(node="n1", to_slot=17 if end < 1_500 else None)
        token = str(end) if end < 1_500 else ""
        return pb.CancelManyResponse(results=results, next_page_token=token, looked=looked)

    node.otherwise_many = behave
    ended = command("cancel", "--topic", "t", "--yes")
    assert (ended.code, ended.out) == (0, "1,495 CANCELLED\n5 cancelled before\n")
    ended = command("cancel", "--topic", "t", "--yes", "--limit", "10")
    assert (ended.code, ended.out) == (0, "10 CANCELLED\n5 cancelled before\n")
    assert "not examined" in ended.err
    looked = pb.Looked(node="n1", incomplete=True)
    node.otherwise_many = answer(pb.CancelManyResponse(looked=looked))
    ended = command("cancel", "--topic", "t", "--yes")
    assert ended.code == 1
    assert "NOT_ALL_EXAMINED" in ended.err


@pytest.mark.parametrize(
    ("outcomes", "incomplete", "reason"),
    [((), True, "NOT_ALL_EXAMINED"), ((pb.CANCEL_OUTCOME_TOO_LATE,), False, "NOT_ALL_CANCELLED")],
)
@pytest.mark.parametrize("flags", [(), ("--yes",)])
def test_where_nothing_is_pending_the_exit_code_is_that_of_a_cancel(
    command: Command,
    node: ScriptedNode,
    outcomes: tuple[pb.CancelOutcome.ValueType, ...],
    reason: str,
    flags: tuple[str, ...],
    *,
    incomplete: bool,
) -> None:
    results = [pb.CancelResult(handle=HANDLE, due_ms=17_000, outcome=each) for each in outcomes]
    looked = pb.Looked(node="n1", incomplete=incomplete)
    node.otherwise_many = answer(pb.CancelManyResponse(results=results, looked=looked))
    ended = command("cancel", "--topic", "t", *flags)
    assert (ended.code, reason in ended.err) == (1, True)


def test_of_many_that_were_rescheduled_those_found_elsewhere_are_done(
    command: Command, node: ScriptedNode
) -> None:
    moved, done = pb.CANCEL_OUTCOME_RESCHEDULED, pb.CANCEL_OUTCOME_CANCELLED
    rows = [(17, 1, moved), (19, 1, done)]

    def behave(_node: object, _request: pb.CancelManyRequest, _context: object) -> object:
        results = [
            pb.CancelResult(
                handle=f"n1.7:{slot}:{number:032x}:orders", due_ms=slot * 1000, outcome=outcome
            )
            for slot, number, outcome in rows
        ]
        return pb.CancelManyResponse(results=results)

    node.otherwise_many = behave
    assert command("cancel", "--topic", "t", "--yes").out == "1 CANCELLED\n"
    rows.append((17, 2, moved))
    ended = command("cancel", "--topic", "t", "--yes")
    assert (
        ended.out
        == "1 CANCELLED\n1 rescheduled, not found at the new due: delivered, or look again\n"
    )
    assert "NOT_ALL_CANCELLED: 1 message of 3 may be delivered" in ended.err
    # Only what would be withdrawn is listed.
    rows.append((18, 3, pb.CANCEL_OUTCOME_UNSPECIFIED))
    listed = command("cancel", "--topic", "t", "--dry-run").err
    assert f"n1.7:18:{3:032x}:orders  " in listed
    assert "n1.7:17:" not in listed


@pytest.mark.parametrize("more", [("--topic", "t"), ("--dry-run",), ("--from", "now")])
def test_cancel_means_one_message_or_what_many_have(
    command: Command, more: tuple[str, ...]
) -> None:
    ended = command("cancel", HANDLE, *more)
    assert ended.code == 2
    assert "HANDLE_AMBIGUOUS" in ended.err


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
    node.script.append(cancelled(number))
    ended = command("cancel", HANDLE, "--json")
    assert (ended.code, ended.document) == (1, {"outcome": outcome, "rescheduled_to_ms": None})
    assert f"error: {outcome}" in ended.err
    node.script.append(rescheduled(pb.RescheduleOutcome.Value(f"RESCHEDULE_OUTCOME_{outcome}")))
    of_reschedule = command("reschedule", HANDLE, "--to", "1900000060000")
    assert of_reschedule.err == ended.err
    assert ("deferred" in ended.err) == (outcome == "ALREADY_DELIVERED")


def test_what_was_rescheduled_is_reported_with_its_due(
    command: Command, node: ScriptedNode
) -> None:
    outcome = pb.CANCEL_OUTCOME_RESCHEDULED
    moved = stored()
    moved.state, moved.rescheduled_to_ms = pb.MESSAGE_STATE_CANCELLED, 1_900_000_060_000
    reported = [
        cancelled(outcome, moved.rescheduled_to_ms),
        answer(pb.GetMessageResponse(message=moved)),
    ]
    node.script += reported[:1]
    ended = command("cancel", HANDLE)
    assert ended.code == 1
    assert (
        "RESCHEDULED: it is not cancelled: it was rescheduled to 2030-03-17T17:47:40" in ended.err
    )
    node.script += reported[:1]
    document = command("cancel", HANDLE, "--json").document
    assert document == {"outcome": "RESCHEDULED", "rescheduled_to_ms": moved.rescheduled_to_ms}
    node.script += reported[1:]
    assert command("get", HANDLE, "--json").document["rescheduled_to_ms"] == 1_900_000_060_000


def test_produce_sends_all_that_was_given(command: Command, node: ScriptedNode) -> None:
    due = datetime.fromtimestamp(DUE_MS // 1000, UTC)
    ended = command(
        *("produce", "orders", "hello", "--key", "k", "--at", due.isoformat()),
        *("--header", "a=1", "--header", "a", "--id", ID.hex()),
        *("--partition", "2", "--timestamp", "1700000000000", "--json"),
    )
    assert ended.document == {
        "handle": f"fake.1:1900000000:{ID.hex()}:orders",
        "id": ID.hex(),
        "due_ms": DUE_MS // 1000 * 1000,
        "id_checked": False,  # this node says nothing of it, as one of an earlier release
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
    assert (ended.code, ended.out) == (0, f"fake.1:{row.due_ms // 1_000}:{row.id.hex()}:orders\n")
    assert ended.err.startswith("due 20")


@pytest.mark.usefixtures("node")
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "USAGE: say which TOPIC"),
        (("orders", "v"), "USAGE: say when it is due: one of --delay, --at and --level"),
        (("orders", "v", "--delay", "5s", "--level", "5s"), "USAGE: say when it is due"),
        (("or ders", "v", "--delay", "5s"), "TOPIC_INVALID: "),
        (("orders", "v", "--delay", "5s", "--header", "dw-id=1"), "HEADER_RESERVED: "),
    ],
)
def test_message_that_cannot_be_is_wrong_usage(
    command: Command, arguments: tuple[str, ...], reason: str
) -> None:
    ended = command("produce", *arguments)
    assert ended.code == 2
    assert ended.err.startswith(f"error: {reason}")


@pytest.mark.usefixtures("node")
def test_a_value_may_begin_with_a_minus_and_a_digit(command: Command) -> None:
    ended = command("produce", "orders", "v", "--delay", "-5s")
    assert ended.code == 2
    assert "--delay: duration '-5s': not numbers with d, h, m" in ended.err
    assert command("produce", "orders", "-5", "--key", "-7d", "--delay", "1m").code == 0


def test_refused_message_is_exit_code_1(command: Command, node: ScriptedNode) -> None:
    node.script.append(abort(Reason.DUE_BEYOND_SPAN))
    ended = command("produce", "orders", "v", "--delay", "30d")
    assert ended.code == 1
    assert ended.err.startswith("error: DUE_BEYOND_SPAN: ")


def test_reschedule_prints_the_handle_from_now_on(command: Command, node: ScriptedNode) -> None:
    ended = command("reschedule", HANDLE, "--to", "1900000060000")
    assert (ended.code, ended.out) == (0, f"a.1:1900000060:{'0' * 32}:orders\n")
    assert ended.err == "due 2030-03-17T17:47:40.000Z\n"
    assert node.reschedules[-1].messages[0].deliver_at_ms == 1_900_000_060_000
    for _ in range(5):  # times from now have microseconds
        assert command("reschedule", HANDLE, "--to", "now+1h").err.count("\n") == 1
    moved = pb.MessageRescheduled(
        outcome=pb.RESCHEDULE_OUTCOME_RESCHEDULED, handle=HANDLE, due_ms=DUE_MS
    )
    node.script.append(answer(pb.RescheduleResponse(results=[moved])))
    ended = command("reschedule", HANDLE, "--to", "1900000060000")
    assert (ended.code, ended.out) == (0, f"{HANDLE}\n")
    assert "not the due asked for" in ended.err
    node.script.append(rescheduled(pb.RESCHEDULE_OUTCOME_TOO_LATE))
    ended = command("reschedule", HANDLE, "--to", "1900000060000", "--json")
    assert ended.code == 1
    assert ended.document == {"outcome": "TOO_LATE", "handle": None, "due_ms": None}
    assert "TOO_LATE: nothing was done: it is about to be delivered, or was" in ended.err
