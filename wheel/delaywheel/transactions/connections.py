"""What the barrier has to know of a DB-API 2.0 connection, whose ever it is."""

from __future__ import annotations

import sqlite3
from typing import Any, Final, Protocol

from delaywheel.transactions.dialects import Dialect

_DRIVERS: Final = {
    "sqlite3": Dialect.SQLITE,
    "psycopg": Dialect.POSTGRESQL,
    "psycopg2": Dialect.POSTGRESQL,
    "pg8000": Dialect.POSTGRESQL,
    "pymysql": Dialect.MYSQL,
    "MySQLdb": Dialect.MYSQL,
    "mysql": Dialect.MYSQL,
    "mariadb": Dialect.MYSQL,
}
_SQLITE_LEGACY: Final = -1
"""What `sqlite3.Connection.autocommit` is from Python 3.12 on, unless it was given."""
_SERVER_STATUS_IN_TRANS: Final = 1

_STATES_THAT_PASS: Final = frozenset({"08", "40", "53", "55", "57", "58"})
"""PostgreSQL's classes: connection, serialization, resources, locks, an operator, the system."""
_DATABASE_DROPPED: Final = "57P04"
_SQLITE_CODES_THAT_PASS: Final = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_INTERRUPT,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_SCHEMA,
    }
)
_MYSQL_CODES_THAT_PASS: Final = frozenset(
    {1040, 1053, 1158, 1159, 1160, 1161, 1203, 1205, 1213, 1317, 2002, 2003, 2006, 2013, 2055, 4031}
)
"""Locks and deadlocks; too many connections; a server that stops; a lost connection."""


class DatabaseConnection(Protocol):
    """A connection of DB-API 2.0."""

    def cursor(self) -> Any:
        """Returns a cursor."""

    def commit(self) -> Any:
        """Commits."""

    def rollback(self) -> Any:
        """Rolls back."""


def dialect_of(connection: DatabaseConnection) -> Dialect:
    """Returns the SQL that a connection's driver speaks; raises TypeError for an unknown one."""
    for kind in type(connection).__mro__:
        found = _DRIVERS.get(kind.__module__.partition(".")[0])
        if found is not None:
            return found
    raise TypeError(
        f"a connection of {type(connection).__module__}: give the barrier its dialect, and the"
        " driver's own connection"
    )


def is_autocommit(connection: DatabaseConnection) -> bool:
    """Whether each statement commits by itself, unless a transaction was begun explicitly."""
    autocommit: object = getattr(connection, "autocommit", _SQLITE_LEGACY)
    if callable(autocommit):  # pymysql, MySQLdb: it sets it
        asked = getattr(connection, "get_autocommit", None)
        return bool(asked()) if asked is not None else False
    if autocommit == _SQLITE_LEGACY:  # also Python 3.11, where sqlite3 has no such attribute
        return getattr(connection, "isolation_level", "") is None
    return autocommit is True


def is_in_transaction(connection: DatabaseConnection) -> bool:
    """Whether a transaction is open, as far as the driver says it."""
    is_open = getattr(connection, "in_transaction", None)  # sqlite3, mysql.connector
    if isinstance(is_open, bool):
        return is_open
    status = getattr(getattr(connection, "info", None), "transaction_status", None)
    if status is not None:  # psycopg, psycopg2: 0 is IDLE
        return int(status) != 0
    return bool(getattr(connection, "server_status", 0) & _SERVER_STATUS_IN_TRANS)  # pymysql


def may_pass(error: Exception) -> bool:
    """Whether a database's error may pass by itself: a lock, a deadlock, a lost connection.

    The database's own code says so. Classes of exceptions do not: drivers count a missing table of
    SQLite, and a missing right of MySQL, among what is operational.
    """
    code = getattr(error, "sqlite_errorcode", None)
    if code is not None:
        return code & 0xFF in _SQLITE_CODES_THAT_PASS
    first = next(iter(error.args), None)
    number = getattr(error, "errno", None) or first
    if isinstance(number, int):
        return number in _MYSQL_CODES_THAT_PASS
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    if isinstance(first, dict):  # pg8000
        state = first.get("C")
    if state:
        return str(state)[:2] in _STATES_THAT_PASS and state != _DATABASE_DROPPED
    # A connection that was lost, and could not be said why.
    return "OperationalError" in {kind.__name__ for kind in type(error).__mro__}
