"""How late messages become visible, and what transactions cost, by their distance.

    python -m local.costs.pace_cost [--rates 300,2000] [--pauses 12,25,follow] [--rounds 3]
    [--seconds S]

Transactions as a leader makes them, on two ids in turn and five partitions, on a broker of its own
that has run for two minutes; nothing else of a node. Every message is due at a time of its own; a
reader in another process says when it saw it. `follow` is the rule of core/leader/pacing.py, a
number a fixed distance in milliseconds: Kafka's own floor at that cadence. They take turns in each
round.
"""

from __future__ import annotations

import argparse
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from operator import itemgetter
from pathlib import Path

import numpy as np
from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from delaywheel_replica.cleaner.kafka.producers import TransactionalProducer
from delaywheel_replica.cleaner.outside.ports import IDS, Record
from delaywheel_replica.core.leader.pacing import CapLimits, first_pace
from delaywheel_replica.core.protocol.transaction_outcomes import TransactionState
from delaywheel_replica.kafka_settings import KafkaNames, KafkaSettings
from local.loopback.kafka import KafkaBroker

TOPIC, CONTROL, PARTITIONS = "orders", "control", 4
WARM_S = 120
WARM_RATE = 1_000
SETTLE_S = 0.5
CALL_MS = 5_000
_VALUE = bytes(180)
_STAMP = struct.Struct("<dI")


@dataclass(frozen=True, slots=True)
class Run:
    """One pause at one rate: milliseconds, and CPU milliseconds for each transaction."""

    transactions: int
    commit_p50: float
    commit_p99: float
    leader_cpu: float
    broker_cpu: float


class Leader:
    """A producer with two ids in turn."""

    def __init__(self, address: str) -> None:
        names = KafkaNames("pace")
        settings = KafkaSettings(names, {"bootstrap.servers": address})
        self._producers = [
            TransactionalProducer(settings, names.leader_id(number), log_level=3)
            for number in range(IDS)
        ]
        for producer in self._producers:
            assert producer.init(30_000).verdict is TransactionState.CONTINUE
        self._turn = 0

    def transact(self, dues: list[float], number: int) -> None:
        """Commits one transaction with these messages."""
        producer = self._producers[self._turn]
        self._turn = (self._turn + 1) % IDS
        producer.begin()
        records = [Record(TOPIC, None, _STAMP.pack(due, number) + _VALUE, []) for due in dues]
        producer.write_own(records)
        last = Record(CONTROL, b"progress", _VALUE, [], partition=0)
        assert producer.commit(last, CALL_MS).verdict is TransactionState.COMMITTED

    def run(self, rate: int, pause: str, seconds: float, number: int, broker: int) -> Run:
        """Sends messages at this rate for this long."""
        dues = _dues(rate, time.time() + 0.2, seconds)
        next_due = next(dues)
        pace = first_pace(CapLimits(1, 1, 1, 1))
        commits: list[float] = []
        began_cpu, began_broker = time.process_time(), _cpu_s(broker)
        next_begin = 0.0
        while next_due is not None:
            at = max(next_due, next_begin)
            time.sleep(max(0.0, at - time.time()))
            began = time.time()
            taken = []
            while next_due is not None and next_due <= began:
                taken.append(next_due)
                next_due = next(dues, None)
            if not taken:
                continue
            self.transact(taken, number)
            took_s = time.time() - began
            commits.append(took_s * 1000)
            pace = pace.after_commit(round(took_s * 1000), None)
            pause_ms = pace.pause_ms if pause == "follow" else float(pause)
            next_begin = began + pause_ms / 1000
        count = len(commits)
        commit_p50, commit_p99 = np.percentile(commits, [50, 99])
        return Run(
            count,
            float(commit_p50),
            float(commit_p99),
            (time.process_time() - began_cpu) * 1000 / count,
            (_cpu_s(broker) - began_broker) * 1000 / count,
        )


def _dues(rate: int, start: float, seconds: float) -> Iterator[float | None]:
    due = start
    while due < start + seconds:
        due += random.expovariate(rate)
        yield due
    yield None


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read(address: str) -> None:
    """Runs the reader, which prints number and lateness of messages until its input ends."""
    consumer = Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "pace",
            "auto.offset.reset": "latest",
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 100,
        }
    )
    consumer.subscribe([TOPIC])
    while True:
        first = consumer.poll(0.1)
        found = [first, *consumer.consume(1_000, 0)] if first is not None else []
        now = time.time()
        for each in found:
            due, number = _STAMP.unpack_from(each.value() or bytes(_STAMP.size))
            print(number, f"{(now - due) * 1000:.2f}")
        sys.stdout.flush()


def measure(
    broker: KafkaBroker, cases: Iterable[tuple[int, str]], seconds: float, warm_s: float
) -> Iterator[tuple[int, str, Run, list[float]]]:
    """Measures each case: a rate and a pause."""
    admin = AdminClient({"bootstrap.servers": broker.address})
    topics = [NewTopic(TOPIC, PARTITIONS, 1), NewTopic(CONTROL, 1, 1)]
    for future in admin.create_topics(topics).values():
        future.result()
    command = [sys.executable, "-m", "local.costs.pace_cost", "--read", broker.address]
    with tempfile.TemporaryFile("w+") as seen:
        with subprocess.Popen(command, stdout=seen) as reader:
            leader = Leader(broker.address)
            leader.run(WARM_RATE, "25", warm_s, 0, broker.pid)
            runs = []
            for number, (rate, pause) in enumerate(cases, 1):
                runs.append((rate, pause, leader.run(rate, pause, seconds, number, broker.pid)))
                time.sleep(SETTLE_S)
            reader.terminate()
        seen.seek(0)
        lateness: dict[int, list[float]] = {}
        for line in seen:
            number_text, late = line.split()
            lateness.setdefault(int(number_text), []).append(float(late))
    for number, run in enumerate(runs, 1):
        yield *run, lateness[number]


def main() -> None:
    """Runs the requested measurements."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rates", default="300,2000", help="messages a second")
    parser.add_argument("--pauses", default="12,25,follow", help="milliseconds between begins")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run")
    parser.add_argument("--warm", type=float, default=WARM_S, help="seconds before the first")
    parser.add_argument("--read", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read:
        read(arguments.read)
        return
    rates, pauses = map(int, arguments.rates.split(",")), arguments.pauses.split(",")
    cases = [*product(rates, pauses)] * arguments.rounds
    with KafkaBroker() as broker:
        found = list(measure(broker, cases, arguments.seconds, arguments.warm))
    print("  rate  pause   per s  late p50    p99  commit p50    p99  CPU ms: leader broker")
    for rate, pause, run, lateness in sorted(found, key=itemgetter(0, 1)):
        p50, p99 = np.percentile(lateness, [50, 99])
        print(
            f"{rate:>6} {pause:>6} {run.transactions / arguments.seconds:>7.1f} {p50:>9.1f}"
            f" {p99:>6.1f} {run.commit_p50:>11.1f} {run.commit_p99:>6.1f}"
            f" {run.leader_cpu:>15.2f} {run.broker_cpu:>6.2f}"
        )


if __name__ == "__main__":
    main()
