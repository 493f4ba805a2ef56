import asyncio
import copy
import pickle
import re
import uuid
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delaywheel import (
    DELIVERED_HEADERS,
    AsyncClient,
    Client,
    DelaywheelError,
    Handle,
    Message,
    MessageInvalidError,
    MessageState,
    Reason,
    RefusedError,
    TimedOutError,
)
from delaywheel import (
    message as module,
)
from delaywheel.client.exchange.answers import StoredMessage
from delaywheel.headers import decode_headers, encode_headers
from delaywheel.message import unix_ms
from delaywheel_proto.v1 import delaywheel_pb2 as pb

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
BEFORE_EPOCH = datetime(1969, 1, 1, tzinfo=UTC)
NAIVE = datetime(2031, 1, 1)  # noqa: DTZ001  to be refused
NOW_NS = 1_900_000_000_000_000_000
HALF_HOUR = timedelta(minutes=30)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "clock_ns", lambda: NOW_NS)


@pytest.mark.parametrize(
    ("microseconds", "expected_ms"), [(0, 0), (1, 1), (999, 1), (1000, 1), (1001, 2), (-1, 0)]
)
def test_a_fraction_of_a_millisecond_rounds_up(microseconds: int, expected_ms: int) -> None:
    assert unix_ms(EPOCH + timedelta(microseconds=microseconds)) == expected_ms


@given(st.datetimes(timezones=st.timezones()))
def test_a_due_is_never_early_and_less_than_a_millisecond_late(moment: datetime) -> None:
    late = EPOCH + timedelta(milliseconds=unix_ms(moment)) - moment.astimezone(UTC)
    assert timedelta(0) <= late < timedelta(milliseconds=1)


def test_a_delay_counts_from_the_nanosecond_at_which_the_message_was_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "clock_ns", lambda: NOW_NS + 1)
    assert Message("t", b"", delay=timedelta(seconds=1)).due_ms == NOW_NS // 1_000_000 + 1001


@pytest.mark.usefixtures("clock")
def test_a_delay_may_be_a_text() -> None:
    assert Message("t", b"", delay="1h30m").due_ms == NOW_NS // 1_000_000 + 5_400_000


@pytest.mark.usefixtures("clock")
def test_a_delay_of_whole_milliseconds_from_a_whole_one_is_exact() -> None:
    assert Message("t", b"", delay=timedelta(0)).due_ms == NOW_NS // 1_000_000
    assert Message("t", b"", delay=timedelta(microseconds=1)).due_ms == NOW_NS // 1_000_000 + 1


def test_the_time_zone_of_a_due_counts() -> None:
    moment = datetime(2031, 1, 1, 12, tzinfo=timezone(timedelta(hours=5)))
    same = datetime(2031, 1, 1, 7, tzinfo=UTC)
    assert Message("t", b"", deliver_at=moment).due_ms == Message("t", b"", deliver_at=same).due_ms


def test_every_message_has_an_id_of_its_own_made_with_it() -> None:
    first, second = Message("t", b"", delay=HALF_HOUR), Message("t", b"", delay=HALF_HOUR)
    assert first.id != second.id
    assert uuid.UUID(bytes=first.id).version == 7


@pytest.mark.parametrize("given_id", [uuid.UUID(int=7), uuid.UUID(int=7).bytes])
def test_an_id_may_be_bytes_or_a_uuid(given_id: uuid.UUID | bytes) -> None:
    assert Message("t", b"", delay=HALF_HOUR, id=given_id).id == (7).to_bytes(16, "big")


DELIVERED = [(name, b"1") for name in sorted(DELIVERED_HEADERS)]
LETTER = [("dw-dead-reason", b"POISON"), ("dw-dead-origin", b"orders/0/1")]


@pytest.mark.parametrize("added", [DELIVERED, LETTER, [*DELIVERED, *LETTER]])
def test_what_was_delivered_is_passed_on_without_what_the_service_has_added(
    added: list[tuple[str, bytes]],
) -> None:
    own = (("trace", b"1"), ("dw-retry-attempt", b"2"), ("trace", None))
    message = Message("t", b"", delay=HALF_HOUR, headers=[*own[:1], *added, *own[1:]])
    assert message.headers == own
    assert decode_headers(message.encoded_headers) == list(own)


