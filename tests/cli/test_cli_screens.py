"""docs/CLI.md shows what the commands print: at 80 and 120 columns, and through a pipe."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.cli.printing import tables
from support.clients.command import WIDTHS, Command, screen_in_document
from support.clients.fake_service import answer
from support.clients.scripted_node import ScriptedNode

NOW_MS = 1_900_000_000_250
SLOT = NOW_MS // 1_000 + 1_800
IDS = [bytes.fromhex(f"01a1fc514a4f731e9c0d5b2e8f6a71{end}") for end in ("c3", "d4")]
LATER, LATER_MS = "2030-03-17T19:00:00Z", 1_900_004_400_000
HANDLES = [
    f"n1.7:{SLOT}:{one.hex()}:{topic}"
    for one, topic in zip(IDS, ("orders", "baskets.reminders"), strict=True)
]


def cluster() -> pb.DescribeClusterResponse:
    """n1 leads; n3 has just been restarted and is still missing frames."""
    books = "/var/lib/delaywheel/ledger/published"
    members = [
        pb.Member(
            node=node,
            address=f"10.0.0.{number}:7420",
            reachable=True,
            accepting=True,
            complete=True,
            report=pb.MemberReport(
                version="0.1.0",
                role="leading" if number == 1 else "standby",
                now_ms=NOW_MS,
                server_started_ms=NOW_MS - 7_200_000 // number**2,
                cleaner_started_ms=NOW_MS - 7_200_000 // number**2,
                elections=1 if number == 1 else 0,
                in_sync_changes=4,
                ledger=pb.LedgerReport(place=books, lag_frames=1_204 * number),
            ),
        )
        for number, node in enumerate(("n1", "n2", "n3"), start=1)
    ]
    in_sync = pb.REPLICA_STATE_IN_SYNC
    return pb.DescribeClusterResponse(
        cluster_id="shop",
        node="n1",
        version="0.1.0",
        leader=pb.Leader(node="n1", epoch=17),
        members=members,
        min_insync=2,
        wheels=[
            pb.WheelStatus(
                wheel="n1.7",
                node="n1",
                state=pb.WHEEL_STATE_OPEN,
                applied_seq=1_310_442,
                high_watermark=1_310_440,
                progress_seq=1_310_398,
                told_by="n1",
                replicas=[
                    pb.Replica(node="n1", state=in_sync),
                    pb.Replica(node="n2", state=in_sync),
                    pb.Replica(
                        node="n3", state=pb.REPLICA_STATE_BEHIND, lag_frames=5_120, lag_ms=2_400
                    ),
                ],
            ),
            pb.WheelStatus(
                wheel="n1.8",
                node="n1",
                state=pb.WHEEL_STATE_SPARE,
                told_by="n1",
                replicas=[pb.Replica(node=node, state=in_sync) for node in ("n1", "n2", "n3")],
            ),
        ],
        progress=pb.Progress(due_ms=NOW_MS - 60),
        floor=NOW_MS // 1_000 - 180,
        lateness_ms=41,
        pending=pb.Pending(messages=2_481_073, length_bytes=612_804_410, node="n1"),
        now_ms=NOW_MS,
    )


def seconds() -> pb.ListSlotsResponse:
    rows = [
        pb.SlotRow(
            slot=SLOT + number,
            messages=messages,
            length_bytes=messages * 247,
            frames=messages // 40 + 1,
            cancels=messages // 500,
            wheels=3,
            copies=3 if number else 2,
        )
        for number, messages in enumerate((1_204, 38, 1_482_007))
    ]
    return pb.ListSlotsResponse(
        node="n1",
        counted_by=["n1", "n2", "n3"],
        progress=pb.Progress(due_ms=NOW_MS - 60),
        slots=rows,
    )


def messages(*, with_content: bool) -> list[pb.StoredMessage]:
    found = [
        pb.StoredMessage(
            handle=handle,
            id=one,
            due_ms=SLOT * 1_000 + 410,
            topic=topic,
            accepted_at_ms=NOW_MS,
            wheel="n1.7",
            seq=1_310_398,
            state=state,
            key_length_bytes=2,
            value_length_bytes=13,
            headers_length_bytes=6,
        )
        for one, handle, topic, state in zip(
            IDS,
            HANDLES,
            ("orders", "baskets.reminders"),
            (pb.MESSAGE_STATE_PENDING, pb.MESSAGE_STATE_CANCELLED),
            strict=True,
        )
    ]
    for message in found if with_content else ():
        message.key, message.value = b"42", b"still there?\n"
        message.headers.add(name="trace", value=b"\x7f")
    return found


COMMANDS = {
    "delaywheel status": ("status",),
    "delaywheel slots": ("slots",),
    f"delaywheel slot {SLOT}": ("slot", str(SLOT)),
    "delaywheel search --topic orders --key 42": ("search", "--topic", "orders", "--key", "42"),
    f"delaywheel get {HANDLES[0]}": ("get", HANDLES[0]),
    f"delaywheel get {HANDLES[1]}": ("get", HANDLES[1]),
    f"delaywheel reschedule {HANDLES[0]} --to {LATER}": ("reschedule", HANDLES[0], "--to", LATER),
    "delaywheel cancel --topic orders --key 42 --yes": (
        *("cancel", "--topic", "orders", "--key", "42", "--yes"),
    ),
}


def answered(asked: tuple[str, ...]) -> object:
    """The node's answer to a command about messages."""
    match asked[0]:
        case "reschedule":
            handle = f"n1.7:{LATER_MS // 1_000}:{IDS[0].hex()}:orders"
            outcome = pb.RESCHEDULE_OUTCOME_RESCHEDULED
            moved = pb.MessageRescheduled(outcome=outcome, due_ms=LATER_MS, handle=handle)
            return pb.RescheduleResponse(results=[moved])
        case "cancel":
            done = pb.CancelResult(handle=HANDLES[0], outcome=pb.CANCEL_OUTCOME_CANCELLED)
            return pb.CancelManyResponse(results=[done] * 204)
    first, second = messages(with_content=True)
    second.rescheduled_to_ms = LATER_MS
    return pb.GetMessageResponse(message=first if HANDLES[0] in asked else second)


