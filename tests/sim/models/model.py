"""Explores every state that a small model can reach, breadth first, so that the way is shortest.

A model is a start, its moves and a check. States are values: equal ones are the same state, so a
model that normalises what does not matter (order of like nodes, values of which only the greatest
counts) has fewer of them.
"""

import gc
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)

Moves = Callable[[S], Iterable[tuple[str, S]]]
"""The possible next moves, each with a name for people, and the state that follows."""

Check = Callable[[S], str | None]
"""Returns what is wrong with a state; None: nothing."""


class TooManyStatesError(Exception):
    """The model has more states than expected."""


@dataclass(frozen=True)
class Explored(Generic[S]):
    """The result of an exploration.

    Attributes:
        states: the number of states seen.
        wrong: what is wrong with the last state of `way`; None: every state is right.
        way: the moves that lead there.
        last: the wrong state; None: there is none.
    """

    states: int
    wrong: str | None = None
    way: tuple[str, ...] = ()
    last: S | None = None

    def __str__(self) -> str:
        if self.wrong is None:
            return f"{self.states} states, all right"
        steps = "\n".join(f"{number:3} {move}" for number, move in enumerate(self.way, 1))
        return f"{self.wrong}, after\n{steps}\n{self.last}"


def explore(start: S, moves: Moves[S], check: Check[S], *, at_most: int) -> Explored[S]:
    """Visits every state that can be reached from `start`, until one is wrong.

    Args:
        start: the first state.
        moves: the possible moves from a state.
        check: returns what is wrong with a state.
        at_most: limit for the number of states.

    Raises:
        TooManyStatesError: there are more.
    """
    with without_collections():
        return _explore(start, moves, check, at_most)


@contextmanager
def without_collections() -> Iterator[None]:
    """Delays garbage collection, since nearly all objects are kept."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _explore(start: S, moves: Moves[S], check: Check[S], at_most: int) -> Explored[S]:
    came_from: dict[S, tuple[S, str] | None] = {start: None}
    wrong = check(start)
    if wrong is not None:
        return Explored(1, wrong, (), start)
    layer = [start]
    while layer:
        following: list[S] = []
        for state in layer:
            for move, after in moves(state):
                if after in came_from:
                    continue
                came_from[after] = (state, move)
                wrong = check(after)
                if wrong is not None:
                    return Explored(len(came_from), wrong, _way(came_from, after), after)
                following.append(after)
        if len(came_from) > at_most:
            raise TooManyStatesError(f"more than {at_most} states")
        layer = following
    return Explored(len(came_from))


def _way(came_from: dict[S, tuple[S, str] | None], last: S) -> tuple[str, ...]:
    moves: list[str] = []
    before = came_from[last]
    while before is not None:
        state, move = before
        moves.append(move)
        before = came_from[state]
    return tuple(reversed(moves))
