"""Parses requests in records of an ingress topic."""

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel import ingress
from delaywheel.headers import decode_headers, encode_headers
from delaywheel.ingress import HalfAnswer
from delaywheel.ways.values import id_in, number_in
from delaywheel_replica.core.ingress.place import NO_TIMESTAMP, IngressPlace, message_id
from delaywheel_replica.core.ingress.reading import (
    ABSENT,
    CommittedRecord,
    Delayed,
    HalfAnswered,
    HalfCommit,
    IngressRules,
    RecordRequest,
    Unfit,
    UnfitReason,
    Withdrawn,
    read,
)
from delaywheel_replica.patterns import Pattern

PLACE = IngressPlace("delaywheel-main-ingress", 3, 4_711)
SENT_MS = 1_900_000_000_000
RULES = IngressRules({"30s": 30_000}, 100, frozenset({"delaywheel-main-dead"}))
WITH_HALVES = replace(RULES, halves=True, max_message_bytes=200)
ID = bytes(range(16))

Headers = Sequence[tuple[str, bytes | None]]
TO = (ingress.TOPIC, b"orders")
SOON = (ingress.DELAY_MS, b"500")


def request_of(
    *headers: tuple[str, bytes | None], rules: IngressRules = RULES, **changed: Any
) -> RecordRequest:
    """The request in a record with these headers."""
    record = CommittedRecord(PLACE, SENT_MS, b"key", b"value", headers)
    return read(record._replace(**changed), rules)


def delayed(*headers: tuple[str, bytes | None], **changed: Any) -> Delayed:
    """The same for a record that can be delayed."""
    found = request_of(*headers, **changed)
    assert isinstance(found, Delayed), found
    return found


def reason(*headers: tuple[str, bytes | None], **changed: Any) -> UnfitReason:
    """Why a record cannot be delayed."""
    found = request_of(*headers, **changed)
    assert isinstance(found, Unfit), found
    return found.reason


def long(number: int) -> bytes:
    """A number as the usual clients write it."""
    return number.to_bytes(8, "big", signed=True)


def test_key_value_and_other_headers_pass_unchanged() -> None:
    passed = [("trace", b"1"), ("trace", None), ("ttl", b"x"), ("dw-retry-attempt", b"2")]
    message = delayed(*passed[:2], TO, passed[2], SOON, passed[3])
    assert message == Delayed(
        id=message_id(PLACE, SENT_MS),
        due_ms=SENT_MS + 500,
        topic="orders",
        partition=ABSENT,
        timestamp_ms=ABSENT,
        key=b"key",
        value=b"value",
        headers=message.headers,
    )
    assert decode_headers(message.headers) == passed
    assert delayed(TO, SOON, key=None, value=None)[5:8] == (None, None, b"")


@given(st.integers(0, 2**53))
def test_numbers_are_text_or_longs(number: int) -> None:
    assert number_in(str(number).encode()) == number
    assert number_in(long(number)) == number


@given(st.binary(max_size=24))
def test_whatever_bytes_are_a_number_or_none(value: bytes) -> None:
    number = number_in(value)
    if value.isdigit() and len(value) <= 19:
        assert number == int(value)
    else:
        is_text = all(0x20 <= byte <= 0x7E for byte in value)
        assert (number is not None) == (len(value) == 8 and not is_text)


@given(st.binary(min_size=16, max_size=16))
def test_ids_are_bytes_or_text(id_: bytes) -> None:
    text = str(uuid.UUID(bytes=id_))
    for form in (id_, text.encode(), text.upper().encode(), text.replace("-", "").encode()):
        assert id_in(form) == id_


@pytest.mark.parametrize("value", [None, b"", b"x", b"0" * 31, b"0" * 33, b"g" * 32, b"-" * 36])
def test_what_is_no_id(value: bytes | None) -> None:
    assert id_in(value) is None
    assert reason(TO, SOON, (ingress.ID, value)) is UnfitReason.ID_INVALID


