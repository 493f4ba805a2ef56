"""What the trace's index costs beside a cluster: how fresh it is, CPU, memory, bytes an event.

    scripts/trace-index --help                                  (its environment)
    python -m local.costs.traced.index_cost [--rate N] [--seconds N]
                                                needs SPARK_KAFKA_JARS, JAVA_HOME
    python -m local.costs.traced.index_cost --merge N    needs neither

Starts a broker and the job, tells it events as ten programs do (half `sent`, half `processed`, a
record each second and program), and prints: how long the oldest event of each batch's file waited
for it, CPU of the job (its JVM included) as a share of one core after its first 30 s, and the most
memory that it had.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from delaywheel.ingress import trace_topic
from delaywheel.trace.batch import BatchHead, decode, encode
from delaywheel_audit.sources.ledger_files import LedgerFolder
from delaywheel_replica.kafka_settings import KafkaNames
from delaywheel_trace.index.events import of_batch, open_writer
from delaywheel_trace.index.folder import IndexFolder
from delaywheel_trace.index.layout import HOUR_MS, QUERY_DIGITS, BatchFile
from delaywheel_trace.job.health import IndexHealth
from delaywheel_trace.job.keeping import IndexKeeper
from local.loopback.kafka import KafkaBroker

CLUSTER: Final = "shop"
PROGRAMS: Final = 10
WARM_S: Final = 30.0
_TICKS: Final = os.sysconf("SC_CLK_TCK")


def told(program: int, number: int, count: int, reporter: str, now_ms: int) -> bytes:
    """Returns what one program tells of a second."""
    kind = "processed" if program % 2 else "sent"
    head = BatchHead(
        kind=kind,
        cluster=CLUSTER,
        reporter=reporter,
        number=number,
        client=f"program-{program}",
        host="host",
        ip="10.0.0.7",
        release="0.1.0",
        share=1.0,
        dropped=0,
    )
    times = [now_ms - 1_000 + row * 1_000 // count for row in range(count)]
    rows: dict[str, Sequence[Any]] = {
        "id": [t.to_bytes(6, "big") + os.urandom(10) for t in times],
        "due_ms": [t + 1_800_000 + row % 997 for row, t in enumerate(times)],
        "topic": ["orders"] * count,
        "time_ms": times,
        "status": ["DONE" if kind == "processed" else "ACCEPTED"] * count,
        "key": [str(t * 7919 % 100_003) for t in times],
        "tags": [None] * count,
        "root": [None] * count,
    }
    if kind == "sent":
        rows |= {"cost_us": [9_000 + row * 31 % 7_000 for row in range(count)]}
        rows |= {"attempts": [1] * count, "node": ["n1"] * count}
    else:
        rows |= {"partition": [0] * count, "offset": [number * count + r for r in range(count)]}
        rows |= {"forwarded_ms": [time_ms - 20 for time_ms in times]}
        rows |= {"group": ["billing"] * count, "attempt": [1] * count}
        rows |= {"handler_us": [row * 17 % 9_000 for row in range(count)]}
    return encode(head, rows)


@contextmanager
def traffic(address: str, rate: int) -> Iterator[None]:
    """Tells events on a thread."""
    producer = Producer({"bootstrap.servers": address, "compression.type": "zstd"})
    ended = threading.Event()
    reporters = [uuid.uuid4().hex for _ in range(PROGRAMS)]

    def run() -> None:
        number, next_s = 0, time.monotonic()
        while not ended.is_set():
            number += 1
            for program, reporter in enumerate(reporters):
                now_ms = int(time.time() * 1000)
                batch = told(program, number, rate // PROGRAMS, reporter, now_ms)
                producer.produce(trace_topic(CLUSTER), batch, reporter)
            producer.poll(0)
            next_s += 1
            ended.wait(max(0.0, next_s - time.monotonic()))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        producer.flush(10)


def family(pid: int) -> list[int]:
    """A process and all that it started."""
    pids = [pid]
    for one in pids:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            pids += map(int, task.read_text().split())
    return pids


def usage(pid: int) -> tuple[float, float]:
    """CPU seconds and MiB of a process and all that it started."""
    cpu_s = memory_mib = 0.0
    for one in family(pid):
        try:
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            pss = Path(f"/proc/{one}/smaps_rollup").read_text().split("Pss:")[1].split()[0]
        except (OSError, IndexError):
            continue
        cpu_s += (int(fields[11]) + int(fields[12])) / _TICKS
        memory_mib += int(pss) / 1_024
    return cpu_s, memory_mib


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, and prints a JSON object."""
    parser = argparse.ArgumentParser(prog="local.costs.traced.index_cost")
    parser.add_argument("--rate", type=int, default=4_000, help="events a second (%(default)s)")
    parser.add_argument("--seconds", type=float, default=180, help="(%(default)s)")
    parser.add_argument("--merge", type=int, help="merge so many batches instead")
    options = parser.parse_args(arguments)
    if options.merge is not None:
        with tempfile.TemporaryDirectory() as scratch:
            print(json.dumps(merged(Path(scratch), options.merge)))
        return 0
    with tempfile.TemporaryDirectory() as scratch, KafkaBroker() as broker:
        folder = Path(scratch)
        names = KafkaNames(CLUSTER)
        topics = [NewTopic(trace_topic(CLUSTER), 3), NewTopic(names.outcomes, 1)]
        admin = AdminClient({"bootstrap.servers": broker.address})
        for made in admin.create_topics(topics).values():
            made.result()
        settings = folder / "node.toml"
        settings.write_text(
            f'cluster_id = "{CLUSTER}"\nnode_id = "n1"\ndata_dir = "{folder / "data"}"\n'
            f'trace = true\n[kafka]\n"bootstrap.servers" = "{broker.address}"\n'
        )
        index = IndexFolder(str(folder / "index"))
        command = [sys.executable, "-m", "delaywheel_trace.job.command"]
        command += ["--settings", str(settings), "--index", index.root]
        with traffic(broker.address, options.rate), subprocess.Popen(command) as job:
            try:
                print(json.dumps(watched(job, index, options.seconds)))
            finally:
                job.terminate()
    return 0


