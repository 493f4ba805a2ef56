"""Which brokers are waited for that are away, and for how long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from delaywheel.kafka_admin import (
    FORGOTTEN_S,
    WAITED_FOR_S,
    MissedBrokers,
)

STEP_S = 0.5


class World:
    """Three brokers and a clock.

    Attributes:
        missed: What is tested.
        away: The brokers that take no connection.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.away = {2}
        self.missed = MissedBrokers(lambda each: each.id not in self.away, lambda: self.now_s)
        self.names(1, 2, 3)

    def names(self, *brokers: int) -> None:
        """Has Kafka name these."""
        named: dict[int, Any] = {each: SimpleNamespace(id=each) for each in brokers}
        self.missed.note(named)

    def waited_s(self) -> float:
        """Looks until nobody is waited for."""
        began_s = self.now_s
        while self.missed.look():
            self.now_s += STEP_S
        return self.now_s - began_s


def test_one_that_is_away_is_waited_for_until_kafka_misses_it() -> None:
    world = World()
    assert world.missed.look()
    world.names(1, 3)
    assert not world.missed.look()


def test_nobody_is_waited_for_while_all_are_there() -> None:
    world = World()
    world.away = set()
    assert not world.missed.look()


def test_one_that_kafka_never_misses_is_waited_for_once() -> None:
    world = World()
    assert world.waited_s() == WAITED_FOR_S
    world.now_s += FORGOTTEN_S - STEP_S
    assert not world.missed.look()


def test_one_that_came_back_is_waited_for_again() -> None:
    world = World()
    world.waited_s()
    world.away = set()
    assert not world.missed.look()
    world.away = {2}
    assert world.waited_s() == WAITED_FOR_S


def test_one_that_nobody_looked_for_meanwhile_is_waited_for_again() -> None:
    world = World()
    world.waited_s()
    world.now_s += 60
    assert world.waited_s() == WAITED_FOR_S


def test_another_one_is_waited_for_as_long() -> None:
    world = World()
    world.waited_s()
    world.away = {2, 3}
    assert world.waited_s() == WAITED_FOR_S
