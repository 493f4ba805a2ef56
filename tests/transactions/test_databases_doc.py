"""The programs of docs/DATABASES.md for databases' drivers, each as printed on its driver."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from delaywheel.consumer import AskedHalf, HalfChecker
from delaywheel.testing import MemoryService
from delaywheel.transactions import Barrier, CommitOutcome, HalfVerdict
from delaywheel.transactions.half import AsyncHalf, Half
from support.consumer.documents import program_of

ORDERS = "CREATE TABLE orders (number integer PRIMARY KEY)"
DROP = "DROP TABLE orders, delaywheel_barrier"


class Shop(HalfChecker):
    """Answers by the barrier."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        super().__init__(group="shop", bootstrap="-", cluster="-")
        self._connect = connect

    def check(self, half: AskedHalf) -> HalfVerdict:
        with closing(self._connect()) as db:
            return Barrier().verdict(db, half)


def on_postgres(code: str, dsn: str) -> tuple[str, Callable[[], Any]]:
    """A program that reaches our server, and what connects to it."""
    psycopg = pytest.importorskip("psycopg")
    folder = dict(part.split("=") for part in dsn.split())["host"]
    for written, here in (
        ('"dbname=shop"', f'"{dsn}"'),
        (":///shop", f"://postgres@/postgres?host={folder}"),
        ('"NAME": "shop"', f'"NAME": "postgres", "USER": "postgres", "HOST": "{folder}"'),
        ('database="shop"', f'database="postgres", user="postgres", host="{folder}"'),
    ):
        code = code.replace(written, here)
    return code, lambda: psycopg.connect(dsn)


def on_mariadb(code: str, socket: str) -> tuple[str, Callable[[], Any]]:
    """The same."""
    pymysql = pytest.importorskip("pymysql")
    code = code.replace('database="shop"', f'database="shop", unix_socket="{socket}"')
    return code, lambda: pymysql.connect(database="shop", unix_socket=socket)


@pytest.mark.parametrize(
    ("holding", "driver", "server"),
    [
        ("psycopg.Connection", "psycopg", "postgres"),
        ("insert(ORDERS)", "sqlalchemy", "postgres"),
        ("DeclarativeBase", "sqlalchemy", "postgres"),
        ("on_commit", "django", "postgres"),
        ("import asyncpg", "asyncpg", "postgres"),
        ("create_async_engine", "sqlalchemy", "postgres"),
        ("import pymysql", "pymysql", "mariadb"),
    ],
)
def test_orders_are_the_messages_that_arrive(
    holding: str,
    driver: str,
    server: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip(driver, reason=f"{driver} is not installed: scripts/test installs it")
    where: str = request.getfixturevalue(server)
    code = program_of("DATABASES.md", holding)
    code, connect = (on_postgres if server == "postgres" else on_mariadb)(code, where)
    fall_silent_about(b"order 3", monkeypatch)
    with MemoryService() as service, closing(connect()) as db:
        db.cursor().execute(ORDERS)
        Barrier().create(db)
        try:
            checks = service.half_checker(Shop(connect))
            # A third one whose sender falls silent, and the first one again, which the database
            # has already.
            code = code.replace("in (1, 2)", "in (1, 2, 3, 1)")
            code = code.replace("localhost:7420", service.address)
            program: dict[str, Any] = {"__name__": "program"}
            with pytest.raises(Exception, match=r"(?i)unique|duplicate"):
                exec(compile(code, holding, "exec", dont_inherit=True), program)
            for name, end in (("engine", "dispose"), ("connection", "close")):
                if name in program:  # what a program leaves to its end
                    getattr(program[name], end)()
            assert values(service) == [b"order 1", b"order 2"]
            service.advance("3s")
            checks.run()
            service.advance("1s")
            assert values(service) == [b"order 1", b"order 2", b"order 3"]
            assert (checks.counts.forwarded, checks.counts.done) == (1, 1)
        finally:
            db.cursor().execute(DROP)
            db.commit()


def values(service: MemoryService) -> list[bytes | None]:
    return [record.value for record in service.delivered("orders")]


def fall_silent_about(value: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender of this message does not say that it has committed."""
    commit, commit_async = Half.commit, AsyncHalf.commit

    def say(half: Half) -> CommitOutcome:
        silent = half.message.value == value
        return CommitOutcome.LEFT_TO_CHECK if silent else commit(half)

    async def say_async(half: AsyncHalf) -> CommitOutcome:
        silent = half.message.value == value
        return CommitOutcome.LEFT_TO_CHECK if silent else await commit_async(half)

    monkeypatch.setattr(Half, "commit", say)
    monkeypatch.setattr(AsyncHalf, "commit", say_async)
