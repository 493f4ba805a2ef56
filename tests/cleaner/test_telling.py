"""The cleaner's row while its main thread waits for Kafka."""

from __future__ import annotations

import pytest

from delaywheel_replica.cleaner.telling import STAMP_S, Telling, Waiting
from delaywheel_replica.core.status import CleanerStatus, Role

STAMP_MS = round(STAMP_S * 1000)


class Row:
    """What was written, the clock, and what the main thread waits for."""

    def __init__(self) -> None:
        self.written: list[CleanerStatus] = []
        self.now_ms = 5_000
        self.waiting: Waiting | None = None
        self.telling = Telling(self.written.append, lambda: self.waiting, self)

    def monotonic_ms(self) -> int:
        return self.now_ms

    def monotonic(self) -> float:
        return self.now_ms / 1000

    def wall_ms(self) -> int:
        return 1_900_000_000_000 + self.now_ms

    def tell(self, role: Role) -> None:
        now_ms = self.now_ms
        self.telling.tell(CleanerStatus("a", "boot", 1, now_ms, self.wall_ms(), role, epoch=7))

    def stamps(self, after_ms: int) -> bool:
        """Whether the row is written then."""
        before = len(self.written)
        self.now_ms += after_ms
        self.telling.stamp()
        return len(self.written) > before


@pytest.fixture
def row() -> Row:
    made = Row()
    made.tell(Role.LEADING)
    return made


def test_a_leader_that_waits_for_a_transaction_is_fresh_and_in_office(row: Row) -> None:
    row.waiting = Waiting(since_ms=row.now_ms, until_ms=row.now_ms + 4_000)
    for _ in range(10):
        assert row.stamps(STAMP_MS)
        status = row.written[-1]
        assert (status.monotonic_ms, status.wall_ms) == (row.now_ms, row.wall_ms())
        assert (status.role, status.epoch, status.call_since_ms) == (Role.LEADING, 7, 5_000)
        assert status.is_in_office(row.now_ms)


def test_a_leader_whose_last_commit_is_too_old_is_stamped_no_more(row: Row) -> None:
    row.waiting = Waiting(since_ms=row.now_ms, until_ms=row.now_ms + 1_000)
    assert row.stamps(1_000)
    assert not row.stamps(STAMP_MS)
    assert not row.written[-1].is_in_office(row.now_ms + 1_000)


def test_who_waits_for_anything_else_is_not_stamped(row: Row) -> None:
    assert not row.stamps(10 * STAMP_MS)


def test_in_health_only_the_main_thread_writes(row: Row) -> None:
    row.waiting = Waiting(since_ms=row.now_ms, until_ms=row.now_ms + 1_000)
    assert not row.stamps(STAMP_MS - 1)


def test_a_new_word_of_the_main_thread_is_not_overwritten_by_its_old_one(row: Row) -> None:
    """The transaction has just ended; the other thread has not seen that yet."""
    row.waiting = Waiting(since_ms=row.now_ms, until_ms=row.now_ms + 4_000)
    row.now_ms += STAMP_MS
    row.tell(Role.STANDBY)
    assert not row.stamps(0)
    assert row.written[-1].role is Role.STANDBY
