"""Events as rows of an index, and what DuckDB has to read to find one."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from delaywheel.trace.batch import BatchHead, Rows
from delaywheel_trace.index.events import (
    SCHEMA,
    of_batch,
    of_ledger,
    of_outcome,
    of_rows,
    places_in_seqs,
)
from support.wheels.indexes import IndexMaker

HOUR_MS = 1_900_000_800_000
HEAD = BatchHead(
    kind="sent",
    cluster="shop",
    reporter="7f0c8a5be53c4d0f9d3ee1c6f6a7d915",
    number=17,
    client=None,
    host="h",
    ip="10.0.0.7",
    release="0.1.0",
    share=1,
    dropped=3,
)
ID, OTHER = bytes(range(16)), bytes(range(16, 32))


def given(event: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if value is not None}


def test_a_batch_becomes_rows() -> None:
    rows: Rows = {
        "id": [ID, OTHER],
        "time_ms": [5, 6],
        "status": ["ACCEPTED", None],
        "key": ["42", None],
    }
    first, second = of_batch(HEAD, rows).to_pylist()
    same: dict[str, Any] = {
        "kind": "sent",
        "cluster": "shop",
        "host": "h",
        "ip": "10.0.0.7",
        "release": "0.1.0",
    }
    same |= {"reporter": HEAD.reporter, "number": 17, "share": 1.0}
    said = {"id": ID, "time_ms": 5, "status": "ACCEPTED", "key": "42"}
    assert given(first) == {**same, **said, "row": 0, "dropped": 3}
    assert given(second) == {**same, "id": OTHER, "time_ms": 6, "row": 1, "dropped": 0}


def test_what_is_unknown_is_kept() -> None:
    head = replace(HEAD, version=2, kind="seen", rest={"zone": "a"})
    rows: Rows = {"id": [ID, OTHER], "colour": ["red", None], "shape": [[1], {"a": 2}]}
    found = of_batch(head, rows).to_pylist()
    assert [(event["kind"], json.loads(event["extra"])) for event in found] == [
        ("seen", {"zone": "a", "v": 2, "colour": "red", "shape": [1]}),
        ("seen", {"zone": "a", "v": 2, "shape": {"a": 2}}),
    ]


def test_a_record_without_id_has_its_place_as_root() -> None:
    rows: Rows = {
        "id": [None, None, ID, None],
        "topic": ["t"] * 4,
        "partition": [1] * 4,
        "offset": [7, 8, 9, None],
        "root": [None, "0190", None, None],
    }
    found = of_batch(replace(HEAD, kind="processed"), rows).to_pylist()
    assert [event["root"] for event in found] == ["t/1/7", "0190", None, None]


def test_halves_of_characters_are_replaced() -> None:
    assert of_batch(HEAD, {"key": ["a\ud800"]}).to_pylist()[0]["key"] == "a?"


def test_outcomes_are_events_known_by_their_place() -> None:
    outcome: dict[str, Any] = {
        "outcome": "deferred",
        "id": ID.hex(),
        "due_ms": 5,
        "topic": "t",
        "until_ms": 9,
    }
    outcome |= {"wheel": "n1.1", "seq": 2, "row": 0, "accepted_at_ms": 1}
    (event,) = of_rows([of_outcome(outcome, "topic-id", 1, 17, 6)]).to_pylist()
    extra = json.loads(event.pop("extra"))
    assert given(event) == {
        "kind": "outcome",
        "id": ID,
        "due_ms": 5,
        "topic": "t",
        "to_ms": 9,
        "time_ms": 6,
        "status": "deferred",
        "reporter": "topic-id",
        "number": 1,
        "row": 17,
    }
    assert extra == {"wheel": "n1.1", "seq": 2, "row": 0, "accepted_at_ms": 1}
    none: list[dict[str, Any]] = [
        {},
        {"outcome": 1},
        {"outcome": "x", "id": "00"},
        {"outcome": "x", "id": 5},
    ]
    for broken in none:
        with pytest.raises(ValueError, match=r"no outcome|an id|hex"):
            of_outcome(broken, "topic-id", 0, 0, 0)


def test_what_is_deferred_goes_on_under_another_id_if_its_own_followed_from_its_place() -> None:
    for id_, becomes in ((ID, None), (b"dwin" + bytes(12), b"dwmv" + bytes(12))):
        for status in ("deferred", "ingress-deferred"):
            outcome = {"outcome": status, "id": id_.hex(), "due_ms": 5, "until_ms": 9}
            assert of_outcome(outcome, "topic-id", 1, 17, 6)["next_id"] == becomes
    outcome = {"outcome": "cancelled", "id": (b"dwin" + bytes(12)).hex(), "due_ms": 5}
    assert of_outcome(outcome, "topic-id", 1, 17, 6)["next_id"] is None


def test_rows_of_the_ledger_are_numbered_in_their_seq() -> None:
    rows = pa.table(
        {
            "id": pa.array([ID, OTHER, ID], pa.binary(16)),
            "due_ms": [7, 8, 9],
            "accepted_at_ms": [1, 1, 2],
            "topic": pa.array(["t", "t", "u"]).dictionary_encode(),
            "wheel": pa.array(["n1.1"] * 3).dictionary_encode(),
            "seq": [4, 4, 5],
        }
    )
    found = of_ledger(rows, places_in_seqs(rows), "shop")
    assert found.schema == SCHEMA
    assert [(e["reporter"], e["number"], e["row"]) for e in found.to_pylist()] == [
        ("n1.1", 4, 0),
        ("n1.1", 4, 1),
        ("n1.1", 5, 0),
    ]


def test_duckdb_asks_the_bloom_filters_of_what_was_merged(tmp_path: Path) -> None:
    maker = IndexMaker(tmp_path, HOUR_MS)
    ids = [os.urandom(16) for _ in range(1_000)]
    maker.batch(
        *(
            {"id": i, "root": i.hex(), "next_id": i, "key": i.hex(), "offset": n}
            for n, i in enumerate(ids)
            if n % 2
        )
    )
    path = maker.folder.full(maker.merge().path)
    present, absent = ids[501], ids[500]
    for name, found, missing in (
        ("id", present, absent),
        ("root", present.hex(), absent.hex()),
        ("next_id", present, absent),
        ("key", present.hex(), absent.hex()),
        ("offset", 501, 500),
    ):
        assert [scanned(path, name, value) for value in (found, missing)] == [1, 0], name


def scanned(path: str, column: str, value: object) -> int:
    """How many row groups a search for a value reads."""
    with duckdb.connect() as connection:
        query = f'EXPLAIN ANALYZE SELECT * FROM read_parquet($files) WHERE "{column}" = $value'
        told = connection.execute(query, {"files": [path], "value": value}).fetchall()[0][1]
    match = re.search(r"Row Groups Scanned: (\d+) / \d+", told)
    return int(match[1]) if match else 0
