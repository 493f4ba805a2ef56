"""What records of ingress topics ask for; the books of it are in test_reconcile_cases.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pyspark.sql import SparkSession

from delaywheel import ingress
from delaywheel.seqset import NO_SEQS
from delaywheel_audit.matching.ingress import ingress_requests
from delaywheel_replica.core.ingress.place import IngressPlace, message_id
from delaywheel_replica.core.protocol.control import IngressRecord

pytestmark = pytest.mark.spark

DUE = 1_900_000_000_000


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
    found = ingress_requests(
        records, {("in", 0): settled, ("in", 1): replace(settled, next_offset=0)}
    )
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
