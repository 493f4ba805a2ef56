"""What is sent of half messages: messages, records of the ingress topic, letters."""

from __future__ import annotations

import json

import pytest

from cleaner.delivery import test_outcomes
from cleaner.delivery.test_outcomes import A1, NAMES, NOW_MS, Leader, sent
from delaywheel.deadletters.letter import Letter, LetterPlace
from delaywheel.headers import encode_headers
from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.cleaner.outside.ports import ANY_PARTITION, NOW, Record
from delaywheel_replica.core.ingress.place import IngressPlace
from delaywheel_replica.core.ingress.reading import CommittedRecord, Delayed, IngressRules, read
from support.due.wheels import Sent, Wheels, wheels_in_memory

OWN = (("x", b"1"), ("ttl", b"1"))


def half(number: int, *more: tuple[str, bytes | None], **content: object) -> Sent:
    headers = (OWN[0], ("dw-half", b"shop"), *more, OWN[1])
    return sent(number, in_ms=5_000, headers=headers, key=b"k", value=b"v", **content)


def end(
    wheels: Wheels,
    message: Sent,
    *kinds: Kind,
    at_ms: int = NOW_MS,
    objection: str | None = None,
) -> list[Record]:
    """Begins a half, adds rows of these kinds, and returns what is written at once, or at its due.

    The rows are accepted at `at_ms`. Control records are left out.
    """
    wheels.write(A1, [message])
    for kind in kinds:
        wheels.cancel(A1, [message], kind=kind, now_ms=at_ms)
    leader = Leader(wheels)
    leader.halves_objection = objection
    list(leader.transactions())
    if Kind.RELEASES not in kinds:
        assert all(record.topic == NAMES.control for record in leader.producers.committed)
        list(leader.transactions(6_000))
    leader.reader.close()
    return [record for record in leader.producers.committed if record.topic != NAMES.control]


def test_one_that_is_due_later_goes_to_the_ingress_topic_and_is_the_same_message(
    wheels: Wheels,
) -> None:
    later_ms = NOW_MS + 1_800_000
    deliver_at = ("dw-half-deliver-at", b"%d" % later_ms)
    message = half(1, deliver_at, partition=3, timestamp_ms=NOW_MS)
    record, outcome = end(wheels, message, Kind.RELEASES)
    assert (record.topic, record.partition, record.timestamp_ms) == (
        NAMES.ingress,
        ANY_PARTITION,
        NOW,
    )
    place = IngressPlace(NAMES.ingress, 0, 7)
    taken = CommittedRecord(place, NOW_MS, record.key, record.value, record.headers)
    request = read(taken, IngressRules({}, 1_000, frozenset()))
    assert isinstance(request, Delayed)
    assert (request.id, request.due_ms, request.topic) == (message.id, later_ms, "orders")
    assert (request.partition, request.timestamp_ms) == (3, NOW_MS)
    assert request.headers == encode_headers(OWN)
    told = json.loads(outcome.value or b"")
    assert (told["outcome"], told["id"], told["topic"], told["until_ms"]) == (
        *("committed", message.id.hex(), "orders", later_ms),
    )


def test_a_question_is_asked_whatever_is_thought_of_its_topic(
    wheels: Wheels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a dead letter it would reach no group: it waits for Kafka, as outcomes do."""
    monkeypatch.setattr(test_outcomes, "BAD", NAMES.halves)
    letter, outcome = end(wheels, half(1))
    assert letter.topic == NAMES.halves
    assert json.loads(outcome.value or b"")["outcome"] == "asked"


def test_a_letter_that_nobody_can_be_asked_with_is_a_dead_letter_and_asks_when_it_is_replayed(
    wheels: Wheels,
) -> None:
    letter, outcome = end(wheels, half(1), objection="grant Create")
    told = json.loads(outcome.value or b"")
    assert (told["outcome"], told["reason"], told["topic"]) == (
        "dead-lettered",
        "HALVES_UNAVAILABLE",
        "orders",
    )
    assert letter.topic == NAMES.dead
    assert ("dw-dead-detail", b"grant Create") in letter.headers
    dead = Letter(LetterPlace(0, 7), NOW_MS, letter.key, letter.value, tuple(letter.headers))
    again = dead.again(NAMES.dead, to=None, as_new=False)
    with wheels_in_memory() as others:
        asked, _ = end(others, half(1))
    assert (again.topic, again.key, again.value) == asked[:3]
    own_id = len(asked.headers) - 4  # each made its own half
    names = [name for name, _ in asked.headers]
    assert [name for name, _ in again.headers] == [*names, "dw-dead-replayed"]
    assert again.headers[:own_id] == [
        (name, value if name != "dw-half-deliver-at" else dict(again.headers)[name])
        for name, value in asked.headers[:own_id]
    ]
    sent_elsewhere = dead.again(NAMES.dead, to="orders", as_new=False)
    assert [name for name, _ in sent_elsewhere.headers] == ["x", "ttl", "dw-dead-replayed"]


@pytest.mark.parametrize("kind", [Kind.COMMITS, Kind.RELEASES])
def test_where_nobody_can_be_asked_commits_count(wheels: Wheels, kind: Kind) -> None:
    (record,) = end(wheels, half(1), kind, objection="grant Create")
    assert record.topic == "orders"


def test_what_the_ingress_topic_does_not_take_is_a_dead_letter_of_its_message(
    wheels: Wheels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent again, it goes to the ingress topic with its own due; the books know its topic."""
    monkeypatch.setattr(test_outcomes, "BAD", NAMES.ingress)
    deliver_at = ("dw-half-deliver-at", b"%d" % (NOW_MS + 60_000))
    record, outcome = end(wheels, half(1, deliver_at), Kind.RELEASES)
    assert record.topic == NAMES.dead
    told = json.loads(outcome.value or b"")
    assert (told["outcome"], told["topic"]) == ("dead-lettered", "orders")
    letter = Letter(LetterPlace(0, 7), NOW_MS, record.key, record.value, tuple(record.headers))
    again = letter.again(NAMES.dead, to=None, as_new=False)
    assert again.topic == NAMES.ingress
    place = IngressPlace(NAMES.ingress, 0, 7)
    taken = CommittedRecord(place, NOW_MS, again.key, again.value, again.headers)
    request = read(taken, IngressRules({}, 1_000, frozenset()))
    assert isinstance(request, Delayed)
    assert (request.due_ms, request.topic) == (NOW_MS + 60_000, "orders")


def test_messages_that_are_no_halves_are_not_released(wheels: Wheels) -> None:
    message = sent(1, in_ms=5_000, headers=(("x", encode_headers([("dw-half", b"shop")])),))
    wheels.write(A1, [message])
    wheels.cancel(A1, [message], kind=Kind.RELEASES)
    leader = Leader(wheels)
    assert leader.run_once().totals()["forwarded"] == 0
    assert leader.run_once(6_000).totals()["forwarded"] == 1
    leader.reader.close()
