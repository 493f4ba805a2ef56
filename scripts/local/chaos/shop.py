"""The programs of a shop: one orders with half messages, one checks them. They are killed.

    python -m local.chaos.shop order DSN ADDRESSES TOPIC GROUP RATE
    python -m local.chaos.shop check DSN BOOTSTRAP CLUSTER GROUP

Each order is a row, and a message whose value is the row's id. Some local transactions are given
up, some take longer than the hold, and some messages have a delay. They print what each came to.
"""

from __future__ import annotations

import itertools
import random
import signal
import sys
import threading
import time
import uuid
from datetime import UTC, datetime, timedelta

import psycopg

from delaywheel import Client, DelaywheelError
from delaywheel.consumer import AskedHalf, HalfChecker
from delaywheel.transactions import Barrier, HalfVerdict

HOLD = "2s"
SLOWEST_S = 4.0
DELAY_S = 4.0
THREADS = 12
BARRIER = Barrier(wait="500ms")
# A broker or a database that is away for half a minute leaves nothing undecided.
RETRY = ("200ms", "1s", "1s", "2s", "2s", "5s", "5s", "5s", "10s", "10s", "10s", "20s", "20s")


class Ordering:
    """Orders at a rate, on several threads, until it is killed."""

    def __init__(self, dsn: str, addresses: str, topic: str, group: str, rate: str) -> None:
        self._dsn, self._topic, self._group = dsn, topic, group
        self._client = Client(addresses)
        self._numbers = itertools.count()
        self._began_s = time.monotonic()
        self._rate_per_s = float(rate)

    def run(self) -> None:
        """Runs for ever."""
        threads = [threading.Thread(target=self._orders) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _orders(self) -> None:
        db: psycopg.Connection | None = None
        while True:
            wait_s = self._began_s + next(self._numbers) / self._rate_per_s - time.monotonic()
            time.sleep(max(0.0, wait_s))
            try:
                db = db or psycopg.connect(self._dsn)
                outcome = self._order(db)
            except psycopg.Error as error:
                outcome, db = f"raised {type(error).__name__}", None
            except DelaywheelError as error:
                outcome = f"raised {getattr(error, 'reason', type(error).__name__)}"
            say(outcome)

    def _order(self, db: psycopg.Connection) -> str:
        """Orders once; returns what the half's sender knows of it."""
        chance = random.Random()  # noqa: S311 - no secret
        id_ = uuid.uuid4()
        due = datetime.now(UTC) + timedelta(seconds=DELAY_S) if chance.random() < 0.3 else None
        is_given_up, is_said = chance.random() < 0.2, chance.random() < 0.5
        with self._client.begin(
            self._topic,
            id_.hex.encode(),
            key=id_.bytes[:1],
            id=id_,
            deliver_at=due,
            group=self._group,
            hold=HOLD,
        ) as half:
            with db.transaction(force_rollback=is_given_up):
                db.execute("INSERT INTO orders VALUES (%s, %s)", (id_, due))
                BARRIER.record(db, half)
                if chance.random() < 0.02:
                    time.sleep(chance.uniform(0, SLOWEST_S))
            if is_given_up:
                if is_said:
                    half.rollback()
                    return "rolled back"
                raise GivenUpError
        return str(half.outcome)


class GivenUpError(DelaywheelError):
    """The local transaction was rolled back, and nobody says so: the check finds out."""

    def __init__(self) -> None:
        super().__init__("given up", outcome_known=True)


class Checker(HalfChecker):
    """Checks by the barrier, over a connection that is kept while it works."""

    def __init__(self, dsn: str, bootstrap: str, cluster: str, group: str) -> None:
        super().__init__(group=group, bootstrap=bootstrap, cluster=cluster, retry=RETRY)
        self._dsn = dsn
        self._db: psycopg.Connection | None = None

    def check(self, half: AskedHalf) -> HalfVerdict:
        """Returns what the barrier says."""
        self._db = self._db or psycopg.connect(self._dsn)
        try:
            verdict = BARRIER.verdict(self._db, half)
        except Exception:
            self._db = None
            raise
        if verdict is HalfVerdict.UNKNOWN:
            self._db.close()
            self._db = None
        say(f"check {verdict}")
        return verdict


def say(line: str) -> None:
    """Prints a line at once; several threads, and processes, do."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "order":
        Ordering(*sys.argv[2:]).run()
    else:
        with Checker(*sys.argv[2:]) as checker:
            signal.signal(signal.SIGTERM, lambda *_: checker.stop())
            checker.run()
