"""A consumer of letters in figures, all of one moment: what its metrics are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from delaywheel.deadletters.counting import MOST_NAMED, OTHERS
from delaywheel.deadletters.settling import Decision, Drop, Replay


class LetterFigures(NamedTuple):
    """One moment of a `DeadLetterConsumer`.

    Attributes:
        decided: The numbers of letters by reason, and by what became of each: `replayed`,
            `dropped`, `kept` or `refused` (it could not be sent again, and is kept).
        waiting_offsets: Offsets that no handler has passed, as of the last look at the topic.
        trouble: What keeps it from its work now, in words; None if nothing does.
    """

    decided: Mapping[tuple[str, str], int]
    handler_failures: int
    waiting_offsets: int
    is_at_work: bool
    trouble: str | None


class LetterTally:
    """Counts what was decided, once it is committed."""

    def __init__(self) -> None:
        """Begins with nothing."""
        self._decided: Counter[tuple[str, str]] = Counter()
        self._open: list[tuple[str, str]] = []
        self._reasons: set[str] = set()
        self.handler_failures = 0
        self.waiting_offsets = 0
        self.is_at_work = False
        self.trouble: str | None = None

    def decide(self, reason: str, decision: Decision, *, is_refused: bool) -> None:
        """Notes a decision, which counts once it is committed."""
        if reason not in self._reasons and len(self._reasons) >= MOST_NAMED:
            reason = OTHERS  # letters may name many reasons, and a metric must not
        self._reasons.add(reason)
        became = "kept"
        if is_refused:
            became = "refused"
        elif isinstance(decision, Replay):
            became = "replayed"
        elif isinstance(decision, Drop):
            became = "dropped"
        self._open.append((reason, became))

    def commit(self) -> None:
        """Counts what was decided since the last time."""
        counted, self._open = self._open, []
        self._decided.update(counted)

    def forget(self) -> None:
        """Drops what was decided since the last time: it was not committed."""
        self._open = []

    def figures(self) -> LetterFigures:
        """Returns all figures, of one moment."""
        return LetterFigures(
            dict(self._decided),
            self.handler_failures,
            self.waiting_offsets,
            self.is_at_work,
            self.trouble,
        )
