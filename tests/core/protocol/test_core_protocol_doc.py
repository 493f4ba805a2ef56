"""docs/PROTOCOL.md says what the code's own tables say."""

from dataclasses import replace
from pathlib import Path

import pytest

from delaywheel.identity import WheelId
from delaywheel_replica.core.election import machine as election
from delaywheel_replica.core.election.events import ENDINGS, TRANSITIONS, ElectionPhase
from delaywheel_replica.core.leader.cancel import (
    CancelDecision,
    CancelView,
    after_writing,
    before_writing,
)
from delaywheel_replica.core.leader.closing import AnswersWanted, Close, closing, wheels_to_close
from delaywheel_replica.core.leader.floor import FRAME_GATES
from delaywheel_replica.core.leader.halves import HalfRows
from delaywheel_replica.core.leader.holders import takeable
from delaywheel_replica.core.leader.lost_frames import Sought, frames_lost
from delaywheel_replica.core.leader.registration import MAX_WHEELS, Registered, register
from delaywheel_replica.core.protocol import control
from delaywheel_replica.core.protocol import status_files as status
from delaywheel_replica.core.protocol.control import (
    REMOVED,
    ROLLED_BACK,
    ControlState,
    IngressRecord,
    NodeRecord,
)
from delaywheel_replica.core.protocol.frames import FrameRange
from delaywheel_replica.core.protocol.heartbeat import Fence, Heartbeat, Promise
from delaywheel_replica.core.protocol.progress import (
    MOST_AHEAD,
    Done,
    Position,
    Progress,
    SetBackRefusal,
)
from delaywheel_replica.core.protocol.reschedules import MessageKey
from delaywheel_replica.core.protocol.transaction_outcomes import ACTIONS, VERDICTS, LibraryAnswer
from support.core.half_ends import HalfEnd, ends
from support.core.values import heartbeat, looked_for, wheel_heartbeat, wheel_record_of

ROOT = Path(__file__).parents[3]
DOC = (ROOT / "docs" / "PROTOCOL.md").read_text(encoding="utf-8")
A1 = WheelId("a", 1)


def table(first_column: str) -> list[list[str]]:
    """The rows under the header that begins with this column."""
    lines = DOC.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    rows = []
    for line in [lines[start], *lines[start + 2 :]]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_modules() -> None:
    core = ROOT / "replica" / "delaywheel_replica" / "core"
    there = {path.relative_to(core).as_posix() for path in core.rglob("*.py")}
    there -= {name for name in there if name.endswith(("__init__.py", "codec.py"))}
    named = {name.strip(" `") for row in table("about")[1:] for name in row[1].split(",")}
    assert named == there


def test_keys_of_the_control_topic() -> None:
    written = [
        control.progress_record(Progress(0, None))[0],
        control.leader_record(0, "a", "t")[0].replace("0", "<i>"),
        control.left_out_record(control.LeftOut())[0],
        control.node_record("<id>", NodeRecord("s", 0))[0],
        control.wheel_record(A1, wheel_record_of())[0].replace("a.1", "<id>"),
        control.lost_record(FrameRange(A1, 7, 9))[0].replace("a.1/7", "<wheel>/<seq>"),
        control.reschedule_record(MessageKey(bytes(16), 7, "orders"), None)[0].replace(
            f"{bytes(16).hex()}/7/orders", "<id>/<due>/<topic>"
        ),
        control.ingress_record(("<topic>", 0), IngressRecord("", 0))[0].replace("0", "<partition>"),
        control.needs_record(control.CONTROL_VERSION)[0],
        control.OPENING[0],
    ]
    assert [row[0].strip("`") for row in table("key")[1:]] == written


def test_phases() -> None:
    rows = table("phase | reported as")[1:]
    assert [(row[0], row[1]) for row in rows] == [(p.value, p.role.value) for p in ElectionPhase]


