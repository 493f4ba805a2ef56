"""The rows of an index: one for each event, whoever told it, and how they are written.

| kind | is | `reporter`, `number`, `row` are |
|---|---|---|
| `sent`, `changed`, `processed`, others | in a batch | the batch's, and the row's place in it |
| `outcome` | in the outcomes topic | the topic's id in Kafka, partition, offset |
| `accepted` | in the ledger | wheel, seq, place among the rows of that seq |

Two rows with one such identity are one event. `root` is null where a way began with this message:
then its root is its id, and a way is found by `id` or by `root`; without id the place is written.
A root that repeated each id would make 21 bytes an event 33. DuckDB asks bloom filters (`BLOOMS`)
where a column is compared with one value, and not within an OR. Columns may be added: those that
a file of an earlier release lacks are null there, for whoever reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from delaywheel.ingress import id_to_send_again
from delaywheel.trace.batch import BatchHead, Rows
from delaywheel.trace.schema import COLUMNS, VERSION

_TEXT, _NUMBER, _ID = pa.string(), pa.int64(), pa.binary(16)

_FIELDS: Final[Mapping[str, pa.DataType]] = {
    "kind": _TEXT,
    "id": _ID,
    "due_ms": _NUMBER,
    "topic": _TEXT,
    "time_ms": _NUMBER,
    "status": _TEXT,
    "key": _TEXT,
    "tags": _TEXT,
    "root": _TEXT,
    "cost_us": _NUMBER,
    "attempts": _NUMBER,
    "node": _TEXT,
    "what": _TEXT,
    "slot": _NUMBER,
    "to_ms": _NUMBER,
    "next_id": _ID,
    "partition": _NUMBER,
    "offset": _NUMBER,
    "forwarded_ms": _NUMBER,
    "group": _TEXT,
    "attempt": _NUMBER,
    "handler_us": _NUMBER,
    "why": _TEXT,
    # JSON of the columns and fields that have no place here; a `v` other than 1, too.
    "extra": _TEXT,
    "reporter": _TEXT,
    "number": _NUMBER,
    "row": _NUMBER,
    "cluster": _TEXT,
    "client": _TEXT,
    "host": _TEXT,
    "ip": _TEXT,
    "release": _TEXT,
    "share": pa.float64(),
    # What the reporter dropped before this batch: in its row 0, so that it may be summed up.
    "dropped": _NUMBER,
}
SCHEMA: Final = pa.schema(_FIELDS)
IDENTITY: Final = ("reporter", "number", "row")
ACCEPTED: Final = "accepted"
OUTCOME: Final = "outcome"
OF_THE_SERVICE: Final = frozenset({ACCEPTED, OUTCOME, "forwarded", "now"})
"""Kinds that no program tells: ledger, outcomes and searches do."""

GROUP_ROWS: Final = 131_072
"""Of a row group, at most."""
BLOOMS: Final = ("id", "root", "next_id", "key", "offset")
_CLIMBING: Final = (
    *("due_ms", "time_ms", "to_ms", "offset", "forwarded_ms"),
    *("slot", "row", "cost_us", "handler_us"),
)
"""Numbers that are near to the one before: 21.5 bytes an event instead of 29.6."""
_VARIED: Final = {"id", "next_id", "root", "key", "extra"}
_REPEATED: Final = [n for n in SCHEMA.names if n not in _VARIED and n not in _CLIMBING]
_BLOOM_ERRORS: Final = 0.01


def of_batch(head: BatchHead, rows: Rows) -> pa.RecordBatch:
    """Returns the events of a decoded batch."""
    count = len(next(iter(rows.values())))
    head_columns = {
        "kind": head.kind,
        "reporter": head.reporter,
        "number": head.number,
        "cluster": head.cluster,
        "client": head.client,
        "host": head.host,
        "ip": head.ip,
        "release": head.release,
        "share": float(head.share),
    }
    columns: dict[str, Any] = {n: rows[n] for n in rows if n in COLUMNS}
    columns["row"] = range(count)
    columns["dropped"] = [head.dropped] + [0] * (count - 1)
    columns["root"] = _roots(columns, count)
    columns["extra"] = _extras(head, rows, count)
    return pa.record_batch(
        [_array(columns.get(f.name), head_columns.get(f.name), f.type, count) for f in SCHEMA],
        schema=SCHEMA,
    )


def with_all_columns(rows: pa.Table) -> pa.Table:
    """Returns rows of a file of this release, or of an earlier one, with all columns.

    Raises:
        pa.ArrowException: It has others: a later release has written it, and knows what they are.
    """
    if unknown := set(rows.column_names) - set(SCHEMA.names):
        raise pa.ArrowInvalid(f"a later release has written it: {', '.join(sorted(unknown))}")
    there = set(rows.column_names)
    columns = [rows[f.name] if f.name in there else pa.nulls(len(rows), f.type) for f in SCHEMA]
    return pa.table(columns, schema=SCHEMA)


def of_rows(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Returns events that are given one by one; what they do not name is null."""
    columns = [_values([row.get(f.name) for row in rows], f.type) for f in SCHEMA]
    return pa.table(columns, schema=SCHEMA)


