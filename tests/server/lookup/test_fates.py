"""What is known of finished messages: never more than is true, even if reports are missed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from delaywheel.identity import WheelId
from delaywheel_replica.core.protocol.progress import Position, Progress
from delaywheel_replica.core.protocol.reschedules import MessageKey
from delaywheel_replica.core.protocol.status_files import CleanerStatus, Role
from delaywheel_replica.link import DeadLetter, DeadLettered
from delaywheel_replica.server.lookup.fates import Fates
from support.server.well import cleaner_status

A1 = WheelId("a", 1)
REASON = "TOPIC_MISSING"


def row(
    progress: Progress, *, counted: int = 0, deferred: int = 0, **changes: Any
) -> CleanerStatus:
    said = cleaner_status(role=Role.LEADING, epoch=3, progress=progress, started_ms=5)
    return replace(said, counters={"dead_lettered": counted, "deferred": deferred}, **changes)


def done_to(due_ms: int, seq: int = 1_000) -> Progress:
    return Progress(due_ms, None, {A1: seq})


def key(number: int, due_ms: int) -> MessageKey:
    return MessageKey(number.to_bytes(16, "big"), due_ms, "orders")


def letter(number: int) -> DeadLetter:
    return DeadLetter(number.to_bytes(16, "big"), number, "orders", REASON)


def is_known(fates: Fates, due_ms: int, seq: int = 1) -> bool:
    return fates.is_known(due_ms, Position(A1, seq, 0))


def test_between_two_rows_that_agree_with_what_was_reported_all_is_known() -> None:
    fates = Fates()
    fates.row(row(done_to(100)))
    assert not is_known(fates, 100), "what was reported before is unknown"
    fates.heard(DeadLettered(5, 0, (letter(150),)))
    fates.row(row(done_to(200), counted=1))
    assert [is_known(fates, due_ms) for due_ms in (100, 101, 200, 201)] == [
        False,
        True,
        True,
        False,
    ]
    assert fates.reason(key(150, 150)) == REASON
    assert fates.reason(key(150, 151)) is None


def test_a_row_is_not_believed_before_all_that_it_counts_was_heard() -> None:
    fates = Fates()
    fates.row(row(done_to(100)))
    fates.row(row(done_to(200), counted=1))
    assert not is_known(fates, 150)
    fates.heard(DeadLettered(5, 0, (letter(150),)))
    fates.row(row(done_to(200), counted=1))
    assert is_known(fates, 199)


def test_behind_what_was_dropped_on_the_way_it_begins_anew() -> None:
    fates = Fates()
    fates.row(row(done_to(100)))
    fates.heard(DeadLettered(5, 2, (letter(180),)))
    fates.row(row(done_to(200), counted=3))
    fates.row(row(done_to(300), counted=3))
    assert not is_known(fates, 150)
    assert is_known(fates, 250)
    assert fates.reason(key(180, 180)) == REASON


def test_what_another_term_did_is_not_known() -> None:
    fates = Fates()
    fates.row(row(done_to(100)))
    fates.row(row(done_to(200)))
    fates.row(row(done_to(300), role=Role.STANDBY))
    fates.row(row(done_to(400), epoch=9))
    fates.row(row(done_to(500), epoch=9))
    assert [is_known(fates, due_ms) for due_ms in (150, 250, 350, 450)] == [
        True,
        False,
        False,
        True,
    ]


def test_what_was_done_while_some_were_deferred_is_not_known() -> None:
    """They are done, and neither delivered nor dead letters."""
    fates = Fates()
    fates.row(row(done_to(100)))
    fates.row(row(done_to(200)))
    fates.row(row(done_to(300), deferred=1))
    fates.row(row(done_to(400), deferred=1))
    assert [is_known(fates, due_ms) for due_ms in (150, 250, 350)] == [True, False, True]


def test_a_late_message_is_known_by_its_frame() -> None:
    fates = Fates()
    fates.row(row(done_to(100, seq=10)))
    fates.row(row(done_to(200, seq=20)))
    assert not is_known(fates, 50, seq=10)
    assert is_known(fates, 50, seq=11)


def test_of_too_much_the_oldest_is_forgotten_and_not_taken_for_delivered() -> None:
    fates = Fates(max_bytes=40 * 320)
    fates.row(row(done_to(0)))
    for number in range(1, 101):
        fates.heard(DeadLettered(5, number - 1, (letter(number),)))
        fates.row(row(done_to(number), counted=number))
    kept = [n for n in range(1, 101) if fates.reason(key(n, n)) is not None]
    assert kept == list(range(kept[0], 101))
    assert 30 <= len(kept) <= 40
    assert not any(is_known(fates, due_ms) for due_ms in range(1, kept[0]))
    assert is_known(fates, 99)


class NothingUntrue(RuleBasedStateMachine):
    """Messages are done one by one; rows and reports are read late, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.dead: dict[int, bool] = {}  # by due: whether it is a dead letter
        self.deferred: set[int] = set()
        self.unreported: list[DeadLetter] = []
        self.now_ms, self.cleaner_ms, self.epoch = 10, 5, 1
        self.counted = self.before = 0

    @initialize(most=st.integers(1, 12))
    def begin(self, most: int) -> None:
        self.fates = Fates(max_bytes=most * 4 * 200)

    @rule(is_dead=st.booleans())
    def one_is_done(self, is_dead: bool) -> None:
        self.now_ms += 1
        self.dead[self.now_ms] = is_dead
        if is_dead:
            self.unreported.append(letter(self.now_ms))
            self.counted += 1

    @rule()
    def one_is_deferred(self) -> None:
        self.now_ms += 1
        self.deferred.add(self.now_ms)

    @rule()
    def row_is_read(self) -> None:
        counted: dict[str, Any] = {"counted": self.counted, "deferred": len(self.deferred)}
        term = {"epoch": self.epoch, "started_ms": self.cleaner_ms}
        self.fates.row(row(done_to(self.now_ms), **counted, **term))

    @rule()
    def letters_are_reported(self) -> None:
        letters, self.unreported = tuple(self.unreported), []
        self.fates.heard(DeadLettered(self.cleaner_ms, self.before, letters))
        self.before += len(letters)

    @rule()
    def letters_are_dropped(self) -> None:
        self.before, self.unreported = self.before + len(self.unreported), []

    @rule(restarts=st.booleans())
    def another_leads_for_a_while(self, restarts: bool) -> None:
        self.now_ms += 1
        self.dead[self.now_ms] = True
        self.epoch += 1
        if restarts:
            self.cleaner_ms, self.unreported = self.cleaner_ms + 1, []
            self.counted = self.before = 0

    @invariant()
    def nothing_untrue_is_said(self) -> None:
        for due_ms, is_dead in self.dead.items():
            reason = self.fates.reason(key(due_ms, due_ms))
            assert reason is None or is_dead
            assert reason is not None or not is_dead or not is_known(self.fates, due_ms)
        assert not any(is_known(self.fates, due_ms) for due_ms in self.deferred)


TestNothingUntrue = NothingUntrue.TestCase
TestNothingUntrue.settings = settings(stateful_step_count=30)
