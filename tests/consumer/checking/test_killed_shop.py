"""Programs and their database are killed at random: orders in it = messages delivered, as sets.

What the service does with halves that nobody commits is done here: each becomes a letter at the end
of its hold. `DELAYWHEEL_DRILL_ORDERS=5000 pytest tests/consumer/checking/test_killed_shop.py` is
the long one.
"""

from __future__ import annotations

import os
import queue
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from delaywheel.ingress import halves_topic
from delaywheel.transactions import Barrier
from local.loopback.kafka import KafkaBroker
from support.consumer.half_letters import SentHalf
from support.kafka.read_committed import CommittedReader, create_topic, read_all, topic_exists
from support.services.service import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

HALVES = int(os.environ.get("DELAYWHEEL_DRILL_ORDERS", "400"))
KILL_EACH_S = 0.7
PATIENCE_S = 240.0


class Killed:
    """One program that is started again whenever it was killed."""

    def __init__(self, log: Path, *arguments: str, lines: queue.Queue[str] | None = None) -> None:
        self._log, self._arguments, self._lines = log, arguments, lines
        self._starts = 0
        self.start()

    def start(self) -> None:
        seed = [f"{self._log.name}-{self._starts}"] if self._arguments[0] == "order" else []
        self._starts += 1
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "support.consumer.shop", *self._arguments, *seed],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                if self._lines is not None and line.endswith("\n"):
                    self._lines.put(line)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Letters:
    """The service's part: asks about each half that was begun, at the end of its hold.

    Attributes:
        asked: The ids, in hex.
    """

    def __init__(self, address: str, halves: str, orders: str, group: str) -> None:
        self._producer = Producer({"bootstrap.servers": address, "linger.ms": 5})
        self._halves, self._orders, self._group = halves, orders, group
        self.begun: queue.Queue[str] = queue.Queue()
        self.asked: list[bytes] = []

    def ask(self, *, wait_s: float) -> bool:
        """Writes the next letter; returns False if no further half was begun."""
        try:
            id_, due_ms = self.begun.get(timeout=wait_s).split()
        except queue.Empty:
            return False
        text = id_.encode()
        half = SentHalf(
            self._orders, text, text, group=self._group, id=bytes.fromhex(id_), due_ms=int(due_ms)
        )
        time.sleep(max(0.0, half.due_ms / 1000 - time.time()))
        headers: Any = half.letter_headers()
        self._producer.produce(self._halves, half.value, half.key, headers=headers)
        self._producer.poll(0)
        self.asked.append(text)
        return True

    def flush(self) -> None:
        assert self._producer.flush(PATIENCE_S) == 0


@pytest.mark.timeout(2 * PATIENCE_S)
def test_orders_are_messages(
    kafka: KafkaBroker,
    cluster: str,
    orders: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed")
    from support.services.postgres import LocalPostgres, find_postgres  # noqa: PLC0415

    programs = find_postgres()
    if programs is None:
        pytest.skip("PostgreSQL is not installed: Debian's package is postgresql")
    halves, group = halves_topic(cluster), f"shop-{orders}"
    if not topic_exists(kafka.address, halves):
        create_topic(kafka.address, halves)
    letters = Letters(kafka.address, halves, orders, group)
    with LocalPostgres(programs) as postgres:

        def select(statement: str) -> list[tuple[Any, ...]]:
            with psycopg.connect(postgres.dsn) as db:
                return list(db.execute(statement).fetchall())

        with psycopg.connect(postgres.dsn) as db:
            db.execute("CREATE TABLE orders (id uuid PRIMARY KEY)")
            Barrier().create(db)
        check = ("check", postgres.dsn, kafka.address, cluster, group)
        ordering = [
            Killed(tmp_path / f"order-{n}", "order", postgres.dsn, lines=letters.begun)
            for n in range(2)
        ]
        checking = [Killed(tmp_path / f"check-{n}", *check) for n in range(2)]
        try:
            kills = kill_at_random(letters, postgres, ordering, checking)
            for program in ordering:
                program.kill()
            while letters.ask(wait_s=1.0):
                pass
            letters.flush()
            wait_until(
                "each half is recorded, or was rolled back by its check",
                lambda: (
                    select("SELECT count(*) FROM delaywheel_barrier") == [(len(letters.asked),)]
                ),
                timeout_s=PATIENCE_S,
            )
            ordered = {id_.hex.encode() for (id_,) in select("SELECT id FROM orders")}
            with CommittedReader(kafka.address, orders, partitions=2) as reader:
                reader.wait_for(len(ordered), timeout_s=PATIENCE_S)
                delivered = Counter(message.value() for message in reader.read_to_end())
        finally:
            for program in (*ordering, *checking):
                program.kill()
    with capsys.disabled():
        print(f"\n{len(letters.asked)} halves, {len(ordered)} orders, killed: {dict(kills)}")  # noqa: T201
    assert delivered == Counter(ordered)
    assert read_all(kafka.address, f"{halves}-dead-{group}") == []


def kill_at_random(
    letters: Letters, postgres: Any, ordering: list[Killed], checking: list[Killed]
) -> Counter[str]:
    """Asks about all halves that were begun, while programs and database are killed."""
    chance, kills = random.Random(7), Counter[str]()
    next_kill_s = time.monotonic() + 3.0
    while len(letters.asked) < HALVES:
        letters.ask(wait_s=0.05)
        if time.monotonic() < next_kill_s:
            continue
        victim = chance.choice(["order", "order", "check", "check", "database"])
        if victim == "database":
            postgres.kill()
            postgres.start()
        else:
            program = chance.choice(ordering if victim == "order" else checking)
            program.kill()
            program.start()
        kills[victim] += 1
        next_kill_s = time.monotonic() + KILL_EACH_S
    return kills
