"""The programs of a shop: one orders with half messages, one checks them. They are killed.

Each order is a row, and a message whose value is the row's id. Some local transactions are given
up, some take longer than the hold, and some messages have a delay. They print what each came to.

A program is forked from a process that has loaded all modules, as a web server forks its workers
(`multiprocessing`'s fork server): to load them takes longer than the shop may be short of one.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import math
import os
import random
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, NamedTuple

import psycopg

from delaywheel import AsyncClient, DelaywheelError
from delaywheel.consumer import AskedHalf, HalfChecker
from delaywheel.transactions import AsyncHalf, Barrier, HalfVerdict

HOLD = "3s"
SLOWEST_S = 4.0
DELAY_S = 4.0
CONNECTIONS: Final = 16
"""How many local transactions one program has under way at a time."""
MOST_OPEN: Final = 1_000
"""How many customers one program serves at a time; who comes then is turned away."""
BARRIER = Barrier(wait="500ms")
# A broker or a database that is away for half a minute leaves nothing undecided.
RETRY = ("200ms", "1s", "1s", "2s", "2s", "5s", "5s", "5s", "10s", "10s", "10s", "20s", "20s")


class Pace(NamedTuple):
    """When one program orders: its share of a shop's customers, who come at an even rate.

    Attributes:
        began_s: When the shop was opened, by the monotonic clock of this machine.
        rate_per_s: Of all programs together.
        programs: How many they are.
        number: Which of them this is, from 0.
    """

    began_s: float
    rate_per_s: float
    programs: int
    number: int

    def at_s(self, number: int) -> float:
        """Returns when the customer comes who is served as this program's number `number`."""
        return self.began_s + (number * self.programs + self.number) / self.rate_per_s

    def next(self, now_s: float) -> int:
        """Returns the number of the first one who comes from now on."""
        come = (now_s - self.began_s) * self.rate_per_s
        return max(0, math.ceil((come - self.number) / self.programs))


class Order(NamedTuple):
    """One order.

    Attributes:
        id: Its row, and the value of its message in hex.
        due: When its message is due; None: at its commit.
        is_given_up: Whether the local transaction is rolled back.
        slow_s: How long it stays open.
    """

    id: uuid.UUID
    due: datetime | None
    is_given_up: bool
    slow_s: float


class Ordering:
    """Orders at a pace until it is killed: a coroutine for each customer, threads for the database.

    Whoever comes while it does not run is not served.
    """

    def __init__(self, dsn: str, topic: str, group: str, pace: Pace) -> None:
        self._dsn, self._topic, self._group, self._pace = dsn, topic, group, pace
        self._threads = ThreadPoolExecutor(CONNECTIONS)
        self._kept = threading.local()

    async def run(self, addresses: str) -> None:
        """Runs for ever."""
        async with AsyncClient(addresses) as client:
            being_served = set[asyncio.Task[None]]()
            for number in itertools.count(self._pace.next(time.monotonic())):
                await asyncio.sleep(self._pace.at_s(number) - time.monotonic())
                if len(being_served) == MOST_OPEN:
                    say("turned away")
                    continue
                task = asyncio.create_task(self._serve(client))
                being_served.add(task)
                task.add_done_callback(being_served.discard)

    async def _serve(self, client: AsyncClient) -> None:
        try:
            outcome = await self._order(client)
        except psycopg.Error as error:
            outcome = f"raised {type(error).__name__}"
        except DelaywheelError as error:
            outcome = f"raised {getattr(error, 'reason', type(error).__name__)}"
        say(outcome)

    async def _order(self, client: AsyncClient) -> str:
        """Orders once; returns what the half's sender knows of it."""
        chance = random.Random()  # noqa: S311 - no secret
        id_ = uuid.uuid4()
        due = datetime.now(UTC) + timedelta(seconds=DELAY_S) if chance.random() < 0.3 else None
        is_given_up, is_said = chance.random() < 0.2, chance.random() < 0.5
        slow_s = chance.uniform(0, SLOWEST_S) if chance.random() < 0.02 else 0.0
        half = await client.begin(
            self._topic,
            id_.hex.encode(),
            key=id_.bytes[:1],
            id=id_,
            deliver_at=due,
            group=self._group,
            hold=HOLD,
        )
        order = Order(id_, due, is_given_up=is_given_up, slow_s=slow_s)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._threads, self._write, half, order)
        if not is_given_up:
            return str(await half.commit())
        if is_said:
            await half.rollback()
            return "rolled back"
        return "given up"  # the check finds out

    def _write(self, half: AsyncHalf, order: Order) -> None:
        """The local transaction, over a connection that its thread keeps while it works."""
        db: psycopg.Connection | None = getattr(self._kept, "db", None)
        self._kept.db = None
        db = db or psycopg.connect(self._dsn)
        with db.transaction(force_rollback=order.is_given_up):
            db.execute("INSERT INTO orders VALUES (%s, %s)", (order.id, order.due))
            BARRIER.record(db, half)
            time.sleep(order.slow_s)
        self._kept.db = db


class Checker(HalfChecker):
    """Checks by the barrier, over a connection that each thread keeps while it works."""

    def __init__(self, dsn: str, bootstrap: str, cluster: str, group: str) -> None:
        super().__init__(group=group, bootstrap=bootstrap, cluster=cluster, retry=RETRY)
        self._dsn = dsn
        self._kept = threading.local()

    def check(self, half: AskedHalf) -> HalfVerdict:
        """Returns what the barrier says."""
        db: psycopg.Connection | None = getattr(self._kept, "db", None)
        self._kept.db = None
        db = db or psycopg.connect(self._dsn)
        verdict = BARRIER.verdict(db, half)
        if verdict is HalfVerdict.UNKNOWN:
            db.close()
        else:
            self._kept.db = db
        say(f"check {verdict}")
        return verdict


def say(line: str) -> None:
    """Prints a line at once; several threads, and processes, do."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def order(dsn: str, addresses: str, topic: str, group: str, pace: Pace) -> None:
    """A program that orders."""
    asyncio.run(Ordering(dsn, topic, group, pace).run(addresses))


def check(dsn: str, bootstrap: str, cluster: str, group: str) -> None:
    """A program that checks; SIGTERM ends it."""
    with Checker(dsn, bootstrap, cluster, group) as checker:
        signal.signal(signal.SIGTERM, lambda *_: checker.stop())
        checker.run()


def run_program(log: Path, program: Callable[..., None], *arguments: object) -> None:
    """Runs a program in a process that was just forked, which ends with its parent.

    Args:
        log: Where its output is appended.
        program: `order` or `check`.
        arguments: Its arguments.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    os.setsid()  # Ctrl-C does not reach it
    with log.open("ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    program(*arguments)
