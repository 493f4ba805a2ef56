"""Records come out of a batch as they went in, and malformed bytes are rejected."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel.headers import encode_headers
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.core.ingress.reading import ABSENT, Delayed, Withdrawn
from delaywheel_replica.core.ingress.underway import RecordAnswer
from delaywheel_replica.core.protocol.codec import MalformedError
from delaywheel_replica.handover.answers import (
    ANSWER_HEAD,
    encode_answers,
    take_answers,
)
from delaywheel_replica.handover.batches import (
    HEAD,
    LONGEST_BYTES,
    RECORD_BYTES,
    Head,
    decode,
    encode,
    length_bytes,
)
from delaywheel_replica.server.node.naming import key_of

CONTENT = st.none() | st.binary(max_size=30)
DELAYED = st.builds(
    Delayed,
    id=st.binary(min_size=16, max_size=16),
    due_ms=st.integers(1, 2**52),
    topic=st.sampled_from(["orders", "a", "x.y-z_0", "t" * 249]),
    partition=st.integers(ABSENT, 2**31 - 1),
    timestamp_ms=st.just(ABSENT) | st.integers(1, 2**63 - 1),
    key=CONTENT,
    value=CONTENT,
    headers=st.lists(st.tuples(st.sampled_from(["h", "ttl"]), CONTENT), max_size=3).map(
        encode_headers
    ),
    # Not handed over: the cleaner alone judges by them; the headers of a half say that it is one.
    has_own_id=st.just(value=False),
    is_half=st.just(value=False),
    half_due_ms=st.just(ABSENT),
)
WITHDRAWN = st.builds(
    Withdrawn,
    st.binary(min_size=16, max_size=16),
    st.integers(1, 2**52),
    st.sampled_from(["orders", "bills"]),
)
MESSAGE = Delayed(bytes(16), 7, "orders", 3, 9, b"key", b"value", encode_headers([("h", b"x")]))


def through(number: int, requests: list[Delayed] | list[Withdrawn]) -> tuple[Head, Columns]:
    """A server's result for a batch."""
    batch = b"".join(encode(number, requests))
    head = Head.parse(batch[: HEAD.size])
    assert head.length_bytes == len(batch) - HEAD.size
    assert head.length_bytes <= sum(map(length_bytes, requests))
    return head, decode(head, batch[HEAD.size :])


def messages_in(columns: Columns) -> list[Delayed]:
    """The messages of columns."""
    return [
        Delayed(
            columns.ids[row].tobytes(),
            int(columns.due_ms[row]),
            columns.topic(row),
            int(columns.partitions[row]),
            int(columns.timestamps_ms[row]),
            columns.key(row),
            columns.value(row),
            encode_headers(columns.headers(row)),
        )
        for row in range(len(columns))
    ]


@given(st.integers(0, 2**32 - 1), st.lists(DELAYED, min_size=1, max_size=9))
def test_messages_come_out_as_they_went_in(number: int, requests: list[Delayed]) -> None:
    head, columns = through(number, requests)
    assert (head.number, head.kind, head.records) == (number, Kind.MESSAGES, len(requests))
    assert messages_in(columns) == requests


@given(st.lists(WITHDRAWN, min_size=1, max_size=9))
def test_cancels_come_out_as_they_went_in(requests: list[Withdrawn]) -> None:
    head, columns = through(1, requests)
    assert head.kind is Kind.CANCELS
    assert [Withdrawn(*key_of(columns, row)) for row in range(len(columns))] == requests


@given(
    st.lists(st.lists(st.sampled_from(RecordAnswer), max_size=9), max_size=5),
    st.integers(1, 99),
)
def test_answers_come_out_as_they_went_in(batches: list[list[RecordAnswer]], piece: int) -> None:
    encoded = b"".join(encode_answers(number, each) for number, each in enumerate(batches))
    received, found = bytearray(), list[tuple[int, tuple[RecordAnswer, ...]]]()
    for begin in range(0, len(encoded), piece):
        received += encoded[begin : begin + piece]
        found += take_answers(received, 9)
    assert found == [(number, tuple(each)) for number, each in enumerate(batches)]
    assert not received


@pytest.mark.parametrize("answer", [ANSWER_HEAD.pack(1, 1) + b"\x09", ANSWER_HEAD.pack(1, 7)])
def test_an_answer_that_is_none(answer: bytes) -> None:
    with pytest.raises(MalformedError):
        list(take_answers(bytearray(answer), 6))


@pytest.mark.parametrize(
    ("length_bytes", "kind", "records"),
    [(9, 0, 1), (9, 4, 1), (9, 1, 0), (LONGEST_BYTES + 1, 1, 1), (9, 1, LONGEST_BYTES)],
)
def test_a_head_that_is_none(length_bytes: int, kind: int, records: int) -> None:
    with pytest.raises(MalformedError):
        Head.parse(HEAD.pack(length_bytes, 1, kind, records))


def test_what_a_batch_costs_covers_what_is_made_of_it() -> None:
    head, _ = through(1, [MESSAGE, MESSAGE])
    assert head.cost_bytes == head.length_bytes + 2 * RECORD_BYTES


@given(st.data())
def test_a_content_that_was_changed_is_refused_or_adds_up(data: st.DataObject) -> None:
    batch = bytearray(b"".join(encode(1, [MESSAGE, MESSAGE])))
    head, content = Head.parse(bytes(batch[: HEAD.size])), batch[HEAD.size :]
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            content[place] = data.draw(st.integers(0, 255))
        else:
            del content[place:]
            break
    try:
        columns = decode(head, bytes(content))
    except MalformedError:
        return
    assert len(columns) == 2
    assert int(columns.lengths_bytes.sum()) == len(columns.blob)
    assert all(columns.topic(row) for row in range(2)) or "" in columns.topics
