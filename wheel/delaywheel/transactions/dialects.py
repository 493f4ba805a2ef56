"""The SQL of the barrier, for each database."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

SELECT_ROW = "SELECT verdict, due_ms FROM {table} WHERE id = {mark}"
RAISE_DUE = "UPDATE {table} SET due_ms = {mark} WHERE id = {mark} AND due_ms < {mark}"

_INDEX = "CREATE INDEX IF NOT EXISTS {name}_due ON {table} (due_ms)"
_INSERT = "INSERT INTO {table} (id, verdict, due_ms) VALUES ({mark}, {mark}, {mark})"
_DELETE_SELECTED = """
DELETE FROM {table} WHERE id IN (SELECT id FROM {table} WHERE due_ms < {mark} LIMIT 1000)
"""
_CREATE_SQLITE = """
CREATE TABLE IF NOT EXISTS {table} (
    id TEXT PRIMARY KEY,
    verdict TEXT NOT NULL,
    due_ms INTEGER NOT NULL
) WITHOUT ROWID
"""
_CREATE_POSTGRESQL = """
CREATE TABLE IF NOT EXISTS {table} (
    id uuid PRIMARY KEY,
    verdict text NOT NULL,
    due_ms bigint NOT NULL
)
"""
_CREATE_MYSQL = """
CREATE TABLE IF NOT EXISTS {table} (
    id CHAR(36) CHARACTER SET ascii PRIMARY KEY,
    verdict VARCHAR(8) CHARACTER SET ascii NOT NULL,
    due_ms BIGINT NOT NULL,
    INDEX {name}_due (due_ms)
) ENGINE=InnoDB
"""


@dataclass(frozen=True, slots=True)
class BarrierSql:
    """The statements for one database: `{table}`, and `{name}` is the table without its schema.

    Attributes:
        create: Creates what is missing.
        insert: Inserts a row unless there is one of that id; waits for other transactions that
            insert it, or delete it.
        begin: The first statements of a check's transaction; `{wait_ms}` and `{wait_s}` are how
            long it waits.
        delete: Deletes some rows of halves that were due before a moment.
        mark: What stands for a parameter.
    """

    create: tuple[str, ...]
    insert: str
    begin: tuple[str, ...]
    delete: str
    mark: str


class Dialect(Enum):
    """A database whose SQL the barrier speaks.

    A check has to see whatever was committed when its statement began, so it does not take the
    isolation level of the connection.
    """

    SQLITE = BarrierSql(
        create=(_CREATE_SQLITE, _INDEX),
        insert=_INSERT.replace("INSERT", "INSERT OR IGNORE"),
        begin=(),  # one transaction writes at a time, and a check begins with a write
        delete=_DELETE_SELECTED,
        mark="?",
    )
    POSTGRESQL = BarrierSql(
        create=(_CREATE_POSTGRESQL, _INDEX),
        insert=f"{_INSERT} ON CONFLICT (id) DO NOTHING",
        begin=(
            "SET TRANSACTION ISOLATION LEVEL READ COMMITTED",
            "SET LOCAL lock_timeout = {wait_ms}",
        ),
        delete=_DELETE_SELECTED,
        mark="%s",
    )
    MYSQL = BarrierSql(
        create=(_CREATE_MYSQL,),
        insert=_INSERT.replace("INSERT", "INSERT IGNORE"),
        begin=(
            "SET TRANSACTION ISOLATION LEVEL READ COMMITTED",
            # For the session: there is no such setting of a transaction.
            "SET SESSION innodb_lock_wait_timeout = {wait_s}",
        ),
        delete="DELETE FROM {table} WHERE due_ms < {mark} LIMIT 1000",
        mark="%s",
    )