def test_transitions() -> None:
    reported = {
        (ElectionPhase(phase), event): frozenset(
            ElectionPhase(name) for name in following.split(", ")
        )
        for phase, event, following in table("phase | event")[1:]
    }
    assert reported == {
        (phase, event.__name__): following for (phase, event), following in TRANSITIONS.items()
    }


def test_endings() -> None:
    words = {True: "yes", False: "no"}
    assert table("reason")[1:] == [
        [reason.value, *(words[flag] for flag in (e.doubles, e.rivals, e.stands_at_once, e.yields))]
        for reason, e in ENDINGS.items()
    ]


def test_times() -> None:
    assert [int(row[1]) for row in table("what | ms")[1:]] == [
        election.MIN_SILENCE_MS,
        election.MAX_SILENCE_MS,
        election.IDLE_COMMIT_MS,
        election.LASTING_MS,
        election.ASKING_MS,
        election.RANK_MS,
        status.SERVER_FRESH_MS,
    ]


def test_reports() -> None:
    header, *rows = table("call")
    assert header[1:] == [answer.value for answer in LibraryAnswer]
    reported = {
        (row[0], answer): cell
        for row in rows
        for answer, cell in zip(header[1:], row[1:], strict=True)
    }
    assert reported == {(c.value, a.value): verdict.value for (c, a), verdict in VERDICTS.items()}
    assert {row[0]: row[1] for row in table("ended as")[1:]} == {
        verdict.value: action.value for verdict, action in ACTIONS.items()
    }


def test_gates() -> None:
    assert [row[0] for row in table("gate")[1:]] == list(FRAME_GATES)


REGISTERED = {
    "unknown": ControlState(),
    "known": ControlState(nodes={"a": NodeRecord("disk-a", 1)}),
}
ABOVE = {
    "none": {},
    "any": {A1: wheel_record_of()},
    "one with today's members": {A1: wheel_record_of()},
    "one with other members": {A1: wheel_record_of("a", "b")},
    f"none, with its share of the {MAX_WHEELS} wheels that a cluster may have": {
        WheelId("a", number): wheel_record_of(closed_at=1) for number in range(1, MAX_WHEELS + 1)
    },
}
DISKS = {"another": "disk-new", "an older copy, as it says": ROLLED_BACK}
NUMBERS = {"number 1": 1, "the same wheel again": 1, "the next number": 2}


@pytest.mark.parametrize("row", table("node id")[1:])
def test_registration(row: list[str]) -> None:
    node, storage, above, answer = row
    state = replace(REGISTERED[node], wheels=ABOVE[above])
    disk = DISKS.get(storage, "disk-a")
    given = register(state, "a", disk, 0, saves=0, members={"a": "disk-a"}, min_insync=1, floor=0)
    if isinstance(given, Registered):
        assert given.wheel.number == NUMBERS[answer]
        assert (given.records == []) == (answer == "the same wheel again")
    else:
        assert given.value == answer


FIVE = ControlState(
    nodes={node: NodeRecord(f"disk-{node}", 1) for node in "abcde"},
    wheels={A1: wheel_record_of("a", "b", "c", "d", "e", min_insync=3)},
)
REPLACED = replace(FIVE, nodes={**FIVE.nodes, "c": NodeRecord("disk-new", 1)})
TAKEN_OUT = replace(FIVE, nodes={**FIVE.nodes, "c": NodeRecord(REMOVED, 1)})
FENCE = Fence("a", 1)


def member(node: str, applied: int, *, complete: bool = True, storage: str = "") -> Promise:
    storage = storage or f"disk-{node}"
    return Promise(node, storage, FENCE, {A1: applied}, all_incomplete=not complete)


def holding(nodes: str, seq: int) -> dict[str, Heartbeat]:
    return {node: heartbeat(node, wheels={A1: wheel_heartbeat(seq)}) for node in nodes}


