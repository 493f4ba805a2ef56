"""A shop whose programs are killed: one orders with half messages, one checks them.

    python -m support.consumer.shop order DSN SEED
    python -m support.consumer.shop check DSN BOOTSTRAP CLUSTER GROUP

The first prints `<id> <due ms>` for each half that it begins, before its local transaction.
"""

from __future__ import annotations

import random
import signal
import sys
import time
import uuid
from typing import NamedTuple

import psycopg

from delaywheel.consumer import AskedHalf, HalfChecker
from delaywheel.transactions import Barrier, HalfVerdict

HOLD_MS = 300
EACH_S = 0.01
BARRIER = Barrier(wait="200ms")
RETRY = ("100ms", "300ms", "1s", "2s", "2s", "5s", "5s", "10s", "10s", "20s")


class BegunHalf(NamedTuple):
    """What its sender knows of a half."""

    id: bytes
    due_ms: int


def order(dsn: str, seed: str) -> None:
    """Orders until it is killed."""
    chance = random.Random(seed)
    db: psycopg.Connection | None = None
    while True:
        due_ms = time.time_ns() // 1_000_000 + HOLD_MS
        half = BegunHalf(uuid.uuid4().bytes, due_ms)
        sys.stdout.write(f"{half.id.hex()} {due_ms}\n")
        sys.stdout.flush()
        try:
            db = db or psycopg.connect(dsn)
            buy(db, half, chance)
        except Exception as error:  # noqa: BLE001 - whatever it was, the check decides
            sys.stderr.write(f"{half.id.hex()}: {error!r}\n")
            db = None
        time.sleep(EACH_S)


def buy(db: psycopg.Connection, half: BegunHalf, chance: random.Random) -> None:
    """The local transaction: some take longer than the hold, and some are given up."""
    with db.transaction() as transaction:
        db.execute("INSERT INTO orders VALUES (%s)", (half.id.hex(),))
        BARRIER.record(db, half)
        if chance.random() < 0.02:
            time.sleep(chance.random())
        if chance.random() < 0.2:
            raise psycopg.Rollback(transaction)


class Shop(HalfChecker):
    """Checks by the barrier, over a connection that is kept while it works."""

    def __init__(self, dsn: str, bootstrap: str, cluster: str, group: str) -> None:
        super().__init__(group=group, bootstrap=bootstrap, cluster=cluster, retry=RETRY)
        self._dsn = dsn
        self._db: psycopg.Connection | None = None

    def check(self, half: AskedHalf) -> HalfVerdict:
        self._db = self._db or psycopg.connect(self._dsn)
        try:
            verdict = BARRIER.verdict(self._db, half)
        except Exception:
            self._db = None
            raise
        if verdict is HalfVerdict.UNKNOWN:
            self._db.close()
            self._db = None
        return verdict


if __name__ == "__main__":
    if sys.argv[1] == "order":
        order(*sys.argv[2:])
    else:
        with Shop(*sys.argv[2:]) as shop:
            signal.signal(signal.SIGTERM, lambda *_: shop.stop())
            shop.run()
