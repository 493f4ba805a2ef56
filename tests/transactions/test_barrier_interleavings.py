"""Local transactions and checks of one half in every order, on real databases.

The truth is the database's: once all transactions have ended, an order is there or it is not.
"""

from __future__ import annotations

import itertools
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from sqlite3 import OperationalError, ProgrammingError
from typing import Any, NamedTuple

import pytest

from delaywheel.transactions import Barrier, HalfVerdict, RecordRefusedError
from delaywheel.transactions.barrier import CLOCKS_DIFFER_MS, RECORD_WITHIN_MS
from delaywheel.transactions.connections import may_pass
from transactions.conftest import ISOLATION, Database

CHECK = "check"
ATTEMPT = ("begin", "record")
ENDS = ("commit", "abort", "die")


class Half(NamedTuple):
    """A half, as both sides know it."""

    id: bytes
    due_ms: int


def new_half(due_ms: int | None = None) -> Half:
    return Half(uuid.uuid4().bytes, time.time_ns() // 1_000_000 if due_ms is None else due_ms)


class Attempt:
    """One local transaction, step by step."""

    def __init__(self, database: Database, isolation: str, number: int, kept: list[Any]) -> None:
        self._database = database
        self._kept = kept  # connections of earlier attempts: to connect costs most here
        self._db: Any = kept.pop() if kept else database.connect(isolation)
        self._number = number
        self._is_lost = False

    def begin(self, _: Half) -> None:
        statement = f"INSERT INTO orders VALUES ({self._database.mark})"
        try:
            self._db.execute(statement, (self._number,))
        except Exception:  # noqa: BLE001 - SQLite lets one transaction write at a time
            self._is_lost = True

    def record(self, half: Half) -> None:
        if self._is_lost:
            return
        try:
            self._database.barrier.record(self._db, half)
        except Exception:  # noqa: BLE001 - whatever it raises, the transaction is rolled back
            self._is_lost = True

    def commit(self, _: Half) -> None:
        if self._is_lost:
            self._db.rollback()
        else:
            self._db.commit()
        self._kept.append(self._db)

    def abort(self, _: Half) -> None:
        self._db.rollback()
        self._kept.append(self._db)

    def die(self, _: Half) -> None:
        self._db.close()


def check(database: Database, half: Half) -> HalfVerdict:
    db = database.connect()
    try:
        return database.barrier.verdict(db, half)
    finally:
        db.close()


def histories(*, attempts: int, checks: int) -> Iterator[list[tuple[int, str]]]:
    """Yields steps (of an attempt, or a check), with every number of checks in every place."""
    for ends in itertools.product(ENDS, repeat=attempts):
        steps = [(n, step) for n, end in enumerate(ends) for step in (*ATTEMPT, end)]
        gaps = range(len(steps) + 1)
        for places in itertools.combinations_with_replacement(gaps, checks):
            history: list[tuple[int, str]] = []
            for gap in gaps:
                history += [(-1, CHECK)] * places.count(gap)
                history += steps[gap : gap + 1]
            yield history


def orders_of(db: Any, numbers: Sequence[int]) -> int:
    """Returns how many of these orders are there."""
    found = db.execute(f"SELECT number FROM orders WHERE number >= {min(numbers)}").fetchall()
    db.rollback()
    return len({number for (number,) in found} & set(numbers))


@pytest.mark.parametrize(("attempts", "checks"), [(1, 2), (2, 1)])
def test_no_check_is_wrong(database: Database, attempts: int, checks: int) -> None:
    numbers = itertools.count()
    seen: set[HalfVerdict] = set()
    checker = database.connect()
    for isolation in ISOLATION[database.name]:
        kept: list[Any] = []
        for history in histories(attempts=attempts, checks=checks):
            half, mine = new_half(), [next(numbers) for _ in range(attempts)]
            running = [Attempt(database, isolation, number, kept) for number in mine]
            answers = []
            for who, step in history:
                if step is CHECK:
                    answers.append(database.barrier.verdict(checker, half))
                else:
                    getattr(running[who], step)(half)
            last = database.barrier.verdict(checker, half)
            count = orders_of(checker, mine)
            expected = HalfVerdict.COMMIT if count else HalfVerdict.ROLLBACK
            assert last is expected, (isolation, history, answers)
            assert {*answers} <= {expected, HalfVerdict.UNKNOWN}, (isolation, history, answers)
            assert count <= 1, (isolation, history, answers)
            seen.update(answers)
        for db in kept:
            db.close()
    checker.close()
    assert seen == set(HalfVerdict)


def test_a_retry_learns_that_the_first_attempt_has_committed(database: Database) -> None:
    half = new_half()
    for number in (1, 2):
        attempt = database.connect()
        attempt.execute(f"INSERT INTO orders VALUES ({database.mark})", (number,))
        if number == 1:
            database.barrier.record(attempt, half)
            attempt.commit()
        else:
            with pytest.raises(RecordRefusedError, match="commit no other") as refused:
                database.barrier.record(attempt, half)
            assert refused.value.verdict is HalfVerdict.COMMIT
        attempt.close()
    db = database.connect()
    assert orders_of(db, [1, 2]) == 1
    db.close()


def test_of_two_halves_with_one_id_only_the_recorded_one_is_sent(database: Database) -> None:
    """Whoever has ids of his own begins a second half when he repeats an order."""
    first = new_half()
    second = Half(first.id, first.due_ms + 5_000)
    db = database.connect()
    database.barrier.record(db, first)
    db.commit()
    with pytest.raises(RecordRefusedError) as refused:
        database.barrier.record(db, second)
    db.rollback()
    db.close()
    assert refused.value.verdict is HalfVerdict.COMMIT
    assert check(database, first) is HalfVerdict.COMMIT
    assert check(database, second) is HalfVerdict.ROLLBACK


def test_a_row_that_may_go_before_a_later_half_is_recorded_decides_nothing(
    database: Database,
) -> None:
    """`clean` may delete the first one's row while the second one's transaction is open."""
    now = new_half()
    for ago_ms, verdict in (
        (0, HalfVerdict.UNKNOWN),
        (RECORD_WITHIN_MS + CLOCKS_DIFFER_MS + 1_000, HalfVerdict.ROLLBACK),
    ):
        second = new_half(now.due_ms - ago_ms)
        first = Half(second.id, second.due_ms - RECORD_WITHIN_MS - 1_000)
        assert check(database, first) is HalfVerdict.ROLLBACK
        assert check(database, second) is verdict


def test_a_local_transaction_is_refused_after_the_check(database: Database) -> None:
    half = new_half()
    assert check(database, half) is HalfVerdict.ROLLBACK
    db = database.connect()
    with pytest.raises(RecordRefusedError, match="the check came first") as refused:
        database.barrier.record(db, half)
    assert refused.value.verdict is HalfVerdict.ROLLBACK
    db.close()


def test_a_row_that_nobody_committed_is_refused(database: Database) -> None:
    half = new_half()
    if database.name == "sqlite":
        db: Any = database.connect(None)
    else:
        db = database.connect()
        db.autocommit = True
    with pytest.raises(ValueError, match="begin a transaction"):
        database.barrier.record(db, half)
    with pytest.raises(ValueError, match="switch autocommit off"):
        database.barrier.verdict(db, half)
    db.execute("BEGIN")
    database.barrier.record(db, half)
    db.execute("ROLLBACK")
    db.close()
    assert check(database, half) is HalfVerdict.ROLLBACK


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_check_has_a_transaction_of_its_own(database: Database) -> None:
    db = database.connect()
    db.execute("SELECT 1")
    with pytest.raises(ValueError, match="in a transaction"):
        database.barrier.verdict(db, new_half())
    db.close()


def test_what_does_not_pass_is_raised(database: Database) -> None:
    class Odd(sqlite3.Connection):
        def cursor(self, *_: object) -> Any:
            raise sqlite3.ProgrammingError

    with pytest.raises(sqlite3.ProgrammingError):
        database.barrier.verdict(sqlite3.connect(":memory:", factory=Odd), new_half())
    with pytest.raises(TypeError, match="give the barrier its dialect"):
        database.barrier.verdict(object(), new_half())  # type: ignore[arg-type]


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_check_waits_for_the_end_of_a_local_transaction(database: Database, end: str) -> None:
    half, db, watching = new_half(), database.connect(), database.connect()
    database.barrier.record(db, half)
    told: list[HalfVerdict] = []

    def wait_for_it() -> None:
        checker = database.connect()
        told.append(Barrier(wait="1m").verdict(checker, half))
        checker.close()

    waiting = threading.Thread(target=wait_for_it)
    waiting.start()
    blocked = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    watching.autocommit = True
    while watching.execute(blocked).fetchone() != (1,):
        time.sleep(0.005)
    getattr(db, end)()
    waiting.join()
    watching.close()
    db.close()
    assert told == [HalfVerdict.COMMIT if end == "commit" else HalfVerdict.ROLLBACK]


def test_missing_table_is_no_unknown_verdict(database: Database) -> None:
    db = database.connect()
    with pytest.raises(Exception, match="nowhere"):
        Barrier("nowhere").verdict(db, new_half())
    assert check(database, new_half()) is HalfVerdict.ROLLBACK  # the connection is left idle
    db.close()


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (OperationalError(1205, "Lock wait timeout exceeded"), True),  # as pymysql has it
        (OperationalError(1142, "INSERT command denied"), False),
        (OperationalError("server closed the connection unexpectedly"), True),
        (ProgrammingError(1146, "Table doesn't exist"), False),
        (ProgrammingError({"C": "42P01"}), False),  # as pg8000 has it
        (ProgrammingError({"C": "40P01"}), True),
    ],
)
def test_codes_say_what_may_pass(error: Exception, *, passes: bool) -> None:
    assert may_pass(error) is passes
