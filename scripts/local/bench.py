"""Figures of one run on this machine: how much is accepted, and how late messages come.

Absolute figures are the machine's; what can be compared is the ratio to Kafka's own in the same
run: an idempotent producer, and the same consumer process with the same settings. Kafka is
measured before and after delaywheel, so that a machine that becomes slower shows.

| phase | what is sent | what is measured |
|---|---|---|
| kafka | 2,000 a second, at once | produce() called → read_committed consumer has it |
| delayed | 2,000 a second, due 2 to 4 s ahead | due → consumer has it |
| short | 2,000 a second, due 50 to 500 ms ahead | due → consumer has it |
| accept | as fast as it goes, due in 10 to 60 minutes | acknowledged messages a second |
| produce | the same into Kafka itself | acknowledged messages a second |
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from delaywheel import Client, Message
from delaywheel_replica.cli.output import print_table
from local.child import interrupt_on_signals
from local.cluster import ClusterError, LocalCluster
from local.kafka import KafkaError
from local.observer import Observer, Record
from local.tally import Spread, due_of

RATE = 2_000
VALUE_BYTES = 200
OBSERVED = {"direct": 3, "delayed": 3, "short": 3}
NOT_OBSERVED = {"bulk": 3}
DELAYED_MS = (2_000, 4_000)
SHORT_MS = (50, 500)
ACCEPT_S = (600, 3_600)
ACCEPT_BATCH = 1_000
ACCEPT_THREADS = 4
TICK_S = 0.005
ARRIVAL_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Size:
    """How long the phases are."""

    lateness_s: float
    accepted: int


SMOKE = Size(lateness_s=10, accepted=200_000)
FULL = Size(lateness_s=60, accepted=2_000_000)


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    """What one process of the node holds."""

    anonymous_mib: float
    descriptors: int


def process_figures(pid: int) -> ProcessFigures:
    """Anonymous memory and open descriptors of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    kib = next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:"))
    return ProcessFigures(
        round(int(kib) / 1024, 1), sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    )


def paced(rate: int, seconds: float) -> Iterator[int]:
    """How many messages to send now, tick after tick, so that the rate is kept."""
    started_at = time.monotonic()
    sent, total = 0, int(rate * seconds)
    while sent < total:
        due = min(int((time.monotonic() - started_at) * rate), total)
        if due > sent:
            yield due - sent
            sent = due
        time.sleep(TICK_S)


