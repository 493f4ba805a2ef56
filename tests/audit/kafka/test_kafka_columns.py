"""Messages as columns. No Kafka: messages are built directly; under a second."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from confluent_kafka import Message
from hypothesis import given
from hypothesis import strategies as st

from delaywheel_audit.kafka.columns import batch_of, schema_of
from delaywheel_audit.kafka.errors import KafkaSourceError
from support.kafka.audit_topic import Headers

ID = uuid.UUID("0190f5ee-7d5a-7cc0-b8a6-0123456789ab")
OURS: list[tuple[str, bytes | None]] = [
    ("dw-id", ID.hex.encode()),
    ("dw-due", b"1767225600123"),
    ("dw-accepted", b"1767225600000"),
    ("dw-wheel", b"shop/node-1.7"),
    ("dw-forwarded", b"1767225600125"),
    ("dw-committed", b"1767225600122"),
]
DW = [
    "dw_id",
    "dw_due_ms",
    "dw_accepted_ms",
    "dw_cluster",
    "dw_wheel",
    "dw_forwarded_ms",
    "dw_committed_ms",
    "dw_malformed",
]
NOTHING = (None,) * (len(DW) - 1)


def message(
    headers: Headers | None = None,
    *,
    offset: int = 0,
    key: bytes | None = None,
    value: bytes | None = None,
    timestamp: tuple[int, int] = (1, 5),
) -> Message:
    given_: Any = headers and list(headers)  # the client's types allow less than it does
    return Message("t", 3, offset, key, value, headers=given_, timestamp=timestamp)


def rows(*messages: Message, columns: list[str] | None = None) -> list[tuple[object, ...]]:
    schema = schema_of(columns)
    batch = batch_of(messages, topic="t", partition=3, schema=schema)
    batch.validate(full=True)
    assert batch.schema == schema
    return [tuple(row.values()) for row in batch.to_pylist()]


def without(row: tuple[object, ...], header: str) -> tuple[object, ...]:
    """A row of `DW` whose header of this name cannot be read."""
    read = {"dw-id": ["dw_id"], "dw-wheel": ["dw_cluster", "dw_wheel"]}
    lost = {*read.get(header, [header.replace("-", "_") + "_ms"]), "dw_malformed"}
    values = (None if name in lost else value for name, value in zip(DW, row, strict=True))
    return (*list(values)[:-1], True)


def test_a_message_as_a_row() -> None:
    found = rows(
        message(OURS, offset=1 << 40, key=b"k", value=b"", timestamp=(1, 1_767_225_600_125)),
        message(offset=(1 << 40) + 1, timestamp=(2, 9)),
        message([], timestamp=(0, -1)),
    )
    headers = [{"name": name, "value": value} for name, value in OURS]
    kafkas = ("t", 3, 1 << 40, 1_767_225_600_125, "CREATE_TIME", b"k", b"", headers)
    numbers = 1_767_225_600_125, 1_767_225_600_122
    ours = (ID.bytes, 1_767_225_600_123, 1_767_225_600_000, "shop", "node-1.7", *numbers, False)
    assert found == [
        (*kafkas, *ours),
        ("t", 3, (1 << 40) + 1, 9, "LOG_APPEND_TIME", None, None, [], *NOTHING, False),
        ("t", 3, 0, None, "NONE", None, None, [], *NOTHING, False),
    ]


def test_a_wheel_of_an_earlier_release_names_no_cluster() -> None:
    headers: Headers = [("dw-wheel", b"n1.7")]
    found = rows(message(headers), message([("dw-wheel", b"shop/ingress")]), columns=DW[3:5])
    assert found == [(None, "n1.7"), ("shop", "ingress")]


def test_headers_are_kept_as_they_are() -> None:
    them: Headers = [("a", b"1"), ("ä", None), ("a", b""), ("a", b"\xff\x00")]
    ((found,),) = rows(message(them), columns=["headers"])
    assert found == [{"name": name, "value": value} for name, value in them]


def test_no_messages_are_no_rows() -> None:
    assert rows() == []


def test_columns_in_the_order_asked_for() -> None:
    assert rows(message(offset=7), columns=["offset", "topic"]) == [(7, "t")]


def test_a_column_that_is_none_is_refused() -> None:
    with pytest.raises(KafkaSourceError, match="OPTION_INVALID: columns: no ofset; there"):
        schema_of(["ofset"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dw-id", None),
        ("dw-id", b""),
        ("dw-id", ID.hex.encode()[:-1]),
        ("dw-id", ID.hex.encode() + b"0"),
        ("dw-id", ID.hex.upper().encode()),
        ("dw-id", ID.hex.encode()[:-1] + b"\n"),
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
    ],
)
def test_a_header_that_cannot_be_read_is_null_and_said(name: str, value: bytes | None) -> None:
    broken = [(n, value if n == name else v) for n, v in OURS]
    good, bad = rows(message(OURS), message(broken), columns=DW)
    assert not good[-1]
    assert bad == without(good, name)


@pytest.mark.parametrize("name", [name for name, _ in OURS])
def test_a_header_that_is_there_twice_is_null_and_said(name: str) -> None:
    twice = [*OURS, (name, dict(OURS)[name])]
    good, bad, after = rows(message(OURS), message(twice), message(OURS), columns=DW)
    assert bad == without(good, name)
    assert after == good


def test_foreign_headers_are_no_matter() -> None:
    others: Headers = [("dw-dead-reason", b"x"), ("DW-ID", b"x"), ("dw-ids", b"x")]
    assert rows(message(others), columns=DW) == [(*NOTHING, False)]


_NAMES = st.sampled_from([*(name for name, _ in OURS), "x"])
_VALUES = st.one_of(st.sampled_from([value for _, value in OURS]), st.none(), st.binary(max_size=9))


@given(st.lists(st.lists(st.tuples(_NAMES, _VALUES), max_size=6), max_size=8))
def test_a_row_hangs_on_its_own_message_alone(
    headers: list[list[tuple[str, bytes | None]]],
) -> None:
    together = rows(*(message(some) for some in headers), columns=DW)
    assert together == [row for some in headers for row in rows(message(some), columns=DW)]
    assert len(together) == len(headers)
