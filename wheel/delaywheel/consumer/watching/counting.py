"""Counts of what a consumer commits, in the same transactions, while their topic takes them.

| what happens | then its counts are |
|---|---|
| a transaction commits records | in it: whoever is killed then, both are there, or neither |
| the trace does not know their topic yet | added to the trace's own, once it is committed |
| these credentials lack the right to write there: Kafka is asked before   | likewise, and that is |
|   | said once, until the right is there; it is asked about each 10 min |
| the topic is away; a transaction with counts failed, for whatever it was | likewise, for 10 min |

So counts keep nothing from being committed: a failure of a transaction that has some is not taken
for one of its records or of a right.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from delaywheel.consumer.message import ConsumerError
from delaywheel.consumer.port import Broker, KafkaUnavailable, TransactionFailure
from delaywheel.consumer.watching.events import CommittedOutcomes
from delaywheel.transactional import Outgoing

if TYPE_CHECKING:  # a program that does not trace imports nothing of it
    from delaywheel.trace.counts import Cell, CellKey, ExactCounts
    from delaywheel.trace.reports import EventReports

_LOG: Final = logging.getLogger("delaywheel.trace")
_WITHOUT_S: Final = 600.0


class CommitCounts:
    """The counts of one consumer; used by its thread."""

    def __init__(self, trace: EventReports | None, broker: Broker) -> None:
        self._broker: Final = broker
        self._exact: ExactCounts | None = None if trace is None else trace.exact_counts()
        self._topic: str | None = None
        self._without_until_s = 0.0
        self.is_forbidden = False
        """Whether a right to write there is missing."""
        if self._exact is not None:
            self._exact.topic()  # has it looked for: it is known with the first transaction then

    def records(self, outcomes: CommittedOutcomes, time_ms: int) -> list[Outgoing]:
        """Returns what a transaction is to write beside these outcomes; say `ended` then."""
        counts = self._exact
        topic = None if counts is None or not outcomes.runs else self._taking()
        if counts is None or topic is None:
            return []
        cells: dict[CellKey, Cell] = {}
        try:
            added = [run.cells(time_ms) for run in outcomes.runs]
            added += [run.cells(time_ms) for run in outcomes.written]
            for each in added:
                _add(cells, each)
            records = counts.records(cells, time_ms).items()
        except Exception:  # noqa: BLE001 - a defect of the trace is no failure of the program
            _LOG.exception("counts could not be made: a defect")
            self._leave_out()
            return []
        return [Outgoing(topic, key, value, []) for key, value in records]

    def ended(
        self, counted: Sequence[Outgoing], failure: TransactionFailure | None
    ) -> TransactionFailure | None:
        """Takes in how a transaction with these counts ended; returns what is left of a failure."""
        if not counted or self._exact is None:
            return failure
        if failure is None:
            self._exact.committed()
            return None
        self._exact.failed()
        self._leave_out()
        ours = {counted[0].topic}
        return failure._replace(
            is_refusal=False,
            is_forbidden=False,
            unanswered=failure.unanswered - ours,
            unable=failure.unable - ours,
        )

    def _taking(self) -> str | None:
        """Returns the topic, if this consumer may write to it, too."""
        if time.monotonic() < self._without_until_s or self._exact is None:
            return None
        topic = self._exact.topic()
        if topic is None or topic == self._topic:
            return topic
        try:
            may_write = self._broker.may_write(topic)
        except (KafkaUnavailable, ConsumerError):
            may_write = None
        if may_write is not None:
            self._note_right(topic, is_there=may_write)
        if not may_write:
            self._leave_out()
            return None
        self._topic = topic
        return topic

    def _note_right(self, topic: str, *, is_there: bool) -> None:
        if is_there == self.is_forbidden:
            self.is_forbidden = not is_there
            text = "%s: Write is missing: counts are not in this consumer's transactions"
            _LOG.warning(text if self.is_forbidden else "%s: no right is missing any more", topic)

    def _leave_out(self) -> None:
        self._topic = None
        self._without_until_s = time.monotonic() + _WITHOUT_S


def _add(cells: dict[CellKey, Cell], more: Mapping[CellKey, Cell]) -> None:
    for key, cell in more.items():
        if key in cells:
            cells[key].add(cell)
        else:
            cells[key] = cell
