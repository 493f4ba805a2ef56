"""What our headers say, read by Spark's SQL: every case in one query. About 3 s."""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Sequence
from typing import Any

import pytest
from pyspark.sql import SparkSession

from delaywheel_audit.kafka.columns import with_own_headers
from support.kafka.audit_topic import Headers

pytestmark = pytest.mark.spark

ID = uuid.UUID("0190f5ee-7d5a-7cc0-b8a6-0123456789ab")
OURS: list[tuple[str, bytes | None]] = [
    ("dw-id", ID.hex.encode()),
    ("dw-due", b"1767225600123"),
    ("dw-accepted", b"1767225600000"),
    ("dw-wheel", b"shop/node-1.7"),
    ("dw-forwarded", b"1767225600125"),
    ("dw-committed", b"1767225600122"),
]
READ = (
    *(ID.bytes, 1_767_225_600_123, 1_767_225_600_000, "shop", "node-1.7"),
    *(1_767_225_600_125, 1_767_225_600_122),
)
NOTHING = (None,) * len(READ)
PLACES = {"dw-id": [0], "dw-due": [1], "dw-accepted": [2], "dw-wheel": [3, 4],
          "dw-forwarded": [5], "dw-committed": [6]}  # fmt: skip

BROKEN: list[tuple[str, bytes | None]] = [
    ("dw-id", None),
    ("dw-id", b""),
    ("dw-id", ID.hex.encode()[:-1]),
    ("dw-id", ID.hex.encode() + b"0"),
    ("dw-id", ID.hex.upper().encode()),
    ("dw-id", ID.hex.encode()[:-1] + b"\n"),
    ("dw-id", ID.hex.encode() + b"\n"),
    ("dw-due", b""),
    ("dw-due", b"-5"),
    ("dw-due", b"12 "),
    ("dw-due", b"007"),
    ("dw-due", b"9" * 19),
    ("dw-accepted", b"\xff\xfe"),
    ("dw-accepted", b"12\n"),
    ("dw-wheel", b"shop/node-1"),
    ("dw-wheel", b"Shop/node-1.7"),
    ("dw-wheel", b"a/b/node-1.7"),
    ("dw-wheel", b"/node-1.7"),
    ("dw-wheel", b"node-1.0"),
    ("dw-wheel", "knöten.1".encode()),
    ("dw-forwarded", b"1.5"),
    ("dw-forwarded", None),
]

Row = tuple[object, ...]


def without(header: str) -> Row:
    """The row of `OURS` if this header cannot be read."""
    lost = PLACES[header]
    return (*(None if at in lost else value for at, value in enumerate(READ)), True)


def cases() -> list[tuple[Headers, Row]]:
    """Headers, and the row that is read from them."""
    broken = [([(n, v if n == name else o) for n, o in OURS], name) for name, v in BROKEN]
    twice = [([*OURS, (name, value)], name) for name, value in OURS]
    foreign: Headers = [("dw-dead-reason", b"x"), ("DW-ID", b"x"), ("dw-ids", b"x"), ("a", None)]
    wheels = [
        (b"n1.7", None, "n1.7"),
        (b"ingress", None, "ingress"),
        (b"s/ingress", "s", "ingress"),
    ]
    return [
        (OURS, (*READ, False)),
        ([*foreign, *foreign, *OURS], (*READ, False)),
        ([], (*NOTHING, False)),
        (foreign, (*NOTHING, False)),
        *((headers, without(name)) for headers, name in broken),
        *((headers, without(name)) for headers, name in twice),
        *(
            ([("dw-wheel", place)], (*NOTHING[:3], cluster, wheel, None, None, False))
            for place, cluster, wheel in wheels
        ),
    ]


def any_case(dice: random.Random) -> tuple[Headers, Row]:
    """Some headers, and what is read from each that is there once and well."""
    names = [*(name for name, _ in OURS), "x"]
    values = [value for _, value in OURS] + [value for _, value in BROKEN]
    headers = [(dice.choice(names), dice.choice(values)) for _ in range(dice.randrange(7))]
    row: list[object] = [*NOTHING, False]
    for name, places in PLACES.items():
        found = [value for other, value in headers if other == name]
        read = good(name, found[0]) if len(found) == 1 else None
        row[-1] = row[-1] or (bool(found) and read is None)
        for place, value in zip(places, read or [None, None], strict=False):
            row[place] = value
    return headers, tuple(row)


def good(name: str, value: bytes | None) -> Sequence[Any] | None:
    """What a header says, read in Python."""
    if value is None:
        return None
    if name == "dw-id":
        return [bytes.fromhex(value.decode())] if re.fullmatch(b"[0-9a-f]{32}", value) else None
    if name == "dw-wheel":
        part = rb"[a-z0-9][a-z0-9-]{0,30}"
        place = re.fullmatch(rb"(?:(%b)/)?(%b\.[1-9][0-9]{0,17}|ingress)" % (part, part), value)
        return place and [group and group.decode() for group in place.groups()]
    return [int(value)] if re.fullmatch(b"[1-9][0-9]{0,17}", value) else None


def test_what_our_headers_say(spark: SparkSession) -> None:
    dice = random.Random(5)
    wanted = [*cases(), *(any_case(dice) for _ in range(150))]
    records = spark.createDataFrame(
        [(number, [*headers]) for number, (headers, _) in enumerate(wanted)],
        "number int, headers array<struct<name: string, value: binary>>",
    )
    found = with_own_headers(records).orderBy("number").drop("number", "headers").collect()
    for (headers, row), read in zip(wanted, found, strict=True):
        assert tuple(read) == row, headers
