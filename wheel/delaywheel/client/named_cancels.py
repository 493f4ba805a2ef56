"""Cancels of named messages over all attempts. No I/O, no clock: the clients carry it out.

Each message is settled on its own, once:

| the message | then |
|---|---|
| has an outcome | settled with it, unless an earlier attempt makes it doubtful |
| is refused, and a retry may help | part of the next attempt |
| is refused for good | settled with the error |
| is not settled before the deadline | settled with TimedOutError |

Asking twice is harmless: the service finds what the first attempt did. But TOO_LATE and NOT_FOUND
say nothing of an earlier attempt whose answer was lost, and that may have succeeded: then the error
is CANCEL_UNKNOWN.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from grpc import StatusCode

from delaywheel.client.exchange.answers import Cancelled, CancelOutcome
from delaywheel.client.exchange.endpoints import Report
from delaywheel.client.exchange.question import OF_THE_CLUSTER
from delaywheel.client.exchange.retry import Failure
from delaywheel.client.searching import ManyCancelled
from delaywheel.errors import CallFailedError, DelaywheelError, RefusedError, TimedOutError
from delaywheel.message import Handle
from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb

MESSAGES_AT_MOST: Final = 1_000
"""How many messages one call names."""

_IN_DOUBT: Final = frozenset({CancelOutcome.TOO_LATE, CancelOutcome.NOT_FOUND})

CancelResult = Cancelled | DelaywheelError
"""What became of one message."""


class NamedCancels:
    """Messages to be cancelled with one call; an `Exchange`."""

    def __init__(self, messages: Sequence[pb.MessageRef]) -> None:
        self._messages: Final = messages
        self._settled: Final[list[CancelResult | None]] = [None] * len(messages)
        self._waiting = list(range(len(messages)))
        self._doubtful: Final[set[int]] = set()
        self._obstacle: Failure | None = None

    @property
    def done(self) -> bool:
        """Whether every message is settled."""
        return not self._waiting

    @property
    def results(self) -> list[CancelResult]:
        """What became of each message, in order; only once done."""
        return [result for result in self._settled if result is not None]

    def request(self) -> pb.CancelRequest:
        """Builds the next attempt from messages that are not settled."""
        if len(self._messages) == 1:
            return pb.CancelRequest(message=self._messages[0])
        return pb.CancelRequest(messages=[self._messages[row] for row in self._waiting])

    def answered(self, response: pb.CancelResponse) -> Report:
        """Settles messages that have an outcome, or are refused for good."""
        if len(self._messages) == 1:
            self._take(
                0, response.outcome, response.due_ms if response.HasField("due_ms") else None
            )
            self._forget_settled()
            return Report(healthy=True)
        if len(response.results) != len(self._waiting):
            return self._defective(f"{len(response.results)} results for {len(self._waiting)}")
        passing: list[Failure] = []
        for row, result in zip(self._waiting, response.results, strict=True):
            if not result.HasField("error"):
                self._take(
                    row, result.outcome, result.due_ms if result.HasField("due_ms") else None
                )
                continue
            failure = Failure.of_error(result.error)
            if self._row_failed(row, failure):
                passing.append(failure)
        self._forget_settled()
        return self._report(passing) if passing else Report(healthy=True)

    def failed(self, failure: Failure) -> Report:
        """Applies a failed attempt to each of its messages."""
        for row in self._waiting:
            self._row_failed(row, failure)
        self._forget_settled()
        return self._report([failure]) if self._waiting else Report(healthy=True)

    def give_up(self, why: str) -> None:
        """Settles the remaining messages: no time is left for another attempt."""
        last = f"; last: {self._obstacle}" if self._obstacle else ""
        for row in self._waiting:
            known = row not in self._doubtful
            self._settled[row] = TimedOutError(f"not answered: {why}{last}", outcome_known=known)
        self._forget_settled()

    def _report(self, passing: Sequence[Failure]) -> Report:
        delays_s = [failure.retry_delay_s or 0.0 for failure in passing]
        return Report(
            healthy=all(failure.reason in OF_THE_CLUSTER for failure in passing),
            retry_delay_s=max(delays_s),
            elsewhere=True,
            # The leader's node is asked in the end, whichever node is called.
            everywhere=any(failure.reason is Reason.BACKPRESSURE for failure in passing),
        )

    def _take(self, row: int, number: "pb.CancelOutcome.ValueType", due_ms: int | None) -> None:
        outcome = CancelOutcome.of(number)
        if outcome is None:
            text = f"the service answered outcome {number}, which this SDK does not know"
        elif row in self._doubtful and outcome in _IN_DOUBT:
            text = f"{outcome} now, but an unanswered earlier attempt may have succeeded"
        else:
            self._settled[row] = Cancelled(outcome, due_ms)
            return
        self._settled[row] = RefusedError(Reason.CANCEL_UNKNOWN, text, outcome_known=False)

    def _row_failed(self, row: int, failure: Failure) -> bool:
        """Applies a failure to one message; returns whether it still waits."""
        verdict = failure.verdict
        if not verdict.outcome_known:
            self._doubtful.add(row)
        if verdict.retry:
            self._obstacle = failure
            return True
        self._settled[row] = failure.error(outcome_known=row not in self._doubtful)
        return False

    def _defective(self, text: str) -> Report:
        for row in self._waiting:
            self._settled[row] = CallFailedError(StatusCode.INTERNAL, text, outcome_known=False)
        self._forget_settled()
        return Report(healthy=True)

    def _forget_settled(self) -> None:
        self._waiting = [row for row in self._waiting if self._settled[row] is None]


def outcome_of(result: CancelResult) -> Cancelled:
    """Returns the outcome of one message, or raises the error."""
    if isinstance(result, DelaywheelError):
        raise result
    return result


def handles_of(handles: Iterable[Handle | str]) -> list[Handle]:
    """Parses handles.

    Raises:
        MessageInvalidError: One of them is malformed.
    """
    return [each if isinstance(each, Handle) else Handle.parse(each) for each in handles]


def in_calls(handles: Sequence[Handle]) -> list[list[pb.MessageRef]]:
    """Splits references to messages into those of single calls."""
    references = [pb.MessageRef(handle=str(handle)) for handle in handles]
    return [
        references[begin : begin + MESSAGES_AT_MOST]
        for begin in range(0, len(references), MESSAGES_AT_MOST)
    ]


def many_cancelled(handles: Sequence[Handle], results: Sequence[CancelResult]) -> ManyCancelled:
    """Sums up what became of many messages.

    Raises:
        DelaywheelError: The error of the first, if none of them has an outcome.
    """
    errors = [each for each in results if isinstance(each, DelaywheelError)]
    if errors and len(errors) == len(results):
        raise errors[0]
    by_outcome: dict[CancelOutcome | None, list[Handle]] = {}
    for handle, result in zip(handles, results, strict=True):
        outcome = None if isinstance(result, DelaywheelError) else result.outcome
        by_outcome.setdefault(outcome, []).append(handle)

    def of(outcome: CancelOutcome | None) -> tuple[Handle, ...]:
        return tuple(by_outcome.get(outcome, ()))

    return ManyCancelled(
        of(CancelOutcome.CANCELLED),
        of(CancelOutcome.TOO_LATE),
        of(None),
        of(CancelOutcome.RESCHEDULED),
        complete=not errors,
        already_delivered=of(CancelOutcome.ALREADY_DELIVERED),
        not_found=of(CancelOutcome.NOT_FOUND),
    )
