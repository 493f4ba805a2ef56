"""Topics of messages that will be due soon, as every node finds them."""

from __future__ import annotations

import pytest

from delaywheel.identity import WheelId
from delaywheel_replica.cleaner.topics_soon import MESSAGES_MOST, WITHIN_S, topics_soon
from support.due.wheels import Sent, wheels_in_memory

NOW_S = 1_700_000_000
WHEELS = [WheelId("n1", 1), WheelId("n2", 1)]


def sent(topic: str, ahead_s: int, number: int = 0) -> Sent:
    return Sent((NOW_S + ahead_s) * 1000 + number % 1000, number.to_bytes(16, "big"), topic)


def test_the_topics_of_the_nearest_second_of_each_wheel_are_found() -> None:
    with wheels_in_memory() as wheels:
        assert topics_soon(wheels.disk, wheels.data, NOW_S * 1000) == set()
        wheels.write(WHEELS[0], [sent("a", 5), sent("b", 7), sent("far", WITHIN_S + 60)])
        wheels.write(WHEELS[1], [sent("c", 30)])
        assert topics_soon(wheels.disk, wheels.data, NOW_S * 1000) == {"a", "c"}
        assert topics_soon(wheels.disk, wheels.data, (NOW_S + 5) * 1000) == {"b", "c"}


@pytest.mark.parametrize("topics", [1, 3])
def test_a_sample_of_a_great_second_suffices(topics: int) -> None:
    with wheels_in_memory() as wheels:
        for begin in range(0, 3 * MESSAGES_MOST, MESSAGES_MOST):
            numbers = range(begin, begin + MESSAGES_MOST)
            wheels.write(WHEELS[0], [sent(f"t{n % topics}", 5, n) for n in numbers])
        soon = topics_soon(wheels.disk, wheels.data, NOW_S * 1000)
        assert soon == {f"t{number}" for number in range(topics)}
