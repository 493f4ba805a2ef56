"""A shop beside the disturbances: its orders go with half messages, and its programs are killed.

Orders in its database must be the messages that arrive, as sets: none twice, none before its local
transaction was committed, none before its due.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from delaywheel.ingress import halves_topic
from delaywheel.transactions import Barrier
from local.loopback.child import end_child, start_child
from local.loopback.cluster import ClusterError, LocalCluster
from local.loopback.postgres import LocalPostgres, find_postgres, has_postgres
from local.stage.observer import Observer, Record

TOPIC: Final = "orders"
GROUP: Final = "shop"
PARTITIONS: Final = 3
SETTINGS: Final = {"halves": True}
_EACH: Final = 2
"""How many programs order, and how many check."""
_KILL_AFTER_S: Final = (2.0, 6.0)
# A half whose order was given up may still be asked about for so long once all others arrived.
_QUIET_S: Final = 15.0
_PATIENCE_S: Final = 120.0
_ORDERS: Final = """
SELECT id, extract(epoch FROM due) * 1000, extract(epoch FROM pg_xact_commit_timestamp(xmin)) * 1000
FROM orders
"""


@dataclass(frozen=True, slots=True)
class HalfVerdict:
    """What became of all orders.

    Attributes:
        orders: Rows in the shop's database.
        delivered: Orders whose message arrived.
        missing: Orders without a message.
        strangers: Messages without an order.
        duplicated: Copies beyond the first, of any message.
        early: Messages that arrived before the commit of their order, or before their due.
        undecided: Halves that ended as dead letters.
        ended: Programs that ended by themselves.
        kills: How often each kind of program was killed.
        outcomes: What senders and checkers were told, or said.
    """

    orders: int
    delivered: int
    missing: int
    strangers: int
    duplicated: int
    early: int
    undecided: int
    ended: int
    kills: Mapping[str, int]
    outcomes: Mapping[str, int]

    @property
    def is_clean(self) -> bool:
        """Whether orders are messages, and no program failed."""
        faults = (self.missing, self.strangers, self.duplicated, self.early, self.undecided)
        return self.orders > 0 and not any((*faults, self.ended))

    def text(self) -> str:
        """Describes it in a few lines."""
        kills = ", ".join(f"{name} {count}" for name, count in sorted(self.kills.items()))
        said = ", ".join(f"{name} {count:,}" for name, count in sorted(self.outcomes.items()))
        same = "the same ones" if self.is_clean else "NOT the same ones, once each and in time"
        return (
            f"half messages: {self.orders:,} orders, {self.delivered:,} messages, {same}: "
            f"{self.missing} missing, {self.strangers} without an order, {self.duplicated} doubled,"
            f" {self.early} early, {self.undecided} undecided\n"
            f"killed: {kills or 'none'}; ended by themselves: {self.ended}\nheard: {said}"
        )


class _Program:
    """One program of the shop, which is started again whenever it ended."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log: Final = log
        self._command: Final = [sys.executable, "-m", "local.chaos.shop", *arguments]
        self._process: subprocess.Popen[bytes] = start_child(self._command, log=log)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def start(self) -> None:
        self._process = start_child(self._command, log=self.log)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        end_child(self._process, patience_s=30.0)


