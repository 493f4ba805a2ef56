"""Requests are scanned before any object is made of them, and no further than is accepted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.server.intake.unpacking import outline_of
from delaywheel_replica.server.intake.validate import (
    REQUEST_HEADERS,
    IntakeRules,
    RequestBatch,
    decode_outlined,
)
from delaywheel_replica.server.node.refusals import RequestRefusedError

RULES = IntakeRules(7200, 120, 500, 1_000_000, 10_000, 16 << 20, {}, frozenset())
NOW_MS = 1_763_700_000_000


def decode(request: bytes) -> RequestBatch:
    outline = outline_of(request, max_messages=RULES.max_request_messages)
    return decode_outlined(request, outline, RULES, now_ms=NOW_MS)


EMPTY_ROW, EMPTY_HEADER = b"\x0a\x00", b"\x2a\x00"

ROWS = st.builds(
    pb.DelayedMessage,
    id=st.none() | st.binary(max_size=20),
    topic=st.text(max_size=300),
    value=st.none() | st.binary(max_size=300),
    headers=st.lists(st.builds(pb.Header, name=st.text(max_size=5), value=st.binary(max_size=5))),
    partition=st.none() | st.integers(-(2**31), 2**31 - 1),
    delay_ms=st.none() | st.integers(-(2**63), 2**63 - 1),
)
COLUMNS = st.builds(
    pb.ColumnBatch,
    messages=st.integers(0, 2**32 - 1) | st.integers(0, 3),
    ids=st.binary(max_size=300),
    topics=st.lists(st.text(max_size=5), max_size=3),
    blob=st.binary(max_size=300),
)


def bytes_of(message: bytes) -> bytes:
    """The bytes of a message in a request."""
    return b"\x0a" + _varint(len(message)) + message


def _varint(number: int) -> bytes:
    encoded = b""
    while number >= 0x80:
        encoded += bytes([number & 0x7F | 0x80])
        number >>= 7
    return encoded + bytes([number])


def reason_of(request: bytes) -> Reason | None:
    try:
        decode(request)
    except RequestRefusedError as error:
        return error.refusal.reason
    return None


@settings(deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=5))
def test_messages_are_where_protobuf_has_them(messages: list[pb.DelayedMessage]) -> None:
    request = pb.DelayProduceRequest(messages=messages).SerializeToString()
    outline = outline_of(request, max_messages=5)
    assert outline.messages == len(messages)
    found = [pb.DelayedMessage.FromString(request[begin:end]) for begin, end in outline.rows]
    assert found == messages


@settings(deadline=None)
@given(COLUMNS)
def test_columns_are_where_protobuf_has_them(columns: pb.ColumnBatch) -> None:
    request = pb.DelayProduceRequest(columns=columns).SerializeToString()
    outline = outline_of(request, max_messages=10)
    if columns.messages > 10:
        assert outline.refusal is not None
        assert outline.refusal.reason is Reason.TOO_MANY_MESSAGES
        return
    topics = [request[begin:end].decode() for begin, end in outline.topics]
    assert topics == list(columns.topics)
    assert outline.messages == columns.messages
    for name in ("ids", "blob"):
        begin, end = (outline.columns or {}).get(name, (0, 0))
        assert request[begin:end] == getattr(columns, name)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=50), max_size=4).map(EMPTY_ROW.join))
def test_any_bytes_are_a_request_or_refused_by_name(request: bytes) -> None:
    assert reason_of(request) in {None, Reason.REQUEST_MALFORMED, Reason.TOO_MANY_MESSAGES}


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (EMPTY_ROW * 10_000, None),
        (EMPTY_ROW * 5_000_000, Reason.TOO_MANY_MESSAGES),
        (
            pb.DelayProduceRequest(
                columns=pb.ColumnBatch(messages=1, topics=[""] * 1_000_000)
            ).SerializeToString(),
            Reason.REQUEST_MALFORMED,
        ),
        (b"\x12\x00" * 2, Reason.REQUEST_MALFORMED),
        (b"\x18\x01" * 1_000_000, Reason.REQUEST_MALFORMED),
        (bytes_of(EMPTY_HEADER * 9_000) * 23, Reason.REQUEST_TOO_LARGE),
        (bytes_of(EMPTY_HEADER * 400_000) * 20, None),
        (bytes_of(EMPTY_HEADER * 400_000) * 21, Reason.REQUEST_TOO_LARGE),
        (b"\x0a\x7f", Reason.REQUEST_MALFORMED),
        (b"\x0b", Reason.REQUEST_MALFORMED),
        (b"\x0a" + b"\xff" * 11, Reason.REQUEST_MALFORMED),
        (b"\x0a\x01\xff", Reason.REQUEST_MALFORMED),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else str(value),
)
def test_what_is_tiny_and_many_is_not_looked_at_beyond_its_bound(
    request_: bytes, reason: Reason | None
) -> None:
    assert reason_of(request_) == reason


def test_a_message_of_very_many_headers_is_refused_alone() -> None:
    many = pb.DelayedMessage(topic="a", delay_ms=5, headers=[pb.Header(name="n")] * 10_001)
    few = pb.DelayedMessage(topic="a", delay_ms=5, headers=[pb.Header(name="n")] * 10_000)
    request = pb.DelayProduceRequest(messages=[many, few]).SerializeToString()
    refusals = decode(request).refusals
    assert {row: refusal.reason for row, refusal in refusals.items()} == {
        0: Reason.MESSAGE_TOO_LARGE
    }
    assert REQUEST_HEADERS >= 20_000
