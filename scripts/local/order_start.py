"""How long a consumer with `ordered` needs to start after many retries: the order topic is read.

    python -m local.order_start [--records N] [--days N] [--uncompacted]

Writes so many retried records into an order topic as they would have been over these days (each
away for ten minutes, with timestamps of then), waits until Kafka has compacted it, and reads it in
a process of its own, as at an assignment. Tombstones go at once, as days have passed in which Kafka
would have removed them. Printed are the records that are left, the seconds, and the greatest memory
of that process, beside that of one that has only loaded the same modules.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from delaywheel.consumer.kafka.order_topic import ORDER_CONFIG, OrderTopics
from delaywheel.consumer.kafka.topics import ends_of
from delaywheel.consumer.records import Partition
from local.loopback.kafka import KafkaBroker

TOPIC = "orders-order-billing"
PARTITIONS = 4
AWAY_MS = 600_000
COMPACTED_S = 600.0
STEADY_S = 30.0


def write(address: str, records: int, days: float) -> None:
    """Writes both records of each retry, in the order in which they would have been written."""
    producer = Producer(
        {"bootstrap.servers": address, "linger.ms": 50, "queue.buffering.max.messages": 1_000_000}
    )
    offset_bytes = struct.Struct(">q")
    span_ms, end_ms = int(days * 86_400_000), time.time_ns() // 1_000_000
    away: deque[tuple[int, int]] = deque()

    def send(offset: int, at_ms: int, due_ms: int | None) -> None:
        key = offset_bytes.pack(offset)
        value = None if due_ms is None else offset_bytes.pack(due_ms) + b"k%d" % offset
        while True:
            try:
                producer.produce(TOPIC, value, key, partition=offset % PARTITIONS, timestamp=at_ms)
            except BufferError:
                producer.poll(0.1)
            else:
                return

    for number in range(records):
        now_ms = end_ms - span_ms + span_ms * number // records
        while away and away[0][1] <= now_ms:
            offset, due_ms = away.popleft()
            send(offset, due_ms, None)
        send(number, now_ms, now_ms + AWAY_MS)
        away.append((number, now_ms + AWAY_MS))
        if number % 10_000 == 0:
            producer.poll(0)
    producer.flush()


def wait_for_compaction(folder: Path) -> int:
    """Waits until the topic has not become smaller for a while; returns its length in bytes."""
    least_bytes, since_s = sys.maxsize, time.monotonic()
    begun_s = since_s
    while time.monotonic() - since_s < STEADY_S and time.monotonic() - begun_s < COMPACTED_S:
        length_bytes = sum(
            path.stat().st_size for path in folder.rglob(f"{TOPIC}-*/*.log") if path.exists()
        )
        if length_bytes < least_bytes:
            least_bytes, since_s = length_bytes, time.monotonic()
        time.sleep(1.0)
    return least_bytes


def read(address: str, *, reads: bool) -> None:
    """Reads the topic as at an assignment, and prints what that took."""
    client: dict[str, Any] = {"bootstrap.servers": address}
    topics = OrderTopics(client, "billing", lambda at: ends_of(AdminClient(client), at))
    begun_s = time.monotonic()
    partitions = [Partition(TOPIC, number) for number in range(PARTITIONS)]
    away = topics.read(partitions) if reads else {}
    took = {
        "away": sum(map(len, away.values())),
        "seconds": round(time.monotonic() - begun_s, 2),
        "most_mib": _most_mib(),
    }
    print(json.dumps(took))


def _most_mib() -> int:
    """Returns the greatest memory of this program; `getrusage` counts its parent's before exec."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) // 1024


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=10_000_000)
    parser.add_argument("--days", type=float, default=3.0)
    parser.add_argument("--uncompacted", action="store_true")
    parser.add_argument("--read", help="internal: reads at this address")
    parser.add_argument("--idle", action="store_true", help="internal: reads nothing")
    given = parser.parse_args()
    if given.read:
        read(given.read, reads=not given.idle)
        return
    with KafkaBroker(settings={"log.cleaner.backoff.ms": "1000"}) as broker:
        admin = AdminClient({"bootstrap.servers": broker.address})
        config = {**ORDER_CONFIG, "delete.retention.ms": "0"}
        made = admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1, config=config)])
        made[TOPIC].result()
        begun_s = time.monotonic()
        write(broker.address, given.records, given.days)
        print(
            f"{given.records:,} retries written in {time.monotonic() - begun_s:.0f} s", flush=True
        )
        if not given.uncompacted:
            left_bytes = wait_for_compaction(broker.folder)
            print(f"{left_bytes / 1e6:.1f} MB left after compaction", flush=True)
        command = [sys.executable, "-m", "local.order_start", "--read", broker.address]
        for more in (["--idle"], [], []):
            print(
                subprocess.run([*command, *more], check=True, capture_output=True, text=True).stdout
            )


if __name__ == "__main__":
    main()
