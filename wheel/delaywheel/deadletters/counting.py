"""Counts of letters by destination and reason, and of those that were dealt with."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from delaywheel.deadletters.letter import Letter, LetterPlace
from delaywheel.deadletters.marks import LetterState

MOST_ROWS = 1_000
"""Topics and reasons come from headers: beyond this number they are counted as `OTHERS`."""
OTHERS = "(others)"
MOST_NAMED = 100


class Count(NamedTuple):
    """Letters of one topic and reason."""

    topic: str
    reason: str
    waiting: int
    replayed: int
    dropped: int


class LetterCounts:
    """Letters counted."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], Counter[LetterState]] = {}

    def add(self, letter: Letter, state: LetterState) -> None:
        """Counts one letter."""
        key = letter.destination, letter.reason
        if key not in self._rows and len(self._rows) >= MOST_ROWS:
            key = OTHERS, OTHERS
        self._rows.setdefault(key, Counter())[state] += 1

    def rows(self) -> list[Count]:
        """Returns the counts, sorted by topic and reason."""
        return [
            Count(
                *key,
                counted[LetterState.WAITING],
                counted[LetterState.REPLAYED],
                counted[LetterState.DROPPED],
            )
            for key, counted in sorted(self._rows.items())
        ]

    def of(self, state: LetterState) -> int:
        """Returns the number of letters in a state."""
        return sum(counted[state] for counted in self._rows.values())


@dataclass(slots=True)
class Settled:
    """The result of a replay or a drop: how many letters were dealt with, each for good.

    Those that could not be sent still wait: `refused` counts them by reason, and `examples` are the
    first.
    """

    done: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    examples: list[tuple[LetterPlace, str]] = field(default_factory=list)

    def refuse(self, place: LetterPlace, why: str) -> None:
        """Records a letter that could not be sent."""
        reason = why.partition(":")[0]
        if reason not in self.refused and len(self.refused) >= MOST_NAMED:
            reason = OTHERS
        self.refused[reason] += 1
        if len(self.examples) < MOST_NAMED:
            self.examples.append((place, why))
