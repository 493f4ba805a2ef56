"""The databases that the barrier is tried on; a machine without PostgreSQL leaves that one out."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from delaywheel.transactions import Barrier
from local.loopback.postgres import LocalPostgres, find_postgres, has_postgres

ISOLATION = {
    "sqlite": ("DEFERRED", "IMMEDIATE"),
    "postgresql": ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"),
}


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """How to connect to a PostgreSQL of our own."""
    programs = find_postgres()
    if programs is None or not has_postgres():
        pytest.skip("PostgreSQL is not installed: psycopg, and Debian's package postgresql")
    with LocalPostgres(programs) as running:
        yield running.dsn


class Database:
    """A database with orders and a barrier.

    Attributes:
        name: `sqlite` or `postgresql`.
    """

    def __init__(self, name: str, connect: Callable[..., Any]) -> None:
        self.name = name
        self.connect = connect
        self.barrier = Barrier(wait="25ms")
        self.mark = "?" if name == "sqlite" else "%s"
        with self.connect() as db:
            db.execute("CREATE TABLE orders (number bigint PRIMARY KEY)")
            self.barrier.create(db)
        db.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """Each kind, new."""
    if request.param == "sqlite":

        def open_file(isolation: Any = "DEFERRED") -> sqlite3.Connection:
            return sqlite3.connect(tmp_path / "shop.db", isolation_level=isolation, timeout=0.025)

        yield Database("sqlite", open_file)
        return
    dsn = request.getfixturevalue("postgres")
    import psycopg  # noqa: PLC0415

    def connect(isolation: str = "READ COMMITTED") -> Any:
        db = psycopg.connect(dsn, options="-c lock_timeout=25ms")
        db.isolation_level = psycopg.IsolationLevel[isolation.replace(" ", "_")]
        return db

    yield Database("postgresql", connect)
    with psycopg.connect(dsn) as db:
        db.execute("DROP TABLE orders, delaywheel_barrier")
