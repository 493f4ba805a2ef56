"""A leader whose clock was ahead: it rests, until an operator sets w back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from delaywheel_replica.cleaner.outside.ports import IDS, Record
from delaywheel_replica.core.protocol.control import leader_record, progress_record
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.status_files import Role
from support.cleaner.place import NAMES, Place

DAY_MS = 86_400_000


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """It has led with a clock a day ahead, as all others had; that is corrected by now."""
    made = Place(tmp_path, required=2)
    with made.scheduler:
        made.clock.step(DAY_MS)
        made.lead()
        made.clock.step(-DAY_MS)
        made.until(lambda: not made.in_term())
        made.until(lambda: made.view.role is Role.RESTING, within_s=90)
        yield made


def progress(place: Place) -> Progress:
    found = place.view.state.progress
    assert found is not None
    return found


def test_without_a_word_it_rests(place: Place) -> None:
    place.never(lambda: place.view.role is Role.LEADING, for_s=30)
    assert progress(place).due_ms > place.clock.wall_ms()


def test_w_is_set_back_to_its_clock_and_it_leads(place: Place) -> None:
    before = progress(place)
    place.leadership.set_back(0)
    place.until(lambda: place.view.role is Role.LEADING)
    after = progress(place)
    assert (after.set_backs, after.ahead_ms) == (1, before.due_ms)
    assert after.seqs == before.seqs
    assert after.floor == before.floor
    assert 0 <= place.clock.wall_ms() - after.due_ms < 1_000


def test_one_word_is_carried_out_once(place: Place) -> None:
    place.leadership.set_back(0)
    place.until(lambda: progress(place).set_backs == 1)
    place.clock.step(DAY_MS)
    place.until(lambda: not place.in_term())
    place.until(lambda: place.view.role is Role.LEADING, within_s=90)
    place.until(lambda: progress(place).ahead == ())
    place.clock.step(-DAY_MS)
    place.until(lambda: not place.in_term())
    place.until(lambda: place.view.role is Role.RESTING, within_s=90)
    place.leadership.set_back(0)
    place.never(lambda: progress(place).set_backs != 1, for_s=5)
    place.leadership.set_back(1)
    place.until(lambda: place.view.role is Role.LEADING)
    assert progress(place).set_backs == 2


def test_the_word_goes_with_the_term(place: Place) -> None:
    """Another caller may have got something newer meanwhile."""
    place.kafka.cut("a")
    place.leadership.set_back(0)
    place.until(lambda: not place.in_term(), within_s=20)
    place.leadership.set_back(0)
    place.kafka.mend("a")
    place.until(place.in_term, within_s=90)
    place.never(lambda: progress(place).set_backs != 0, for_s=3)


def test_who_follows_sees_that_w_was_set_back(place: Place) -> None:
    place.agrees = set()
    before = progress(place)
    after = before.set_back(place.clock.wall_ms())
    assert isinstance(after, Progress)
    rival = place.client("b").producers()

    def commit(index: int, key: str, value: bytes | None) -> None:
        rival.begin(index)
        rival.commit(index, Record(NAMES.control, key.encode(), value, [], partition=0), 2_000)

    def stand() -> None:
        for index in range(IDS):
            rival.init(index, 5_000)
            commit(index, *leader_record(index, "b", "its own"))
        commit(0, *progress_record(after))

    place.scheduler.spawn("b", stand)
    place.until(lambda: progress(place) == after)
    assert after.due_ms < before.due_ms
