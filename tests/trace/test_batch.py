"""Batches of events: what is encoded is decoded, and what is none is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel.trace.batch import BatchHead, BatchInvalidError, decode, encode
from delaywheel.trace.schema import COLUMNS, EventKind, Form

DOCUMENT = (Path(__file__).parents[2] / "docs" / "TRACE.md").read_text(encoding="utf-8")
EXAMPLE = DOCUMENT.partition("```json\n")[2].partition("```")[0]

_TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
_OF_FORM: dict[Form, st.SearchStrategy[Any]] = {
    Form.ID: st.binary(min_size=16, max_size=16),
    Form.NAME: _TEXTS,
    Form.NUMBER: st.integers(-(2**63), 2**63 - 1),
    Form.TEXT: _TEXTS,
}
HEADS = st.builds(
    BatchHead,
    kind=st.sampled_from(EventKind),
    cluster=_TEXTS,
    reporter=st.binary(min_size=16, max_size=16).map(bytes.hex),
    number=st.integers(0, 2**63 - 1),
    client=st.none() | _TEXTS,
    host=_TEXTS,
    ip=st.none() | _TEXTS,
    release=_TEXTS,
    share=st.floats(0, 1),
    dropped=st.integers(0, 2**63 - 1),
)


def _columns_of(kind: str) -> list[str]:
    return [name for name, column in COLUMNS.items() if kind in column.kinds]


@st.composite
def batches(draw: st.DrawFn) -> tuple[BatchHead, dict[str, list[Any]]]:
    head = draw(HEADS)
    count = draw(st.integers(1, 5))
    return head, {
        name: draw(
            st.lists(st.none() | _OF_FORM[COLUMNS[name].form], min_size=count, max_size=count)
        )
        for name in _columns_of(head.kind)
    }


@given(batches())
def test_what_is_encoded_is_decoded(batch: tuple[BatchHead, dict[str, list[Any]]]) -> None:
    head, rows = batch
    assert decode(encode(head, rows)) == (head, rows)


def test_the_documents_example_is_one_way_of_two_attempts() -> None:
    head, rows = decode(EXAMPLE.encode())
    assert list(rows) == _columns_of(head.kind)
    assert rows["status"] == ["RETRIED", "DONE"]
    first, second = rows["id"]
    assert rows["next_id"] == [second, None]
    assert rows["root"] == [None, first.hex()]
    assert rows["to_ms"][0] == rows["due_ms"][1]
    assert json.loads(encode(head, rows)) == json.loads(EXAMPLE)


def test_the_document_has_the_columns_of_the_code() -> None:
    section = DOCUMENT.partition("## Columns\n")[2].partition("\n## ")[0]
    documented = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            for name in cells[0].split(","):
                kinds = tuple(EventKind) if cells[1] == "all" else cells[1].split(", ")
                documented[name.strip(" `")] = (cells[2], [kind.strip("`") for kind in kinds])
    assert documented == {
        name: (column.form, list(column.kinds)) for name, column in COLUMNS.items()
    }


def test_what_a_later_version_adds_is_kept_as_it_is() -> None:
    later = json.loads(EXAMPLE)
    later |= {"v": 2, "kind": "seen", "zone": "b"}
    later["rows"]["mood"] = [{"is": "good"}, 0]
    head, rows = decode(json.dumps(later).encode())
    assert (head.version, head.kind) == (2, "seen")
    assert rows["mood"] == [{"is": "good"}, 0]
    assert rows["topic"] == ["orders", "orders-retry-billing"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"v": 0}, "v is 0"),
        ({"reporter": "7F"}, "reporter is '7F'"),
        ({"number": True}, "number is True"),
        ({"share": 1.5}, "share is 1.5"),
        ({"dropped": -1}, "dropped is -1"),
        ({"names": ["orders", 1]}, "names"),
        ({"names": ["orders"]}, "not in names"),
        ({"rows": []}, "rows"),
        ({"rows": {}}, "length"),
        ({"rows": {"id": []}}, "length"),
        ({"rows": {"id": [None], "due_ms": [1, 2]}}, "length"),
        ({"rows": {"id": ["42"]}}, "column id"),
        ({"rows": {"due_ms": [2**63]}}, "column due_ms"),
        ({"rows": {"due_ms": [1.0]}}, "column due_ms"),
        ({"rows": {"topic": [-1]}}, "column topic"),
        ({"rows": {"key": [42]}}, "column key"),
    ],
)
def test_what_is_no_batch_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(BatchInvalidError, match=says):
        decode(json.dumps(json.loads(EXAMPLE) | change).encode())


@pytest.mark.parametrize("record", [b"", b"{", b"\xff", b"[]", b"17", b"[" * 100_000])
def test_records_of_somebody_else_are_refused(record: bytes) -> None:
    with pytest.raises(BatchInvalidError):
        decode(record)
