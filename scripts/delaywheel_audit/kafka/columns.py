"""Kafka's messages as columns.

A message costs one call into the client library for each property read; everything
else works on whole columns. Properties that no column needs are not read: headers cost most.

| column | type | |
|---|---|---|
| topic, partition, offset | string, int, long | |
| timestamp_ms, timestamp_type | long, string | CREATE_TIME, LOG_APPEND_TIME; of old: null, NONE |
| key, value | binary | null as in Kafka |
| headers | array of (name string, value binary) | in order, with repeats; empty if unreadable |
| dw_id | binary | 16 bytes |
| dw_due_ms, dw_accepted_ms, dw_forwarded_ms, dw_committed_ms | long | Unix ms |
| dw_cluster | string | which delivered it; null, too, for a release that did not say |
| dw_wheel | string | |
| dw_malformed | boolean | one of these headers cannot be read, or is there more than once |

The `dw_` columns are read from the headers of delaywheel: null where the header is absent, not
written as delaywheel writes it, or there more than once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME, Message

from delaywheel_audit.kafka.headers import headers_of
from delaywheel_audit.kafka.options import invalid

_HEADER = pa.struct([("name", pa.string()), ("value", pa.binary())])
_HEADERS = pa.list_(pa.field("element", _HEADER))

FIELDS: dict[str, pa.DataType] = {
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp_ms": pa.int64(),
    "timestamp_type": pa.string(),
    "key": pa.binary(),
    "value": pa.binary(),
    "headers": _HEADERS,
    "dw_id": pa.binary(),
    "dw_due_ms": pa.int64(),
    "dw_accepted_ms": pa.int64(),
    "dw_cluster": pa.string(),
    "dw_wheel": pa.string(),
    "dw_forwarded_ms": pa.int64(),
    "dw_committed_ms": pa.int64(),
    "dw_malformed": pa.bool_(),
}
"""All columns, in order."""

Column: TypeAlias = "pa.Array[Any]"
_Mask: TypeAlias = npt.NDArray[np.bool_]
_Read: TypeAlias = Callable[[Column], Column]


class _Form(NamedTuple):
    """The form in which delaywheel writes a header."""

    pattern: str
    read: _Read
    """Built from values that all match the pattern."""


def _hex_digits() -> npt.NDArray[np.uint8]:
    digits = np.zeros(256, np.uint8)
    for value, digit in enumerate(b"0123456789abcdef"):
        digits[digit] = value
    return digits


_DIGITS = _hex_digits()


def _read_ids(texts: Column) -> Column:
    fixed = texts.cast(pa.binary(32))
    data: Any = fixed.buffers()[1]
    digits = _DIGITS[np.frombuffer(data, np.uint8)[fixed.offset * 32 :][: len(fixed) * 32]]
    ids: Any = (digits[0::2] << 4) | digits[1::2]
    packed = pa.Array.from_buffers(pa.binary(16), len(fixed), [None, pa.py_buffer(ids)])
    return packed.cast(pa.binary())


def _read_numbers(texts: Column) -> Column:
    return texts.cast(pa.string()).cast(pa.int64())


def _read_texts(texts: Column) -> Column:
    return texts.cast(pa.string())


def _clusters_of(places: Column) -> Column:
    named: Column = pc.match_substring(places, "/")
    clusters: Column = pc.if_else(named, pc.replace_substring_regex(places, "/.*", ""), None)
    return clusters


def _wheels_of(places: Column) -> Column:
    wheels: Column = pc.replace_substring_regex(places, "^.*/", "")
    return wheels


_NUMBER = _Form(r"^(0|[1-9][0-9]{0,17})$", _read_numbers)
_OWN = {
    "dw-id": _Form(r"^[0-9a-f]{32}$", _read_ids),
    "dw-due": _NUMBER,
    "dw-accepted": _NUMBER,
    "dw-wheel": _Form(
        r"^([a-z0-9][a-z0-9-]{0,30}/)?([a-z0-9][a-z0-9-]{0,30}\.[1-9][0-9]{0,17}|ingress)$",
        _read_texts,
    ),
    "dw-forwarded": _NUMBER,
    "dw-committed": _NUMBER,
}
"""The headers of delaywheel; names of clusters and wheels as `delaywheel.identity` has them,
`ingress` for no wheel."""


class _OwnHeader(NamedTuple):
    """One of our headers, over all messages."""

    values: Column
    malformed: _Mask


class _Messages:
    """Columns of messages of one partition, each built on first use."""

    def __init__(self, messages: Sequence[Message], topic: str, partition: int) -> None:
        self._messages = messages
        self._topic = topic
        self._partition = partition
        self._own: dict[str, _OwnHeader] = {}

    def column(self, name: str) -> Column:
        """Returns one of `FIELDS`."""
        return _MAKERS[name](self)

    def topics(self) -> Column:
        return pa.repeat(pa.scalar(self._topic, pa.string()), len(self._messages))

    def partitions(self) -> Column:
        return pa.repeat(pa.scalar(self._partition, pa.int32()), len(self._messages))

    def offsets(self) -> Column:
        return pa.array(list(map(Message.offset, self._messages)), pa.int64())

    def timestamps(self) -> Column:
        kinds, times = self._times
        return pa.array(times, mask=~np.isin(kinds, list(_KINDS)))

    def timestamp_types(self) -> Column:
        kinds, _ = self._times
        places = np.zeros(len(kinds), np.int8)
        for place, kind in enumerate(_KINDS, start=1):
            places[kinds == kind] = place
        return pa.array(["NONE", *_KINDS.values()]).take(places)

    def keys(self) -> Column:
        return pa.array(list(map(Message.key, self._messages)), pa.binary())

    def values(self) -> Column:
        return pa.array(list(map(Message.value, self._messages)), pa.binary())

    @cached_property
    def headers(self) -> Any:
        """Returns the headers as a `pa.ListArray`."""
        given: Any = pa.array([headers_of(message) for message in self._messages], _HEADERS)
        # Kafka has no null for headers, only empty headers.
        return pa.ListArray.from_arrays(given.offsets, given.values, type=_HEADERS)

    def own(self, name: str) -> _OwnHeader:
        """Returns the parsed values of one of our headers."""
        if name not in self._own:
            self._own[name] = self._read_own(name)
        return self._own[name]

    def malformed(self) -> Column:
        return pa.array(np.logical_or.reduce([self.own(name).malformed for name in _OWN]))

    @cached_property
    def _times(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        both = np.array(list(map(Message.timestamp, self._messages)), np.int64).reshape(-1, 2)
        return both[:, 0], both[:, 1]

    @cached_property
    def _rows(self) -> npt.NDArray[np.int64]:
        """Returns, for each header, the row of its message."""
        rows: npt.NDArray[np.int64] = pc.list_parent_indices(self.headers).to_numpy()
        return rows

    def _read_own(self, name: str) -> _OwnHeader:
        form = _OWN[name]
        names, values = self.headers.values.flatten()
        same = pc.equal(names, pa.scalar(name))
        found = np.flatnonzero(same.to_numpy(zero_copy_only=False))
        times = np.bincount(self._rows[found], minlength=len(self._messages))
        found = found[times[self._rows[found]] == 1]
        texts = values.take(pa.array(found))
        readable = _matches(texts, form.pattern)
        read = form.read(texts.filter(pa.array(readable)))
        place = np.full(len(self._messages), -1, np.int64)
        place[self._rows[found[readable]]] = np.arange(len(read))
        malformed: _Mask = (times > 0) & (place < 0)
        places: Any = pa.array(place, mask=place < 0)
        return _OwnHeader(read.take(places), malformed)


def _matches(texts: Column, pattern: str) -> _Mask:
    filled: Any = texts.fill_null(b"")  # no pattern matches what is empty
    found = pc.match_substring_regex(filled, pattern)
    mask: _Mask = found.to_numpy(zero_copy_only=False)
    return mask


_KINDS = {
    TIMESTAMP_CREATE_TIME: "CREATE_TIME",
    TIMESTAMP_LOG_APPEND_TIME: "LOG_APPEND_TIME",
}

_MAKERS: dict[str, Callable[[_Messages], Column]] = {
    "topic": _Messages.topics,
    "partition": _Messages.partitions,
    "offset": _Messages.offsets,
    "timestamp_ms": _Messages.timestamps,
    "timestamp_type": _Messages.timestamp_types,
    "key": _Messages.keys,
    "value": _Messages.values,
    "headers": lambda messages: messages.headers,
    "dw_id": lambda messages: messages.own("dw-id").values,
    "dw_due_ms": lambda messages: messages.own("dw-due").values,
    "dw_accepted_ms": lambda messages: messages.own("dw-accepted").values,
    "dw_cluster": lambda messages: _clusters_of(messages.own("dw-wheel").values),
    "dw_wheel": lambda messages: _wheels_of(messages.own("dw-wheel").values),
    "dw_forwarded_ms": lambda messages: messages.own("dw-forwarded").values,
    "dw_committed_ms": lambda messages: messages.own("dw-committed").values,
    "dw_malformed": _Messages.malformed,
}


def schema_of(columns: Iterable[str] | None) -> pa.Schema:
    """Returns the Arrow schema of these columns; None: of all columns.

    Raises:
        KafkaSourceError: OPTION_INVALID, for a name that is no column.
    """
    names = list(FIELDS if columns is None else columns)
    if unknown := [name for name in names if name not in FIELDS]:
        raise invalid(f"columns: no {', '.join(unknown)}; there are {', '.join(FIELDS)}")
    return pa.schema([(name, FIELDS[name]) for name in names])


def batch_of(
    messages: Sequence[Message], *, topic: str, partition: int, schema: pa.Schema
) -> pa.RecordBatch:
    """Returns the messages as a batch with the columns of the schema."""
    made = _Messages(messages, topic, partition)
    arrays = [made.column(name) for name in schema.names]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
