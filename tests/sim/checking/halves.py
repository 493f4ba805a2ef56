"""Checks of half messages, against what became of each one's local transaction.

| | invariant | checked at |
|---|---|---|
| 1 | delivered only if its local transaction was committed, whatever is lost | each commit |
| 2 | one end: delivered, a dead letter, cancelled or asked | each commit |
| 3 | recorded as committed in time: nobody is asked, unless something was wrong | the end |
| 4 | the letter is the message, and says what its group must know | each commit |

The database: when a group is asked before the local transaction has ended, its barrier rolls that
back.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from sim.checking.book import GROUP, Entry
from sim.checking.truth import Key
from sim.kafka.log import Entry as LogEntry
from sim.machine.clocks import EPOCH_MS
from sim.machine.scheduler import US_PER_MS
from sim.plans.plan import Action

if TYPE_CHECKING:
    from sim.nodes.world import World

IN_TIME_MS = 300
"""A commit that is recorded so long before the due counts at it, if nothing is wrong."""


class HalvesChecks:
    """Checks the halves of one run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._ends: Counter[Key] = Counter()
        self._asked: set[Key] = set()

    def delivered(self, entry: Entry) -> None:
        """Checks a half that went to its topic."""
        if not entry.is_half:
            return
        if not entry.committed:
            self._fail(f"{entry} is delivered, and its transaction was not committed")
        self._ended(entry)

    def outcome(self, entry: Entry, outcome: str) -> None:
        """Checks a half that ended otherwise."""
        if entry.is_half and outcome in {"cancelled", "asked"}:
            self._ended(entry)
        if outcome == "asked" and not entry.is_half:
            self._fail(f"{entry} is no half, and somebody is asked about it")

    def asked(self, letter: LogEntry) -> None:
        """Checks a letter."""
        headers = dict(letter.headers)
        key = bytes.fromhex((headers["dw-id"] or b"").decode()), int(headers["dw-due"] or 0)
        entry = self._world.book.by_key.get(key)
        if entry is None or not entry.is_half:
            self._fail(f"a letter about what is no half: {headers}")
            return
        self._asked.add(key)
        own = [
            *entry.headers,
            ("dw-half", GROUP),
            ("dw-half-topic", entry.topic.encode()),
            ("dw-half-deliver-at", b"%d" % (entry.due_ms + 1)),
        ]
        if (letter.key, letter.value) != (entry.record_key, entry.value):
            self._fail(f"the letter about {entry} has other contents")
        if letter.headers[:-4] != own:
            self._fail(f"the letter about {entry} has other headers: {letter.headers}")
        if entry.committed is None:
            entry.committed = False

    def check_at_the_end(self) -> None:
        """Checks the drained cluster."""
        is_calm = not any(isinstance(step, Action) for step in self._world.plan.steps)
        for entry in self._world.book.entries.values():
            if not (entry.is_half and is_calm and entry.committed_us >= 0):
                continue
            due_us = (entry.due_ms - EPOCH_MS) * US_PER_MS
            if entry.committed_us + IN_TIME_MS * US_PER_MS <= due_us and entry.key in self._asked:
                self._fail(f"{entry} was committed in time, and its group is asked")

    def _ended(self, entry: Entry) -> None:
        self._ends[entry.key] += 1
        if self._ends[entry.key] > 1 and not self._may_be_forgotten(entry):
            self._fail(f"{entry} has a second end")

    def _may_be_forgotten(self, entry: Entry) -> bool:
        """Whether a frame that had a part in the first end was lost."""
        truth, key = self._world.truth, entry.key
        names = (*truth.copies[key], *truth.commits[key], *truth.cancels[key])
        return any(truth.frames[name].gone for name in names)

    def _fail(self, what: str) -> None:
        self._world.violation(what)
