"""Rows and columns mean the same; every fault of a message is named."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel.headers import encode_headers
from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.patterns import Pattern
from delaywheel_replica.rights import Granted, Right, Rights
from delaywheel_replica.server.access.callers import Caller
from delaywheel_replica.server.access.spending import TopicRoom
from delaywheel_replica.server.intake.unpacking import outline_of
from delaywheel_replica.server.intake.validate import (
    IntakeRules,
    RequestBatch,
    decode_outlined,
    refuse_foreign_halves,
    refuse_without_room,
)
from delaywheel_replica.server.node.refusals import Refusal, RequestRefusedError
from support.wheels.messages import Message, columns_of, messages_of

NOW_MS = 1_763_700_000_000
RULES = IntakeRules(
    span_seconds=100,
    late_window_seconds=10,
    clock_skew_ms=500,
    max_message_bytes=50,
    max_request_messages=20,
    max_request_bytes=10_000,
    levels_ms={"5s": 5_000, "2m": 120_000},
    own_topics=frozenset({"delaywheel-c-control"}),
)
BIG = replace(RULES, max_request_bytes=1 << 20, max_message_bytes=100_000)
ID = bytes(range(16))


def decode(request: pb.DelayProduceRequest, rules: IntakeRules, *, now_ms: int) -> RequestBatch:
    content = request.SerializeToString()
    outline = outline_of(content, max_messages=rules.max_request_messages)
    return decode_outlined(content, outline, rules, now_ms=now_ms)


def row(**fields: Any) -> pb.DelayedMessage:
    message = {"topic": "orders", "value": b"v", **fields}
    if not {"deliver_at_ms", "delay_ms", "level"} & message.keys():
        message["deliver_at_ms"] = NOW_MS
    return pb.DelayedMessage(**message)


def decoded(*messages: pb.DelayedMessage) -> RequestBatch:
    return decode(pb.DelayProduceRequest(messages=messages), RULES, now_ms=NOW_MS)


def reason_of(message: pb.DelayedMessage) -> Reason | None:
    refusal = decoded(message).refusals.get(0)
    return None if refusal is None else refusal.reason


def column_request(contents: list[Message], /, **changes: Any) -> pb.DelayProduceRequest:
    columns = columns_of(contents)
    batch = {
        "messages": len(contents),
        "ids": columns.ids.tobytes(),
        "due_ms": columns.due_ms.tobytes(),
        "topics": columns.topics,
        "topic_numbers": columns.topic_numbers.tobytes(),
        "key_lengths": columns.key_lengths.tobytes(),
        "value_lengths": columns.value_lengths.tobytes(),
        "headers_lengths": columns.headers_lengths.tobytes(),
        "partitions": columns.partitions.tobytes(),
        "timestamps_ms": columns.timestamps_ms.tobytes(),
        "blob": bytes(columns.blob),
        **changes,
    }
    return pb.DelayProduceRequest(columns=pb.ColumnBatch(**batch))


def row_request(messages: list[Message]) -> pb.DelayProduceRequest:
    request = pb.DelayProduceRequest()
    for message in messages:
        added = request.messages.add(
            id=message.id,
            topic=message.topic,
            key=message.key,
            value=message.value,
            deliver_at_ms=message.due_ms,
            headers=[pb.Header(name=name, value=value) for name, value in message.headers],
        )
        if message.partition != -1:
            added.partition = message.partition
        if message.timestamp_ms != -1:
            added.timestamp_ms = message.timestamp_ms
    return request


CONTENTS = st.none() | st.binary(max_size=30)
ANY_MESSAGES = st.builds(
    Message,
    due_ms=st.integers(NOW_MS - 12_000, NOW_MS + 101_000) | st.integers(-5, 5),
    id=st.binary(min_size=16, max_size=16),
    topic=st.sampled_from(["orders", "a.b_c-d", "", ".", "..", "o rders", "ö", "x" * 250])
    | st.just("delaywheel-c-control"),
    key=CONTENTS,
    value=CONTENTS,
    headers=st.lists(
        st.tuples(st.sampled_from(["a", "", "dw-id", "dw", "DW-x", "ö"]), CONTENTS), max_size=3
    ).map(tuple),
    partition=st.integers(-1, 5) | st.just(-7),
    timestamp_ms=st.integers(-1, 5) | st.just(-7),
)


@given(st.lists(ANY_MESSAGES, min_size=1, max_size=20))
def test_rows_and_columns_mean_the_same(messages: list[Message]) -> None:
    by_rows = decode(row_request(messages), RULES, now_ms=NOW_MS)
    by_columns = decode(column_request(messages), RULES, now_ms=NOW_MS)
    assert {row: refusal.reason for row, refusal in by_rows.refusals.items()} == {
        row: refusal.reason for row, refusal in by_columns.refusals.items()
    }
    kept = [row for row in range(len(messages)) if row not in by_columns.refusals]
    for batch in (by_columns, by_rows):
        batch.accept()
        assert messages_of(batch.accepted) == [messages[row] for row in kept]


GROUP = ("dw-half", b"shop")


@pytest.mark.parametrize(
    ("headers", "hold_ms", "reason"),
    [
        ([GROUP], 10_500, None),
        ([GROUP], -5_000, None),
        ([("x", b""), GROUP, ("dw-half-deliver-at", b"%d" % (NOW_MS + 60_000))], 3_000, None),
        ([GROUP], 10_501, Reason.HALF_INVALID),
        ([GROUP, GROUP], 3_000, Reason.HALF_INVALID),
        ([("dw-half", None)], 3_000, Reason.HALF_INVALID),
        ([("dw-half", b"a b")], 3_000, Reason.HALF_INVALID),
        ([GROUP, ("dw-half-deliver-at", b"soon")], 3_000, Reason.HALF_INVALID),
        ([GROUP, ("dw-half-deliver-at", b"%d" % (NOW_MS + 9))], 9, Reason.HALF_INVALID),
        ([GROUP, ("dw-half-deliver-at", b"%d" % (NOW_MS + 10**6))], 9, Reason.DUE_BEYOND_SPAN),
        ([("dw-half-deliver-at", b"%d" % NOW_MS)], 3_000, Reason.HEADER_RESERVED),
        ([GROUP, ("dw-id", b"")], 3_000, Reason.HEADER_RESERVED),
    ],
)
def test_what_is_wrong_with_a_half_is_named(
    headers: list[tuple[str, bytes | None]], hold_ms: int, reason: Reason | None
) -> None:
    rules = replace(BIG, halves_refusal=lambda: None)
    message = Message(NOW_MS + hold_ms, ID, "orders", headers=tuple(headers))
    for request in (row_request([message]), column_request([message])):
        batch = decode(request, rules, now_ms=NOW_MS)
        refusal = batch.refusals.get(0)
        assert (None if refusal is None else refusal.reason) == reason
        assert len(batch.accepted_halves()) == (reason is None)
    if reason is None:
        assert reason_of_half(message) is Reason.HALVES_OFF


@pytest.mark.parametrize(("beyond_bytes", "reason"), [(0, None), (1, Reason.MESSAGE_TOO_LARGE)])
def test_a_half_leaves_room_for_its_letter(beyond_bytes: int, reason: Reason | None) -> None:
    rules = replace(BIG, halves_refusal=lambda: None, max_message_bytes=10_000)
    value = bytes(10_000 - 4_096 - len(encode_headers([GROUP])) + beyond_bytes)
    message = Message(NOW_MS + 3_000, ID, "orders", value=value, headers=(GROUP,))
    refusal = decode(row_request([message]), rules, now_ms=NOW_MS).refusals.get(0)
    assert (None if refusal is None else refusal.reason) is reason


def reason_of_half(message: Message) -> Reason:
    return decode(row_request([message]), BIG, now_ms=NOW_MS).refusals[0].reason


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"deliver_at_ms": NOW_MS + 100_500}, None),
        ({"deliver_at_ms": NOW_MS + 100_501}, Reason.DUE_BEYOND_SPAN),
        ({"deliver_at_ms": 2**63 - 1}, Reason.DUE_BEYOND_SPAN),
        ({"delay_ms": 2**63 - 1}, Reason.DUE_BEYOND_SPAN),
        ({"deliver_at_ms": NOW_MS - 10_000}, None),
        ({"deliver_at_ms": NOW_MS - 10_001}, Reason.DUE_TOO_OLD),
        ({"deliver_at_ms": 0}, Reason.DUE_INVALID),
        ({"deliver_at_ms": -(2**63)}, Reason.DUE_INVALID),
        ({"topic": ""}, Reason.TOPIC_INVALID),
        ({"topic": "__consumer_offsets"}, Reason.TOPIC_INVALID),
        ({"topic": "delaywheel-c-dead-marks"}, Reason.TOPIC_INVALID),
        ({"topic": "a b"}, Reason.TOPIC_INVALID),
        ({"topic": ".."}, Reason.TOPIC_INVALID),
        ({"topic": "x" * 249}, None),
        ({"topic": "x" * 250}, Reason.TOPIC_INVALID),
        ({"topic": "delaywheel-c-control"}, Reason.TOPIC_INVALID),
        ({"value": b"x" * 50}, None),
        ({"value": b"x" * 51}, Reason.MESSAGE_TOO_LARGE),
        ({"key": b"x" * 25, "value": b"x" * 26}, Reason.MESSAGE_TOO_LARGE),
        ({"headers": [pb.Header(name="dw-x")]}, Reason.HEADER_RESERVED),
        ({"headers": [pb.Header(name="a"), pb.Header(name="")]}, Reason.HEADER_INVALID),
        ({"headers": [pb.Header(name="a\0b")]}, Reason.HEADER_INVALID),
        ({"id": b"x" * 15}, Reason.ID_INVALID),
        ({"id": b""}, Reason.ID_INVALID),
        ({"id": b"dwin" + bytes(12)}, Reason.ID_INVALID),
        ({"id": ID}, None),
        ({"id": ID, "delay_ms": 5}, Reason.SENT_AT_MISSING),
        ({"id": ID, "level": "5s"}, Reason.SENT_AT_MISSING),
        ({"id": ID, "delay_ms": 5, "sent_at_ms": NOW_MS}, None),
        ({"delay_ms": 5}, None),
        ({"delay_ms": -1}, Reason.DELAY_INVALID),
        ({"level": "5s"}, None),
        ({"level": "7s"}, Reason.LEVEL_UNKNOWN),
        ({"level": "2m"}, Reason.DUE_BEYOND_SPAN),
        ({"delay_ms": 5, "level": "5s"}, Reason.DUE_AMBIGUOUS),
        ({"delay_ms": 5, "deliver_at_ms": NOW_MS}, Reason.DUE_AMBIGUOUS),
        ({"partition": -1}, Reason.PARTITION_INVALID),
        ({"partition": 0}, None),
        ({"timestamp_ms": -1}, Reason.TIMESTAMP_INVALID),
        ({"timestamp_ms": 0}, Reason.TIMESTAMP_INVALID),
    ],
)
def test_what_is_wrong_with_a_message_is_named(
    fields: dict[str, Any], reason: Reason | None
) -> None:
    assert reason_of(row(**fields)) == reason


@pytest.mark.parametrize(
    ("span_seconds", "reported"),
    [(604_800, "7 d"), (7_200, "2 h"), (5_400, "90 min"), (100, "100 s"), (366 * 86_400, "366 d")],
)
def test_the_greatest_delay_is_reported(span_seconds: int, reported: str) -> None:
    rules = replace(RULES, span_seconds=span_seconds)
    message = row(deliver_at_ms=NOW_MS + 2 * 366 * 86_400_000)
    batch = decode(pb.DelayProduceRequest(messages=[message]), rules, now_ms=NOW_MS)
    assert batch.refusals[0].text == (
        f"More than {reported} ahead, the greatest delay here."
        " Choose a nearer due, or let the operator raise span_seconds."
    )


def test_of_a_message_that_is_too_large_both_sizes_are_reported() -> None:
    messages = [row(value=b"x" * 51), row(value=b"x" * 1_234), row(value=b"x" * 7_000)]
    batch = decode(pb.DelayProduceRequest(messages=messages), RULES, now_ms=NOW_MS)
    reported = [batch.refusals[number].detail for number in range(2)]
    assert reported == [
        "51 bytes, at most 50 (max_message_bytes)",
        "1,234 bytes, at most 50 (max_message_bytes)",
    ]
    assert re.match(r"7,0\d\d bytes, at most 50 ", batch.refusals[2].detail)


def test_a_message_without_any_due_is_refused() -> None:
    assert reason_of(pb.DelayedMessage(topic="orders")) == Reason.DUE_MISSING


def test_a_relative_delay_counts_from_when_it_was_sent() -> None:
    batch = decoded(
        row(delay_ms=7),
        row(level="5s"),
        row(delay_ms=7, sent_at_ms=NOW_MS - 1_000),
        row(id=ID, level="5s", sent_at_ms=NOW_MS - 1_000),
    )
    assert batch.columns.due_ms.tolist() == [
        NOW_MS + 7,
        NOW_MS + 5_000,
        NOW_MS - 993,
        NOW_MS + 4_000,
    ]


def test_an_id_is_given_where_there_is_none() -> None:
    batch = decoded(row(), row(), row(id=ID))
    first, second, third = (id_.tobytes() for id_ in batch.columns.ids)
    assert third == ID
    assert first != second
    assert {first[6] >> 4, second[6] >> 4} == {7}


def test_a_refused_message_leaves_the_others_alone() -> None:
    batch = decoded(row(value=b"a"), row(id=b"short"), row(value=b"c"), row(topic=""))
    batch.accept()
    assert [batch.accepted.value(number) for number in range(2)] == [b"a", b"c"]
    assert set(batch.refusals) == {1, 3}
    full = Refusal(Reason.SLOT_FULL)
    batch.refuse_accepted({1: full})
    assert set(batch.refusals) == {1, 2, 3}
    assert batch.refusals[2] is full


ONE = [Message(NOW_MS, ID, "orders", b"k", b"v", (("h", b"x"),))]


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (pb.DelayProduceRequest(), Reason.REQUEST_MALFORMED),
        (pb.DelayProduceRequest(columns=pb.ColumnBatch()), Reason.REQUEST_MALFORMED),
        (
            pb.DelayProduceRequest(messages=[row()], columns=column_request(ONE).columns),
            Reason.REQUEST_MALFORMED,
        ),
        (pb.DelayProduceRequest(messages=[row()] * 21), Reason.TOO_MANY_MESSAGES),
        (column_request(ONE * 21), Reason.TOO_MANY_MESSAGES),
        (column_request(ONE, messages=2**32 - 1), Reason.TOO_MANY_MESSAGES),
        (pb.DelayProduceRequest(messages=[row(value=bytes(10_000))]), Reason.REQUEST_TOO_LARGE),
        (column_request(ONE, messages=2), Reason.REQUEST_MALFORMED),
        (column_request(ONE, ids=b"x" * 15), Reason.REQUEST_MALFORMED),
        (column_request(ONE, due_ms=b"x" * 7), Reason.REQUEST_MALFORMED),
        (column_request(ONE, topics=[]), Reason.REQUEST_MALFORMED),
        (column_request(ONE, topic_numbers=b"\1\0\0\0"), Reason.REQUEST_MALFORMED),
        (column_request(ONE, blob=b""), Reason.REQUEST_MALFORMED),
        (column_request(ONE, blob=b"x" * 100), Reason.REQUEST_MALFORMED),
        (
            column_request(ONE, key_lengths=np.int32(-2).tobytes()),
            Reason.REQUEST_MALFORMED,
        ),
        (
            column_request(ONE, value_lengths=np.int32(2**31 - 1).tobytes()),
            Reason.REQUEST_MALFORMED,
        ),
        (
            column_request(ONE, headers_lengths=np.int32(-1).tobytes()),
            Reason.REQUEST_MALFORMED,
        ),
        (column_request(ONE, partitions=b"x"), Reason.REQUEST_MALFORMED),
        (column_request(ONE, topics=["orders", ""]), Reason.REQUEST_MALFORMED),
        (column_request(ONE, timestamps_ms=b"x"), Reason.REQUEST_MALFORMED),
    ],
)
def test_a_request_that_cannot_be_taken_is_refused_as_a_whole(
    request_: pb.DelayProduceRequest, reason: Reason
) -> None:
    with pytest.raises(RequestRefusedError) as caught:
        decode(request_, RULES, now_ms=NOW_MS)
    assert caught.value.refusal.reason == reason


def test_columns_that_nobody_uses_may_be_left_out() -> None:
    batch = decode(column_request(ONE, partitions=b"", timestamps_ms=b""), RULES, now_ms=NOW_MS)
    assert messages_of(batch.columns) == ONE


@pytest.mark.parametrize("in_columns", [False, True])
def test_topics_of_refused_messages_go_no_further(*, in_columns: bool) -> None:
    """A name longer than a frame's dictionary can hold would end the encoding process."""
    long = "x" * 70_000
    messages = [replace(ONE[0], topic=topic) for topic in (long, "orders", long)]
    make = column_request if in_columns else row_request
    batch = decode(make(messages), BIG, now_ms=NOW_MS)
    assert {row: refusal.reason for row, refusal in batch.refusals.items()} == {
        0: Reason.TOPIC_INVALID,
        2: Reason.TOPIC_INVALID,
    }
    batch.accept()
    assert batch.accepted.topics == ("orders",)


