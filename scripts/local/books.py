"""The books at scale: a synthetic ledger and as many real Kafka records, reconciled.

    python -m local.books --messages 10000000

It makes a ledger in its real layout and, in a broker of its own, the topics that the service would
have left: each message with its four headers, cancelled ones and duplicates as outcomes, one
progress record. Then it runs `delaywheel reconcile` on them, and measures time and memory of all
its processes together, without the broker.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # it is there

from delaywheel.identity import WheelId
from delaywheel_replica.core.protocol.control import NodeRecord, node_record, progress_record
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.kafka_settings import KafkaNames
from delaywheel_replica.server.ledger.place import SCHEMA
from local.loopback.child import interrupt_on_signals
from local.loopback.kafka import KafkaBroker
from local.reconciling import finds_the_connector

CLUSTER = "books"
TOPICS = ("orders", "bills")
NODES = ("n1", "n2", "n3")
PARTITIONS = 4
"""The partitions of each topic."""
DELAY_MS = 600_000
RATE = 2_000
"""How many messages a second the synthetic cluster accepted."""
FRAME = 20
"""How many messages a frame has."""
CHUNK = 100_000
MISSING_EVERY = 100
"""One message in this many is not in Kafka but among the outcomes."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Messages of one wheel, as one file of the ledger has them."""

    wheel: WheelId
    ids: bytes
    accepted_ms: int
    first_seq: int
    rows: int

    def dues(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Returns the due of each message."""
        return np.arange(self.rows) * 1000 // RATE + self.accepted_ms + DELAY_MS

    def accepted(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Returns when each message was accepted, the same within a frame."""
        return self.dues() // 10 * 10 - DELAY_MS

    def seqs(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Returns the seq of each message."""
        return self.first_seq + np.arange(self.rows) // FRAME


def chunks(messages: int, end_ms: int, most: int = CHUNK) -> Iterator[Chunk]:
    """Yields all messages, alternating wheels; the last is due before `end_ms`."""
    began_ms = end_ms - messages * 1000 // RATE - DELAY_MS - 60_000
    seqs = dict.fromkeys(NODES, 1)
    for number, first in enumerate(range(0, messages, most)):
        rows = min(most, messages - first)
        node = NODES[number % len(NODES)]
        at_ms = began_ms + first * 1000 // RATE
        yield Chunk(WheelId(node, 1), os.urandom(16 * rows), at_ms, seqs[node], rows)
        seqs[node] += -(-rows // FRAME)


def write_ledger(folder: Path, chunk: Chunk, topics: Sequence[str]) -> None:
    """Writes a chunk as published files, one for each hour that it touches."""
    accepted, seqs = chunk.accepted(), chunk.seqs()
    numbers = (np.arange(chunk.rows) % len(topics)).astype(np.int32)
    ids = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(16), chunk.rows, [None, pa.py_buffer(chunk.ids)]
    )
    table = pa.table(
        {
            "id": ids,
            "due_ms": chunk.dues(),
            "accepted_at_ms": accepted,
            "topic": pa.DictionaryArray.from_arrays(numbers, list(topics)),
            "wheel": pa.DictionaryArray.from_arrays(
                np.zeros(chunk.rows, np.int32), [str(chunk.wheel)]
            ),
            "seq": seqs,
        },
        schema=SCHEMA,
    )
    # A file lies in the hour of its first frame here: readers go by rows, not by hours.
    hours = accepted[::FRAME] // 3_600_000
    cuts = [0, *(int(cut) * FRAME + FRAME for cut in np.flatnonzero(np.diff(hours))), chunk.rows]
    for begin, end in pairwise(cuts):
        hour = np.datetime64(int(accepted[begin]), "ms")
        text = str(hour)
        inside = folder / f"date={text[:10]}" / f"hour={text[11:13]}"
        inside.mkdir(parents=True, exist_ok=True)
        name = f"{chunk.wheel}-{seqs[begin]:019}-{seqs[end - 1]:019}.parquet"
        pq.write_table(table.slice(begin, end - begin), inside / name, compression="zstd")


class Sender:
    """Writes to Kafka what the service would have written."""

    def __init__(self, address: str, cluster: str, topics: Sequence[str]) -> None:
        names = KafkaNames(cluster)
        self._names = names
        self._topics = topics
        admin = AdminClient({"bootstrap.servers": address})
        wanted = [NewTopic(topic, num_partitions=PARTITIONS) for topic in topics]
        wanted.append(NewTopic(names.outcomes, num_partitions=1))
        wanted.append(
            NewTopic(names.control, num_partitions=1, config={"cleanup.policy": "compact"})
        )
        for made in admin.create_topics(wanted).values():
            made.result(30)
        self._producer = Producer(
            {
                "bootstrap.servers": address,
                "linger.ms": 50,
                "batch.size": 1_000_000,
                "compression.type": "lz4",
                "queue.buffering.max.messages": 500_000,
                # Keeps the order of what is sent again because a new partition is not led yet.
                "enable.idempotence": True,
            }
        )

    def send(self, chunk: Chunk) -> None:
        """Forwards a chunk's messages, except for some with other outcomes."""
        wheel = f"{self._names.cluster_id}/{chunk.wheel}".encode()
        hexed = chunk.ids.hex()
        for row, (due, accepted, seq) in enumerate(
            zip(
                chunk.dues().tolist(), chunk.accepted().tolist(), chunk.seqs().tolist(), strict=True
            )
        ):
            text = hexed[32 * row : 32 * row + 32]
            round_, number = divmod(row, len(self._topics))
            topic = self._topics[number]
            if row % MISSING_EVERY == 0:
                self._cancelled(text, due, accepted, topic, str(chunk.wheel), seq)
                continue
            headers: list[tuple[str, str | bytes | None]] = [
                ("dw-id", text.encode()),
                ("dw-due", b"%d" % due),
                ("dw-accepted", b"%d" % accepted),
                ("dw-wheel", wheel),
            ]
            # Kafka's own choice would depend on the broker's speed: each partition is in order.
            partition = round_ % PARTITIONS
            self._produce(topic, b"content of a message", headers, due + 2 + row % 7, partition)

    def finish(self, done: Progress) -> None:
        """Reports everything as done."""
        records = [node_record(node, NodeRecord("storage", 1)) for node in NODES]
        for key, value in (*records, progress_record(done)):
            self._producer.produce(self._names.control, value, key)
        self._producer.flush(60)

    def _cancelled(
        self, text: str, due: int, accepted: int, topic: str, wheel: str, seq: int
    ) -> None:
        outcome = {
            "outcome": "cancelled",
            "id": text,
            "due_ms": due,
            "accepted_at_ms": accepted,
            "topic": topic,
            "wheel": wheel,
            "seq": seq,
            "row": 0,
        }
        self._produce(self._names.outcomes, json.dumps(outcome).encode(), [], due)

    def _produce(
        self,
        topic: str,
        value: bytes,
        headers: list[tuple[str, str | bytes | None]],
        at_ms: int,
        partition: int = 0,
    ) -> None:
        while True:
            try:
                self._producer.produce(
                    topic, value, headers=headers, timestamp=at_ms, partition=partition
                )
            except BufferError:
                self._producer.poll(0.1)
            else:
                self._producer.poll(0)
                return


def make(
    messages: int,
    ledger: Path,
    address: str,
    *,
    cluster: str = CLUSTER,
    topics: Sequence[str] = TOPICS,
    rows_per_file: int = CHUNK,
) -> None:
    """Creates the ledger and the topics."""
    end_ms = int(time.time() * 1000) - 60_000
    sender = Sender(address, cluster, topics)
    seqs: dict[WheelId, int] = {}
    for number, chunk in enumerate(chunks(messages, end_ms, rows_per_file)):
        write_ledger(ledger, chunk, topics)
        sender.send(chunk)
        seqs[chunk.wheel] = int(chunk.seqs()[-1])
        if number % 10 == 9:
            print(f"made {(number + 1) * rows_per_file:,}", file=sys.stderr)
    sender.finish(Progress(end_ms, None, seqs, end_ms // 1000 - 120))


class Tree:
    """Measures the memory of a process and all its children while they run."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.peak_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops measuring."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.5):
            self.peak_bytes = max(self.peak_bytes, sum(_resident(pid) for pid in self._pids()))

    def _pids(self) -> set[int]:
        parents = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    parents[int(entry.name)] = int(
                        (entry / "stat").read_text().rsplit(")")[-1].split()[1]
                    )
                except OSError:
                    continue
        found = {self._pid}
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        return found


def _resident(pid: int) -> int:
    """Returns resident memory, with pages shared by forks counted once."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0


def measure(messages: int, folder: Path, memory: str, heap: str) -> int:
    """Creates and reconciles the books, prints costs; returns the job's exit code."""
    with KafkaBroker(folder / "kafka", heap=heap) as broker:
        began = time.monotonic()
        make(messages, folder / "ledger", broker.address)
        print(f"made in {time.monotonic() - began:.0f} s", file=sys.stderr)
        command = [
            *(sys.executable, "-m", "delaywheel_audit.job", "--cluster", CLUSTER),
            *("--ledger", str(folder / "ledger"), "--kafka", broker.address),
            *("--output", str(folder / "output"), "--memory", memory),
        ]
        environment = {
            **os.environ,
            **finds_the_connector(),
            "SPARK_LOCAL_DIRS": str(folder / "spark"),
        }
        began = time.monotonic()
        with subprocess.Popen(command, env=environment) as job:
            tree = Tree(job.pid)
            code = job.wait()
        seconds = time.monotonic() - began
        tree.stop()
    print(
        f"{messages:,} rows against {messages - messages // MISSING_EVERY:,} records: "
        f"{seconds:.0f} s, {messages / seconds:,.0f} a second, "
        f"{tree.peak_bytes / 2**30:.2f} GiB at most, exit code {code}"
    )
    return code


def main() -> int:
    """Runs one measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--memory", default="2g", help="heap of Spark (%(default)s)")
    parser.add_argument("--heap", default="1g", help="heap of the broker (%(default)s)")
    parser.add_argument("--folder", type=Path, help="where it all goes; removed in the end")
    given = parser.parse_args()
    interrupt_on_signals()
    folder = Path(tempfile.mkdtemp(prefix="delaywheel-books-", dir=given.folder))
    try:
        return measure(given.messages, folder, given.memory, given.heap)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