class Shop:
    """Programs and a database on a running cluster; see `open_shop`."""

    def __init__(
        self,
        cluster: LocalCluster,
        postgres: LocalPostgres,
        observer: Observer,
        rate_per_s: float,
        chance: random.Random,
        note: Callable[[str], None],
    ) -> None:
        """Opens: programs order at this rate, all together."""
        self._cluster, self._postgres, self._observer = cluster, postgres, observer
        self._chance, self._note = chance, note
        addresses = ",".join(node.address for node in cluster.nodes)
        order = ("order", postgres.dsn, addresses, TOPIC, GROUP, f"{rate_per_s / _EACH}")
        check = ("check", postgres.dsn, cluster.kafka, "local", GROUP)
        folder = cluster.folder
        self._ordering = [_Program(folder / f"order-{n}.log", *order) for n in range(_EACH)]
        self._checking = [_Program(folder / f"check-{n}.log", *check) for n in range(_EACH)]
        self._programs = [*self._ordering, *self._checking]
        self._kills = Counter[str]()
        self._ended = 0
        self._plan_kill()

    def look_after(self) -> None:
        """Starts programs that ended, and kills one if it is time."""
        for program in self._programs:
            if not program.is_running:
                self._ended += 1
                self._note(f"a program of the shop ended by itself: {program.log}")
                program.start()
        if time.monotonic() >= self._kill_at_s:
            self._kill()
            self._plan_kill()

    def _plan_kill(self) -> None:
        self._kill_at_s = time.monotonic() + self._chance.uniform(*_KILL_AFTER_S)

    def _kill(self) -> None:
        victim = self._chance.choice(["order", "order", "check", "check", "database"])
        self._kills[victim] += 1
        if victim == "database":
            self._postgres.kill()
            self._postgres.start()
            return
        program = self._chance.choice(self._ordering if victim == "order" else self._checking)
        program.kill()
        program.start()

    def kill(self) -> None:
        """Ends all programs at once."""
        for program in self._programs:
            program.kill()

    def close(self) -> HalfVerdict:
        """Ends the programs that order, waits until all is decided, and compares."""
        for program in self._ordering:
            program.kill()
        orders = self._orders()
        deadline_s, quiet_since_s, seen = time.monotonic() + _PATIENCE_S, time.monotonic(), -1
        while time.monotonic() < deadline_s:
            time.sleep(0.2)
            self._cluster.watch()
            if len(self._observer.records) != seen or self._missing(orders):
                quiet_since_s, seen = time.monotonic(), len(self._observer.records)
            if time.monotonic() - quiet_since_s > _QUIET_S:
                break
        for program in self._checking:
            program.end()
        return self._verdict(orders)

    def _orders(self) -> dict[bytes, float]:
        """Returns each order with the Unix ms before which its message must not arrive."""
        import psycopg  # noqa: PLC0415 - not for `--help`

        with psycopg.connect(self._postgres.dsn) as db:
            rows = db.execute(_ORDERS).fetchall()
        return {
            id_.hex.encode(): max(float(committed_ms), float(due_ms or 0))
            for id_, due_ms, committed_ms in rows
        }

    def _missing(self, orders: Mapping[bytes, float]) -> set[bytes]:
        return set(orders) - {record.value or b"" for record in self._observer.records}

    def _verdict(self, orders: Mapping[bytes, float]) -> HalfVerdict:
        records = self._observer.records
        copies = Counter(record.value or b"" for record in records)
        missing, strangers = self._missing(orders), copies.keys() - orders.keys()
        for name, ids in (("missing", missing), ("without an order", strangers)):
            for id_ in sorted(ids)[:20]:
                self._note(f"{name}: {id_.decode()}")
        return HalfVerdict(
            orders=len(orders),
            delivered=len(orders) - len(missing),
            missing=len(missing),
            strangers=len(strangers),
            duplicated=sum(count - 1 for count in copies.values()),
            early=sum(
                record.received_ms < orders.get(record.value or b"", 0) for record in records
            ),
            undecided=self._undecided(),
            ended=self._ended,
            kills=dict(self._kills),
            outcomes=_said(self._programs),
        )

    def _undecided(self) -> int:
        return len(_read(self._cluster, f"{halves_topic('local')}-dead-{GROUP}"))


def _said(programs: list[_Program]) -> dict[str, int]:
    """Counts what programs printed; log lines of libraries have a time, and are no outcomes."""
    kinds = ("COMMITTED", "LEFT_TO_CHECK", "None", "rolled back", "raised ", "check ")
    lines = [line for one in programs for line in one.log.read_text(errors="replace").splitlines()]
    return dict(Counter(line for line in lines if line.startswith(kinds)))


def _read(cluster: LocalCluster, topic: str) -> list[Record]:
    """Reads all of a topic with one partition; none if there is no such topic."""
    from confluent_kafka.admin import AdminClient  # noqa: PLC0415 - not for `--help`

    if (
        topic
        not in AdminClient({"bootstrap.servers": cluster.kafka}).list_topics(timeout=20).topics
    ):
        return []
    with Observer(cluster.kafka, {topic: 1}) as observer:
        time.sleep(2.0)
    return observer.records


@contextmanager
def open_shop(
    cluster: LocalCluster, rate_per_s: float, chance: random.Random, note: Callable[[str], None]
) -> Iterator[Shop]:
    """Starts a database and the shop's programs; ends all of them.

    Raises:
        ClusterError: There is no PostgreSQL, or no psycopg.
    """
    programs = find_postgres()
    if programs is None or not has_postgres():
        raise ClusterError("--halves needs psycopg and PostgreSQL: Debian's package is postgresql")
    import psycopg  # noqa: PLC0415 - not everywhere

    cluster.create_topic(TOPIC, PARTITIONS)
    with (
        LocalPostgres(programs) as postgres,
        Observer(cluster.kafka, {TOPIC: PARTITIONS}) as observer,
    ):
        with psycopg.connect(postgres.dsn) as db:
            db.execute("CREATE TABLE orders (id uuid PRIMARY KEY, due timestamptz)")
            Barrier().create(db)
        shop = Shop(cluster, postgres, observer, rate_per_s, chance, note)
        try:
            yield shop
        finally:
            shop.kill()
