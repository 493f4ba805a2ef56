"""How large the topic of counts gets, and the table `ends` that is made of it.

    python -m local.costs.traced.counts_cost [--reporters N] [--topics N] [--groups N] [--rate N]
                                      [--minutes N]

Programs send to all topics, messages due within the hour; what they count goes, as they write it,
to a topic of a real broker. Printed are its size as it was written, and once it is compacted; and
that of a day's table.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from confluent_kafka.admin import (  # type: ignore[attr-defined] # missing in its stubs
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
)
from confluent_kafka.cimpl import NewTopic

from delaywheel.ingress import counts_topic
from delaywheel.trace.counts import BUCKET_MS, Cell, CellKey, Direction, EndCounts
from delaywheel.trace.kafka import TraceProducer
from delaywheel.trace.reporter import COUNT_S
from local.loopback.kafka import KafkaBroker

TOPIC: Final = counts_topic("shop")
BEGAN_MS: Final = 1_900_000_800_000 // BUCKET_MS * BUCKET_MS
DUE_WITHIN: Final = 60
"""Minutes."""


class Program:
    """A reporter that sends to all topics."""

    def __init__(self, address: str, number: int, topics: int) -> None:
        self._producer = TraceProducer({"bootstrap.servers": address})
        self._counts = EndCounts()
        self._random = np.random.default_rng(number)
        self._topics = [f"orders-{topic}" for topic in range(topics)]
        self._head: dict[str, Any] = {
            "cluster": "shop",
            "reporter": uuid.uuid4().hex,
            "client": f"web-{number}",
            "host": f"checkout-{number}",
            "release": "0.1.0",
            "since_ms": BEGAN_MS,
        }
        self._left = 0

    def write(self, at_ms: int, messages: float) -> int:
        """Counts messages, and writes what has changed; returns how many records that is."""
        shape = len(self._topics), DUE_WITHIN
        sent = self._random.poisson(messages / (shape[0] * shape[1]), shape)
        first = at_ms // BUCKET_MS
        for topic, minute in np.argwhere(sent).tolist():
            cell = CellKey(Direction.SENT, self._topics[topic], None, (first + minute) * BUCKET_MS)
            count = int(sent[topic, minute])
            sums = self._random.integers(0, 1 << 64, 2, np.uint64).tolist()
            self._counts.add({cell: Cell(count, count * 230, 0, 0, *sums)})
        taken = self._counts.take({**self._head, "at_ms": at_ms})
        self._left += len(taken)
        for key, value in taken.items():
            self._producer.send(TOPIC, key, value, partial(self._ended, key, value))
        while self._left:
            self._producer.poll(1)
        return len(taken)

    def _ended(self, key: bytes, value: bytes, error: str) -> None:
        assert not error, error
        self._counts.ended(key, value, is_written=True)
        self._left -= 1


def size_of(broker: KafkaBroker) -> int:
    """Returns the bytes of the topic's segments."""
    return sum(file.stat().st_size for file in broker.folder.rglob(f"{TOPIC}-*/*.log"))


def compact(broker: KafkaBroker) -> int:
    """Has the topic compacted; returns its size, which no longer changes then."""
    place = ConfigResource(ConfigResource.Type.TOPIC, TOPIC)
    for name, value in {"segment.ms": "1000", "min.cleanable.dirty.ratio": "0.01"}.items():
        place.add_incremental_config(
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        )
    admin = AdminClient({"bootstrap.servers": broker.address})
    admin.incremental_alter_configs([place])[place].result()
    producer = TraceProducer({"bootstrap.servers": broker.address})
    size, same = size_of(broker), 0
    while same < 10:
        for number in range(12):  # what is written last is in a segment of its own, as it is
            producer.send(TOPIC, b"%d" % number, b"{}", lambda _: None)
        producer.poll(1)
        time.sleep(2)
        before, size = size, size_of(broker)
        same = same + 1 if abs(size - before) < before / 100 else 0
    return size


def table_bytes(topics: int, groups: int, minutes: int) -> int:
    """Returns what the table `ends` takes, with a row for each topic, minute and group."""
    random = np.random.default_rng(1)
    rows: list[dict[str, Any]] = []
    for minute in range(minutes):
        for topic in range(topics):
            count = int(random.poisson(10_000))
            same = {"topic": f"orders-{topic}", "bucket_ms": BEGAN_MS + minute * BUCKET_MS}
            same |= {"forwarded": count, "state": "whole", "difference": 0}
            sent = {"said_sent": count, "refused": 0, "unknown": 0, "acceptances": count}
            rows.append({**same, **sent, "accepted": count, "group": None, "consumed": None})
            rows += [{**same, "group": f"g-{n}", "consumed": count} for n in range(groups)]
    with tempfile.NamedTemporaryFile() as file:
        pq.write_table(pa.Table.from_pylist(rows), file.name)
        return Path(file.name).stat().st_size


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, and prints a JSON object."""
    parser = argparse.ArgumentParser(description="How large counts get.")
    parser.add_argument("--reporters", type=int, default=20, help="programs (%(default)s)")
    parser.add_argument("--topics", type=int, default=10, help="(%(default)s)")
    parser.add_argument("--groups", type=int, default=2, help="of each topic (%(default)s)")
    parser.add_argument("--rate", type=int, default=2_000, help="messages a second (%(default)s)")
    parser.add_argument("--minutes", type=int, default=6, help="(%(default)s)")
    asked = parser.parse_args(arguments)
    with KafkaBroker(settings={"log.cleaner.backoff.ms": "500"}) as broker:
        admin = AdminClient({"bootstrap.servers": broker.address})
        topic = NewTopic(TOPIC, 3, config={"cleanup.policy": "compact"})
        admin.create_topics([topic])[TOPIC].result()
        programs = [Program(broker.address, n, asked.topics) for n in range(asked.reporters)]
        records = 0
        for tick in range(int(asked.minutes * 60 / COUNT_S)):
            at_ms = BEGAN_MS + int(tick * COUNT_S * 1_000)
            messages = asked.rate * COUNT_S / asked.reporters
            records += sum(program.write(at_ms, messages) for program in programs)
        written = size_of(broker)
        compacted = compact(broker)
    cells = asked.reporters * asked.topics * (asked.minutes + DUE_WITHIN - 1)
    said = {
        "records": records,
        "mb": written / 1e6,
        "cells": cells,
        "compacted_mb": compacted / 1e6,
    }
    said["ends_mb_a_day"] = table_bytes(asked.topics, asked.groups, 1_440) / 1e6
    print(json.dumps({name: round(value, 1) for name, value in said.items()}))


if __name__ == "__main__":
    main()