@pytest.mark.parametrize(
    ("reason", "parts"),
    [
        (Reason.DUE_MISSING, {}),
        (Reason.DUE_AMBIGUOUS, {"delay": HALF_HOUR, "level": "30s"}),
        (Reason.DUE_AMBIGUOUS, {"delay": HALF_HOUR, "deliver_at": EPOCH}),
        (Reason.DUE_INVALID, {"deliver_at": NAIVE}),
        (Reason.DELAY_INVALID, {"delay": timedelta(microseconds=-1)}),
        (Reason.DELAY_INVALID, {"delay": "30 minutes"}),
        (Reason.ID_INVALID, {"delay": HALF_HOUR, "id": b"short"}),
        (Reason.TOPIC_INVALID, {"delay": HALF_HOUR, "topic": ""}),
        (Reason.TOPIC_INVALID, {"delay": HALF_HOUR, "topic": ".."}),
        (Reason.TOPIC_INVALID, {"delay": HALF_HOUR, "topic": "a b"}),
        (Reason.TOPIC_INVALID, {"delay": HALF_HOUR, "topic": "a\n"}),
        (Reason.TOPIC_INVALID, {"delay": HALF_HOUR, "topic": "a" * 250}),
        (Reason.HEADER_RESERVED, {"delay": HALF_HOUR, "headers": {"dw-id": b""}}),
        (Reason.HEADER_RESERVED, {"delay": HALF_HOUR, "headers": [*DELIVERED, ("dw-x", b"")]}),
        (Reason.HEADER_RESERVED, {"delay": HALF_HOUR, "headers": [*DELIVERED, ("dw-dead-x", b"")]}),
        (Reason.HEADER_INVALID, {"delay": HALF_HOUR, "headers": [("", b"")]}),
        (Reason.HEADER_INVALID, {"delay": HALF_HOUR, "headers": [("\ud800", b"")]}),
        (Reason.HEADER_INVALID, {"delay": HALF_HOUR, "headers": [("a\0b", b"")]}),
        (Reason.PARTITION_INVALID, {"delay": HALF_HOUR, "partition": -1}),
        (Reason.TIMESTAMP_INVALID, {"delay": HALF_HOUR, "timestamp": NAIVE}),
        (Reason.TIMESTAMP_INVALID, {"delay": HALF_HOUR, "timestamp": BEFORE_EPOCH}),
    ],
)
def test_what_the_service_would_refuse_is_refused_when_made(
    reason: Reason, parts: dict[str, object]
) -> None:
    parts = {"topic": "t", "value": b"", **parts}
    with pytest.raises(MessageInvalidError) as caught:
        Message(**parts)  # type: ignore[arg-type]
    assert caught.value.reason is reason
    assert caught.value.outcome_known
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "parts",
    [
        {"value": "text"},
        {"key": "text"},
        {"value": bytearray(b"")},
        {"headers": {"name": "text"}},
        {"headers": {b"name": b""}},
        {"id": "0190163d8694739b8d3f8a4d6a1f5d10"},
        {"delay": 5},
        {"delay": None, "level": 30},
        {"topic": None},
        {"topic": b"t"},
        {"partition": "0"},
        {"partition": True},
        {"delay": None, "deliver_at": 1_900_000_000_000},
    ],
)
def test_other_types_than_bytes_are_refused_by_name(parts: dict[str, object]) -> None:
    parts = {"topic": "t", "value": b"", "delay": HALF_HOUR, **parts}
    with pytest.raises(TypeError, match=r"bytes|str|timedelta|datetime|int|name"):
        Message(**parts)  # type: ignore[arg-type]


def test_the_error_for_text_says_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"value must be bytes or None, not str: encode"):
        Message("t", "text", delay=HALF_HOUR)  # type: ignore[arg-type]


HEADERS = st.lists(
    st.tuples(
        st.text(
            st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1
        ).filter(lambda name: not name.startswith("dw-")),
        st.none() | st.binary(),
    )
)


@given(HEADERS)
@settings(deadline=None)
def test_headers_keep_order_duplicates_and_nulls(headers: list[tuple[str, bytes | None]]) -> None:
    message = Message("t", b"", delay=HALF_HOUR, headers=headers)
    assert list(message.headers) == headers
    assert decode_headers(encode_headers(headers)) == headers
    assert message.length_bytes == len(encode_headers(headers))


def test_headers_may_be_a_mapping_or_any_iterable_of_pairs() -> None:
    pairs = (("a", b"1"), ("b", None))
    assert Message("t", b"", delay=HALF_HOUR, headers=dict(pairs)).headers == pairs
    assert Message("t", b"", delay=HALF_HOUR, headers=iter(pairs)).headers == pairs


def test_null_and_empty_differ() -> None:
    message = Message("t", None, key=b"", delay=HALF_HOUR)
    assert (message.key, message.value) == (b"", None)


@pytest.mark.usefixtures("clock")
def test_a_level_becomes_a_due_once() -> None:
    message = Message("t", b"", level="30s")
    assert message.due_ms is None
    message.fix_due(0, {"30s": 30_000}, "deliver")
    message.fix_due(0, {"30s": 99_000}, "deliver")
    assert message.due_ms == NOW_NS // 1_000_000 + 30_000


def test_an_unknown_level_is_refused_and_may_be_known_later() -> None:
    message = Message("t", b"", level="30s")
    with pytest.raises(RefusedError, match="15s, 1m") as caught:
        message.fix_due(0, {"15s": 15_000, "1m": 60_000}, "deliver")
    assert caught.value.reason is Reason.LEVEL_UNKNOWN
    message.fix_due(0, {"30s": 30_000}, "deliver")
    assert message.due_ms is not None


