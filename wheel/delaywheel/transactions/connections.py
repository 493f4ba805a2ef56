"""What the barrier has to know of a DB-API 2.0 connection, whose ever it is."""

from __future__ import annotations

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


class DatabaseConnection(Protocol):
    """A connection of DB-API 2.0."""

    def cursor(self) -> Any:
        """Returns a cursor."""
        ...

    def commit(self) -> Any:
        """Commits."""
        ...

    def rollback(self) -> Any:
        """Rolls back."""
        ...


def dialect_of(connection: DatabaseConnection) -> Dialect:
    """Returns the SQL that a connection's driver speaks.

    Raises:
        TypeError: The driver is not known.
    """
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
    """Whether a database's error may pass by itself: a lock, a deadlock, a lost connection."""
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None) or ""
    names = {kind.__name__ for kind in type(error).__mro__}
    return "OperationalError" in names or str(state).startswith("40")