def test_topics_that_no_message_has_are_dropped() -> None:
    messages = [replace(ONE[0], topic=topic) for topic in ("a", "b", "a")]
    request = column_request(messages, topics=["x" * 70_000, "a", "b"])
    request.columns.topic_numbers = np.array([1, 2, 1], dtype="<u4").tobytes()
    batch = decode(request, BIG, now_ms=NOW_MS)
    assert batch.columns.topics == ("a", "b")
    assert messages_of(batch.columns) == messages


def test_what_a_caller_wrote_is_said_back_in_part() -> None:
    message = row(level="x" * 5_000)
    (refusal,) = decode(
        pb.DelayProduceRequest(messages=[message]), BIG, now_ms=NOW_MS
    ).refusals.values()
    assert refusal.reason is Reason.LEVEL_UNKNOWN
    assert len(refusal.text) < 300


def test_headers_that_are_none_are_refused_one_by_one() -> None:
    good = encode_headers([("a", b"b")])
    messages = [Message(NOW_MS, ID, "orders", None, None, (("a", b"b"),))] * 3
    blob = good + b"\xff" * len(good) + good
    batch = decode(column_request(messages, blob=blob), RULES, now_ms=NOW_MS)
    assert {row: refusal.reason for row, refusal in batch.refusals.items()} == {
        1: Reason.HEADER_INVALID
    }


