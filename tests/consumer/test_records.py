"""A retry carries its record unchanged; a consumer's arguments are checked at its creation."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel.consumer import RetryConsumer
from delaywheel.consumer.records import (
    Incoming,
    Place,
    RecordHeaders,
    Trip,
    dead_letter,
    error_text,
    retry_record,
    unpack_retry,
)
from delaywheel.consumer.settings import read_settings, transactional_ids
from delaywheel.levels import length_ms
from delaywheel.record_headers import PASSED_PREFIX, TTL_HEADER, all_headers, is_reserved

names = st.one_of(
    st.sampled_from(["ttl", "dw-id", "dw-retry-attempt", "dw-retry-kept-x", "dw-topic", "trace"]),
    st.text(max_size=8),
)
headers = st.lists(st.tuples(names, st.one_of(st.none(), st.binary(max_size=8))), max_size=6)
errors = st.one_of(st.none(), st.text(max_size=20))
trips = st.builds(
    Trip,
    attempt=st.integers(2, 9),
    origin=st.builds(
        Place,
        topic=st.just("or.ders-1"),
        partition=st.integers(0, 99),
        offset=st.integers(0, 2**60),
        timestamp_ms=st.integers(0, 2**45),
    ),
    first_error=errors,
    last_error=errors,
)


@given(own=headers, trip=trips)
def test_a_retry_comes_back_as_it_was(own: list[tuple[str, bytes | None]], trip: Trip) -> None:
    sent = retry_record(
        ingress_topic="delaywheel-c-ingress",
        retry_topic="orders-retry-g",
        trip=trip,
        key=None,
        value=b"",
        headers=own,
        due_ms=7,
        partition=None,
    )
    meant = [name for name, _ in sent.headers if not name.startswith(PASSED_PREFIX)]
    assert [name for name in meant if name.startswith("dw-")] == [
        "dw-topic",
        "dw-id",
        "dw-deliver-at",
    ]
    assert TTL_HEADER not in meant
    # As ingress passes it on, and adds its own.
    back: RecordHeaders = [(name, value) for name, value in sent.headers if not is_reserved(name)]
    back += [("dw-id", b"1"), ("dw-due", b"7"), ("dw-wheel", b"a.1")]
    place = Place("orders-retry-g", 0, 5, 9)
    came, its = unpack_retry(Incoming(place, None, b"", back))
    assert its == own
    expected = trip._replace(
        first_error=encoded(trip.first_error), last_error=encoded(trip.last_error)
    )
    assert came == expected


def encoded(text: str | None) -> str | None:
    return None if text is None else text.encode(errors="replace").decode()


def test_what_somebody_else_put_there_is_at_its_first_attempt() -> None:
    place = Place("orders-retry-g", 0, 5, 9)
    reported: RecordHeaders = [
        ("dw-retry-attempt", b"many"),
        ("dw-retry-origin", b"x"),
        ("mine", b"1"),
    ]
    trip, own = unpack_retry(Incoming(place, b"k", b"v", reported))
    assert (trip, own) == (Trip(1, place), [("mine", b"1")])


def test_a_letter_has_the_headers_as_they_were_and_then_ours() -> None:
    own: RecordHeaders = [("dw-id", b"x"), ("ttl", b"5"), ("a", None)]
    letter = dead_letter(
        dead_topic="orders-dead-g",
        retry_topic="orders-retry-g",
        group="g",
        reason="BY\ud800HAND",
        trip=Trip(3, Place("orders", 0, 1, 2), "OSError: first", "OSError: last"),
        key=b"k",
        value=None,
        headers=own,
    )
    assert letter.headers[:3] == own
    assert dict(letter.headers[3:]) == {
        "dw-dead-reason": b"BY?HAND",
        "dw-dead-topic": b"orders-retry-g",
        "dw-dead-group": b"g",
        "dw-dead-attempts": b"3",
        "dw-dead-origin": b"orders/0/1",
        "dw-dead-origin-timestamp": b"2",
        "dw-dead-first-error": b"OSError: first",
        "dw-dead-detail": b"OSError: last",
    }


def test_errors_are_reported_whatever_they_are() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert error_text(MuteError()) == "MuteError: (its text is unavailable)"
    assert error_text(OSError()) == "OSError"
    assert len(error_text(OSError("x" * 5_000))) == 300
    group = ExceptionGroup("tasks", [ValueError("x"), ExceptionGroup("inner", [OSError()])])
    inner = "ExceptionGroup: inner (1 sub-exception): OSError"
    said = f"ExceptionGroup: tasks (2 sub-exceptions): ValueError: x; {inner}"
    assert error_text(group) == said


@pytest.mark.parametrize(
    "options",
    [
        {"retry": "5s"},
        {"retry": ("5 seconds",)},
        {"retry": (timedelta(seconds=-1),)},
        {"retry_on": KeyboardInterrupt},
        {"expired": "drop"},
        {"start": "middle"},
        {"max_held": 0},
        {"kafka": {"group.id": "x"}},
        {"route": ["a..b"]},
        {"retries": 3},
        {"group": "a/b"},
        {"group": ""},
        {"topics": ()},
        {"topics": ("a", "a")},
    ],
)
def test_a_mistake_is_reported_when_it_is_made(options: dict[str, object]) -> None:
    reported = {"topics": "orders", "group": "g", "bootstrap": "k:1"} | options
    with pytest.raises((ValueError, TypeError)):
        RetryConsumer(reported.pop("topics"), **reported)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dw-retry-attempt", b"-7"),
        ("dw-retry-attempt", b"0"),
        ("dw-retry-attempt", b"1_0"),
        ("dw-retry-attempt", b"9" * 19),
        ("dw-retry-origin", b"orders/0/" + b"9" * 20),
        ("dw-retry-origin", b"orders/0/" + b"9" * 19),
        ("dw-retry-origin", b"orders/-1/5"),
        ("dw-retry-origin", b"ord ers/0/5"),
        ("dw-retry-origin-timestamp", b"9" * 19),
        ("dw-retry-origin-timestamp", b"-2"),
    ],
)
def test_numbers_that_no_consumer_writes_are_a_strangers(name: str, value: bytes) -> None:
    said: dict[str, bytes | None] = {
        "dw-retry-attempt": b"2",
        "dw-retry-origin": b"orders/0/5",
        "dw-retry-origin-timestamp": b"-1",
    }
    place = Place("orders-retry-g", 0, 5, 9)
    trip, _ = unpack_retry(Incoming(place, None, None, list(said.items())))
    assert trip == Trip(2, Place("orders", 0, 5, -1))
    said[name] = value
    trip, _ = unpack_retry(Incoming(place, None, None, list(said.items())))
    assert trip == Trip(1, place)


def test_no_two_groups_share_a_topic_or_a_transactional_id() -> None:
    pairs = [
        ("orders", "a-retry-b"),
        ("orders-retry-a", "b"),
        ("x", "retry-g"),
        ("x-retry", "g"),
        ("o", "g-dead-h"),
        ("o-dead-g", "h"),
    ]
    made = [next(iter(read_settings(source, group, "k", {}).topics)) for source, group in pairs]
    names = [name for one in made for name in (one.retry, one.dead, one.order)]
    assert len(set(names)) == len(names)
    assert made[0].retry.startswith("orders-retry-a-retry-b-")
    assert read_settings("orders", "g", "k", {}).topics.names_of("orders").retry == "orders-retry-g"
    instances = [("billing", "eu-1"), ("billing-eu", "1"), ("billing", "eu"), ("billing", "eu-1-1")]
    ids = [one for instance in instances for one in transactional_ids(*instance)]
    assert len(set(ids)) == len(ids)
    assert transactional_ids("g", "1") == transactional_ids("g", "1")
    with pytest.raises(ValueError, match="orders-retry-g"):
        read_settings(["orders", "orders-retry-g"], "g", "k", {})


def test_durations_are_rounded_up() -> None:
    assert length_ms(timedelta(microseconds=1)) == 1
    assert length_ms("1m30s") == 90_000
    assert read_settings("o", "g", "k", {"retry": ()}).retry.longest_ms == 0


class _Read:
    """A record of the client, whose headers may be unreadable."""

    def __init__(
        self, found: list[tuple[str, bytes | None]] | None, *, fails: bool = False
    ) -> None:
        self._found = found
        self._fails = fails

    def headers(self) -> RecordHeaders | None:
        if self._fails:
            raise SystemError
        return self._found


def test_headers_that_cannot_be_read_spoil_no_others() -> None:
    bad, plain, traced = _Read(None, fails=True), _Read(None), _Read([("a", b"1")])
    found, unread = all_headers([plain, bad, bad, traced, bad])
    assert found == [None, None, None, [("a", b"1")], None]
    assert unread == [1, 2, 4]
    assert all_headers([]) == ([], [])
