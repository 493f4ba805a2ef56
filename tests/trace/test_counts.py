"""What both ends count: the same messages have the same sums, whoever counts them, in any order."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from delaywheel import RefusedError
from delaywheel.testing import MemoryService
from delaywheel.testing.tracing import MemoryTrace
from delaywheel.trace.counts import (
    BUCKET_MS,
    Cell,
    CellKey,
    Counted,
    CountsPart,
    Direction,
    ExactCounts,
    folded,
    hashes_of,
)
from delaywheel.trace.options import TraceOptions
from delaywheel.trace.reports import EventReports
from delaywheel.transactional import Outgoing


class Sums(MemoryTrace):
    """A sink that adds up counts."""

    def __init__(self) -> None:
        super().__init__([], TraceOptions())
        self.cells: dict[CellKey, Cell] = {}

    def count(self, cells: Mapping[CellKey, Cell]) -> None:
        for key, cell in cells.items():
            self.cells.setdefault(key, Cell()).add(cell)

    def of(self, direction: Direction, topic: str) -> Cell:
        total = Cell()
        for key, cell in self.cells.items():
            if (key.direction, key.topic) == (direction, topic):
                total.add(cell)
        return total


def test_hashes_are_those_of_columns() -> None:
    random = np.random.default_rng(7)
    ids, dues_ms = random.bytes(16_000), random.integers(0, 1 << 42, 1_000)
    halves = np.frombuffer(ids, ">u8").astype(np.uint64).reshape(-1, 2)
    factors = [np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)]
    high = halves[:, 0] ^ dues_ms.astype(np.uint64) * factors[0]
    mixed = high * factors[1] + halves[:, 1] * factors[2]
    single = [ids[at : at + 16] for at in range(0, len(ids), 16)]
    assert hashes_of(single, dues_ms.tolist()) == (mixed ^ mixed >> np.uint64(32)).tolist()


def test_records_are_those_of_the_document() -> None:
    text = (Path(__file__).parents[2] / "docs" / "TRACE.md").read_text(encoding="utf-8")
    example = json.loads(
        text.partition("## Counts")[2].partition("```json\n")[2].partition("```")[0]
    )
    ids, dues_ms = [bytes(16)], [example["bucket_ms"] + 59_999]
    own = Counted(Direction.CONSUMED, "orders", "billing", ids, dues_ms, [612], [17])
    head = ("cluster", "reporter", "client", "host", "release", "since_ms")
    part = CountsPart("counts", {name: example[name] for name in head}, 1)
    counts = ExactCounts(lambda: part)
    assert counts.topic() == "counts"
    [record] = counts.records(folded(own), example["at_ms"]).values()
    written = json.loads(record)
    assert list(written) == list(example)
    same = ("v", "exact", "part", "topic", "group", "bucket_ms", "bytes", "direction")
    assert [written[name] for name in same] == [example[name] for name in same]
    assert written["late"] == {"5": 1}


def test_exchanged_dues_are_other_messages() -> None:
    ids = [bytes(15) + bytes([n]) for n in range(4)]
    for dues_ms in ([60_001, 60_000, 60_002, 60_003], [60_000, 60_001, 60_003, 60_002]):
        [one], [other] = (
            folded(Counted(Direction.SENT, "t", None, ids, each, [0] * 4)).values()
            for each in (dues_ms, sorted(dues_ms))
        )
        assert one.messages == other.messages
        assert (one.sum, one.xor) != (other.sum, other.xor)


def test_what_is_sent_is_what_is_consumed_and_retries_are_counted_where_they_are() -> None:
    sums, options = Sums(), TraceOptions(sample=0.01)
    trace = EventReports(sums, options)
    with MemoryService(topics=["orders", "orders-retry-billing"]) as service:
        consumer = service.consumer("orders", group="billing", retry=("70s",), trace=trace)
        with service.client(trace=trace) as client:
            for number in range(40):
                client.produce_async("orders", b"%d" % number, key=b"k", delay=f"{number + 1}s")
            client.flush()
            with suppress(RefusedError):
                client.produce("bills", b"", delay="1s")
        service.write(Outgoing("orders", None, b"not ours", []))
        for _ in range(2):
            service.advance("70s")
            for message in consumer:
                with message:
                    if message.attempt == 1 and message.value == b"7":
                        message.produce("orders", b"later", after="20s")
                    elif message.attempt == 1 and message.value == b"8":
                        raise ConnectionError
    for topic, messages in (("orders", 41), ("orders-retry-billing", 1)):
        sent, got = (sums.of(direction, topic) for direction in Direction)
        assert (sent.messages, sent.bytes, sent.sum, sent.xor) == (
            *(got.messages, got.bytes, got.sum, got.xor),
        )
        assert got.messages == messages
        assert sum(got.late.values()) == messages
    assert sums.of(Direction.SENT, "bills").refused == 1
    buckets = {key.bucket_ms for key in sums.cells if key.topic == "orders"}
    assert len(buckets) > 1
    assert all(bucket is not None and bucket % BUCKET_MS == 0 for bucket in buckets)
    assert {key.group for key in sums.cells if key.direction == "consumed"} == {"billing"}