@pytest.fixture
def screen(
    command: Command, node: ScriptedNode, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str], str]:
    node.describe = answer(cluster())
    node.list_slots = answer(seconds())
    node.get_slot = answer(pb.GetSlotResponse(messages=messages(with_content=False)))
    looked = pb.Looked(node="n1", messages=1_483_249, length_bytes=366_362_505)
    node.search = answer(
        pb.SearchResponse(messages=messages(with_content=False)[:1], looked=looked)
    )

    def show(line: str, width: str) -> str:
        monkeypatch.setattr(tables, "terminal_columns", lambda: WIDTHS[width])
        node.script.append(answer(answered(COMMANDS[line])))
        ended = command(*COMMANDS[line])
        node.script.clear()
        assert ended.code == 0
        return ended.out

    return show


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: line.split()[1])
def test_screens_are_as_the_document_shows_them(
    screen: Callable[[str, str], str], line: str, width: str
) -> None:
    assert screen(line, width) == screen_in_document(line, width)


@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: line.split()[1])
def test_nothing_is_wider_than_80_columns_there(
    screen: Callable[[str, str], str], line: str
) -> None:
    assert max(map(len, screen(line, "80 columns").splitlines())) <= 80


def test_a_pipe_gets_a_line_for_each_row(screen: Callable[[str, str], str]) -> None:
    listed = screen(f"delaywheel slot {SLOT}", "a pipe").splitlines()
    assert [line.split()[0] for line in listed] == ["handle", *HANDLES]
    assert len({len(line.split()) for line in listed}) == 1


@pytest.mark.parametrize("width", [1, 20, 40])
def test_on_no_terminal_a_handle_is_folded(
    command: Command, node: ScriptedNode, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr(tables, "terminal_columns", lambda: width)
    node.get_slot = answer(pb.GetSlotResponse(messages=messages(with_content=True)))
    reported = command("slot", str(SLOT), "--content").out
    for whole in (*HANDLES, "2030-03-17T18:16:40.410Z", '"still there?\\n"'):
        assert whole in reported
