"""Figures of one run on this machine: how much is accepted, and how late messages come.

Absolute figures are the machine's; what can be compared is the ratio to Kafka's own in the same
run: an idempotent producer, and the same consumer process with the same settings. Kafka is
measured before and after delaywheel, so that a machine that becomes slower shows.

| phase | what is sent | what is measured |
|---|---|---|
| kafka | at each rate, at once | produce() called → read_committed consumer has it |
| delayed | at each rate, due 2 to 4 s ahead | due → consumer has it |
| short | at each rate, due 50 to 500 ms ahead | due → consumer has it |
| accept | as fast as it goes, due in 10 to 60 minutes | acknowledged messages a second |
| produce | the same into Kafka itself | acknowledged messages a second |

Of delaywheel's phases it is also told what CPU time each process of each node took, and whether
there were elections, changes of who is in sync, or restarts: such a run is not a calm one.
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
from local.bench_report import print_report
from local.child import interrupt_on_signals
from local.cluster import ClusterError, LocalCluster
from local.kafka_jars import KafkaError
from local.observer import Observer, Record
from local.scraping import Meter
from local.tally import Spread, due_of

DEFAULT_RATE_PER_S = 2_000
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
    idle_s: float


SMOKE = Size(lateness_s=10, accepted=200_000, idle_s=3)
FULL = Size(lateness_s=60, accepted=2_000_000, idle_s=20)


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    """What one process of the node holds."""

    anonymous_mib: float
    descriptors: int


@dataclass(frozen=True, slots=True)
class Phase:
    """What was measured while messages were sent.

    Attributes:
        lateness_ms: Of each message.
        sent_per_s: As it came out: a busy machine may not keep the rate.
    """

    lateness_ms: list[float]
    sent_per_s: float


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

    def run(self, rates_per_s: Sequence[int], say: Callable[[str], None]) -> dict[str, Any]:
        """All phases in order."""
        say("warming up")
        self._direct(DEFAULT_RATE_PER_S, 2)
        self._delayed("short", SHORT_MS, DEFAULT_RATE_PER_S, 2)
        idle, idle_cpu_share = self._processes(), self._idle_cpu_share()
        rates = [self._at_rate(rate, say) for rate in rates_per_s]
        say(f"delaywheel: {self._size.accepted:,} messages, as fast as they are taken")
        meter = Meter(self._cluster.nodes)
        accepted_per_s = self._accept_rate()
        accept_cost, loaded = meter.read(), self._processes()
        say("Kafka alone: the same")
        return {
            "machine": {"cpus": os.cpu_count(), "platform": platform.platform()},
            "nodes": len(self._cluster.nodes),
            "value_bytes": VALUE_BYTES,
            "rates": rates,
            "accept": {
                "messages": self._size.accepted,
                "per_s": round(accepted_per_s),
                "cost": asdict(accept_cost),
            },
            "kafka_produced_per_s": round(self._produce_rate()),
            "idle_cpu_share": idle_cpu_share,
            "processes": {"idle": idle, "loaded": loaded},
        }

    def _at_rate(self, rate_per_s: int, say: Callable[[str], None]) -> dict[str, Any]:
        """Lateness at one rate, Kafka's own before and after."""
        told = f"{rate_per_s:,} messages a second"
        say(f"Kafka alone: {told}")
        before = self._direct(rate_per_s, self._size.lateness_s / 2)
        say(f"delaywheel: {told}, due 2 to 4 s ahead")
        meter = Meter(self._cluster.nodes)
        delayed = self._delayed("delayed", DELAYED_MS, rate_per_s, self._size.lateness_s)
        costs = {"delayed": meter.read()}
        say(f"delaywheel: {told}, due 50 to 500 ms ahead")
        meter = Meter(self._cluster.nodes)
        short = self._delayed("short", SHORT_MS, rate_per_s, self._size.lateness_s)
        costs["short"] = meter.read()
        say("Kafka alone once more")
        after = self._direct(rate_per_s, self._size.lateness_s / 2)
        kafka_ms = before.lateness_ms + after.lateness_ms
        lateness = {
            "kafka": Spread.of(kafka_ms),
            "delayed": Spread.of(delayed.lateness_ms),
            "short": Spread.of(short.lateness_ms),
        }
        kafka, phases = lateness["kafka"], {"delayed": delayed, "short": short}
        sent_per_s = {name: round(phase.sent_per_s) for name, phase in phases.items()}
        return {
            "rate_per_s": rate_per_s,
            "sent_per_s": {
                "kafka": round((before.sent_per_s + after.sent_per_s) / 2),
                **sent_per_s,
            },
            "lateness": {name: asdict(value) for name, value in lateness.items()},
            "ratio_p50": {name: round(lateness[name].p50_ms / kafka.p50_ms, 2) for name in phases},
            "ratio_p99": {name: round(lateness[name].p99_ms / kafka.p99_ms, 2) for name in phases},
            "phases": {
                name: {"messages": len(phase.lateness_ms), "cost": asdict(costs[name])}
                for name, phase in phases.items()
            },
        }

    def _direct(self, rate_per_s: int, seconds: float) -> Phase:
        """From produce to the consumer."""
        started_at = time.monotonic()
        count = 0
        for batch in paced(rate_per_s, seconds):
            for _ in range(batch):
                self._producer.produce("direct", self._value, key=str(time.time_ns()).encode())
            self._producer.poll(0)
            count += batch
        sent_per_s = count / (time.monotonic() - started_at)
        self._producer.flush()
        lateness_ms = [
            record.received_ms - int(record.key or 0) / 1e6
            for record in self._take("direct", count)
        ]
        return Phase(lateness_ms, sent_per_s)

    def _delayed(
        self, topic: str, ahead_ms: tuple[int, int], rate_per_s: int, seconds: float
    ) -> Phase:
        """From the due to the consumer."""
        chance = random.Random(2)  # noqa: S311 - no secret
        started_at = time.monotonic()
        pending = []
        for batch in paced(rate_per_s, seconds):
            for _ in range(batch):
                delay = timedelta(milliseconds=chance.randint(*ahead_ms))
                pending.append(self._client.produce_async(topic, self._value, delay=delay))
        sent_per_s = len(pending) / (time.monotonic() - started_at)
        for one in pending:
            one.result()
        records = self._take(topic, len(pending))
        lateness_ms = [record.received_ms - due_of(record) for record in records]
        return Phase(lateness_ms, sent_per_s)

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
        """Figures of each process of each node."""
        rows = {node.id: node.row() for node in self._cluster.nodes}
        return {
            f"{node} {name}": asdict(process_figures(row[f"{name}_pid"]))
            for node, row in rows.items()
            for name in ("server", "cleaner")
        }

    def _idle_cpu_share(self) -> dict[str, float]:
        """How much of one CPU each process takes with nothing to do."""
        meter, started_at = Meter(self._cluster.nodes), time.monotonic()
        time.sleep(self._size.idle_s)
        cost, passed_s = meter.read(), time.monotonic() - started_at
        return {
            f"{node} {name}": cpu_s / passed_s
            for node, of_node in cost.nodes.items()
            for name, cpu_s in of_node.cpu_s.items()
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench", description="Measure delaywheel beside Kafka itself, in one run."
    )
    parser.add_argument("--smoke", action="store_true", help="short phases: about a minute")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="how many (default: 1)")
    parser.add_argument(
        "--rate",
        type=int,
        action="append",
        metavar="R",
        help="messages a second at which lateness is measured; may be given again (default: 2000)",
    )
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures here as JSON")
    options = parser.parse_args(arguments)
    rates_per_s = options.rate or [DEFAULT_RATE_PER_S]
    if options.nodes < 1 or min(rates_per_s) < 1:
        parser.error("--nodes and --rate must be at least 1")
    interrupt_on_signals()

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        with LocalCluster(nodes=options.nodes, say=say) as cluster:
            cluster.wait_until_accepting()
            for name, partitions in (OBSERVED | NOT_OBSERVED).items():
                cluster.create_topic(name, partitions)
            with (
                Client(cluster.nodes[0].address) as client,
                Observer(cluster.kafka, OBSERVED) as observer,
            ):
                size = SMOKE if options.smoke else FULL
                report = Bench(cluster, client, observer, size).run(rates_per_s, say)
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
