"""Where a message went: the cleaner is asked, and awaited only briefly."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from delaywheel.record_headers import HALF_GROUP, LONGEST_HOLD_MS
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.link import AskPlace, LinkPlace, PlaceFound
from delaywheel_replica.server.lookup.places import ASKED_AT_MOST, AskedPlaces

DELIVERED, DEAD, DONE, PENDING, CANCELLED = (
    pb.MessageState.Value(f"MESSAGE_STATE_{name}")
    for name in ("DELIVERED", "DEAD_LETTERED", "DONE", "PENDING", "CANCELLED")
)


@pytest.fixture(autouse=True)
def _short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delaywheel_replica.server.lookup.places.ANSWER_WAIT_S", 0.1)


class Cleaner:
    """Receives questions, and answers them as the test says."""

    def __init__(self, found: PlaceFound | None) -> None:
        self.asked: list[AskPlace] = []
        self.places = AskedPlaces(ask=self._hear, halves_topic="halves")
        self._found = found

    def _hear(self, question: AskPlace) -> bool:
        self.asked.append(question)
        if self._found is not None:
            answer = replace(self._found, question=question.question)
            asyncio.get_running_loop().call_soon(self.places.heard, answer)
        return True


def message(state: pb.MessageState.ValueType) -> pb.StoredMessage:
    return pb.StoredMessage(id=bytes(16), due_ms=17, topic="orders", state=state)


@pytest.mark.parametrize(
    ("state", "is_dead"), [(DELIVERED, False), (DEAD, True), (DONE, None)], ids=str
)
async def test_a_record_proves_what_became_of_a_message(
    state: pb.MessageState.ValueType, is_dead: bool | None
) -> None:
    cleaner = Cleaner(PlaceFound(0, LinkPlace("orders", 2, 4_711)))
    asked = message(state)
    await cleaner.places.add_place(asked)
    assert [question.is_dead for question in cleaner.asked] == [is_dead]
    assert (asked.place.topic, asked.place.partition, asked.place.offset) == ("orders", 2, 4_711)
    assert asked.state == DELIVERED


async def test_a_dead_letter_shows_its_reason() -> None:
    cleaner = Cleaner(PlaceFound(0, LinkPlace("dead", 0, 1), "TOPIC_MISSING"))
    asked = message(DONE)
    await cleaner.places.add_place(asked)
    assert (asked.state, asked.dead_reason) == (DEAD, "TOPIC_MISSING")


@pytest.mark.parametrize("place", [None, LinkPlace("halves", 0, 1)])
@pytest.mark.parametrize(
    ("answer", "state"),
    [
        (None, "ASKED"),
        ("committed", "COMMITTED"),
        ("rolled-back", "ROLLED_BACK"),
        ("undecided", "UNDECIDED"),
        ("of a later release", "ASKED"),
    ],
)
async def test_what_a_group_has_answered_is_the_state_of_its_half(
    answer: str | None, state: str, place: LinkPlace | None
) -> None:
    cleaner = Cleaner(PlaceFound(0, place, answer=answer))
    asked = message(pb.MESSAGE_STATE_ASKED)
    await cleaner.places.add_place(asked)
    assert [(each.is_asked_half, each.topic) for each in cleaner.asked] == [(True, "orders")]
    assert asked.state == pb.MessageState.Value(f"MESSAGE_STATE_{state}")
    assert asked.HasField("place") == (place is not None)


@pytest.mark.parametrize(
    ("found", "state"),
    [
        (LinkPlace("orders", 0, 1), "DELIVERED"),
        (LinkPlace("dead", 0, 1), "DEAD_LETTERED"),
        ("cancelled", "CANCELLED"),
        ("asked", "ASKED"),
        ("committed", "COMMITTED"),
    ],
    ids=str,
)
async def test_what_became_of_a_message_is_its_outcome_or_its_record(
    found: LinkPlace | str, state: str
) -> None:
    """Halves that groups were asked about, and dead letters, were told to be delivered."""
    place = LinkPlace("outcomes", 0, 1) if isinstance(found, str) else found
    reason = "HALVES_UNAVAILABLE" if place.topic == "dead" else None
    outcome = found if isinstance(found, str) else None
    asked = message(DONE)
    ended = await Cleaner(PlaceFound(0, place, reason, outcome=outcome)).places.ended(asked)
    assert ended == pb.MessageState.Value(f"MESSAGE_STATE_{state}")
    assert asked.dead_reason == (reason or "")


async def test_a_half_is_looked_for_from_its_commit_on() -> None:
    """Its record, its dead letter and its outcome may all come before its due."""
    cleaner = Cleaner(PlaceFound(0))
    half = message(DONE)
    half.headers.add(name=HALF_GROUP, value=b"shop")
    for each in (half, message(DONE)):
        assert await cleaner.places.ended(each) is None
    assert [each.early_ms for each in cleaner.asked] == [LONGEST_HOLD_MS, 0]


@pytest.mark.parametrize("found", [None, PlaceFound(0)], ids=["no answer", "not found"])
async def test_without_a_record_nothing_is_known(found: PlaceFound | None) -> None:
    cleaner = Cleaner(found)
    asked = message(DONE)
    await cleaner.places.add_place(asked)
    assert asked == message(DONE)
    cleaner.places.heard(PlaceFound(cleaner.asked[0].question, LinkPlace("orders", 0, 0)))


@pytest.mark.parametrize("state", [PENDING, CANCELLED])
async def test_what_is_not_done_is_not_looked_for(state: pb.MessageState.ValueType) -> None:
    cleaner = Cleaner(PlaceFound(0))
    await cleaner.places.add_place(message(state))
    assert cleaner.asked == []


async def test_who_asks_for_many_places_takes_none_of_others() -> None:
    """256 of one principal's left others without theirs, and cancels in doubt without an end."""
    cleaner = Cleaner(None)
    of_one = [
        ask(message(DONE), "token:one")
        for ask in (cleaner.places.add_place, cleaner.places.ended)
        for _ in range(ASKED_AT_MOST)
    ]
    of_others = (cleaner.places.add_place(message(DONE), f"cn:{n}") for n in range(9))
    await asyncio.gather(*of_one, *of_others, cleaner.places.ended(message(DONE)))
    assert len(cleaner.asked) == ASKED_AT_MOST // 2 + 9 + 1
    await cleaner.places.add_place(message(DONE), "token:one")
    assert len(cleaner.asked) == ASKED_AT_MOST // 2 + 9 + 2, "there is room again"


async def test_so_many_wait_and_no_more() -> None:
    cleaner = Cleaner(None)
    await asyncio.gather(
        *(cleaner.places.add_place(message(DONE), n) for n in range(2 * ASKED_AT_MOST))
    )
    assert len(cleaner.asked) == ASKED_AT_MOST
    await cleaner.places.add_place(message(DONE))
    assert len(cleaner.asked) == ASKED_AT_MOST + 1, "there is room again"
