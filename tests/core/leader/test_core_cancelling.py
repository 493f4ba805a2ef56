"""Cancel answers against the truth: every run of transactions over a small world."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest

from delaywheel.identity import WheelId
from delaywheel_replica.core.leader.cancel import (
    TOO_LATE_MS,
    CancelDecision,
    CancelView,
    after_writing,
    before_writing,
    directly_before,
    is_cancelled,
)
from delaywheel_replica.core.protocol.progress import Done, Position, Progress
from delaywheel_replica.core.protocol.status_files import CleanerStatus, Role

A1, B1 = WheelId("a", 1), WheelId("b", 1)
DUE_MS = 10
COPY = Position(B1, 1, 0)
OTHER = Position(B1, 1, 1)

# Every progress around the due: w before, at and past it; a cancel in a.1 at 1 or 2.
EVERY_PROGRESS = [
    Progress(due_ms, position, {A1: cancels, B1: messages})
    for due_ms in (8, 9, 10)
    for position in (None, COPY, OTHER)
    for cancels in (0, 1, 2)
    for messages in (0, 1)
]


def is_step(before: Progress, after: Progress) -> bool:
    """The cleaner's possible steps: nothing goes back, V rests while a millisecond is split."""
    if after.due_ms < before.due_ms or any(after.seq(w) < before.seq(w) for w in (A1, B1)):
        return False
    if before.position is not None and after.due_ms == before.due_ms:
        same = after.seqs == before.seqs
        return same and after.position is not None and after.position >= before.position
    return True


def runs(length: int) -> list[tuple[Progress, ...]]:
    found: list[tuple[Progress, ...]] = [(progress,) for progress in EVERY_PROGRESS]
    for _ in range(length - 1):
        found = [
            (*run, after) for run in found for after in EVERY_PROGRESS if is_step(run[-1], after)
        ]
    return found


def truth(run: tuple[Progress, ...], cancels: list[Position]) -> str:
    """The first transaction that takes the message decides."""
    for before, after in pairwise(run):
        if after.covers(DUE_MS, COPY) and not before.covers(DUE_MS, COPY):
            counted = any(cancel.seq <= after.seq(cancel.wheel) for cancel in cancels)
            return "cancelled" if counted else "delivered"
    return "pending"