def of_outcome(
    outcome: Mapping[str, Any], topic_id: str, partition: int, offset: int, time_ms: int
) -> dict[str, Any]:
    """Returns the event that a record of the outcomes topic tells, for `of_rows`.

    Raises:
        ValueError: It is no outcome.
    """
    status = outcome.get("outcome")
    if not isinstance(status, str):
        raise ValueError("no outcome")  # noqa: TRY004 - what a topic has is a value
    named = {
        "due_ms": _number(outcome.get("due_ms")),
        "topic": _text(outcome.get("topic")),
        "what": _text(outcome.get("answer")),
        "to_ms": _number(outcome.get("until_ms")),
        "why": _text(outcome.get("reason")),
    }
    rest = set(outcome) - {"outcome", "id", "due_ms", "topic", "answer", "until_ms", "reason"}
    id_ = outcome.get("id")
    if id_ is not None:
        id_ = bytes.fromhex(id_) if isinstance(id_, str) else b""
        if len(id_) != _ID.byte_width:
            raise ValueError("an id that is none")
    # What is deferred comes back under the same id, but for one that followed from its place.
    is_deferred = status in ("deferred", "ingress-deferred")
    next_id = id_to_send_again(id_) if id_ is not None and is_deferred else None
    return {
        **named,
        "kind": OUTCOME,
        "id": id_,
        "next_id": None if next_id == id_ else next_id,
        "time_ms": time_ms,
        "status": status,
        "extra": _dumps({name: outcome[name] for name in sorted(rest)}) if rest else None,
        "reporter": topic_id,
        "number": partition,
        "row": offset,
    }


def of_ledger(rows: pa.Table, places: npt.NDArray[np.int64], cluster: str) -> pa.Table:
    """Returns rows of the ledger as events; `places_in_seqs` has the places."""
    count = len(rows)
    given = {
        "id": rows["id"],
        "due_ms": rows["due_ms"],
        "time_ms": rows["accepted_at_ms"],
        "topic": rows["topic"].cast(_TEXT),
        "reporter": rows["wheel"].cast(_TEXT),
        "number": rows["seq"],
        "row": pa.array(places),
    }
    same = {"kind": ACCEPTED, "status": "ACCEPTED", "cluster": cluster}
    columns = [given.get(f.name) for f in SCHEMA]
    filled = [
        _array(None, same.get(field.name), field.type, count) if column is None else column
        for column, field in zip(columns, SCHEMA, strict=True)
    ]
    return pa.table(filled, schema=SCHEMA)


def places_in_seqs(rows: pa.Table) -> npt.NDArray[np.int64]:
    """Returns the place of each row of the ledger among those of its seq, which are together."""
    seqs = rows["seq"].combine_chunks().to_numpy()
    begins = np.flatnonzero(np.diff(seqs, prepend=-1))
    return np.arange(len(seqs)) - np.repeat(begins, np.diff(begins, append=len(seqs)))


def open_writer(sink: Any, values: Mapping[str, int] | None = None) -> pq.ParquetWriter:
    """Opens a file of events.

    Args:
        sink: Where it goes.
        values: Which columns get bloom filters, for as many values a row group.
    """
    blooms = {n: {"ndv": count, "fpp": _BLOOM_ERRORS} for n, count in (values or {}).items()}
    return pq.ParquetWriter(
        sink,
        SCHEMA,
        compression="zstd",
        use_dictionary=_REPEATED,  # type: ignore[arg-type]  # its stubs know no list
        column_encoding=dict.fromkeys(_CLIMBING, "DELTA_BINARY_PACKED"),
        bloom_filter_options=blooms or None,
    )


def values_of(rows: pa.Table) -> dict[str, int]:
    """Returns how many values the columns have that get bloom filters, if they have any."""
    counts = {name: len(rows) - rows[name].null_count for name in BLOOMS}
    return {name: count for name, count in counts.items() if count}


def write_merged(sink: Any, rows: pa.Table) -> None:
    """Writes rows that are sorted by id and time, with bloom filters."""
    values = {name: min(count, GROUP_ROWS) for name, count in values_of(rows).items()}
    with open_writer(sink, values) as writer:
        writer.write_table(rows, row_group_size=GROUP_ROWS)


def _array(values: Any, same: Any, kind: Any, count: int) -> Any:
    """Returns a column of values, or of one value."""
    if values is not None:
        return _values(values, kind)
    if same is None:
        return pa.nulls(count, kind)
    return pa.repeat(_values([same], kind)[0], count)


def _values(values: Any, kind: Any) -> Any:
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:  # JSON may have halves of a character
        clean = [v and v.encode(errors="replace").decode() for v in values]
        return pa.array(clean, kind)


def _roots(columns: Mapping[str, Sequence[Any]], count: int) -> list[str | None]:
    """Returns the roots as they are told; where neither it nor an id is, the place."""
    roots = list(columns.get("root") or [None] * count)
    ids, places = columns.get("id"), [columns.get(n) for n in ("topic", "partition", "offset")]
    if None in places:
        return roots
    for row in range(count):
        if roots[row] is None and (ids is None or ids[row] is None):
            place = [column[row] for column in places if column is not None]
            if None not in place:
                roots[row] = "/".join(map(str, place))
    return roots


def _extras(head: BatchHead, rows: Rows, count: int) -> list[str | None] | None:
    unknown = [name for name in rows if name not in COLUMNS]
    same = dict(head.rest)
    if head.version != VERSION:
        same["v"] = head.version
    if not unknown and not same:
        return None
    extras = (
        same | {n: rows[n][row] for n in unknown if rows[n][row] is not None}
        for row in range(count)
    )
    return [_dumps(extra) if extra else None for extra in extras]


def _number(value: Any) -> int | None:
    is_one = isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
    return value if is_one else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


_dumps: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
