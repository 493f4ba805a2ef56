"""The content of a letter, and the record that it is sent again as."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel.consumer import records as consumed
from delaywheel.deadletters import Letter, LetterPlace, Selection
from delaywheel.ingress import is_reserved_topic

DEAD = "delaywheel-main-dead"
_HEADERS = st.lists(
    st.tuples(
        st.sampled_from(
            ["a", "ttl", "dw-id", "dw-due", "dw-wheel", "dw-topic", "dw-retry-kept-ttl"]
            + [f"dw-dead-{name}" for name in ("reason", "topic", "origin", "partition", "replayed")]
        ),
        st.none() | st.binary(max_size=6) | st.sampled_from([b"orders", b"in/0/7", b"3"]),
    ),
    max_size=8,
).map(tuple)


def letter(*headers: tuple[str, bytes | None], at_ms: int = 1_000, offset: int = 5) -> Letter:
    return Letter(LetterPlace(2, offset), at_ms, b"key", b"value", headers)


OWN = letter(
    ("a", b"1"),
    ("a", None),
    ("dw-id", b"0190163d8694739b8d3f8a4d6a1f5d10"),
    ("dw-due", b"1700000000000"),
    ("dw-accepted", b"1"),
    ("dw-wheel", b"n.1"),
    ("dw-dead-reason", b"TOPIC_MISSING"),
    ("dw-dead-topic", b"orders"),
    ("dw-dead-partition", b"3"),
    ("dw-dead-timestamp", b"1699999999999"),
)


def test_a_letter_of_delaywheel_goes_out_as_it_came_in() -> None:
    again = OWN.again(DEAD, to=None, as_new=False)
    assert (again.topic, again.key, again.value) == ("orders", b"key", b"value")
    assert (again.partition, again.timestamp_ms) == (3, 1_699_999_999_999)
    assert again.headers == [
        ("a", b"1"),
        ("a", None),
        ("dw-dead-replayed", b"%s/2/5" % DEAD.encode()),
    ]
    assert (OWN.reason, OWN.due_ms) == ("TOPIC_MISSING", 1_700_000_000_000)
    assert OWN.id == "0190163d8694739b8d3f8a4d6a1f5d10"


def test_to_another_topic_the_partition_is_open() -> None:
    again = OWN.again(DEAD, to="late", as_new=False)
    assert (again.topic, again.partition, again.timestamp_ms) == ("late", -1, 1_699_999_999_999)
    anew = OWN.again(DEAD, to=None, as_new=True)
    assert (anew.topic, anew.partition, anew.timestamp_ms) == ("orders", -1, 0)


def test_a_record_of_an_ingress_topic_goes_back_with_what_it_asked_for() -> None:
    asked = (("dw-topic", b"orders"), ("dw-level", b"5m"), ("dw-id", b"7"))
    dead = letter(*asked, ("dw-dead-reason", b"LEVEL_UNKNOWN"), ("dw-dead-origin", b"in/0/9"))
    again = dead.again(DEAD, to=None, as_new=False)
    assert again.topic == "in"
    assert again.headers[:-1] == list(asked)


def test_a_half_that_nobody_decided_is_asked_again_or_sent_elsewhere_as_the_message() -> None:
    half = (("dw-id", b"1"), ("dw-half", b"shop"), ("dw-half-topic", b"orders"))
    undecided = letter(
        ("trace", b"t"),
        *half,
        ("dw-dead-reason", b"UNDECIDED"),
        ("dw-dead-topic", b"halves-retry-shop"),
        ("dw-dead-group", b"shop"),
        ("dw-dead-origin", b"halves/0/9"),
    )
    asked = undecided.again(DEAD, to=None, as_new=True)
    kept = [(f"dw-retry-kept-{name}", value) for name, value in half]
    assert asked.headers[:-1] == [("trace", b"t"), *kept]
    sent = undecided.again(DEAD, to="orders", as_new=False)
    assert sent.headers[:-1] == [("trace", b"t")]
    assert (undecided.topic, undecided.destination) == ("halves-retry-shop", "orders")
    assert [Selection(topic=name).takes(undecided) for name in ("orders", "mails")] == [True, False]


def test_a_letter_of_a_consumer_is_the_next_retry_of_its_record() -> None:
    dead = letter(
        ("trace", b"t"),
        ("dw-wheel", b"n.1"),
        ("dw-dead-reason", b"old"),
        ("dw-dead-topic", b"old"),
        ("dw-dead-reason", b"ATTEMPTS_EXHAUSTED"),
        ("dw-dead-topic", b"orders-billing-retry"),
        ("dw-dead-group", b"billing"),
        ("dw-dead-attempts", b"3"),
        ("dw-dead-origin", b"orders/0/9"),
        ("dw-dead-origin-timestamp", b"77"),
        ("dw-dead-first-error", b"OSError: 1"),
        ("dw-dead-detail", b"OSError: 3"),
    )
    assert (dead.reason, dead.topic) == ("ATTEMPTS_EXHAUSTED", "orders-billing-retry")
    names = ("orders", "orders-billing-retry", "old", "mails")
    assert [Selection(topic=name).takes(dead) for name in names] == [True, True, False, False]
    again = dead.again(DEAD, to=None, as_new=False)
    # The consumer itself reads it.
    place = consumed.Place("orders-billing-retry", 1, 2, 3)
    trip, own = consumed.unpack_retry(
        consumed.Incoming(place, again.key, again.value, again.headers)
    )
    assert own == [("trace", b"t"), ("dw-wheel", b"n.1")]
    origin = consumed.Place("orders", 0, 9, 77)
    assert trip == consumed.Trip(4, origin, "OSError: 1", "OSError: 3")
    # As new, it is a stranger's record there; elsewhere it is a message like any other.
    anew = dead.again(DEAD, to=None, as_new=True)
    assert [name for name, _ in anew.headers][:-1] == ["trace", "dw-retry-kept-dw-wheel"]
    elsewhere = dead.again(DEAD, to="late", as_new=False)
    assert [name for name, _ in elsewhere.headers][:-1] == ["trace"]


@given(_HEADERS)
def test_whatever_is_in_its_headers_it_can_be_shown_and_sent(
    headers: tuple[tuple[str, bytes | None], ...],
) -> None:
    dead = letter(*headers)
    again = dead.again(DEAD, to=None, as_new=False)
    assert [name for name, _ in again.headers].count("dw-dead-replayed") == 1
    assert not any(name.startswith("dw-dead-") for name, _ in again.headers[:-1])
    own = [each for each in headers if not each[0].startswith("dw-")]
    assert [each for each in again.headers if not each[0].startswith("dw-")] == own
    assert Selection(topic=dead.topic, reason=dead.reason, id=dead.id).takes(dead)
    # What is sent again and dies again is sent as the first time.
    twice = letter(*again.headers, ("dw-dead-topic", b"orders")).own_headers
    assert [each for each in twice if not each[0].startswith("dw-")] == own


@pytest.mark.parametrize(
    ("selection", "takes"),
    [
        (Selection(), True),
        (Selection(topic="orders"), True),
        (Selection(topic="mails"), False),
        (Selection(reason="EXPIRED"), False),
        (Selection(from_ms=1_000, to_ms=1_001), True),
        (Selection(from_ms=1_001), False),
        (Selection(to_ms=1_000), False),
        (Selection(id="0190163d8694739b8d3f8a4d6a1f5d10"), True),
        (Selection(id="00"), False),
        (Selection(key=b"key"), True),
        (Selection(key=b"k"), False),
        (Selection(headers=(("a", b"1"),)), True),
        (Selection(headers=(("a", b"1"), ("b", None))), False),
        (Selection(headers=(("a", None),)), True),
        (Selection(places=frozenset([LetterPlace(2, 5), LetterPlace(2, 6)])), True),
        (Selection(places=frozenset([LetterPlace(1, 5)])), False),
    ],
)
def test_all_that_is_said_must_fit(selection: Selection, takes: bool) -> None:
    assert selection.takes(OWN) is takes


def test_places_have_a_text() -> None:
    assert LetterPlace.parse(str(LetterPlace(3, 12_345))) == LetterPlace(3, 12_345)
    for text in ("", "3", "3:", ":3", "3:-1", "a:1", "1:2:3"):
        with pytest.raises(ValueError, match="is not"):
            LetterPlace.parse(text)


def test_nothing_is_sent_where_the_service_keeps_its_records() -> None:
    names = ("delaywheel-a-control", "delaywheel-a-b-outcomes", DEAD, f"{DEAD}-marks")
    assert all(map(is_reserved_topic, names))
    others = ("orders-dead-billing-marks", "__consumer_offsets", "__transaction_state")
    assert all(map(is_reserved_topic, others))
    taken = ("orders", "delaywheel-a-ingress", "bench-marks", "__own", "orders-dead-billing")
    assert not any(map(is_reserved_topic, taken))


def test_without_the_kafka_client_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['confluent_kafka'] = None\n"
        "import delaywheel; from delaywheel import Client\n"
        "import delaywheel.deadletters"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert "install delaywheel[deadletters]" in ended.stderr
