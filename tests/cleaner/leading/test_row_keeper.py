"""The cleaner's row while its main thread waits for Kafka."""

from __future__ import annotations

import pytest

from delaywheel_replica.cleaner.row_keeper import (
    PROMPT_S,
    QUIET_ROW_S,
    ROW_S,
    STAMP_S,
    RowKeeper,
    RowNews,
    View,
    Waiting,
)
from delaywheel_replica.core.protocol.control import ControlState
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.status_files import CleanerStatus, Role

STAMP_MS = round(STAMP_S * 1000)


class Row:
    """The written statuses, the clock, and what the main thread waits for."""

    def __init__(self) -> None:
        self.written: list[CleanerStatus] = []
        self.now_ms = 5_000
        self.waiting: Waiting | None = None
        self.keeper = RowKeeper(self.written.append, lambda: self.waiting, self)

    def monotonic_ms(self) -> int:
        return self.now_ms

    def monotonic(self) -> float:
        return self.now_ms / 1000

    def wall_ms(self) -> int:
        return 1_900_000_000_000 + self.now_ms

    def report(self, role: Role) -> None:
        now_ms = self.now_ms
        self.keeper.report(CleanerStatus("a", "boot", 1, now_ms, self.wall_ms(), role, epoch=7))

    def stamps(self, after_ms: int) -> bool:
        """Whether the row is written then."""
        before = len(self.written)
        self.now_ms += after_ms
        self.keeper.stamp()
        return len(self.written) > before


@pytest.fixture
def row() -> Row:
    made = Row()
    made.report(Role.LEADING)
    return made


def test_a_leader_that_waits_for_a_transaction_is_fresh_and_in_term(row: Row) -> None:
    row.waiting = Waiting(since_ms=row.now_ms, until_ms=row.now_ms + 4_000)
    for _ in range(10):
        assert row.stamps(STAMP_MS)
        status = row.written[-1]
        assert (status.monotonic_ms, status.wall_ms) == (row.now_ms, row.wall_ms())
        assert (status.role, status.epoch) == (Role.LEADING, 7)
        assert status.is_in_term(row.now_ms)


def test_a_leader_whose_last_commit_is_too_old_is_stamped_no_more(row: Row) -> None:
    row.waiting = Waiting(since_ms=row.now_ms, until_ms=row.now_ms + 1_000)
    assert row.stamps(1_000)
    assert not row.stamps(STAMP_MS)
    assert not row.written[-1].is_in_term(row.now_ms + 1_000)


def test_who_waits_for_anything_else_is_not_stamped(row: Row) -> None:
    assert not row.stamps(10 * STAMP_MS)


def test_in_health_only_the_main_thread_writes(row: Row) -> None:
    row.waiting = Waiting(since_ms=row.now_ms, until_ms=row.now_ms + 1_000)
    assert not row.stamps(STAMP_MS - 1)


def test_a_new_word_of_the_main_thread_is_not_overwritten_by_its_old_one(row: Row) -> None:
    """The transaction has just ended; the other thread has not seen that yet."""
    row.waiting = Waiting(since_ms=row.now_ms, until_ms=row.now_ms + 4_000)
    row.now_ms += STAMP_MS
    row.report(Role.STANDBY)
    assert not row.stamps(0)
    assert row.written[-1].role is Role.STANDBY


class Sayings:
    """Changes the leader's state in each iteration; returns how often it writes the status."""

    def __init__(self) -> None:
        self.news = RowNews()
        self.now_s = 100.0
        self.asked_s = 0.0
        self.due_ms = 0
        self.role = Role.LEADING
        self.written: list[bool] = []
        self.run_once(0)

    def run_once(self, after_s: float, *, commits: bool = False, late_ms: int = 0) -> bool:
        """Whether it writes; `written` says whether with anything new."""
        self.now_s += after_s
        self.due_ms += commits
        state = ControlState(progress=Progress(due_ms=self.due_ms, position=None))
        view = View(self.role, 1, None, state, 0, late_ms, None)
        writes, is_new = self.news.look(view, self.now_s, asked_s=self.asked_s)
        if writes:
            self.written.append(is_new)
        return writes


@pytest.fixture
def said() -> Sayings:
    return Sayings()


def test_progress_that_nobody_waits_for_is_reported_ten_times_a_second(said: Sayings) -> None:
    for _ in range(100):
        said.run_once(0.01, commits=True)
    assert 9 <= len(said.written) - 1 <= 11
    assert all(said.written)


def test_after_a_request_for_a_commit_each_is_reported_at_once_for_a_while(
    said: Sayings,
) -> None:
    assert not said.run_once(0.01, commits=True)
    said.asked_s = said.now_s
    assert said.run_once(0.001), "what was committed meanwhile too"
    assert not said.run_once(0.001), "nothing is new"
    assert said.run_once(0.001, commits=True)
    said.run_once(PROMPT_S)
    assert not said.run_once(0.01, commits=True)


def test_a_change_of_anything_else_is_reported_at_once(said: Sayings) -> None:
    assert not said.run_once(0.01, commits=True, late_ms=50)
    said.role = Role.STANDBY
    assert said.run_once(0.001)
    assert said.written == [True, True]


def test_a_row_is_never_old_though_nothing_changes(said: Sayings) -> None:
    assert said.news.wait_s(said.now_s) == pytest.approx(QUIET_ROW_S)
    assert not said.run_once(QUIET_ROW_S / 2)
    assert said.news.wait_s(said.now_s) > 0, "it waits"
    assert said.run_once(said.news.wait_s(said.now_s) + 1e-6)
    assert said.written == [True, False]


def test_progress_that_waits_to_be_reported_ends_the_wait(said: Sayings) -> None:
    assert not said.run_once(0.01, commits=True)
    assert said.news.wait_s(said.now_s) == pytest.approx(ROW_S - 0.01)
    assert said.run_once(said.news.wait_s(said.now_s) + 1e-6)