def watched(job: subprocess.Popen[bytes], index: IndexFolder, seconds: float) -> dict[str, float]:
    """Looks at the job each half second."""
    seen: set[str] = set()
    waited: list[float] = []
    memory: list[float] = []
    rows = size = 0
    while not any(isinstance(f, BatchFile) for f in index.listing().counting):
        if job.poll() is not None:
            raise SystemExit("the job ended")
        time.sleep(0.5)
    time.sleep(WARM_S)
    began_s, began_cpu_s = time.monotonic(), usage(job.pid)[0]
    seen = {file.path for file in index.listing().counting}
    while time.monotonic() < began_s + seconds and job.poll() is None:
        for file in index.listing().counting:
            if file.path not in seen and isinstance(file, BatchFile):
                seen.add(file.path)
                path = Path(index.full(file.path))
                times = pq.read_table(path, columns=["time_ms"])["time_ms"]
                waited.append(path.stat().st_mtime - (pc.min(times).as_py() or 0) / 1_000)
                rows, size = rows + len(times), size + path.stat().st_size
        memory.append(usage(job.pid)[1])
        time.sleep(0.5)
    passed_s = time.monotonic() - began_s
    waited.sort()
    return {
        "seconds": round(passed_s, 1),
        "events_a_second": round(rows / passed_s),
        "freshness_p50_s": round(waited[len(waited) // 2], 2),
        "freshness_max_s": round(waited[-1], 2),
        "cpu_share": round((usage(job.pid)[0] - began_cpu_s) / passed_s, 3),
        "memory_first_mib": round(memory[0]),
        "memory_last_mib": round(memory[-1]),
        "memory_most_mib": round(max(memory)),
        "bytes_an_event_in_batches": round(size / max(1, rows), 1),
    }


def write(rows: pa.Table, stream: Any) -> None:
    """Writes a batch's file."""
    with open_writer(stream) as writer:
        writer.write_table(rows)


def merged(folder: Path, batches: int) -> dict[str, float]:
    """Merges batches of an hour that is over."""
    index = IndexFolder(str(folder / "index"))
    hour_ms = (int(time.time() * 1000) // HOUR_MS - 3) * HOUR_MS
    reporters = [uuid.uuid4().hex for _ in range(PROGRAMS)]
    for batch in range(batches):
        tables = []
        for program, reporter in enumerate(reporters):
            record = told(program, batch, 2_000, reporter, hour_ms + 5_000 * batch)
            tables.append(of_batch(*decode(record)))
        path = BatchFile(hour_ms, "0" * QUERY_DIGITS, batch).path
        index.put(path, partial(write, pa.Table.from_batches(tables)))
    ledger = LedgerFolder(str(folder / "ledger"))
    keeper = IndexKeeper(index, ledger, CLUSTER, 24 * HOUR_MS, IndexHealth())
    before_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1_024
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    keeper.step(int(time.time() * 1000))
    passed_s, cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
    paths = [Path(index.full(file.path)) for file in index.listing().counting]
    rows = sum(pq.ParquetFile(path).metadata.num_rows for path in paths)
    return {
        "events": rows,
        "files": len(paths),
        "seconds": round(passed_s, 1),
        "cpu_s": round(cpu_s, 1),
        "memory_before_mib": round(before_mib),
        "memory_most_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1_024),
        "bytes_an_event": round(sum(path.stat().st_size for path in paths) / rows, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
