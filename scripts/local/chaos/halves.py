"""A shop beside the disturbances: its orders go with half messages, and its programs are killed.

Orders in its database must be the messages that arrive, as sets: none twice, none before its local
transaction was committed, none before its due.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from delaywheel.ingress import halves_topic
from delaywheel.transactions import Barrier
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
"""After the last message, while some are missing."""
_END_S: Final = 30.0
_ORDERS: Final = """
SELECT id, extract(epoch FROM due) * 1000, extract(epoch FROM pg_xact_commit_timestamp(xmin)) * 1000
FROM orders
"""


@dataclass(frozen=True, slots=True)
class HalfVerdict:
    """What became of all orders.

    Attributes:
        orders: Rows in the shop's database.
        seconds: How long the shop was open.
        median_per_s: Orders committed in a second, the median of that time's seconds.
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
    seconds: float
    median_per_s: float
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
            f"half messages: {self.orders:,} orders in {self.seconds:.0f} s, of which the median "
            f"had {self.median_per_s:g}; {self.delivered:,} messages, {same}: "
            f"{self.missing} missing, {self.strangers} without an order, {self.duplicated} doubled,"
            f" {self.early} early, {self.undecided} undecided\n"
            f"killed: {kills or 'none'}; ended by themselves: {self.ended}\nheard: {said}"
        )


class _Order(NamedTuple):
    """When an order was committed, and when its message is due (0: at the commit), in Unix ms."""

    committed_ms: float
    due_ms: float


class _Program:
    """One program of the shop, which is started again whenever it ended."""

    def __init__(self, log: Path, program: Callable[..., None], *arguments: object) -> None:
        self.log: Final = log
        self._arguments: Final = (log, program, *arguments)
        self.start()

    @property
    def is_running(self) -> bool:
        return self._process.is_alive()

    def start(self) -> None:
        from local.chaos.shop import run_program  # noqa: PLC0415 - not everywhere

        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=run_program, args=self._arguments, daemon=True)
        self._process.start()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def end(self) -> None:
        self._process.terminate()
        self._process.join(_END_S)
        self.kill()


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
        topic: str = TOPIC,
        *,
        kills: bool = True,
    ) -> None:
        """Opens: programs order at this rate, all together."""
        self._kills_some = kills
        self._cluster, self._postgres, self._observer = cluster, postgres, observer
        self._chance, self._note = chance, note
        from local.chaos.shop import Pace, check, order  # noqa: PLC0415 - not everywhere

        addresses = ",".join(node.address for node in cluster.nodes)
        folder, began_s = cluster.folder, time.monotonic()
        paces = [Pace(began_s, rate_per_s, _EACH, number) for number in range(_EACH)]
        self._began_s = began_s
        self._ordering = [
            _Program(
                folder / f"order-{pace.number}.log",
                *(order, postgres.dsn, addresses, topic, GROUP, pace),
            )
            for pace in paces
        ]
        self._checking = [
            _Program(
                folder / f"check-{n}.log", *(check, postgres.dsn, cluster.kafka, "local", GROUP)
            )
            for n in range(_EACH)
        ]
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
        if self._kills_some and time.monotonic() >= self._kill_at_s:
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
        seconds = time.monotonic() - self._began_s
        orders = self._orders()
        quiet_since_s, seen, patience_s = time.monotonic(), -1, _PATIENCE_S
        while time.monotonic() < quiet_since_s + patience_s:
            time.sleep(0.2)
            self._cluster.watch()
            if len(self._observer.records) != seen:
                quiet_since_s, seen = time.monotonic(), len(self._observer.records)
                patience_s = _PATIENCE_S if self._missing(orders) else _QUIET_S
        for program in self._checking:
            program.end()
        return self._verdict(orders, seconds)

    def _orders(self) -> dict[bytes, _Order]:
        """Returns each order, by the value of its message."""
        import psycopg  # noqa: PLC0415 - not for `--help`

        with psycopg.connect(self._postgres.dsn) as db:
            rows = db.execute(_ORDERS).fetchall()
        return {
            id_.hex.encode(): _Order(float(committed_ms), float(due_ms or 0))
            for id_, due_ms, committed_ms in rows
        }

    def _missing(self, orders: Mapping[bytes, _Order]) -> set[bytes]:
        return set(orders) - {record.value or b"" for record in self._observer.records}

    def _verdict(self, orders: Mapping[bytes, _Order], seconds: float) -> HalfVerdict:
        records = self._observer.records
        copies = Counter(record.value or b"" for record in records)
        missing, strangers = self._missing(orders), copies.keys() - orders.keys()
        for name, ids in (("missing", missing), ("without an order", strangers)):
            for id_ in sorted(ids)[:20]:
                self._note(f"{name}: {id_.decode()}")
        return HalfVerdict(
            orders=len(orders),
            seconds=seconds,
            median_per_s=median_per_s([one.committed_ms for one in orders.values()], seconds),
            delivered=len(orders) - len(missing),
            missing=len(missing),
            strangers=len(strangers),
            duplicated=sum(count - 1 for count in copies.values()),
            early=sum(
                record.received_ms < max(one.committed_ms, one.due_ms)
                for record in records
                if (one := orders.get(record.value or b"")) is not None
            ),
            undecided=self._undecided(),
            ended=self._ended,
            kills=dict(self._kills),
            outcomes=_said(self._programs),
        )

    def _undecided(self) -> int:
        return len(_read(self._cluster, f"{halves_topic('local')}-dead-{GROUP}"))


def median_per_s(committed_ms: Sequence[float], seconds: float) -> float:
    """Returns the median number of commits in one of the seconds that a shop was open.

    It leaves out the first and the last second, which are not whole.
    """
    each = Counter(int(ms / 1000) for ms in committed_ms)
    if not each:
        return 0.0
    whole = range(min(each) + 1, min(each) + int(seconds))
    return float(statistics.median([each[second] for second in whole] or [0]))


def _said(programs: list[_Program]) -> dict[str, int]:
    """Counts what programs printed; log lines of libraries have a time, and are no outcomes."""
    words = ("COMMITTED", "LEFT_TO_CHECK", "ROLLED_BACK", "None", "rolled back", "given up")
    kinds = (*words, "raised ", "check ")
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
    cluster: LocalCluster,
    rate_per_s: float,
    chance: random.Random,
    note: Callable[[str], None],
    topic: str = TOPIC,
    *,
    kills: bool = True,
) -> Iterator[Shop]:
    """Starts a database and the shop's programs, of which it kills some; ends all of them.

    Raises:
        ClusterError: There is no PostgreSQL, or no psycopg.
    """
    programs = find_postgres()
    if programs is None or not has_postgres():
        raise ClusterError("--halves needs psycopg and PostgreSQL: Debian's package is postgresql")
    import psycopg  # noqa: PLC0415 - not everywhere

    # What each program of the shop needs is loaded once: they are killed every few seconds.
    # Not the main module itself: runpy warns of one that is there before it runs.
    loaded = ["local.chaos.shop", "local.chaos.audit", "local.chaos.disturbing"]
    multiprocessing.set_forkserver_preload(loaded)
    cluster.create_topic(topic, PARTITIONS)
    with (
        LocalPostgres(programs) as postgres,
        Observer(cluster.kafka, {topic: PARTITIONS}) as observer,
    ):
        with psycopg.connect(postgres.dsn) as db:
            db.execute("CREATE TABLE orders (id uuid PRIMARY KEY, due timestamptz)")
            Barrier().create(db)
        shop = Shop(cluster, postgres, observer, rate_per_s, chance, note, topic, kills=kills)
        try:
            yield shop
        finally:
            shop.kill()