class Bench:
    """The phases, on a cluster that is up."""

    def __init__(
        self, cluster: LocalCluster, client: Client, observer: Observer, size: Size
    ) -> None:
        """Puts the parts together."""
        from confluent_kafka import Producer  # noqa: PLC0415 - `--help` must not need it

        self._cluster = cluster
        self._client = client
        self._observer = observer
        self._size = size
        self._value = random.Random(1).randbytes(VALUE_BYTES)  # noqa: S311 - no secret
        self._producer = Producer(
            {"bootstrap.servers": cluster.kafka, "enable.idempotence": True, "log_level": 2}
        )
        self._arrived = 0

    def run(self, say: Callable[[str], None]) -> dict[str, Any]:
        """All phases in order."""
        say("warming up")
        self._direct(2)
        self._delayed("short", SHORT_MS, 2)
        idle = self._processes()
        say(f"Kafka alone: {RATE:,} messages a second")
        direct = self._direct(self._size.lateness_s / 2)
        say(f"delaywheel: {RATE:,} a second, due 2 to 4 s ahead")
        delayed = self._delayed("delayed", DELAYED_MS, self._size.lateness_s)
        say(f"delaywheel: {RATE:,} a second, due 50 to 500 ms ahead")
        short = self._delayed("short", SHORT_MS, self._size.lateness_s)
        say("Kafka alone once more")
        direct += self._direct(self._size.lateness_s / 2)
        say(f"delaywheel: {self._size.accepted:,} messages, as fast as they are taken")
        accept = self._accept_rate()
        loaded = self._processes()
        say("Kafka alone: the same")
        produce = self._produce_rate()
        lateness = {
            name: Spread.of(values)
            for name, values in (("kafka", direct), ("delayed", delayed), ("short", short))
        }
        return {
            "machine": {"cpus": os.cpu_count(), "platform": platform.platform()},
            "rate_per_s": RATE,
            "value_bytes": VALUE_BYTES,
            "lateness": {name: asdict(value) for name, value in lateness.items()},
            "ratio_p50": {
                name: round(lateness[name].p50_ms / lateness["kafka"].p50_ms, 2)
                for name in ("delayed", "short")
            },
            "accepted_per_s": round(accept),
            "kafka_produced_per_s": round(produce),
            "processes": {
                "idle": idle,
                "loaded": loaded | {"pending": self._size.accepted},
            },
        }

    def _direct(self, seconds: float) -> list[float]:
        """Milliseconds from produce to the consumer."""
        count = 0
        for batch in paced(RATE, seconds):
            for _ in range(batch):
                self._producer.produce("direct", self._value, key=str(time.time_ns()).encode())
            self._producer.poll(0)
            count += batch
        self._producer.flush()
        return [
            record.received_ms - int(record.key or 0) / 1e6
            for record in self._take("direct", count)
        ]

    def _delayed(self, topic: str, ahead_ms: tuple[int, int], seconds: float) -> list[float]:
        """Milliseconds from the due to the consumer."""
        chance = random.Random(2)  # noqa: S311 - no secret
        pending = []
        for batch in paced(RATE, seconds):
            for _ in range(batch):
                delay = timedelta(milliseconds=chance.randint(*ahead_ms))
                pending.append(self._client.produce_async(topic, self._value, delay=delay))
        for one in pending:
            one.result()
        return [record.received_ms - due_of(record) for record in self._take(topic, len(pending))]

    def _take(self, topic: str, count: int) -> list[Record]:
        """The next records of the only topic that is being written."""
        deadline = time.monotonic() + ARRIVAL_TIMEOUT_S
        while len(self._observer.records) < self._arrived + count:
            self._cluster.watch()
            if time.monotonic() > deadline:
                missing = self._arrived + count - len(self._observer.records)
                raise ClusterError(f"{missing} messages of {topic} did not arrive")
            time.sleep(0.05)
        taken = self._observer.records[self._arrived :]
        self._arrived += len(taken)
        if len(taken) != count or any(record.topic != topic for record in taken):
            raise ClusterError(f"{len(taken)} records arrived where {count} were sent to {topic}")
        return taken

    def _accept_rate(self) -> float:
        """Acknowledged messages a second."""
        chance = threading.local()

        def send(_: int) -> None:
            if not hasattr(chance, "random"):
                chance.random = random.Random()  # noqa: S311 - no secret
            batch = [
                Message(
                    "bulk",
                    self._value,
                    delay=timedelta(seconds=chance.random.uniform(*ACCEPT_S)),
                )
                for _ in range(ACCEPT_BATCH)
            ]
            for result in self._client.produce_many(batch):
                result.unwrap()

        started_at = time.monotonic()
        with ThreadPoolExecutor(ACCEPT_THREADS) as pool:
            for _ in pool.map(send, range(self._size.accepted // ACCEPT_BATCH)):
                pass
        return self._size.accepted / (time.monotonic() - started_at)

    def _produce_rate(self) -> float:
        """Messages a second that Kafka itself acknowledges to the idempotent producer."""
        started_at = time.monotonic()
        for _ in range(self._size.accepted):
            while True:
                try:
                    self._producer.produce("bulk", self._value)
                    break
                except BufferError:
                    self._producer.poll(0.01)
        if self._producer.flush(ARRIVAL_TIMEOUT_S):
            raise ClusterError("Kafka did not acknowledge what was sent to it")
        return self._size.accepted / (time.monotonic() - started_at)

    def _processes(self) -> dict[str, Any]:
        row = self._cluster.nodes[0].row()
        return {name: asdict(process_figures(row[f"{name}_pid"])) for name in ("server", "cleaner")}


LABELS = {
    "kafka": "Kafka, produce → consume",
    "delayed": "delaywheel, due 2 to 4 s ahead",
    "short": "delaywheel, due 50 to 500 ms ahead",
}


def print_report(report: dict[str, Any]) -> None:
    """The figures as tables."""
    rows = []
    for name, label in LABELS.items():
        row = report["lateness"][name]
        figures = [f"{row[key]:,.1f}" for key in ("p50_ms", "p99_ms", "max_ms")]
        rows.append((label, row["messages"], *figures, str(report["ratio_p50"].get(name, 1.0))))
    print_table(
        ["lateness", "messages", "p50 ms", "p99 ms", "max ms", "ratio"],
        rows,
        title=f"{report['rate_per_s']:,} messages a second",
    )
    print()
    ours, theirs = report["accepted_per_s"], report["kafka_produced_per_s"]
    print_table(
        ["delaywheel", "Kafka", "ratio"],
        [(ours, theirs, f"{ours / theirs:.2f}")],
        title=f"acknowledged messages a second, {report['value_bytes']} bytes each",
    )
    print()
    idle, loaded = report["processes"]["idle"], report["processes"]["loaded"]
    print_table(
        ["process", "anonymous MiB", "descriptors"],
        [
            (
                name,
                f"{idle[name]['anonymous_mib']} → {loaded[name]['anonymous_mib']}",
                f"{idle[name]['descriptors']} → {loaded[name]['descriptors']}",
            )
            for name in ("server", "cleaner")
        ],
        title=f"the node with nothing pending → with {loaded['pending']:,} messages pending",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench", description="Measure delaywheel beside Kafka itself, in one run."
    )
    parser.add_argument("--smoke", action="store_true", help="short phases: about a minute")
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures here as JSON")
    options = parser.parse_args(arguments)
    interrupt_on_signals()

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        with LocalCluster(say=say) as cluster:
            cluster.wait_until_accepting()
            for name, partitions in (OBSERVED | NOT_OBSERVED).items():
                cluster.create_topic(name, partitions)
            with (
                Client(cluster.nodes[0].address) as client,
                Observer(cluster.kafka, OBSERVED) as observer,
            ):
                size = SMOKE if options.smoke else FULL
                report = Bench(cluster, client, observer, size).run(say)
    except KeyboardInterrupt:
        return 130
    except (ClusterError, KafkaError) as error:
        say(str(error))
        return 1
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    print_report(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