TO_CLOSE: dict[str, tuple[ControlState, dict[str, Heartbeat], set[str]]] = {
    "left": (FIVE, {"a": heartbeat("a", last_number=1)}, set()),
    "replaced": (replace(FIVE, nodes={"a": NodeRecord("disk-new", 1)}), {}, set()),
    "silent": (FIVE, {"a": heartbeat("a", open_=A1)}, {"a"}),
    "superseded": (
        replace(FIVE, wheels={**FIVE.wheels, WheelId("a", 2): wheel_record_of("a", "b")}),
        {"a": heartbeat("a", open_=A1)},
        set(),
    ),
}


def test_what_is_to_be_closed() -> None:
    assert [row[0] for row in table("a wheel is")[1:]] == list(TO_CLOSE)
    assert wheels_to_close(FIVE, {"a": heartbeat("a", open_=A1)}) == []
    for state, heartbeats, silent in TO_CLOSE.values():
        assert wheels_to_close(state, heartbeats, silent) == [A1]


ANSWERED = {
    "fewer than R complete, not all N": [("a", True), ("b", True), ("c", False)],
    "R complete": [("a", True), ("b", True), ("c", True)],
    "all N": [("a", True), ("b", True), ("c", False), ("d", False), ("e", False)],
}
HOLDERS = {"any": "ab", "fewer than W": "ab", "W": "abc"}


@pytest.mark.parametrize("row", table("answers of members")[1:])
def test_closing(row: list[str]) -> None:
    answered, holders, result = row
    answers = [member(node, 7, complete=complete) for node, complete in ANSWERED[answered]]
    heartbeats = holding("abcde", 5) | holding(HOLDERS[holders], 7)
    assert type(closing(A1, FIVE, answers, heartbeats, taken=0)).__name__ == result


MEMBERS = {
    "answers, complete": (FIVE, [member("c", 9)]),
    "answers, incomplete": (FIVE, [member("c", 9, complete=False)]),
    "was replaced, answers or not": (REPLACED, [member("c", 9, storage="disk-new")]),
    "was taken out, answers or not": (TAKEN_OUT, [member("c", 9)]),
    "has an answer from another storage": (FIVE, [member("c", 9, storage="disk-new")]),
    "has not answered for this wheel": (FIVE, []),
}


@pytest.mark.parametrize("row", table("a member that")[1:])
def test_members(row: list[str]) -> None:
    what, for_r, for_all, for_end, may_hold = row
    state, answers = MEMBERS[what]
    storage = answers[0].storage if answers else "disk-c"
    others = [member("a", 7), member("b", 7)]
    incomplete = [member(node, 7, complete=False) for node in ("a", "b", "d", "e")]
    everyone = holding("abcde", 9)
    with_r = closing(A1, state, others + answers, everyone, taken=0)
    with_all = closing(A1, state, incomplete + answers, everyone, taken=0)
    assert isinstance(with_r, AnswersWanted) == (for_r == "no")
    assert isinstance(with_all, AnswersWanted) == (for_all == "no")
    if for_all == "yes":
        assert with_all == Close(9 if for_end == "yes" else 7)
    own = replace(heartbeat("c", wheels={A1: wheel_heartbeat(9)}), storage=storage)
    enough = [member(node, 9) for node in ("a", "b", "d")]
    held = closing(A1, state, enough, holding("ab", 9) | {"c": own}, taken=0)
    assert isinstance(held, Close) == (may_hold == "yes")


def unacknowledged(reported: Heartbeat) -> Heartbeat:
    """The same, but nothing is known to be acknowledged."""
    wheels = {w: replace(each, high_watermark=0) for w, each in reported.wheels.items()}
    return replace(reported, wheels=wheels)


