"""The databases that the barrier is tried on; a machine without PostgreSQL leaves that one out."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from delaywheel.transactions import Barrier
from local.loopback.child import end_child, start_child
from local.loopback.postgres import LocalPostgres, find_postgres, has_postgres
from support.services.waiting import wait_until

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


@pytest.fixture(scope="session")
def mariadb() -> Iterator[str]:
    """The socket of a MariaDB of our own, with an empty database `shop`; it asks no password."""
    program = shutil.which("mariadbd", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip("MariaDB is not installed: Debian's package mariadb-server")
    pymysql = pytest.importorskip("pymysql")
    with tempfile.TemporaryDirectory(prefix="dw-my-") as folder:  # short, as sockets' names are
        owner = pwd.getpwuid(os.geteuid()).pw_name
        socket = f"{folder}/socket"
        # Without tables of users it starts in an empty folder, in a fraction of the time.
        options = [
            *("--no-defaults", f"--datadir={folder}", f"--socket={socket}", f"--user={owner}"),
            *("--skip-networking", "--skip-grant-tables", "--innodb-log-file-size=4M"),
        ]
        process = start_child([program, *options], log=Path(folder, "log"))
        try:
            wait_until("MariaDB listens", lambda: Path(socket).exists())
            with pymysql.connect(unix_socket=socket) as db:
                db.cursor().execute("CREATE DATABASE shop")
            yield socket
        finally:
            process.send_signal(signal.SIGTERM)
            end_child(process, patience_s=10.0)


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
