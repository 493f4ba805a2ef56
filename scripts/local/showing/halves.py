"""Demonstrates orders that go with a database: committed, rolled back, and decided by the check."""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from delaywheel import Client
from delaywheel.consumer import AskedHalf, HalfChecker
from delaywheel.deadletters.reading import TopicReader
from delaywheel.trace import Trace
from delaywheel.transactions import Barrier, HalfVerdict
from local.loopback.cluster import ClusterError, LocalCluster

TOPIC = "demo-orders"
GROUP = "demo-shop"
WITHIN_S = 60.0
BARRIER = Barrier()
COMMITTED, ROLLED_BACK, CHECKED = b"committed", b"rolled back", b"not heard of again"


class Ordered(NamedTuple):
    """What became of three orders, each with a half message.

    Attributes:
        orders: How many are in the database.
        arrived: The messages that arrived.
        verdict: What the check said of the one whose sender was not heard of again.
        checked: The id of that.
    """

    orders: int
    arrived: tuple[bytes, ...]
    verdict: str
    checked: bytes

    @property
    def is_clean(self) -> bool:
        """Whether the orders in the database are the messages that arrived."""
        return (self.orders, self.verdict) == (2, "commit") and sorted(self.arrived) == sorted(
            (COMMITTED, CHECKED)
        )


class _Shop(HalfChecker):
    """Checks, and notes what it said."""

    def __init__(self, folder: Path, kafka: str, cluster_id: str, trace: Trace) -> None:
        super().__init__(group=GROUP, bootstrap=kafka, cluster=cluster_id, trace=trace)
        self._path = folder / "shop.db"
        self.said = threading.Event()
        self.verdict = ""

    def check(self, half: AskedHalf) -> HalfVerdict:
        with self.database() as db:
            verdict = BARRIER.verdict(db, half)
        self.verdict = str(verdict)
        self.said.set()
        return verdict

    def database(self) -> closing[sqlite3.Connection]:
        """Opens the shop's database."""
        return closing(sqlite3.connect(self._path))


def order_three(cluster: LocalCluster, cluster_id: str, trace: Trace) -> Ordered:
    """Orders three times; of the last one the sender does not say that it has committed."""
    cluster.create_topic(TOPIC, 1)
    shop = _Shop(cluster.folder, cluster.kafka, cluster_id, trace)
    with (
        shop,
        shop.database() as db,
        Client(cluster.nodes[0].address, timeout=WITHIN_S, trace=trace) as client,
    ):
        checking = threading.Thread(target=shop.run, name="checking", daemon=True)
        checking.start()
        db.execute("CREATE TABLE orders (what TEXT)")
        BARRIER.create(db)
        for what in (COMMITTED, ROLLED_BACK, CHECKED):
            # A busy machine takes seconds to begin and end a half; the last one is asked about.
            hold = "3s" if what is CHECKED else "9s"
            half = client.begin(TOPIC, what, group=GROUP, hold=hold)
            with db:
                db.execute("INSERT INTO orders VALUES (?)", (what,))
                BARRIER.record(db, half)
                if what is ROLLED_BACK:
                    db.rollback()
            if what is COMMITTED:
                half.commit()
            elif what is ROLLED_BACK:
                half.rollback()
        if not shop.said.wait(WITHIN_S):
            raise ClusterError(
                f"nobody asked about a half within {WITHIN_S:.0f} s; see {cluster.folder}/*.log"
            )
        (orders,) = db.execute("SELECT count(*) FROM orders").fetchone()
        arrived = _arrived(cluster, orders)
        shop.stop()
        checking.join(WITHIN_S)
    return Ordered(orders, arrived, shop.verdict, half.id)


def _arrived(cluster: LocalCluster, orders: int) -> tuple[bytes, ...]:
    """Returns the messages that arrived, as soon as they are so many as there are orders."""
    reader = TopicReader({"bootstrap.servers": cluster.kafka}, TOPIC, timeout_s=WITHIN_S)
    deadline = time.monotonic() + WITHIN_S
    try:
        while True:
            found = tuple(record.value() or b"" for record in reader.read(reader.bounds(1)))
            if len(found) >= orders:
                return found
            if time.monotonic() > deadline:
                raise ClusterError(f"{len(found)} of {orders} orders have arrived")
            cluster.watch()
            time.sleep(0.1)
    finally:
        reader.close()