def test_a_refusal_informs_programs_and_people() -> None:
    refusal = decoded(row(topic="")).refusals[0]
    error = refusal.as_error()
    assert (error.code, error.reason) == (3, "TOPIC_INVALID")
    assert Reason.TOPIC_INVALID.advice in error.message
    assert not error.HasField("retry_delay_ms")


def test_a_topic_that_is_named_often_is_one() -> None:
    """Else its quota would be as many."""
    named = column_request(
        [Message(NOW_MS, number.to_bytes(16, "big"), "orders", None, b"v") for number in range(8)],
        topics=["orders", "bills", "orders", "orders"],
        topic_numbers=np.array([0, 1, 2, 3, 0, 1, 2, 3], "<u4").tobytes(),
    )
    batch = decode(named, RULES, now_ms=NOW_MS)
    assert batch.columns.topics == ("orders", "bills")
    assert batch.columns.topic_numbers.tolist() == [0, 1, 0, 0, 0, 1, 0, 0]
    rooms = {"orders": TopicRoom(4, 1 << 40)}
    refuse_without_room(batch, rooms.get)
    assert sorted(batch.refusals) == [6, 7]


@pytest.mark.parametrize("room", [TopicRoom(2, 1 << 40), TopicRoom(1 << 40, 2)])
def test_what_is_refused_takes_no_room_of_others(room: TopicRoom) -> None:
    old, good = row(deliver_at_ms=NOW_MS - 60_000), row()
    batch = decoded(old, old, good, old, good, good)
    refuse_without_room(batch, {"orders": room}.get)
    reasons = [batch.refusals[number].reason for number in sorted(batch.refusals)]
    assert sorted(batch.refusals) == [0, 1, 3, 5]
    assert reasons == [Reason.DUE_TOO_OLD] * 3 + [Reason.QUOTA_EXCEEDED]