def test_a_due_is_said_in_three_ways() -> None:
    at_ms = SENT_MS + 86_400_000
    assert delayed(TO, (ingress.DELAY_MS, long(7))).due_ms == SENT_MS + 7
    assert delayed(TO, (ingress.LEVEL, b"30s")).due_ms == SENT_MS + 30_000
    assert delayed(TO, (ingress.DELIVER_AT, str(at_ms).encode())).due_ms == at_ms
    assert delayed(TO, (ingress.DELIVER_AT, long(at_ms)), timestamp_ms=NO_TIMESTAMP).due_ms == at_ms


def test_the_last_of_a_header_counts() -> None:
    assert delayed((ingress.TOPIC, b"old"), TO, SOON).topic == "orders"


def test_partition_timestamp_and_id_are_taken_as_given() -> None:
    message = delayed(
        TO, SOON, (ingress.PARTITION, b"0"), (ingress.TIMESTAMP, long(9)), (ingress.ID, ID)
    )
    assert (message.partition, message.timestamp_ms, message.id) == (0, 9, ID)


REASONS = [
    (UnfitReason.TOPIC_INVALID, [SOON]),
    (UnfitReason.TOPIC_INVALID, [SOON, (ingress.TOPIC, None)]),
    (UnfitReason.TOPIC_INVALID, [SOON, (ingress.TOPIC, b"..")]),
    (UnfitReason.TOPIC_INVALID, [SOON, (ingress.TOPIC, b"a b")]),
    (UnfitReason.TOPIC_INVALID, [SOON, (ingress.TOPIC, b"\xff")]),
    (UnfitReason.TOPIC_INVALID, [SOON, (ingress.TOPIC, b"delaywheel-main-dead")]),
    (UnfitReason.TOPIC_INVALID, [SOON, (ingress.TOPIC, b"delaywheel-main-dead-marks")]),
    (UnfitReason.TOPIC_INVALID, [SOON, (ingress.TOPIC, b"orders-dead-billing-marks")]),
    (UnfitReason.TOPIC_INVALID, [SOON, (ingress.TOPIC, b"__consumer_offsets")]),
    (UnfitReason.DUE_MISSING, [TO]),
    (UnfitReason.DUE_AMBIGUOUS, [TO, SOON, (ingress.LEVEL, b"30s")]),
    (UnfitReason.DUE_INVALID, [TO, (ingress.DELIVER_AT, b"0")]),
    (UnfitReason.DUE_INVALID, [TO, (ingress.DELIVER_AT, long(-1))]),
    (UnfitReason.DUE_INVALID, [TO, (ingress.DELIVER_AT, b"9" * 19)]),
    (UnfitReason.DUE_INVALID, [TO, (ingress.DELIVER_AT, b"%d" % (SENT_MS // 1_000))]),
    (UnfitReason.DUE_INVALID, [TO, (ingress.DELIVER_AT, long(SENT_MS // 1_000))]),
    (UnfitReason.DUE_INVALID, [TO, (ingress.DELIVER_AT, b"%d" % (SENT_MS * 1_000))]),
    (UnfitReason.DUE_INVALID, [TO, (ingress.DELIVER_AT, b"tomorrow")]),
    (UnfitReason.DELAY_INVALID, [TO, (ingress.DELAY_MS, b"an hour ")]),
    (UnfitReason.DUE_INVALID, [TO, (ingress.DELAY_MS, long(2**63 - 1))]),
    (UnfitReason.DELAY_INVALID, [TO, (ingress.DELAY_MS, b"-5")]),
    (UnfitReason.DELAY_INVALID, [TO, (ingress.DELAY_MS, long(-5))]),
    (UnfitReason.DELAY_INVALID, [TO, (ingress.DELAY_MS, None)]),
    (UnfitReason.LEVEL_UNKNOWN, [TO, (ingress.LEVEL, b"31s")]),
    (UnfitReason.LEVEL_UNKNOWN, [TO, (ingress.LEVEL, None)]),
    (UnfitReason.PARTITION_INVALID, [TO, SOON, (ingress.PARTITION, b"2147483648")]),
    (UnfitReason.PARTITION_INVALID, [TO, SOON, (ingress.PARTITION, b"first")]),
    (UnfitReason.TIMESTAMP_INVALID, [TO, SOON, (ingress.TIMESTAMP, b"0")]),
    (UnfitReason.HEADER_RESERVED, [TO, SOON, ("dw-delay", b"5")]),
    (UnfitReason.HEADER_INVALID, [TO, SOON, ("", b"5")]),
    (UnfitReason.HEADER_INVALID, [TO, SOON, ("cut\0off", b"5")]),
    (UnfitReason.HEADER_INVALID, [TO, SOON, ("\ud800", b"5")]),
    (UnfitReason.MESSAGE_TOO_LARGE, [TO, SOON, ("h", b"x" * 200)]),
    (UnfitReason.ID_INVALID, [(ingress.CANCEL, b"x"), (ingress.DELIVER_AT, b"5")]),
    (UnfitReason.DUE_INVALID, [(ingress.CANCEL, ID)]),
]


@pytest.mark.parametrize(("expected", "headers"), REASONS, ids=str)
def test_what_cannot_be_delayed_is_reported(expected: UnfitReason, headers: Headers) -> None:
    assert reason(*headers) is expected


def test_headers_of_ours_do_not_count_as_those_that_are_passed_on() -> None:
    """Else a message that is accepted with as many could not come back once it is deferred."""
    rules = replace(RULES, max_message_bytes=1 << 20)
    most, ours = (
        ingress.HEADERS_MOST,
        [("dw-wheel", b"a/b.1"), TO, SOON, ("dw-first-due", b"1700000000000")],
    )
    for count, is_taken in ((most, True), (most + 1, False)):
        headers = [*[("h", None)] * count, *ours]
        found = read(CommittedRecord(PLACE, SENT_MS, None, None, headers), rules)
        assert isinstance(found, Delayed) == is_taken
    only_ours = read(CommittedRecord(PLACE, SENT_MS, None, None, ours * most), rules)
    assert isinstance(only_ours, Unfit)
    assert only_ours.detail == "More than 10,000 headers"


def test_nobody_takes_the_id_that_a_place_will_give() -> None:
    """The record there would be dropped as a duplicate, with no letter."""
    id_ = message_id(PLACE, SENT_MS)
    unfit = read(CommittedRecord(PLACE, 1, b"", b"", (TO, SOON, (ingress.ID, id_))), RULES)
    assert isinstance(unfit, Unfit)
    assert (unfit.reason, "are the service's" in unfit.detail) == (UnfitReason.ID_INVALID, True)


def test_a_header_that_is_nearly_ours_is_told_which_is_meant() -> None:
    unfit = read(CommittedRecord(PLACE, SENT_MS, b"", b"", (TO, ("dw-delay", b"5"))), RULES)
    assert isinstance(unfit, Unfit)
    assert unfit.detail.endswith(f"did you mean {ingress.DELAY_MS}?")


def test_a_topic_leads_where_it_may() -> None:
    """It takes no cancels then: which topic a message is of is not known before it is cancelled."""
    limited = replace(RULES, destinations={PLACE.topic: [Pattern("orders*"), Pattern("bills")]})

    def outcome(
        topic: bytes, place: IngressPlace = PLACE, *headers: tuple[str, bytes | None]
    ) -> RecordRequest:
        asked = headers or (SOON, (ingress.TOPIC, topic))
        return read(CommittedRecord(place, SENT_MS, b"key", b"value", asked), limited)

    for topic in (b"orders", b"orders.eu", b"bills"):
        assert isinstance(outcome(topic), Delayed)
    at = (ingress.CANCEL, ID), (ingress.DELIVER_AT, long(SENT_MS))
    cancel = *at, (ingress.TOPIC, b"bills.eu")
    for refused in (outcome(b"bills.eu"), outcome(b"", PLACE, *cancel)):
        assert isinstance(refused, Unfit)
        assert refused.reason is UnfitReason.FORBIDDEN
    other = PLACE._replace(topic="another-ingress")
    assert isinstance(outcome(b"bills.eu", other), Delayed)
    assert isinstance(outcome(b"", other, *cancel), Withdrawn)
    assert isinstance(outcome(b"", PLACE, *at, (ingress.TOPIC, b"bills")), Withdrawn)


def half(*more: tuple[str, bytes | None], rules: IngressRules = WITH_HALVES) -> RecordRequest:
    """The request in a record of a half, some of whose headers are others."""
    said = {"dw-half": b"shop", ingress.ID: ID, ingress.DELIVER_AT: b"%d" % SENT_MS}
    return request_of(TO, *{**said, **dict(more)}.items(), rules=rules)


def test_a_half_and_its_commit() -> None:
    found = half(("dw-half-deliver-at", long(SENT_MS + 9)), ("trace", b"1"))
    assert isinstance(found, Delayed)
    assert (found.id, found.due_ms, found.topic) == (ID, SENT_MS, "orders")
    assert (found.is_half, found.half_due_ms) == (True, SENT_MS + 9)
    told = [("trace", b"1"), ("dw-half", b"shop"), ("dw-half-deliver-at", b"%d" % (SENT_MS + 9))]
    assert found.headers == encode_headers(told)
    at_its_commit = half()
    assert isinstance(at_its_commit, Delayed)
    assert (at_its_commit.is_half, at_its_commit.half_due_ms) == (True, ABSENT)
    assert not delayed(TO, SOON).is_half
    commit = ((ingress.COMMIT, ID), (ingress.DELIVER_AT, b"%d" % SENT_MS), TO)
    record = CommittedRecord(PLACE, SENT_MS, None, None, commit)
    assert read(record, WITH_HALVES) == HalfCommit(ID, SENT_MS, "orders")


@pytest.mark.parametrize("answer", HalfAnswer)
def test_what_a_group_has_answered(answer: HalfAnswer) -> None:
    named = ((ingress.ID, ID.hex().encode()), (ingress.DELIVER_AT, long(SENT_MS)), TO)
    record = CommittedRecord(
        PLACE, SENT_MS, None, None, ((ingress.ANSWER, answer.encode()), *named)
    )
    assert read(record, RULES) == HalfAnswered(ID, SENT_MS, "orders", answer)


LIMITED = replace(WITH_HALVES, destinations={PLACE.topic: [Pattern("*")]})
COMMITTING = (ingress.COMMIT, ID)


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        (UnfitReason.HALVES_OFF, half(rules=RULES)),
        (UnfitReason.HALVES_OFF, half(COMMITTING, rules=RULES)),
        (UnfitReason.FORBIDDEN, half(rules=LIMITED)),
        (UnfitReason.FORBIDDEN, half(COMMITTING, rules=LIMITED)),
        (UnfitReason.HALF_INVALID, half(("dw-half", b"all of us"))),
        (UnfitReason.HALF_INVALID, half(("dw-half", None))),
        (UnfitReason.MESSAGE_TOO_LARGE, half(("x", bytes(WITH_HALVES.max_message_bytes // 2)))),
        (UnfitReason.HALF_INVALID, half(("dw-half-deliver-at", b"soon"))),
        (UnfitReason.HALF_INVALID, half(("dw-half-deliver-at", b"%d" % SENT_MS))),
        (UnfitReason.HALF_INVALID, half(COMMITTING, (ingress.CANCEL, ID))),
        (UnfitReason.HEADER_RESERVED, half(("dw-half-topic", b"orders"))),
        (UnfitReason.HALF_INVALID, half((ingress.ANSWER, b"perhaps"))),
        (UnfitReason.HALF_INVALID, half((ingress.ANSWER, None))),
        (UnfitReason.HALF_INVALID, request_of(SOON, (ingress.ANSWER, b"undecided"))),
        (UnfitReason.FORBIDDEN, half((ingress.ANSWER, b"undecided"), rules=LIMITED)),
        (UnfitReason.ID_INVALID, half((ingress.COMMIT, b"mine"))),
        (UnfitReason.HALF_INVALID, request_of(TO, SOON, ("dw-half", b"g"), rules=WITH_HALVES)),
        (
            UnfitReason.HALF_INVALID,
            request_of(TO, SOON, ("dw-half-deliver-at", b"1"), rules=WITH_HALVES),
        ),
    ],
)
def test_no_half_or_commit(expected: UnfitReason, found: RecordRequest) -> None:
    assert isinstance(found, Unfit)
    assert found.reason is expected


def test_a_due_in_seconds_is_refused_with_what_was_sent_and_what_is_wanted() -> None:
    found = request_of(TO, (ingress.DELIVER_AT, b"1764100000"))
    assert isinstance(found, Unfit)
    assert found.detail == "dw-deliver-at b'1764100000': Unix milliseconds have 12 to 14 digits"


def test_headers_that_cannot_be_read_are_reported() -> None:
    found = read(CommittedRecord(PLACE, SENT_MS, b"key", b"value", None), RULES)
    assert isinstance(found, Unfit)
    assert found.reason is UnfitReason.HEADER_INVALID


def test_a_delay_needs_a_timestamp() -> None:
    assert reason(TO, SOON, timestamp_ms=NO_TIMESTAMP) is UnfitReason.DUE_INVALID


def test_a_detail_is_short() -> None:
    found = request_of(TO, (ingress.LEVEL, b"x" * 10_000))
    assert isinstance(found, Unfit)
    assert len(found.detail) < 100


def test_a_cancel_needs_topic_id_and_due() -> None:
    named = (ingress.CANCEL, ID), (ingress.DELIVER_AT, long(SENT_MS))
    assert request_of(*named, TO) == Withdrawn(ID, SENT_MS, "orders")
    assert reason(*named) is UnfitReason.TOPIC_INVALID


DELIVERED: Headers = [
    ("dw-id", b"00" * 16), ("dw-due", b"1"), ("dw-accepted", b"1"), ("dw-wheel", b"a.1"),
    ("dw-forwarded", b"1"), ("dw-dead-reason", b"REFUSED"),
]  # fmt: skip


def test_what_was_delivered_before_gets_an_id_of_its_own() -> None:
    """Otherwise two groups that send one message again at one time would lose one of both."""
    message = delayed(*DELIVERED, TO, SOON)
    assert (message.id, message.headers) == (message_id(PLACE, SENT_MS), b"")
    assert delayed(*DELIVERED, TO, SOON, (ingress.ID, ID)).id == ID
    assert delayed(TO, SOON, *DELIVERED).topic == "orders"


@given(
    st.lists(
        st.tuples(
            st.sampled_from([*ingress.DUES, ingress.TOPIC, ingress.ID, ingress.CANCEL, "h", "dw-x"])
            | st.text(max_size=5),
            st.none() | st.binary(max_size=20),
        ),
        max_size=8,
    ),
    st.integers(-1, 2**63 - 1),
)
def test_whatever_is_sent_is_read_the_same_again(headers: Headers, timestamp_ms: int) -> None:
    record = CommittedRecord(PLACE, timestamp_ms, None, b"", headers)
    found = read(record, RULES)
    assert found == read(record, RULES)
    if isinstance(found, Delayed):
        assert len(found.id) == 16
        assert 0 < found.due_ms < 2**63


@given(st.integers(0, 2**31 - 1), st.integers(0, 2**63 - 1), st.integers(-1, 2**63 - 1))
def test_an_id_follows_from_place_and_timestamp(
    partition: int, offset: int, timestamp_ms: int
) -> None:
    place = IngressPlace("t", partition, offset)
    made = uuid.UUID(bytes=message_id(place, timestamp_ms))
    assert (made.version, made.variant) == (8, uuid.RFC_4122)
    others = [
        (place._replace(topic="t2"), timestamp_ms),
        (place._replace(partition=partition ^ 1), timestamp_ms),
        (place._replace(offset=offset ^ 1), timestamp_ms),
        (place, timestamp_ms ^ 1),
    ]
    assert made.bytes not in [message_id(*other) for other in others]


def test_an_id_is_never_made_otherwise() -> None:
    """The next release must produce the same: it may read records handed over by this one."""
    assert message_id(PLACE, SENT_MS).hex() == "6477696e2e16891fbea5b96792e1d78d"


def test_a_strangers_long_name_is_compared_with_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 1 MB took a second of the leader's one thread."""
    compared: list[str] = []
    monkeypatch.setattr("difflib.get_close_matches", lambda name, *_, **__: compared.append(name))
    unfit = read(CommittedRecord(PLACE, SENT_MS, None, None, [("dw-" + "x" * 1_000, b"")]), RULES)
    assert isinstance(unfit, Unfit)
    assert (unfit.reason, len(unfit.detail) < 100) == (UnfitReason.HEADER_RESERVED, True)
    assert compared == []
