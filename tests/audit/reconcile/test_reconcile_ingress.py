"""Messages accepted through ingress count once, whether a wheel had them or not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from delaywheel import ingress
from delaywheel.seqset import NO_SEQS
from delaywheel_audit.kafka.control import Done
from delaywheel_audit.matching.ingress import SCHEMA, Asked, wishes, with_ingress
from delaywheel_audit.matching.reconcile import Books, Inputs, outcomes_schema, reconcile
from delaywheel_audit.matching.retention import Deleted
from delaywheel_audit.matching.terms import Facts, Terms
from delaywheel_audit.sources.inputs import LEDGER_SCHEMA
from delaywheel_audit.sources.ledger_files import Extent
from delaywheel_replica.core.ingress.place import IngressPlace, message_id
from delaywheel_replica.core.protocol.control import IngressRecord

pytestmark = pytest.mark.spark

NOW = 1_900_000_000_000
DUE = NOW - 600_000
FACTS = Facts(
    done=Done(NOW, {"n1.1": 9}, {}, NOW // 1000 - 60, {}, {"n1": 1}),
    began_ms=NOW,
    extents={"n1.1": Extent(1, 9, DUE - 60_000, NOW - 1_000)},
)
TERMS = Terms(span_ms=7_200_000)
KAFKA = (
    "topic string, partition int, offset long, timestamp_ms long, timestamp_type string,"
    " dw_id binary, dw_due_ms long, dw_accepted_ms long, dw_wheel string, dw_forwarded_ms long,"
    " dw_malformed boolean"
)
OUTCOMES = outcomes_schema().replace("id string", "id binary")


def id_of(name: str) -> bytes:
    return name.encode().ljust(16, b"\0")


class World:
    """Records of an ingress topic, and their outcomes."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self.asked: list[tuple[Any, ...]] = []
        self.ledger: list[tuple[Any, ...]] = []
        self.kafka: list[tuple[Any, ...]] = []
        self.outcomes: list[tuple[Any, ...]] = []

    def ask(self, name: str, due: int = DUE) -> str:
        """Adds a settled record; returns its place."""
        offset = len(self.asked)
        self.asked.append((id_of(name), due, "orders", f"in/0/{offset}", offset, due - 1_000))
        return f"in/0/{offset}"

    def forward(self, name: str, wheel: str = "ingress", due: int = DUE) -> None:
        place = ("orders", 0, len(self.kafka), due + 5, "CREATE_TIME")
        self.kafka.append((*place, id_of(name), due, due - 3, wheel, None, False))

    def accept(self, name: str, due: int = DUE) -> None:
        self.ledger.append((id_of(name), due, due - 3, "orders", "n1.1", 5))

    def reconciled(self, *, has_all: bool = True) -> Books:
        spark = self._spark
        ledger = spark.createDataFrame(self.ledger, LEDGER_SCHEMA)
        kafka = spark.createDataFrame(self.kafka, KAFKA)
        outcomes = spark.createDataFrame(self.outcomes, OUTCOMES)
        asked = Asked(spark.createDataFrame(self.asked, SCHEMA), is_used=True, has_all=has_all)
        books = with_ingress(ledger, asked, kafka, outcomes, TERMS, FACTS)

        def letters() -> DataFrame:
            raise AssertionError("there are none")

        inputs = Inputs(books, kafka, outcomes, lambda: kafka, lambda: Deleted({}, 0), letters)
        return reconcile(lambda _: inputs, TERMS, FACTS)


def findings(books: Books) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for row in books.findings.collect():
        name = bytes.fromhex(row["id"]).rstrip(b"\0").decode()
        found.setdefault(row["kind"], set()).add(name)
    return found


def test_each_record_counts_once(spark: SparkSession) -> None:
    world = World(spark)
    for name in ("direct", "twice", "wheel", "gone", "fresh wheel"):
        world.ask(name)
    world.ask("not published yet", NOW)
    origin = world.ask("dead")
    world.outcomes.append(("ingress-dead-lettered", "SLOT_FULL", *[None] * 11, origin))
    for name in ("direct", "twice", "twice", "forged"):
        world.forward(name)
    world.accept("wheel")
    world.forward("wheel", "n1.1")
    world.forward("fresh wheel", "n1.1", DUE)
    world.accept("fresh wheel")
    books = world.reconciled()
    assert findings(books) == {
        "duplicated": {"twice"},
        "unexpected": {"forged"},
        "missing": {"gone"},
    }
    counts = {"accepted": 5, "forwarded": 4, "missing": 1, "pending": 0}
    assert {name: books.totals[name] for name in counts} == counts
    books.release()


def test_what_went_out_is_believed_once_its_record_may_be_deleted(spark: SparkSession) -> None:
    world = World(spark)
    world.forward("record deleted")
    books = world.reconciled(has_all=False)
    assert not findings(books)
    assert (books.totals["accepted"], books.totals["forwarded"]) == (1, 1)
    books.release()


def test_what_records_ask_for(spark: SparkSession) -> None:
    def record(offset: int, *headers: tuple[str, bytes], partition: int = 0) -> tuple[Any, ...]:
        return "in", partition, offset, DUE, [*headers]

    to, soon = (ingress.TOPIC, b"orders"), (ingress.DELAY_MS, b"5")
    records = spark.createDataFrame(
        [
            record(0, to, soon),
            record(1, to, (ingress.LEVEL, b"old")),
            record(2, to),
            record(3, (ingress.CANCEL, bytes(16)), (ingress.DELIVER_AT, b"7")),
            record(4, to, soon),
            record(0, to, soon, partition=1),
        ],
        "topic string, partition int, offset long, timestamp_ms long,"
        " headers array<struct<name: string, value: binary>>",
    )
    settled = IngressRecord("id", 4, NO_SEQS, {"old": 7_000})
    found = wishes(records, {("in", 0): settled, ("in", 1): replace(settled, next_offset=0)})
    assert [tuple(row) for row in found.orderBy("offset").collect()] == [
        (bytearray(message_id(IngressPlace("in", 0, 0), DUE)), DUE + 5, "orders", "in/0/0", 0, DUE),
        (
            bytearray(message_id(IngressPlace("in", 0, 1), DUE)),
            DUE + 7_000,
            "orders",
            "in/0/1",
            1,
            DUE,
        ),
    ]
