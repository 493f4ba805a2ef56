"""Old rows go, and no check is wrong for that."""

from __future__ import annotations

import itertools
import time

import pytest

from delaywheel.transactions import Barrier, Dialect, HalfVerdict, RecordRefusedError
from transactions.conftest import Database
from transactions.test_barrier_interleavings import check, new_half

HOUR_MS = 3_600_000


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def clean(database: Database, keep: str = "1h") -> int:
    db = database.connect()
    try:
        return database.barrier.clean(db, keep=keep)
    finally:
        db.close()


def rows(database: Database) -> int:
    with database.connect() as db:
        (count,) = db.execute(
            "SELECT count(*) FROM delaywheel_barrier WHERE verdict <> 'floor'"
        ).fetchone()
    db.close()
    return int(count)


def insert(database: Database, due_ms: int, count: int) -> None:
    mark = database.mark
    statement = f"INSERT INTO delaywheel_barrier VALUES ({mark}, 'commit', {mark})"
    with database.connect() as db:
        cursor = db.cursor()
        cursor.executemany(statement, [(str_of(new_half().id), due_ms) for _ in range(count)])
    db.close()


def str_of(id_: bytes) -> str:
    text = id_.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def test_old_rows_go_and_young_ones_stay(database: Database) -> None:
    old_ms = now_ms() - HOUR_MS - 1
    insert(database, old_ms, 2_500)
    insert(database, now_ms() - HOUR_MS // 2, 3)
    assert clean(database, "1d") == 0
    assert clean(database) == 2_500
    assert rows(database) == 3
    assert clean(database) == 0


def test_a_check_below_the_floor_is_unknown_whatever_the_row_said(database: Database) -> None:
    half = new_half(now_ms() - 2 * HOUR_MS)
    insert(database, half.due_ms, 1)
    clean(database)
    for _ in range(2):
        assert check(database, half) is HalfVerdict.UNKNOWN
    assert rows(database) == 0


def test_a_row_that_is_still_there_counts(database: Database) -> None:
    half = new_half(now_ms() - 2 * HOUR_MS)
    assert check(database, half) is HalfVerdict.ROLLBACK
    insert(database, half.due_ms, 1)
    clean(database, "3h")
    assert check(database, half) is HalfVerdict.ROLLBACK


def test_a_transaction_does_not_record_what_may_be_deleted(database: Database) -> None:
    half = new_half(now_ms() - HOUR_MS)
    with database.connect() as db, pytest.raises(RecordRefusedError) as refused:
        database.barrier.record(db, half)
    assert refused.value.verdict is HalfVerdict.UNKNOWN
    db.close()


@pytest.mark.parametrize("keep", ["0s", "59m"])
def test_rows_are_kept_for_an_hour(database: Database, keep: str) -> None:
    with pytest.raises(ValueError, match="at least an hour"):
        clean(database, keep)


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_cleaning_between_the_statements_of_a_check(database: Database) -> None:
    """Before each statement of a check all old rows go: none of its answers is wrong."""
    told = set()
    for at in itertools.count():
        half = new_half(now_ms() - 2 * HOUR_MS)
        with database.connect() as db:
            db.execute(
                "INSERT INTO delaywheel_barrier VALUES (%s, 'commit', %s)",
                (str_of(half.id), half.due_ms),
            )
            db.execute("UPDATE delaywheel_barrier SET due_ms = 0 WHERE verdict = 'floor'")
        watched = Interrupted(database, at)
        barrier = Barrier(dialect=Dialect.POSTGRESQL)
        told.add(barrier.verdict(watched, half))
        watched.close()
        if not watched.was_interrupted:
            break
    assert told == {HalfVerdict.UNKNOWN, HalfVerdict.COMMIT}


class Interrupted:
    """A connection whose rows are cleaned away before one of its statements."""

    def __init__(self, database: Database, at: int) -> None:
        self._database, self._left = database, at
        self._db = database.connect()
        self.commit, self.rollback, self.close = (
            self._db.commit,
            self._db.rollback,
            self._db.close,
        )
        self.was_interrupted = False

    def cursor(self) -> Interrupted:
        self._cursor = self._db.cursor()
        self.fetchone = self._cursor.fetchone
        return self

    @property
    def rowcount(self) -> int:
        return int(self._cursor.rowcount)

    def execute(self, statement: str, values: tuple[object, ...] = ()) -> None:
        if self._left == 0:
            self.was_interrupted = True
            clean(self._database)
        self._left -= 1
        self._cursor.execute(statement, values)
