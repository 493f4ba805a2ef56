"""What happens in a consumer, as calls of the program that has it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from delaywheel.consumer.book import Cut
from delaywheel.consumer.message import Outcome, ReceivedMessage, Settlement
from delaywheel.consumer.records import Partition
from delaywheel.consumer.watching.tracing import CommittedRun, committed_runs, written_runs
from delaywheel.functions import check_begun, check_plain
from delaywheel.ways.records import WrittenRun

if TYPE_CHECKING:  # a program that does not trace imports nothing of it
    from delaywheel.trace.reports import EventReports

_LOG = logging.getLogger("delaywheel.consumer")


class ConsumerEvents:
    """Base class of what a program does when something happens in its consumer.

    Each outcome is reported once, after the transaction that has it was committed. All methods are
    called on the consumer's own thread, which fetches and commits: keep them short. What one raises
    is logged, and changes nothing. `pause`, `resume`, `stop` and `seek` may be called there: a seek
    is made once the event has returned, before anything else is handed out. What would wait for the
    consumer (`flush`, `receive`, a loop, leaving its block) raises RuntimeError.
    """

    def retried(self, message: ReceivedMessage, due_ms: int, why: str) -> None:
        """A record comes back at this time (Unix ms)."""

    def dead(self, message: ReceivedMessage, topic: str, why: str) -> None:
        """A record is a dead letter in this topic."""

    def expired(self, message: ReceivedMessage, why: str) -> None:
        """A record's time to live was over; it is skipped or a dead letter, by the options."""

    def skipped(self, message: ReceivedMessage) -> None:
        """A record is of another route."""

    def commit_failed(self, why: str) -> None:
        """A transaction was not committed, or perhaps not; it is tried again."""

    def assigned(self, partitions: Sequence[Partition]) -> None:
        """These partitions are read from now on."""

    def revoked(self, partitions: Sequence[Partition]) -> None:
        """These partitions are no longer ours; what was settled of them is committed."""


class CommittedOutcomes(NamedTuple):
    """What a transaction has committed, as far as anybody wants to know it.

    Attributes:
        settled: Records with their outcomes, for the program's events.
        runs: All records, for its trace.
        written: What handlers have written for later, for its trace, too.
        is_counted: Whether their counts were written in the same transaction.
    """

    settled: Sequence[tuple[ReceivedMessage, Settlement]] = ()
    runs: Sequence[CommittedRun] = ()
    written: Sequence[WrittenRun] = ()
    is_counted: bool = False


def check_events(events: ConsumerEvents) -> None:
    """Raises TypeError if one of its methods has to be awaited."""
    for name in vars(ConsumerEvents):
        if not name.startswith("_"):
            check_plain(f"events.{name}", getattr(events, name))


class EventCalls:
    """Calls a program's events, and tells its trace; all is quiet if it has neither."""

    def __init__(
        self,
        events: ConsumerEvents | None,
        trace: EventReports | None,
        group: str,
        *,
        is_check: bool,
    ) -> None:
        """Takes what is to be called."""
        self._has_events = events is not None
        self._events = events or ConsumerEvents()
        self._trace = trace
        self._group = group
        self._is_check = is_check

    def to_report(self, cut: Cut) -> CommittedOutcomes:
        """Returns what is to be reported of a transaction; call it while records still have it."""
        settled: Sequence[tuple[ReceivedMessage, Settlement]] = ()
        runs: Sequence[CommittedRun] = ()
        if self._has_events:
            settled = [
                (block.message(index), settlement)
                for block, index, settlement in cut.settled()
                if settlement.outcome in _REPORTED
            ]
        if self._trace is not None:
            runs = committed_runs(cut, self._group, is_check=self._is_check)
        return CommittedOutcomes(settled, runs, written_runs(runs), cut.is_counted)

    def outcomes(self, committed: CommittedOutcomes) -> None:
        """Reports outcomes that are committed."""
        if self._trace is not None:
            is_counted = committed.is_counted
            for run in committed.runs:
                self._trace.processed(run, is_counted=is_counted)
            for written in committed.written:
                self._trace.written(written, is_counted=is_counted)
        events = self._events
        for message, settlement in committed.settled:
            match settlement.outcome:
                case Outcome.RETRIED:
                    self._call(events.retried, message, settlement.due_ms, settlement.why)
                case Outcome.DEAD if settlement.record is not None:
                    self._call(events.dead, message, settlement.record.topic, settlement.why)
                case Outcome.EXPIRED:
                    self._call(events.expired, message, settlement.why)
                case _:
                    self._call(events.skipped, message)

    def end(self) -> None:
        """Waits until the trace is written, 2 s at most."""
        if self._trace is not None:
            self._trace.flush()

    def commit_failed(self, why: str) -> None:
        """Reports that a transaction failed."""
        self._call(self._events.commit_failed, why)

    def assigned(self, partitions: Sequence[Partition]) -> None:
        """Reports what is read from now on."""
        self._call(self._events.assigned, partitions)

    def revoked(self, partitions: Sequence[Partition]) -> None:
        """Reports what is no longer ours."""
        self._call(self._events.revoked, partitions)

    @staticmethod
    def _call(event: Callable[..., object], *given: object) -> None:
        try:
            check_begun(event, event(*given))
        except Exception:  # noqa: BLE001 - it is the program's
            _LOG.exception("an event of the program")


_REPORTED = frozenset({Outcome.RETRIED, Outcome.DEAD, Outcome.EXPIRED, Outcome.SKIPPED})
