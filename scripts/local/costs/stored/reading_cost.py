"""The cost of a message to the cleaner, from its slot file to Kafka's client.

    python -m local.costs.stored.reading_cost [--messages 2000,10000,100000]
    [--frames 1-8] [--folder DIR]

A store is filled as the server fills it: a few seconds that hold this many messages each, in small
frames. Then, with files in the page cache, a leader's reader loads each second and cuts it into
transactions, and their messages are handed to a Kafka client without a broker, so that only the
call itself is counted. CPU time of the whole process, the least of several seconds.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from confluent_kafka import Producer
from numpy.typing import NDArray

from delaywheel.headers import encode_headers
from delaywheel.identity import WheelId
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.folder.node_state import Spare
from delaywheel.storage.frames.columns import Columns, content_starts
from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.cleaner.delivery import outcomes
from delaywheel_replica.cleaner.due.reader import DueReader
from delaywheel_replica.cleaner.kafka.producers import LeaderProducers, TransactionalProducer
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.kafka_settings import KafkaNames
from delaywheel_replica.server.store.store import Store, StoreLimits

VALUE_BYTES = 200
SECONDS = 5
CAP_MESSAGES = 10_000
CAP_BYTES = 8 << 20
HEADERS = encode_headers([("trace", b"0123456789abcdef"), ("kind", b"order")])
_START_SLOT = 1_800_000_000


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one message; CPU time in microseconds."""

    messages: int
    frames: int
    loading_us: float
    cutting_us: float
    making_us: float
    producing_us: float


class _Sink:
    """A Kafka client without a broker, whose queue keeps everything."""

    def __init__(self) -> None:
        self._producer = Producer(
            {
                "bootstrap.servers": "127.0.0.1:9",
                "queue.buffering.max.messages": 10_000_000,
                "queue.buffering.max.kbytes": 2_000_000,
                "log_level": 0,
                "linger.ms": 1_000,
            },
        )
        producers = LeaderProducers.__new__(LeaderProducers)
        producer = TransactionalProducer.__new__(TransactionalProducer)
        producer._producer = self._producer  # noqa: SLF001 - neither init nor a transaction
        producer._failed, producer._has_messages = None, False  # noqa: SLF001
        producers._producers = {0: producer}  # noqa: SLF001
        self.port = producers

    def purge(self) -> None:
        self._producer.purge()
        self._producer.poll(0)


def fill(data: Path, messages: int, frame_messages: range) -> tuple[WheelId, int]:
    """Creates a folder whose seconds hold this many messages each; returns wheel and frames."""
    limits = StoreLimits(3_600, 7_200, recent_bytes=1)
    store = Store.open(PosixDisk(), data, node="n1", cluster_id="c", boot_id="boot", limits=limits)
    wheel = WheelId("n1", 1)
    store.open_wheel(Spare(wheel, 0, {"n1": store.state.storage}, 1))
    random = np.random.default_rng(1)
    slots = _START_SLOT + np.arange(SECONDS)
    while messages:
        size = min(messages, int(random.integers(frame_messages.start, frame_messages.stop)))
        messages -= size
        columns = _columns(random, np.repeat(slots, size))
        store.append(columns, Kind.MESSAGES, _START_SLOT * 1000 - 5_000)
    store.checkpoint(lambda _wheel, _seq: None)
    last_seq = store.last_seq
    store.release()
    return wheel, last_seq


def _columns(random: np.random.Generator, slots: NDArray[np.int64]) -> Columns:
    rows = len(slots)
    key_bytes = 8
    content = key_bytes + VALUE_BYTES + len(HEADERS)
    blob = (bytes(key_bytes) + bytes(VALUE_BYTES) + HEADERS) * rows
    return Columns(
        due_ms=slots * 1000 + random.integers(0, 1000, rows),
        ids=np.frombuffer(os.urandom(16 * rows), np.uint8).reshape(rows, 16),
        topics=("orders",),
        topic_numbers=np.zeros(rows, np.uint32),
        key_lengths=np.full(rows, key_bytes, np.int32),
        value_lengths=np.full(rows, VALUE_BYTES, np.int32),
        headers_lengths=np.full(rows, len(HEADERS), np.int32),
        partitions=np.full(rows, -1, np.int32),
        timestamps_ms=np.full(rows, -1, np.int64),
        blob=memoryview(blob),
        starts=content_starts(np.full(rows, content, np.int64)),
    )


def measure(messages: int, frame_messages: range, folder: Path | None) -> Cost:
    """Fills a folder, measures, and deletes it."""
    data = Path(tempfile.mkdtemp(prefix="reading-", dir=folder))
    try:
        wheel, frames = fill(data, messages, frame_messages)
        reader = DueReader(PosixDisk(), data, preload_thread=False)
        costs = list(_seconds(reader, wheel, frames, _Sink()))
        reader.close()
    finally:
        shutil.rmtree(data, ignore_errors=True)
    least = [min(column) * 1e6 / messages for column in zip(*costs, strict=True)]
    return Cost(messages, frames // SECONDS, *least)


def _seconds(
    reader: DueReader, wheel: WheelId, last_seq: int, sink: _Sink
) -> Iterator[tuple[float, float, float, float]]:
    for slot in range(_START_SLOT, _START_SLOT + SECONDS):
        reader.start(Progress(slot * 1000 - 1, None, {wheel: last_seq}))
        reader.update({wheel: last_seq})
        now_ms = slot * 1000 - 1
        began = time.process_time()
        step = reader.next_step(now_ms - 1_000, CAP_MESSAGES, CAP_BYTES)
        step = reader.next_step(now_ms, CAP_MESSAGES, CAP_BYTES)
        loading = time.process_time() - began
        names = KafkaNames("c")
        cutting = making = producing = 0.0
        for now_ms in range(slot * 1000 + 19, slot * 1000 + 1000, 20):
            behind = True
            while behind:
                began = time.process_time()
                step = reader.next_step(now_ms, CAP_MESSAGES, CAP_BYTES)
                behind = step.behind
                cut = time.process_time()
                cutting += cut - began
                for _ in outcomes.forwarded(names, step.messages, now_ms):
                    pass
                made = time.process_time()
                making += made - cut
                refused = sink.port.write(0, outcomes.forwarded(names, step.messages, now_ms))
                producing += time.process_time() - made
                assert not refused
                reader.done(step)
        sink.purge()
        yield loading, cutting, making, producing - making


def main() -> None:
    """Runs the requested measurements."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--messages", default="2000,10000,100000", help="of a second")
    parser.add_argument("--frames", default="1-8", help="messages of a frame")
    parser.add_argument("--folder", type=Path, help="where to make the data folders")
    arguments = parser.parse_args()
    least, most = map(int, arguments.frames.split("-"))
    print("CPU us of a message: loading  cutting   making  producing\n  messages   frames")
    for amount in map(int, arguments.messages.split(",")):
        cost = measure(amount, range(least, most + 1), arguments.folder)
        print(
            f"{cost.messages:>10,} {cost.frames:>8,} {cost.loading_us:>10.2f}"
            f" {cost.cutting_us:>8.2f} {cost.making_us:>8.2f} {cost.producing_us:>10.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
