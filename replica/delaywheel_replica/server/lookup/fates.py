"""The outcome of messages that are done, as far as this node's cleaner reported it.

A dead letter is reported as such by its topic, id and due: to look in the outcomes topic would take
a consumer for each question. Deliveries are never reported, so that forwarding costs no more; they
follow from what is known of a period: a *span* is what was done between two progress records while
every dead letter was reported. The cleaner's status has both, how many it has counted and how far
it has come, so the two can be compared:

| the row says | then the span |
|---|---|
| it leads, and has counted as many as it reported | reaches its progress; a new one begins there |
| it has counted more | rests: they are on their way, or were dropped |
| it has deferred some since | ends where it was: which ones is not reported; a new one begins |
| it does not lead, or in another term | ends |

A span also ends if a report does not follow on the one before. What became of a message that was
done outside of all spans is not known here. Memory is bounded: the oldest dead letters and spans
are forgotten together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from delaywheel_replica.core.leader.halves import is_released
from delaywheel_replica.core.protocol.progress import Position, Progress
from delaywheel_replica.core.protocol.reschedules import MessageKey
from delaywheel_replica.core.protocol.status_files import CleanerStatus, Role
from delaywheel_replica.link import DeadLettered

MAX_BYTES: Final = 16 << 20
_LETTER_BYTES: Final = 320
_GENERATIONS: Final = 4
# Each has two progress records: seqs of up to 900 wheels.
_SPANS_AT_MOST: Final = 8


@dataclass(slots=True)
class _Span:
    """A span between two progress records of which every dead letter is known.

    `term` names the cleaner's term, and counts what it has deferred: nothing within the span.
    """

    term: tuple[int, int | None, int]
    begin: Progress
    end: Progress

    def has(self, due_ms: int, position: Position, releases: Collection[Position]) -> bool:

        def is_done(progress: Progress) -> bool:
            is_covered = progress.covers(due_ms, position)
            return is_covered or is_released(position, releases, progress)

        return not is_done(self.begin) and is_done(self.end)


@dataclass(slots=True)
class _Generation:
    """What was reported in some period; forgotten as a whole."""

    reasons: dict[MessageKey, str] = field(default_factory=dict)
    spans: deque[_Span] = field(default_factory=lambda: deque(maxlen=_SPANS_AT_MOST))


class Fates:
    """Keeps outcomes. Written by the event loop's thread, read by any."""

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        self._letters_each = max(1, max_bytes // _LETTER_BYTES // _GENERATIONS)
        self._generations: deque[_Generation] = deque([_Generation()], maxlen=_GENERATIONS)
        self._open: _Span | None = None
        # Identified by the cleaner's process: a status of the previous one may be read after a
        # report of the next.
        self._counted: dict[int, int] = {}

    def heard(self, report: DeadLettered) -> None:
        """Takes dead letters that the cleaner reports."""
        if report.before != self._counted.get(report.cleaner_ms, 0):
            self._open = None
        self._counted = {
            **dict(list(self._counted.items())[-1:]),
            report.cleaner_ms: report.before + len(report.letters),
        }
        newest = self._generations[-1]
        for letter in report.letters:
            if len(newest.reasons) >= self._letters_each:
                newest, self._open = _Generation(), None
                self._generations.append(newest)
            newest.reasons[MessageKey(letter.id, letter.due_ms, letter.topic)] = letter.reason

    def row(self, status: CleanerStatus) -> None:
        """Takes a new status of the cleaner."""
        progress = status.progress
        if status.role is not Role.LEADING or progress is None:
            self._open = None
            return
        if status.counters.get("dead_lettered", 0) != self._counted.get(status.started_ms, 0):
            return
        term = status.started_ms, status.epoch, status.counters.get("deferred", 0)
        if self._open is None or self._open.term != term:
            self._open = _Span(term, progress, progress)
            self._generations[-1].spans.append(self._open)
        self._open.end = progress

    def reason(self, key: MessageKey) -> str | None:
        """Returns why this message is a dead letter; None if it is not known to be one."""
        kept = (each.reasons for each in list(self._generations))
        return next((reasons[key] for reasons in kept if key in reasons), None)

    def is_known(
        self, due_ms: int, position: Position, releases: Collection[Position] = ()
    ) -> bool:
        """Whether this message, if it were a dead letter, would be known as one."""
        spans = [span for generation in list(self._generations) for span in list(generation.spans)]
        return any(span.has(due_ms, position, releases) for span in spans)