OWN = unacknowledged(holding("a", 9)["a"])
HELD = {node: unacknowledged(each) for node, each in holding("bc", 7).items()}
REPORTED = {"d": heartbeat("d", wheels={A1: wheel_heartbeat(0, high_watermark=6)})}
CLOSED = replace(FIVE, wheels={A1: replace(FIVE.wheels[A1], closed_at=4)})
TAKEABLE: dict[str, tuple[ControlState, Heartbeat, dict[str, Heartbeat], int]] = {
    "not held by the leader's node": (FIVE, heartbeat("a"), holding("bcd", 9), 0),
    "not closed, held by W by their heartbeats": (FIVE, OWN, HELD, 7),
    "not closed, its HW reported by any node": (FIVE, OWN, REPORTED, 6),
    "closed at T": (CLOSED, OWN, {}, 4),
}


def test_what_may_be_taken() -> None:
    assert [row[0] for row in table("wheel | enters V up to")[1:]] == list(TAKEABLE)
    for state, own, others, limit in TAKEABLE.values():
        assert takeable(state, own, others) == {A1: limit}


SAID = {"said that they lack it": "abcde", "did not all say so": "abcd"}
SEQS = {
    "any": 3,
    "≤ V, ≤ T, or ≤ what its own node says to have written": 3,
    "beyond all of these": 9,
}


def test_lost_frames() -> None:
    for who, seqs, result in table("all holders")[1:]:
        said, _, but = who.partition(", but one")
        seq = SEQS[seqs]
        missing = {n: heartbeat(n, wheels={A1: wheel_heartbeat(5, missing=(3,))}) for n in "abcde"}
        heartbeats = missing | (holding("b", 5) if "newest heartbeat" in but else {})
        if "is verifying" in but:
            heartbeats["b"] = replace(heartbeat("b"), verifying=frozenset({A1}))
        sought = Sought("a", heartbeats, (), *looked_for({(A1, seq): SAID[said]}))
        assert bool(frames_lost(FIVE, {}, sought)) == (result == "lost")


