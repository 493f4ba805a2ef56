"""docs/PROTOCOL.md says what the code's own tables say."""

from dataclasses import replace
from pathlib import Path

import pytest

from delaywheel.identity import WheelId
from delaywheel_replica.core import beat, control, election
from delaywheel_replica.core.cancelling import (
    CancelDecision,
    CancelView,
    after_writing,
    before_writing,
)
from delaywheel_replica.core.closing import Close, Fence, FenceAnswer, closing
from delaywheel_replica.core.control import ControlState, NodeRecord
from delaywheel_replica.core.election_events import ENDINGS, TRANSITIONS, Phase
from delaywheel_replica.core.floor import FRAME_GATES
from delaywheel_replica.core.progress import Position, Progress
from delaywheel_replica.core.registration import Registered, register
from delaywheel_replica.core.reports import ACTIONS, VERDICTS, Answer
from support.core_values import wheel_record_of

ROOT = Path(__file__).parents[2]
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
    there = {path.name for path in core.glob("*.py")} - {"__init__.py", "fields.py"}
    named = {name.strip(" `") for row in table("about")[1:] for name in row[1].split(",")}
    assert named == there


def test_keys_of_the_control_topic() -> None:
    written = [
        control.progress_record(Progress(0, None))[0],
        control.leader_record(0, "a", "t")[0].replace("0", "<i>"),
        control.node_record("<id>", NodeRecord("s", 0))[0],
        control.wheel_record(A1, wheel_record_of())[0].replace("a.1", "<id>"),
        control.lost_record(A1, 7)[0].replace("a.1/7", "<wheel>/<seq>"),
    ]
    assert [row[0].strip("`") for row in table("key")[1:]] == written


def test_phases() -> None:
    rows = table("phase | told as")[1:]
    assert [(row[0], row[1]) for row in rows] == [(p.value, p.role.value) for p in Phase]


def test_transitions() -> None:
    told = {
        (Phase(phase), event): frozenset(Phase(name) for name in following.split(", "))
        for phase, event, following in table("phase | event")[1:]
    }
    assert told == {
        (phase, event.__name__): following for (phase, event), following in TRANSITIONS.items()
    }


def test_endings() -> None:
    words = {True: "yes", False: "no"}
    assert table("reason")[1:] == [
        [reason.value, *(words[flag] for flag in (e.doubles, e.rivals, e.stands_at_once))]
        for reason, e in ENDINGS.items()
    ]


def test_times() -> None:
    assert [int(row[1]) for row in table("what | ms")[1:]] == [
        election.MIN_SILENCE_MS,
        election.MAX_SILENCE_MS,
        election.IDLE_COMMIT_MS,
        election.LASTING_MS,
        beat.SERVER_FRESH_MS,
    ]


def test_reports() -> None:
    header, *rows = table("call")
    assert header[1:] == [answer.value for answer in Answer]
    told = {
        (row[0], answer): cell
        for row in rows
        for answer, cell in zip(header[1:], row[1:], strict=True)
    }
    assert told == {(c.value, a.value): verdict.value for (c, a), verdict in VERDICTS.items()}
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
}
NUMBERS = {"number 1": 1, "the same wheel again": 1, "the next number": 2}


@pytest.mark.parametrize("row", table("node id")[1:])
def test_registration(row: list[str]) -> None:
    node, storage, above, answer = row
    state = replace(REGISTERED[node], wheels=ABOVE[above])
    disk = "disk-new" if storage == "another" else "disk-a"
    given = register(state, "a", disk, 0, members={"a": "disk-a"}, min_insync=1, floor=0)
    if isinstance(given, Registered):
        assert given.wheel.number == NUMBERS[answer]
        assert (given.records == []) == (answer == "the same wheel again")
    else:
        assert given.value == answer


FIVE = wheel_record_of("a", "b", "c", "d", "e", min_insync=3)
FENCE = Fence("a", 1)


def member(node: str, applied: int, *, complete: bool = True, storage: str = "") -> FenceAnswer:
    return FenceAnswer(node, storage or f"disk-{node}", FENCE, {A1: applied}, complete)


ANSWERED = {
    "fewer than R complete, not all N": [("a", True), ("b", True), ("c", False)],
    "R complete": [("a", True), ("b", True), ("c", True)],
    "all N": [("a", True), ("b", True), ("c", False), ("d", False), ("e", False)],
}
HOLDERS = {"any": 2, "fewer than W": 2, "W": 3}


@pytest.mark.parametrize("row", table("answers of members")[1:])
def test_closing(row: list[str]) -> None:
    answered, holders, result = row
    answers = [
        member(node, 7 if index < HOLDERS[holders] else 5, complete=complete)
        for index, (node, complete) in enumerate(ANSWERED[answered])
    ]
    assert type(closing(A1, FIVE, answers)).__name__ == result


MEMBERS = {
    "answers, complete": [member("c", 9)],
    "answers, incomplete": [member("c", 9, complete=False)],
    "answers with another storage than it was registered with": [member("c", 9, storage="new")],
    "has not answered for this wheel": [],
}


@pytest.mark.parametrize("row", table("a member that")[1:])
def test_members(row: list[str]) -> None:
    what, for_r, for_all, for_end = row
    others = [member("a", 7), member("b", 7)]
    incomplete = [member(node, 7, complete=False) for node in ("a", "b", "d", "e")]
    with_r = type(closing(A1, FIVE, others + MEMBERS[what])).__name__
    with_all = closing(A1, FIVE, incomplete + MEMBERS[what])
    assert (with_r != "AnswersWanted") == (for_r == "yes")
    assert (type(with_all).__name__ != "AnswersWanted") == (for_all == "yes")
    if for_all == "yes":
        assert (with_all != Close(7)) == (for_end == "yes")


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
)
DONE = Progress(1_000, None, {A1: 1})
KNOWN = {
    "not leading, or the row is old": replace(VIEW, leading=False),
    "no copy, everything could be read": replace(VIEW, copies=[]),
    "no copy, something could not be read": replace(VIEW, copies=[], complete=False),
    "a cancel lies there": replace(VIEW, cancels=[CANCEL]),
    "a copy is done, everything could be read": replace(VIEW, progress=DONE),
    "a copy is done, something could not be read": replace(VIEW, progress=DONE, complete=False),
    "due within the next 100 ms": replace(VIEW, now_ms=900),
    "none of these": VIEW,
}
WRITTEN = replace(VIEW, cancels=[CANCEL])
SEEN = {
    ("yes", "w < due"): replace(WRITTEN, progress=Progress(999, None, {A1: 2})),
    ("yes", "w ≥ due"): replace(WRITTEN, progress=Progress(1_000, None, {A1: 2})),
    ("no", "done, everything could be read"): replace(WRITTEN, progress=DONE),
    ("no", "done, something could not be read"): replace(WRITTEN, progress=DONE, complete=False),
    ("no", "not done"): WRITTEN,
}


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
