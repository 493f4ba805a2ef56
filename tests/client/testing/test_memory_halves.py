"""A shop with half messages, tried without Kafka: its own checker, its own database."""

from __future__ import annotations

import sqlite3
from datetime import timedelta

import pytest

from delaywheel import Client, Message, RefusedError
from delaywheel.consumer import AskedHalf, AsyncHalfChecker, HalfChecker
from delaywheel.ingress import halves_topic
from delaywheel.reasons import Reason
from delaywheel.testing import MemoryService
from delaywheel.transactions import Barrier, CommitOutcome, HalfVerdict
from support.consumer.documents import program_of


class Shop(HalfChecker):
    """Answers by the barrier, or as the test says."""

    def __init__(self, db: sqlite3.Connection) -> None:
        super().__init__(group="shop", bootstrap="-", cluster="-", retry=("1s",))
        self._db = db
        self.fails = False
        self.asked: list[AskedHalf] = []

    def check(self, half: AskedHalf) -> HalfVerdict:
        self.asked.append(half)
        return HalfVerdict.UNKNOWN if self.fails else Barrier().verdict(self._db, half)


class AwaitedShop(AsyncHalfChecker):
    """Commits all."""

    async def check(self, half: AskedHalf) -> HalfVerdict:
        assert half.value == b"late"
        return HalfVerdict.COMMIT


@pytest.fixture
def db() -> sqlite3.Connection:
    db = sqlite3.connect(":memory:")
    Barrier().create(db)
    return db


def values(service: MemoryService) -> list[bytes | None]:
    return [record.value for record in service.delivered("orders")]


def test_a_half_is_delivered_by_its_commit_or_by_its_check(db: sqlite3.Connection) -> None:
    with MemoryService() as service, service.client() as client:
        shop = Shop(db)
        checks = service.half_checker(shop)
        with client.begin("orders", b"now", group="shop") as now:
            with db:
                Barrier().record(db, now)
            assert values(service) == []
            now.commit()
        assert (now.outcome, values(service)) == (CommitOutcome.COMMITTED, [b"now"])
        with client.begin(
            "orders", b"in a minute", group="shop", delay="1m", headers={"x": b"1"}
        ) as later:
            later.commit()
        lost = client.begin("orders", b"recorded", group="shop")
        with db:
            Barrier().record(db, lost)
        client.begin("orders", b"forgotten", group="shop")
        client.begin("orders", b"rolled back", group="shop").rollback()
        cancelled = client.begin("orders", b"cancelled", group="shop")
        client.cancel(cancelled.handle)
        assert cancelled.commit() is CommitOutcome.ROLLED_BACK
        service.advance("3s")
        assert lost.commit() is CommitOutcome.LEFT_TO_CHECK
        assert checks.run() is None
        assert [half.value for half in shop.asked] == [b"recorded", b"forgotten"]
        assert (checks.counts.forwarded, checks.counts.done) == (1, 1)
        service.advance("1m")
        assert values(service) == [b"now", b"recorded", b"in a minute"]
        assert all(
            not name.startswith("dw-")
            for one in service.delivered("orders")
            for name, _ in one.headers
        )
        assert service.delivered("orders")[-1].headers == (("x", b"1"),)


def test_a_block_whose_error_was_caught_sends_nothing(db: sqlite3.Connection) -> None:
    """It ends normally, though its transaction was rolled back: as in a web handler."""
    db.execute("CREATE TABLE orders (number INTEGER PRIMARY KEY)")

    def order(client: Client, number: int) -> str:
        with client.begin("orders", b"%d" % number, group="shop") as half:
            try:
                with db:
                    Barrier().record(db, half)
                    db.execute("INSERT INTO orders VALUES (?)", (number,))
            except sqlite3.IntegrityError:
                return "already there"
            half.commit()
        return "ordered"

    with MemoryService() as service, service.client() as client:
        checks = service.half_checker(Shop(db))
        assert [order(client, 1), order(client, 1)] == ["ordered", "already there"]
        service.advance("4s")
        checks.run()
        assert values(service) == [b"1"]
        assert (checks.counts.forwarded, checks.counts.done) == (0, 1)


def test_a_half_is_sent_however_late_its_check_commits(db: sqlite3.Connection) -> None:
    with MemoryService(topics=["orders"]) as service, service.client() as client:
        checks = service.half_checker(Shop(db))
        with db:
            Barrier().record(db, client.begin("orders", b"late", group="shop"))
        service.advance("1h")
        checks.run()
        assert values(service) == [b"late"]


def test_what_no_check_decides_is_undecided(db: sqlite3.Connection) -> None:
    with MemoryService() as service, service.client() as client:
        shop = Shop(db)
        shop.fails, checks = True, service.half_checker(shop)
        client.begin("orders", b"v", group="shop")
        client.begin("orders", b"of others", group="others")
        for seconds in (3, 2, 2):
            service.advance(timedelta(seconds=seconds))
            checks.run()
        assert [half.attempt for half in shop.asked] == [1, 2]
        (letter,) = checks.dead_letters
        assert dict(letter.headers)["dw-dead-reason"] == b"UNDECIDED"
        assert len(service.delivered(halves_topic("memory"))) == 2
        assert values(service) == []


async def test_many_are_begun_or_none_and_coroutines_check() -> None:
    with MemoryService(topics=["orders"]) as service:
        async with service.async_client() as client:
            many = [Message("orders", b"%d" % n, delay="0s") for n in range(3)]
            async with await client.begin_many(many, group="shop") as halves:
                await halves.commit()
            assert {half.outcome for half in halves} == {CommitOutcome.COMMITTED}
            assert [half.id for half in halves] == [message.id for message in many]
            assert sorted(map(str, values(service))) == ["b'0'", "b'1'", "b'2'"]
            some = [Message("orders", b"x", delay="0s"), Message("elsewhere", b"x", delay="0s")]
            with pytest.raises(RefusedError) as refused:
                await client.begin_many(some, group="shop")
            assert refused.value.reason is Reason.TOPIC_UNKNOWN
            await client.begin("orders", b"late", group="shop")
            service.advance("3s")
            checks = service.half_checker(AwaitedShop(group="shop", bootstrap="-", cluster="-"))
            waiting = checks.run()
            assert waiting is not None
            await waiting
        assert checks.counts.forwarded == 1  # and the half of the refused call was cancelled
        service.advance("1s")
        assert values(service)[3:] == [b"late"]


def test_programs_of_the_document(db: sqlite3.Connection) -> None:
    exec(program_of("TRANSACTIONS.md", "half_checker"), {"__name__": "shop"})
    with MemoryService() as service, service.client() as client:
        given = {"client": client, "db": db, "BARRIER": Barrier(), "Message": Message}
        exec(program_of("TRANSACTIONS.md", "begin_many"), {**given, "texts": [b"1", b"2"]})
        service.advance("30m")
        assert sorted(map(str, values(service))) == ["b'1'", "b'2'"]
    assert db.execute("SELECT count(*) FROM delaywheel_barrier").fetchone() == (2,)