def test_a_past_due_becomes_now_once() -> None:
    message = Message("t", b"", deliver_at=EPOCH)
    message.fix_due(1000, {}, "deliver")
    message.fix_due(2000, {}, "deliver")
    assert message.due_ms == 1000


def test_a_past_due_may_be_refused() -> None:
    message = Message("t", b"", deliver_at=EPOCH)
    with pytest.raises(RefusedError) as caught:
        message.fix_due(1000, {}, "reject")
    assert caught.value.reason is Reason.DUE_PASSED
    assert re.search(r"its due, \d{4}-\d\d-\d\dT[\d:.]+Z, is past", str(caught.value))
    assert caught.value.failed is message


def test_a_delay_is_no_past_due_even_if_it_was_over_when_first_sent() -> None:
    message = Message("t", b"", delay=timedelta(0))
    later_ms = message.made_ns // 1_000_000 + 5000
    message.fix_due(later_ms, {}, "reject")
    assert message.due_ms == later_ms


def test_a_handle_and_its_text() -> None:
    handle = Handle("a.3", 1_900_000_000, bytes(range(16)), "orders")
    assert Handle.parse(str(handle)) == handle
    assert str(handle) == "a.3:1900000000:000102030405060708090a0b0c0d0e0f:orders"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a.3:1",
        "a.3:x:" + "0" * 32 + ":orders",
        "a.3:1:" + "0" * 31 + ":orders",
        "a.3:1:" + "0" * 32,
        "a.3:1:" + "0" * 32 + ":no topic",
    ],
)
def test_what_is_no_handle_is_refused(text: str) -> None:
    with pytest.raises(MessageInvalidError) as caught:
        Handle.parse(text)
    assert caught.value.reason is Reason.HANDLE_INVALID


def test_contents_do_not_show_in_a_message_s_repr() -> None:
    assert "secret" not in repr(Message("t", b"secret", key=b"secret", delay=HALF_HOUR))


def test_errors_and_messages_pass_between_processes() -> None:
    message = Message("t", b"value", level="30s")
    error = TimedOutError("late", outcome_known=False, failed=message)
    back = pickle.loads(pickle.dumps(error))
    assert (str(back), back.outcome_known) == ("late", False)
    assert (back.failed.id, back.failed.level) == (message.id, "30s")
    refused = copy.copy(MessageInvalidError(Reason.ID_INVALID, "text"))
    assert refused.reason is Reason.ID_INVALID


@pytest.mark.parametrize("pair", ["a", ("a", b"b", b"c"), None])
def test_what_is_no_pair_is_no_header(pair: Any) -> None:
    with pytest.raises(TypeError, match="headers are a mapping, or pairs of name and value"):
        Message("t", b"", headers=[pair], delay=HALF_HOUR)


NOWHERE = "127.0.0.1:1"
DUE = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"id": bytes(16), "due": DUE}, r"Give topic, id and due \(--topic, --id, --due\)"),
        ({"topic": "orders", "due": DUE}, "Give topic, id and due"),
        ({}, "Say which message"),
        ({"topic": "orders", "id": bytes(16)}, "Give topic, id and due"),
        ({"handle": f"a.1:1:{0:032x}:orders", "id": bytes(16), "due": DUE}, "a handle alone"),
        ({"topic": "no topic", "id": bytes(16), "due": DUE}, "TOPIC_INVALID"),
        ({"topic": "orders", "id": bytes(16), "due": NAIVE}, "time zone"),
        ({"handle": "not a handle"}, "HANDLE_INVALID"),
    ],
)
def test_what_names_no_message_is_told_what_is_missing(given: dict[str, object], says: str) -> None:
    with Client(NOWHERE) as client, pytest.raises(MessageInvalidError, match=says):
        client.get(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("condition", [{"key": "k"}, {"header": ("trace", "7")}])
def test_text_as_a_condition_of_a_search_is_told_to_be_encoded(
    condition: dict[str, object],
) -> None:
    with Client(NOWHERE) as client, pytest.raises(TypeError, match=r"text\.encode"):
        client.search("orders", **condition)  # type: ignore[arg-type]


def test_a_client_on_two_loops_is_told_to_be_two() -> None:
    made: list[AsyncClient] = []

    async def first() -> None:
        made.append(AsyncClient(NOWHERE, timeout=0.1))
        with pytest.raises(DelaywheelError):
            await made[0].produce("orders", b"", delay="1s")

    async def second() -> None:
        with pytest.raises(RuntimeError, match="make a client in each loop"):
            await made[0].produce("orders", b"", delay="1s")

    asyncio.run(first())
    asyncio.run(second())


def test_what_was_given_another_due_is_rescheduled_and_not_cancelled() -> None:
    stored = pb.StoredMessage(
        handle=f"a.1:1:{0:032x}:orders", state=pb.MESSAGE_STATE_CANCELLED, rescheduled_to_ms=9
    )
    found = StoredMessage.of(stored)
    assert (found.state, found.rescheduled_to_ms) == (MessageState.RESCHEDULED, 9)
    stored.ClearField("rescheduled_to_ms")
    assert StoredMessage.of(stored).state is MessageState.CANCELLED