def view(**changes: object) -> CancelView:
    base = CancelView(
        due_ms=DUE_MS,
        now_ms=DUE_MS - TOO_LATE_MS - 1,
        leading=True,
        progress=Progress(0, None, {A1: 5, B1: 5}),
        copies=[COPY],
        cancels=[],
        complete=True,
        current=True,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("seqs", [[1], [2], [1, 2]])
def test_no_answer_after_writing_is_ever_untrue(seqs: list[int]) -> None:
    """Whichever of the records are seen, and whatever follows."""
    cancels = [Position(A1, seq, 0) for seq in seqs]
    decided: set[CancelDecision] = set()
    start = Progress(8, None, {})
    for run in runs(3):
        if not is_step(start, run[0]):
            continue
        real = truth((start, *run), cancels)
        for before, seen in pairwise((start, *run)):
            for known in (None, before):
                found = view(progress=seen, before=known, cancels=cancels)
                decision = after_writing(found)
                decided.add(decision)
                if decision is CancelDecision.CANCELLED:
                    assert real != "delivered", run
                if decision is CancelDecision.ALREADY_DELIVERED:
                    assert real == "delivered", run
    assert decided == {
        CancelDecision.CANCELLED,
        CancelDecision.ALREADY_DELIVERED,
        CancelDecision.UNKNOWN,
        CancelDecision.WAIT,
    }


def test_what_needs_no_look_is_what_a_look_would_decide() -> None:
    ahead = (Done(12, None, {B1: 1}),)
    every = [*EVERY_PROGRESS, *(replace(each, ahead=ahead) for each in EVERY_PROGRESS)]
    decided = set[bool]()
    for progress, due_ms, seq in product(every, range(7, 14), range(4)):
        cancel = Position(A1, seq, 0)
        decided.add(is_cancelled(due_ms, cancel, progress))
        if is_cancelled(due_ms, cancel, progress):
            found = view(due_ms=due_ms, progress=progress, cancels=[cancel])
            assert after_writing(found) is CancelDecision.CANCELLED
    assert len(decided) == 2


def test_the_transaction_that_took_both_cancelled_the_message() -> None:
    """What one step did is decided, unless a part of its millisecond was taken before."""
    start, cancel = Progress(8, None, {}), Position(A1, 1, 0)
    after = Progress(10, None, {A1: 1, B1: 1})
    for before in EVERY_PROGRESS:
        if not (is_step(start, before) and is_step(before, after)) or before.seq(A1):
            continue
        decision = after_writing(view(progress=after, before=before, cancels=[cancel]))
        is_whole = before.last_due_ms < DUE_MS
        assert decision is (CancelDecision.CANCELLED if is_whole else CancelDecision.UNKNOWN)


def status(transactions: int, progress: Progress, **changes: object) -> CleanerStatus:
    made = CleanerStatus("a", "boot", 1, 0, 0, Role.LEADING, epoch=5, progress=progress)
    return replace(made, counters={"transactions": transactions}, **changes)  # type: ignore[arg-type]


def test_what_was_committed_directly_before_is_known_without_a_gap_alone() -> None:
    first, second = Progress(8, None, {}), Progress(9, None, {})
    before, after = status(3, first), status(4, second)
    assert directly_before(before, after, None) == first
    assert directly_before(after, status(5, second), first) == first, "nothing was taken"
    for gap in (
        status(5, second),
        status(4, second, epoch=6),
        status(4, second, pid=2),
        status(4, second, role=Role.STANDBY),
    ):
        assert directly_before(before, gap, None) is None
    assert directly_before(None, after, None) is None


def set_back_runs() -> Iterator[tuple[Progress, ...]]:
    """One step under a clock that was ahead, w set back, one more step, and the rest."""
    start, last = Progress(8, None, {}), {A1: 2, B1: 1}
    for ahead in EVERY_PROGRESS:
        after = ahead.set_back(7) if is_step(start, ahead) else None
        if not isinstance(after, Progress):
            continue
        for one in EVERY_PROGRESS:
            first = after.moved(one.due_ms, one.position, one.seqs)
            if is_step(after, first):
                yield start, ahead, after, first, first.moved(11, None, last)


@pytest.mark.parametrize("seqs", [[1], [2], [1, 2]])
def test_no_answer_is_untrue_when_w_was_set_back(seqs: list[int]) -> None:
    """Whether the message's copy is seen or cannot be read."""
    cancels = [Position(A1, seq, 0) for seq in seqs]
    decided: set[tuple[bool, CancelDecision]] = set()
    for run in set_back_runs():
        real = truth(run, cancels)
        for before, seen in pairwise(run[1:]):
            for readable, known in product((True, False), (None, before)):
                copies = [COPY] if readable else []
                found = view(
                    progress=seen, before=known, cancels=cancels, copies=copies, readable=readable
                )
                decision = after_writing(found)
                decided.add((readable, decision))
                if decision is CancelDecision.CANCELLED:
                    assert real != "delivered", run
                if decision is CancelDecision.ALREADY_DELIVERED:
                    assert real == "delivered", run
    assert {decision for readable, decision in decided if readable} == {
        CancelDecision.CANCELLED,
        CancelDecision.ALREADY_DELIVERED,
        CancelDecision.UNKNOWN,
        CancelDecision.WAIT,
    }


def test_once_a_cancel_is_written_only_true_answers_are_left() -> None:
    allowed = {
        CancelDecision.CANCELLED,
        CancelDecision.ALREADY_DELIVERED,
        CancelDecision.UNKNOWN,
        CancelDecision.WAIT,
    }
    copies = [list(chosen) for size in (0, 1, 2) for chosen in combinations([COPY, OTHER], size)]
    for progress, found, complete in product(EVERY_PROGRESS, copies, (True, False)):
        seen = view(
            progress=progress, copies=found, complete=complete, cancels=[Position(A1, 1, 0)]
        )
        assert after_writing(seen) in allowed


def test_cancelled_is_said_only_of_what_was_scanned_with_all_that_progress_covers() -> None:
    counted = view(progress=Progress(8, None, {A1: 1}), cancels=[Position(A1, 1, 0)])
    assert after_writing(counted) is CancelDecision.CANCELLED
    assert after_writing(replace(counted, current=False)) is CancelDecision.WAIT
    # What cannot be read may be the mark of another due.
    assert after_writing(replace(counted, readable=False)) is CancelDecision.WAIT
    assert after_writing(replace(counted, rescheduled=True)) is CancelDecision.RESCHEDULED
    assert before_writing(view(rescheduled=True)) is CancelDecision.RESCHEDULED