COPY = Position(A1, 1, 0)
CANCEL = Position(A1, 2, 0)
VIEW = CancelView(
    due_ms=1_000,
    now_ms=0,
    leading=True,
    progress=Progress(0, None, {A1: 1}),
    copies=[COPY],
    cancels=[],
    complete=True,
    current=True,
)
DONE = Progress(1_000, None, {A1: 1})
KNOWN = {
    "not leading, or the row is old": replace(VIEW, leading=False),
    "its second lies below the floor: it is finished and deleted": replace(
        VIEW, copies=[], progress=Progress(900, None, floor=VIEW.due_ms // 1000 + 1)
    ),
    "it was rescheduled": replace(VIEW, rescheduled=True),
    "no copy, the node holds all that was acknowledged": replace(VIEW, copies=[]),
    "no copy, it may lack some of it": replace(VIEW, copies=[], complete=False),
    "a cancel lies there": replace(VIEW, cancels=[CANCEL]),
    "a copy is done, its second could be read": replace(VIEW, progress=DONE),
    "a copy is done, some of its second could not be read": replace(
        VIEW, progress=DONE, readable=False
    ),
    "due within the next 100 ms": replace(VIEW, now_ms=900),
    "a commit or a release lies there, of a half": replace(VIEW, commits=[CANCEL]),
    "none of these": VIEW,
}
WRITTEN = replace(VIEW, cancels=[CANCEL])
BEYOND = Progress(900, None, {A1: 2}, ahead=(Done(999, None, {A1: 1}),), set_backs=1)
ELSEWHERE = replace(BEYOND, ahead=(Done(2_000, None, {}),))
AHEAD = replace(BEYOND, ahead=(Done(2_000, None, {A1: 1}),))
SEEN = {
    ("yes or no", "it was rescheduled"): replace(WRITTEN, rescheduled=True),
    ("yes", "w < due, beyond all that was done ahead"): replace(WRITTEN, progress=BEYOND),
    ("yes", "w < due, was not done ahead, its second could be read"): replace(
        WRITTEN, progress=ELSEWHERE
    ),
    ("yes", "w < due, perhaps done ahead"): replace(WRITTEN, progress=AHEAD),
    ("yes", "w ≥ due, and one transaction took both: directly before, w < due"): replace(
        WRITTEN, progress=Progress(1_000, None, {A1: 2}), before=Progress(999, None, {A1: 1})
    ),
    ("yes", "w ≥ due otherwise"): replace(WRITTEN, progress=Progress(1_000, None, {A1: 2})),
    ("no", "done, its second could be read"): replace(WRITTEN, progress=DONE),
    ("no", "done, some of its second could not be read"): replace(
        WRITTEN, progress=DONE, readable=False
    ),
    ("no", "not done"): WRITTEN,
}


CLOCK_MS = 500
SET_BACK = {
    "NOTHING_TO_SET_BACK": Progress(CLOCK_MS, None),
    "SET_BACK_TOO_OFTEN": Progress(900, None, ahead=(Done(990, None),) * MOST_AHEAD),
}
MESSAGES = {
    "in a frame ≤ V, due ≤ w": (900, Position(A1, 2, 0)),
    "in a frame ≤ V°, due ≤ w°": (999, COPY),
    "in a frame ≤ V°, due in millisecond w° + 1, up to p°": (1_000, COPY),
    "none of these": (1_000, Position(A1, 2, 0)),
}


def test_when_w_is_set_back() -> None:
    rows = table("w is set back")[1:]
    assert [row[1] for row in rows] == [refusal.value for refusal in SetBackRefusal]
    assert f"fewer than {MOST_AHEAD} earlier" in rows[1][0]
    for refusal, progress in SET_BACK.items():
        assert progress.set_back(CLOCK_MS) == SetBackRefusal[refusal]
    assert isinstance(Progress(CLOCK_MS + 1, None).set_back(CLOCK_MS), Progress)


def test_what_is_done_when_w_was_set_back() -> None:
    rows = table("a message, while anything is done ahead")[1:]
    assert [row[0] for row in rows] == list(MESSAGES)
    progress = replace(BEYOND, ahead=(Done(999, COPY, {A1: 1}),))
    for what, reported in rows:
        assert progress.covers(*MESSAGES[what]) == (reported == "done")


def test_cancel_before_writing() -> None:
    rows = table("what is known")[1:]
    assert [row[0] for row in rows] == list(KNOWN)
    for known, decision in rows:
        view = KNOWN[known]
        expected = after_writing(view) if decision.startswith("as") else CancelDecision[decision]
        assert before_writing(view) is expected


def test_cancel_after_writing() -> None:
    rows = table("a cancel with c ≤ V")[1:]
    assert [(row[0], row[1]) for row in rows] == list(SEEN)
    for counted, message, decision in rows:
        assert after_writing(SEEN[counted, message]) is CancelDecision[decision]


HALF = HalfRows(VIEW.due_ms, frozenset([COPY]))
SAID_OF_HALVES = {
    "another copy was done before, or comes first in this step": replace(
        HALF, copies=frozenset([COPY, CANCEL])
    ),
    "a cancel counts": replace(HALF, cancels=frozenset([CANCEL]), commits=frozenset([CANCEL])),
    "a commit or a release counts": replace(HALF, releases=frozenset([CANCEL])),
    "none of these": replace(HALF, commits=frozenset([Position(A1, 3, 0)])),
}


def test_what_becomes_of_a_half() -> None:
    rows = table("a copy of a half that a step takes")[1:]
    assert [row[0] for row in rows] == list(SAID_OF_HALVES)
    after = Progress(VIEW.due_ms, None, {A1: 2})
    for what, end in rows:
        found = ends(SAID_OF_HALVES[what], VIEW.progress or after, after)
        assert found[max(found)] is HalfEnd[end]


def test_a_half_is_done_before_its_due_if_a_release_counts() -> None:
    half = replace(VIEW, releases=[CANCEL])
    released = Progress(0, None, {A1: 2})
    assert before_writing(replace(half, progress=released)) is CancelDecision.ALREADY_DELIVERED
    assert before_writing(half) is CancelDecision.WAIT
