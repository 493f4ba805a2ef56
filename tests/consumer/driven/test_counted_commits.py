"""Counts in a consumer's transactions: they are what is committed, and keep nothing from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from random import Random

import pytest

from delaywheel.consumer.records import Partition, RecordHeaders
from delaywheel.testing.tracing import MemoryTrace
from delaywheel.trace.counts import Cell, CellKey, CountsPart, hashes_of
from delaywheel.trace.options import TraceOptions
from delaywheel.trace.reports import EventReports
from support.consumer.driven import DrivenConsumer, start
from support.consumer.fake_kafka import FakeKafka, Fault

COUNTS = "counts"
DUE_MS = 1_900_000_000_000


class Sink(MemoryTrace):
    """Knows where counts are written; `beside` is what was counted after its commit."""

    def __init__(self) -> None:
        super().__init__([], TraceOptions())
        self.parts = 0
        self.beside = Cell()

    def begin_counts(self) -> CountsPart | None:  # type: ignore[override]
        self.parts += 1
        return CountsPart(COUNTS, {"reporter": "r"}, self.parts)

    def count(self, cells: Mapping[CellKey, Cell]) -> None:
        for cell in cells.values():
            self.beside.add(cell)


def traced(kafka: FakeKafka, sink: Sink, **options: object) -> DrivenConsumer:
    kafka.more[COUNTS] = "its id"
    kafka.written.add(COUNTS)
    return start(kafka, trace=EventReports(sink, TraceOptions()), **options)


def send(kafka: FakeKafka, first: int, count: int) -> None:
    for number in range(first, first + count):
        due_ms = DUE_MS + number * 9_000
        headers: RecordHeaders = [("dw-id", b"%032x" % number), ("dw-due", b"%d" % due_ms)]
        kafka._append(Partition(kafka.source, number % kafka.partitions), None, b"v", headers)


def written(kafka: FakeKafka) -> Cell:
    """The sum of the last record of each key."""
    last = {one.key: one.value for one in kafka.committed_records if one.topic == COUNTS}
    total = Cell()
    for value in last.values():
        found = json.loads(value or b"")
        assert found["exact"]
        if found["direction"] == "consumed" and found["topic"] == kafka.source:
            sums = int(found["sum"], 16), int(found["xor"], 16)
            total.add(Cell(found["messages"], found["bytes"], 0, 0, *sums))
    return total


def committed(kafka: FakeKafka) -> tuple[int, int]:
    """How many records of the source are behind its offsets, and the sum of their hashes."""
    own = [
        dict(one.headers or ())
        for at, log in kafka.logs.items()
        if at.topic == kafka.source
        for one in log[: kafka.offsets.get(at, 0)]
    ]
    ids = [bytes.fromhex((one["dw-id"] or b"").decode()) for one in own]
    dues_ms = [int(one["dw-due"] or b"") for one in own]
    return len(own), sum(hashes_of(ids, dues_ms)) % (1 << 64)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_counted_is_what_is_committed_whatever_fails(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delaywheel.consumer.watching.counting._WITHOUT_S", 0.0)
    random, kafka, sink = Random(seed), FakeKafka(), Sink()
    consumer = traced(kafka, sink)
    for turn in range(60):
        send(kafka, turn * 5, random.randint(0, 5))
        consumer.broker.fault = random.choice([None, None, Fault.FAILS, Fault.UNKNOWN])
        if random.random() < 0.1:  # whoever has a doubt then never gets to know
            at = [Partition(t, n) for t in (kafka.source, kafka.retry) for n in range(2)]
            kafka.rebalance({consumer.broker: at})
        consumer.engine._commits._recover_at_s = 0.0
        consumer.run_once()
        for message in consumer.take(9):
            if random.random() < 0.2:
                message.retry("5s")
            else:
                message.done()
        total = written(kafka)
        assert (total.messages, total.sum) == committed(kafka)
    assert total.messages > 50
    assert sink.parts > 1
    assert sink.beside.messages == 0


@pytest.mark.parametrize("how", ["denied", "hidden", "silent", "away"])
def test_a_topic_of_counts_that_takes_none_keeps_nothing_from_being_committed(
    how: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how != "silent":
        monkeypatch.setattr("delaywheel.consumer.watching.counting._WITHOUT_S", 0.0)
    kafka, sink = FakeKafka(), Sink()
    consumer = traced(kafka, sink, wait_for_rights=None)
    if how == "away":
        del kafka.more[COUNTS]
    else:
        getattr(kafka, how).add(COUNTS)
    send(kafka, 0, 20)
    for _ in range(9):
        consumer.run_often()
        for message in consumer.take(9):
            message.done()
    assert consumer.engine.counts.done == 20
    assert consumer.engine.counts.failed_commits == (how == "silent")
    is_forbidden = how in ("denied", "hidden")
    assert consumer.engine.figures().are_counts_forbidden is is_forbidden
    assert [COUNTS in one.message for one in caplog.records if one.name == "delaywheel.trace"] == (
        [True] * is_forbidden
    )
    assert consumer.engine.health.is_well
    assert sink.beside.messages == 20
    assert written(kafka).messages == 0


def test_a_right_that_is_taken_away_costs_one_transaction_and_is_used_once_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("delaywheel.consumer.watching.counting._WITHOUT_S", 0.0)
    kafka, sink = FakeKafka(), Sink()
    consumer = traced(kafka, sink, wait_for_rights=None)
    forbidden = []
    for turn in range(9):
        kafka.denied = {COUNTS} if 3 <= turn < 6 else set()
        send(kafka, turn * 4, 4)
        for _ in range(4):
            consumer.engine._commits._recover_at_s = 0.0
            consumer.run_once()
            for message in consumer.take(9):
                message.done()
        forbidden.append(consumer.engine.figures().are_counts_forbidden)
    assert consumer.engine.counts.failed_commits == 1
    assert forbidden == [False] * 3 + [True] * 3 + [False] * 3
    assert written(kafka).messages + sink.beside.messages == committed(kafka)[0] == 36
    assert 0 < sink.beside.messages < 18