def test_a_topics_messages_are_found_without_a_pass_for_each() -> None:
    names = ["b", "a", "b", "c", "a", "b"]
    batch = decode(
        column_request([replace(ONE[0], topic=name) for name in names]), RULES, now_ms=NOW_MS
    )
    found = {name: batch.rows_for(number) for number, name in enumerate(batch.columns.topics)}
    assert {name: rows.tolist() for name, rows in found.items()} == {
        "a": [1, 4],
        "b": [0, 2, 5],
        "c": [3],
    }


def test_who_may_not_name_a_group_sends_no_half_of_it() -> None:
    """Anybody filled the checker and the database of any group."""
    rights = Rights(
        [
            Granted(
                frozenset({Right.PRODUCE, Right.HALF}), (Pattern("orders"),), (Pattern("shop-*"),)
            )
        ]
    )
    halves = [
        row(headers=[pb.Header(name="dw-half", value=group)])
        for group in (b"shop-1", b"payments", b"payments")
    ]
    rules = replace(BIG, halves_refusal=lambda: None)
    batch = decode(pb.DelayProduceRequest(messages=[row(), *halves]), rules, now_ms=NOW_MS)
    refusal = refuse_foreign_halves(batch, Caller("token:shop", "token", lambda: rights))
    assert refusal is not None
    assert refusal.principal == "token:shop"
    assert batch.refusals == {2: refusal, 3: refusal}
