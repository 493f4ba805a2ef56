"""Room that sharers have together."""

from __future__ import annotations

from contextlib import ExitStack

from delaywheel_replica.server.access.shared_room import SharedRoom


def test_a_sharer_takes_no_more_than_is_left_to_others() -> None:
    room = SharedRoom(9)
    assert room.left("a") == 5
    room.take("a", 5)
    assert [room.left(sharer) for sharer in "ab"] == [0, 2]
    room.take("b", 2)
    room.take("c")
    assert [room.left(sharer) for sharer in "abcd"] == [0, 0, 0, 1]
    room.give_back("a", 5)
    assert [room.left(sharer) for sharer in "abcd"] == [3, 2, 3, 3]


def test_a_sharer_takes_no_more_than_it_may() -> None:
    room = SharedRoom(64, 8)
    room.take("a", 7)
    assert [room.left(sharer) for sharer in "ab"] == [1, 8]


def test_a_place_is_given_back_by_who_had_one_however_it_ends() -> None:
    room = SharedRoom(2)
    with ExitStack() as places:
        assert places.enter_context(room.place("a"))
        assert not places.enter_context(room.place("a"))
        assert places.enter_context(room.place("b"))
        assert not places.enter_context(room.place("c"))
        assert room.taken == 2
    assert (room.taken, room.left("a")) == (0, 1)
