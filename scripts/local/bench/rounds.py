"""Rounds: when they may begin, how many undisturbed ones to measure, and their order.

They begin when the broker is warm: its JVM costs three times as much in its first minute. It is
warm after two minutes of work, or once the later of two consecutive windows is no cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from local.stage.scraping import Cost

WINDOW_S = 10.0
ALIKE = 0.05
"""How much cheaper, as a share, the later window may be."""
MOST_S = 120.0

RoundT = TypeVar("RoundT")
PartT = TypeVar("PartT")


@dataclass(slots=True)
class Rounds(Generic[RoundT]):
    """The rounds that count, and why others do not."""

    kept: list[RoundT] = field(default_factory=list)
    void: list[str] = field(default_factory=list)


def disturbances(cost: Cost) -> str:
    """Returns what disturbed a round; empty if nothing did."""
    counts = {
        "elections": sum(node.elections for node in cost.nodes.values()),
        "in-sync changes": sum(node.in_sync_changes for node in cost.nodes.values()),
        "restarted processes": sum(node.restarts for node in cost.nodes.values()),
    }
    return ", ".join(f"{what} {count}" for what, count in counts.items() if count)


def run_rounds(
    wanted: int,
    measure: Callable[[int], RoundT],
    disturbed: Callable[[RoundT], str],
) -> Rounds[RoundT]:
    """Measures until enough rounds count; gives up after twice as many.

    Args:
            wanted: How many rounds, at least 1.
            measure: Measures a round, given its number from 0, void ones included.
            disturbed: Returns why a round is void; empty: it counts.
    """
    done: Rounds[RoundT] = Rounds()
    for number in range(2 * wanted):
        one = measure(number)
        if why := disturbed(one):
            done.void.append(why)
        else:
            done.kept.append(one)
        if len(done.kept) == wanted:
            break
    return done


def in_turn(parts: Sequence[PartT], number: int) -> list[PartT]:
    """Returns the parts of a round, starting with another one each time.

    Example:
        >>> in_turn("abc", 1)
        ['b', 'c', 'a']
    """
    first = number % len(parts)
    return [*parts[first:], *parts[:first]]


def is_steady(costs_ms: list[float]) -> bool:
    """Whether the last window costs no less than the one before, within `ALIKE`."""
    if len(costs_ms) < 3:  # the first window opens connections
        return False
    before, now = costs_ms[-2:]
    return now >= before * (1 - ALIKE)


def warm_up(measure: Callable[[float], float], say: Callable[[str], None]) -> list[float]:
    """Works until costs are steady.

    Args:
        measure: Works for this many seconds; returns the broker's CPU milliseconds per transaction.
        say: Prints a line for people.

    Returns:
        The cost of each window.
    """
    costs_ms: list[float] = []
    while len(costs_ms) * WINDOW_S < MOST_S and not is_steady(costs_ms):
        costs_ms.append(measure(WINDOW_S))
        say(f"warming the broker: {costs_ms[-1]:.1f} ms of CPU a transaction")
    return costs_ms
