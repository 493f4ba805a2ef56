"""Searches of random indexes find what a scan of all their events finds."""

from __future__ import annotations

import io
import json
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from delaywheel_trace.index.events import IDENTITY
from delaywheel_trace.search.indexes import COLUMNS, _listed
from delaywheel_trace.search.lookups import Lookups
from support.wheels.indexes import Event, IndexMaker

HOUR_MS = 1_900_000_800_000
IDS = [bytes([n]) * 16 for n in range(6)]
ROOTS = [*(id_.hex() for id_ in IDS), "t/0/1"]
NONE = st.none()

EVENT = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["sent", "changed", "processed"]),
        "id": NONE | st.sampled_from(IDS),
        "next_id": NONE | NONE | st.sampled_from(IDS),
        "root": NONE | st.sampled_from(ROOTS),
        "key": NONE | st.sampled_from(["a", "b"]),
        "tags": NONE | st.sampled_from(["x", "x,y", "z"]),
        "topic": st.sampled_from(["t", "u"]),
        "partition": st.just(0),
        "offset": st.integers(0, 2),
        "status": st.sampled_from(["DONE", "RETRIED"]),
        "group": NONE | st.sampled_from(["g", "h"]),
        "time_ms": st.integers(HOUR_MS, HOUR_MS + 5),
    }
)
BATCHES = st.lists(EVENT, min_size=1, max_size=9).flatmap(
    # Of events with an identity each, some more than once, in any order.
    lambda events: st.lists(
        st.lists(
            st.sampled_from([{**one, "number": n, "row": 0} for n, one in enumerate(events)]),
            min_size=1,
            max_size=6,
        ),
        min_size=1,
        max_size=3,
    )
)
HAVING = st.fixed_dictionaries(
    {},
    optional={
        "key": st.sampled_from(["a", "b", "c"]),
        "tag": st.sampled_from(["x", "y", "x,y"]),
        "topic": st.sampled_from(["t", "u"]),
        "status": st.sampled_from(["RETRIED", "done"]),
        "group": st.just("g"),
        "from_ms": st.integers(HOUR_MS, HOUR_MS + 5),
        "to_ms": st.integers(HOUR_MS, HOUR_MS + 6),
    },
).filter(bool)
EARLIER = st.tuples(
    # Of events with a number below this one an earlier release did not know these columns.
    st.integers(0, 9),
    st.lists(
        st.sampled_from(["next_id", "root", "key", "tags", "group", "forwarded_ms", "share"]),
        max_size=4,
        unique=True,
    ),
)
QUESTION = (
    st.sampled_from(IDS).map(lambda id_: {"id": id_.hex()})
    | st.integers(0, 2).map(lambda offset: {"place": ["t", 0, offset]})
    | HAVING.map(lambda having: {"having": having})
)


@given(BATCHES, EARLIER, QUESTION, st.booleans())
def test_a_search_finds_what_a_scan_finds(
    batches: list[list[Event]],
    earlier: tuple[int, list[str]],
    question: dict[str, Any],
    is_merged: bool,
) -> None:
    below, unknown = earlier
    nothing = dict.fromkeys(unknown)
    batches = [
        [{**event, **nothing} if event["number"] < below else event for event in batch]
        for batch in batches
    ]
    with tempfile.TemporaryDirectory() as folder:
        index = IndexMaker(Path(folder), HOUR_MS)
        index.lacks = unknown
        for batch in batches:
            index.batch(*batch)
        if is_merged:
            index.merge()
        found = searched(folder, question)
    assert sorted(map(identity, found)) == sorted(scanned(batches, question))


def searched(folder: str, question: dict[str, Any]) -> list[Any]:
    listed, chunks = _listed([folder], None)
    request = {**question, "limit": 100, "columns": COLUMNS, "identity": IDENTITY}
    request["chunks"] = [chunk.request for chunk in chunks]
    request["arrived_ms"] = [index.arrived_ms for index in listed.indexes]
    with redirect_stdout(io.StringIO()) as said:
        Lookups(json.loads(json.dumps(request))).run()
    lines = [json.loads(line) for line in said.getvalue().splitlines()]
    assert lines[-1] == {"end": 1}
    assert not [line for line in lines if "unread" in line]
    return [line["row"] for line in lines if "row" in line]


def identity(row: Event) -> tuple[Any, ...]:
    return row["number"], row["row"]


def scanned(batches: list[list[Event]], question: dict[str, Any]) -> set[tuple[Any, ...]]:
    """Every event, compared with all that is named, until nothing new is."""
    first: dict[tuple[Any, ...], Event] = {}
    for event in (event for batch in batches for event in batch):
        first.setdefault(identity(event), event)
    return follow([*first.values()], question)


def follow(events: list[Event], question: dict[str, Any]) -> set[tuple[Any, ...]]:
    ids: set[bytes] = set()
    roots: set[str] = set()
    found: set[tuple[Any, ...]] = set()
    if "id" in question:
        ids.add(bytes.fromhex(question["id"]))
    elif "place" in question:
        roots.add("/".join(map(str, question["place"])))
    for event in events:
        if is_asked_for(event, question):
            if "place" in question:
                found.add(identity(event))
                name(event, ids, roots)
            else:
                begin(event, ids, roots)
    asked = bytes.fromhex(question.get("id", ""))
    own = [one for one in events if one["id"] == asked or one["root"] == asked.hex()]
    is_alone = "id" in question and not any(
        one["kind"] == "sent" or one["root"] not in (None, asked.hex()) for one in own
    )
    before = -1
    while before != len(found) + len(ids) + len(roots):
        before = len(found) + len(ids) + len(roots)
        ids |= {bytes.fromhex(root) for root in roots if "/" not in root}
        roots |= {id_.hex() for id_ in ids}
        for event in events:
            is_before = is_alone and event["next_id"] == asked
            if event["id"] in ids or event["root"] in roots or is_before:
                found.add(identity(event))
                name(event, ids, roots)
    return found


def begin(event: Event, ids: set[bytes], roots: set[str]) -> None:
    """Notes what a search by what rows have follows from the rows that it finds."""
    if event["id"] is not None:
        ids.add(event["id"])
    if event["root"] is not None:
        roots.add(event["root"])
    elif event["id"] is None:
        roots.add(f"{event['topic']}/{event['partition']}/{event['offset']}")


def name(event: Event, ids: set[bytes], roots: set[str]) -> None:
    ids |= {event[column] for column in ("id", "next_id") if event[column] is not None}
    roots |= {event["root"]} - {None}


def is_asked_for(event: Event, question: dict[str, Any]) -> bool:
    if "id" in question:
        return False
    if "place" in question:
        return bool([event[n] for n in ("topic", "partition", "offset")] == question["place"])
    having = question["having"]
    tags = [event["tags"], *(event["tags"] or "").split(",")]
    return all(
        (
            event["key"] == having.get("key", event["key"]),
            "tag" not in having or having["tag"] in tags,
            event["topic"] == having.get("topic", event["topic"]),
            having.get("status", event["status"]).upper() == event["status"],
            event["group"] == having.get("group", event["group"]),
            having.get("from_ms", 0) <= event["time_ms"] < having.get("to_ms", HOUR_MS * 2),
        )
    )
