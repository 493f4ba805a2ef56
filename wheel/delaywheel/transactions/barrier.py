"""The barrier: a table that lets a local transaction and a check about it not miss each other.

A half message names its row. Whoever inserts the row first has decided, for ever:

| who | inserts | in the transaction |
|---|---|---|
| the sender, `record` | `commit` | that the message goes with |
| the check, `verdict` | `rollback` | of its own, which it commits before it answers |

| a check comes | its insert | it answers |
|---|---|---|
| after the local transaction committed | finds the row | COMMIT |
| after it was rolled back, or its program died before that | inserts the row | ROLLBACK |
| before it records | inserts the row; `record` is refused later | ROLLBACK |
| after it recorded, while it is open | waits for its end, as keys are unique; then as above | |
| the same, and the end does not come within `wait` | ends with an error of the database | UNKNOWN |
| when database or network fail | may be committed or not | UNKNOWN; the next check finds out |

Isolation levels do not matter to that: uniqueness is checked against what other transactions have
inserted, whatever a snapshot shows. What has to be read is read after the insert, by a check in
READ COMMITTED (it sets that itself), where each statement sees all that is committed by then. A
local transaction may have any level: under REPEATABLE READ and above, its `record` fails with a
serialization error, instead of being refused, if the check came after its snapshot. SQLite lets one
transaction write at a time: a check that meets another waits as long as its connection says.
MySQL's checks take no gap lock, as they insert before they read, in READ COMMITTED; two that wait
for one transaction which rolls back may meet in a deadlock, and one of them is UNKNOWN.

A row is found by its half's id alone. If one id names two halves (its sender has ids of its own,
and begins another half as it repeats an order), the row is of the one that came first, and `record`
refuses the other: so the check of that one says ROLLBACK. But not while the row might be deleted
before `record` refuses the other by its due: until then that is UNKNOWN.

Old rows are deleted by the halves' dues, which sender and check know alike. A check of a half whose
row may have been deleted must not insert: `clean` first commits a *floor*, a row of its own, and
then deletes rows below it. A check that has inserted reads the floor afterwards: if its half lies
below, it takes its insert back, and answers UNKNOWN. The other side needs a clock: rows are kept
for an hour at least after their due, and `record` refuses a half that was due half an hour ago.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from delaywheel.levels import Duration, length_ms
from delaywheel.message import clock_ns, time_text
from delaywheel.transactions.connections import (
    DatabaseConnection,
    dialect_of,
    is_autocommit,
    is_in_transaction,
    may_pass,
)
from delaywheel.transactions.dialects import RAISE_DUE, SELECT_ROW, Dialect
from delaywheel.transactions.verdict import HalfName, HalfVerdict, RecordRefusedError

_LOG = logging.getLogger("delaywheel.transactions")

BARRIER_TABLE: Final = "delaywheel_barrier"
LEAST_KEEP_MS: Final = 3_600_000
"""Rows are kept for so long after the due of their half, at least."""
RECORD_WITHIN_MS: Final = 1_800_000
"""And `record` refuses a half that was due so long ago: its row might be deleted already."""
CLOCKS_DIFFER_MS: Final = 300_000
"""How much the clocks of a sender and a check may differ."""

_TABLE: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*\.)?([A-Za-z_][A-Za-z0-9_]*)")
_FLOOR_ID: Final = str(uuid.UUID(int=0))
_FLOOR: Final = "floor"

_REFUSED: Final = {
    HalfVerdict.COMMIT: "a transaction that recorded this half has committed: commit no other",
    HalfVerdict.ROLLBACK: "the check came first, and the half is dropped: begin another half",
    # MySQL, if the transaction has a snapshot that is older than the row.
    HalfVerdict.UNKNOWN: "a check, or another transaction, has decided about this half",
}


class Barrier:
    """The table in which local transactions and checks of half messages meet; see this module.

    It holds no connection, and threads may share it. Connections are those of any DB-API 2.0 driver
    for SQLite, PostgreSQL or MySQL (InnoDB); asyncio drivers are none. docs/TRANSACTIONS.md has a
    sender and a checker.
    """

    def __init__(
        self,
        table: str = BARRIER_TABLE,
        *,
        dialect: Dialect | None = None,
        wait: Duration = "2s",
    ) -> None:
        """Does not connect.

        Args:
            table: With its schema if it has one; no name that would have to be quoted.
            dialect: None: as the connection's driver says.
            wait: How long a check waits for a local transaction to end. SQLite waits as its
                connection says instead (`timeout`), MySQL for whole seconds.
        """
        matched = _TABLE.fullmatch(table)
        if matched is None:
            raise ValueError(f"table {table!r}: letters, digits and _, and one '.' at most")
        wait_ms = max(1, length_ms(wait))
        self._names: Final = {
            "table": table,
            "name": matched[2],
            "wait_ms": str(wait_ms),
            "wait_s": str(-(-wait_ms // 1000)),
        }
        self._given_dialect: Final = dialect

    def statements(self, dialect: Dialect) -> list[str]:
        """Returns the statements that create what is missing, for a program of migrations."""
        return [self._sql(statement, dialect) for statement in dialect.value.create]

    def create(self, connection: DatabaseConnection) -> None:
        """Creates the table if it is missing, and commits."""
        cursor = connection.cursor()
        for statement in self.statements(self._dialect(connection)):
            cursor.execute(statement)
        connection.commit()

    def record(self, connection: DatabaseConnection, half: HalfName) -> None:
        """Records within the transaction that is open that the half goes with it.

        It is one insert. Whatever it raises, roll the transaction back: RecordRefusedError, if a
        check has decided already or the half was recorded before; ValueError, if no transaction is
        open and the driver would commit the row alone; or an error of the database.
        """
        if is_autocommit(connection) and not is_in_transaction(connection):
            raise ValueError(
                "the connection commits each statement by itself: begin a transaction, or the half"
                " would be committed without it"
            )
        if clock_ns() // 1_000_000 - half.due_ms > RECORD_WITHIN_MS:
            raise RecordRefusedError(
                HalfVerdict.UNKNOWN,
                f"the half was held until {time_text(half.due_ms)}, and its check has been made"
                " long since: begin another one",
            )
        dialect, cursor = self._dialect(connection), connection.cursor()
        if self._insert(cursor, dialect, half, HalfVerdict.COMMIT):
            return
        recorded, _ = self._recorded(cursor, dialect, half)
        raise RecordRefusedError(recorded, _REFUSED[recorded])

    def verdict(self, connection: DatabaseConnection, half: HalfName) -> HalfVerdict:
        """Returns what became of a half's local transaction; if it has not recorded, it never will.

        The connection must be to the same database, and to the server that takes writes. It has no
        transaction open, before and after (ValueError, also for autocommit). What else must not
        wait has another connection. UNKNOWN: the local transaction is still open, or the database
        fails for now, or the row may have been deleted. An error that will not pass by itself is
        raised: there is no table.
        """
        dialect = self._dialect(connection)
        _check_is_idle(connection, dialect)
        try:
            return self._decided(connection, dialect, half)
        except Exception as error:
            with suppress(Exception):  # the connection may be gone
                connection.rollback()
            if not may_pass(error):
                raise
            _LOG.warning("the verdict of %s is unknown: %s", half.id.hex(), error)
            return HalfVerdict.UNKNOWN

    def _decided(
        self, connection: DatabaseConnection, dialect: Dialect, half: HalfName
    ) -> HalfVerdict:
        cursor = connection.cursor()
        for statement in dialect.value.begin:
            cursor.execute(self._sql(statement, dialect))
        if not self._insert(cursor, dialect, half, HalfVerdict.ROLLBACK):
            recorded, due_ms = self._recorded(cursor, dialect, half)
            connection.rollback()
            return recorded if due_ms == half.due_ms else _beside(half, due_ms)
        floor = self._read(cursor, dialect, _FLOOR_ID)
        if floor is not None and half.due_ms < int(floor[1]):
            connection.rollback()
            _LOG.error(
                "the verdict of %s, held until %s, is unknown: its row may have been deleted",
                *(half.id.hex(), time_text(half.due_ms)),
            )
            return HalfVerdict.UNKNOWN
        connection.commit()
        return HalfVerdict.ROLLBACK

    def clean(
        self, connection: DatabaseConnection, *, keep: Duration = "7d", most: int = 1_000_000
    ) -> int:
        """Deletes the rows of halves that were due before; let one program do it, now and then.

        Commits many short transactions on a connection as for `verdict`, and returns how many rows
        were deleted, about `most` at most. After an error of the database repeat the call.

        Args:
            keep: For how long rows are kept after the due of their half, an hour at least: longer
                than the last check may come after it, or that one is UNKNOWN. So add up the
                intervals between checks, and the time after which you would still replay dead
                letters of halves.
        """
        keep_ms = length_ms(keep)
        if keep_ms < LEAST_KEEP_MS:
            raise ValueError(f"keep={keep!r}: at least an hour")
        dialect = self._dialect(connection)
        _check_is_idle(connection, dialect)
        before_ms = clock_ns() // 1_000_000 - keep_ms
        cursor = connection.cursor()
        self._execute(cursor, dialect, dialect.value.insert, _FLOOR_ID, _FLOOR, 0)
        self._execute(cursor, dialect, RAISE_DUE, before_ms, _FLOOR_ID, before_ms)
        connection.commit()
        deleted = 0
        while deleted < most:
            # The floor's own row is never below it.
            count = self._execute(cursor, dialect, dialect.value.delete, before_ms)
            connection.commit()
            if not count:
                break
            deleted += count
        return deleted

    def _insert(self, cursor: Any, dialect: Dialect, half: HalfName, verdict: HalfVerdict) -> bool:
        """Inserts a half's row; returns False if there is one."""
        row = (_text(half), verdict.value, half.due_ms)
        return bool(self._execute(cursor, dialect, dialect.value.insert, *row))

    def _recorded(
        self, cursor: Any, dialect: Dialect, half: HalfName
    ) -> tuple[HalfVerdict, int | None]:
        """Returns what the row of a half's id says, and of which due; UNKNOWN: it is gone."""
        found = self._read(cursor, dialect, _text(half))
        if found is None:
            return HalfVerdict.UNKNOWN, None
        return HalfVerdict(found[0]), int(found[1])

    def _read(self, cursor: Any, dialect: Dialect, id_: str) -> Sequence[Any] | None:
        cursor.execute(self._sql(SELECT_ROW, dialect), (id_,))
        row: Sequence[Any] | None = cursor.fetchone()
        return row

    def _execute(self, cursor: Any, dialect: Dialect, statement: str, *values: object) -> int:
        """Executes a statement; returns how many rows it has changed."""
        cursor.execute(self._sql(statement, dialect), values)
        count = int(cursor.rowcount)
        if count < 0:
            raise TypeError(f"{cursor!r} does not say how many rows it has changed")
        return count

    def _sql(self, statement: str, dialect: Dialect) -> str:
        return statement.format(mark=dialect.value.mark, **self._names)

    def _dialect(self, connection: DatabaseConnection) -> Dialect:
        return self._given_dialect or dialect_of(connection)


def _beside(half: HalfName, due_ms: int | None) -> HalfVerdict:
    """Returns the verdict of a half while the row of its id is that of another, of this due."""
    if due_ms is None:
        return HalfVerdict.UNKNOWN
    stays = half.due_ms - due_ms <= LEAST_KEEP_MS - RECORD_WITHIN_MS
    ago_ms = clock_ns() // 1_000_000 - half.due_ms
    if stays or ago_ms > RECORD_WITHIN_MS + CLOCKS_DIFFER_MS:
        return HalfVerdict.ROLLBACK
    return HalfVerdict.UNKNOWN


def _text(half: HalfName) -> str:
    return str(uuid.UUID(bytes=half.id))


def _check_is_idle(connection: DatabaseConnection, dialect: Dialect) -> None:
    """Checks that a transaction of our own can be begun and ended.

    With SQLite one may always be open, which shows nothing before its first statement.
    """
    if is_autocommit(connection):
        raise ValueError("the connection commits each statement by itself: switch autocommit off")
    if dialect is not Dialect.SQLITE and is_in_transaction(connection):
        raise ValueError("the connection is in a transaction: end it, or take another connection")
