"""Cancels, reschedules and commits of named messages over all attempts. No I/O, no clock.

Each message is settled on its own, once:

| the message | then |
|---|---|
| has an outcome | settled with it, unless an earlier attempt makes it doubtful |
| is refused, and a retry may help | part of the next attempt |
| is refused for good | settled with the error |
| is not settled before the deadline | settled with TimedOutError |

A call for several callers is answered in part, and over with the first answer: what has no outcome
by then is let go (`Again`), and named in another call, after a back-off if it was refused. So
nobody's message keeps a call from ending. A call that a node refuses as a whole, or does not answer
in time, is made once more at another node; then its messages are let go too. So others have their
turn, and what nobody waits for any more is not named again. Only while no node answers a call goes
on.

Asking twice is harmless: the service finds what the first attempt did. But TOO_LATE and NOT_FOUND
say nothing of an earlier attempt whose answer was lost, or not waited for, and that may have
succeeded:

| in doubt, the answer is | then |
|---|---|
| TOO_LATE | asked again, a few times: once the due has passed, it is known what was first |
| TOO_LATE still, or NOT_FOUND | the error is CANCEL_UNKNOWN, or RESCHEDULE_UNKNOWN |
| anything else | settled with it |
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from grpc import StatusCode

from delaywheel.client.exchange.answers import (
    Cancelled,
    CancelOutcome,
    Rescheduled,
    RescheduleOutcome,
    RescheduleResult,
)
from delaywheel.client.exchange.endpoints import Report
from delaywheel.client.exchange.question import OF_THE_CLUSTER
from delaywheel.client.exchange.retry import AttemptFailure, Obstacle
from delaywheel.client.searching import ManyCancelled
from delaywheel.client.transport.port import Method
from delaywheel.errors import (
    CallFailedError,
    DelaywheelError,
    RefusedError,
    TimedOutError,
)
from delaywheel.message import Handle
from delaywheel.reasons import Reason
from delaywheel.transactions.half import CommitOutcome, RollbackOutcome
from delaywheel_proto.v1 import delaywheel_pb2 as pb

MESSAGES_AT_MOST: Final = 1_000
"""How many messages one call names."""


class HalfCommitted(NamedTuple):
    """What became of the commit of a half."""

    outcome: CommitOutcome


NamedT = TypeVar("NamedT", bound=pb.MessageRef | pb.NewDue | pb.HalfRef)
RequestT = TypeVar("RequestT")
ResultsT = TypeVar("ResultsT", bound="Results")
AnswerT = TypeVar("AnswerT", bound=Cancelled | Rescheduled | HalfCommitted)


class Results(Protocol):
    """A response with a result for each message that was named."""

    @property
    def results(self) -> Iterable[Any]:
        """In the order of the messages."""
        ...


class Again(NamedTuple):
    """A message that is to be named in another call.

    Attributes:
        retry_delay_s: Not before a back-off, of this length at least, as the service asks; None: it
            is being decided.
        is_doubtful: An attempt may have succeeded.
        is_late: It was TOO_LATE, in doubt.
        why: What kept it from being settled, for people; empty: nothing but time.
    """

    retry_delay_s: float | None = None
    is_doubtful: bool = True
    is_late: bool = False
    why: str = ""


OnSettled: TypeAlias = Callable[[int, AnswerT | DelaywheelError | Again], None]
"""Called with the number of a message, and what became of it."""


class Doubts(dict[int, int]):
    """Which messages of a call its attempts may have changed, while it goes on. Thread-safe.

    By number, each with how often it was TOO_LATE since. Who gives up before the call does
    withdraws the message: it is not named again, so what is known then stays true.

    Attributes:
        why: How the last attempt failed, for people; empty: none has.
    """

    def __init__(self, doubtful: Mapping[int, int] | None = None) -> None:
        """Takes those that an earlier call may have changed."""
        super().__init__(doubtful or {})
        self.why = ""
        self._lock: Final = Lock()
        self._withdrawn: Final[set[int]] = set()
        self._is_under_way = False

    def begin(self, numbers: list[int]) -> list[int]:
        """Begins an attempt; returns those that it names."""
        with self._lock:
            self._is_under_way = True
            return self._wanted(numbers)

    def end(self, numbers: list[int], why: str) -> list[int]:
        """Ends an attempt that has failed; returns those that are still waited for."""
        with self._lock:
            self._is_under_way, self.why = False, why
            return self._wanted(numbers)

    def withdraw(self, number: int) -> bool:
        """Has a message named no more; returns whether nothing can have changed it."""
        with self._lock:
            self._withdrawn.add(number)
            return not self._is_under_way and number not in self

    def _wanted(self, numbers: list[int]) -> list[int]:
        if not self._withdrawn:
            return numbers
        return [number for number in numbers if number not in self._withdrawn]


# The leader's node is asked in the end, whichever node is called.
_OF_THE_LEADERS_NODE: Final = frozenset({Reason.BACKPRESSURE, Reason.RESCHEDULES_BUSY})

ELSEWHERE_AT_MOST: Final = 1
"""How many other nodes a call asks that one refuses, or does not answer in time."""

_LATE: Final = frozenset({CancelOutcome.TOO_LATE, RescheduleOutcome.TOO_LATE})
LATE_ASKED_AT_MOST: Final = 8
"""Five seconds or so; a message of long ago stays TOO_LATE."""
_LATE_AGAIN_S: Final = 0.25

_IN_DOUBT: Final = frozenset(
    {
        CancelOutcome.TOO_LATE,
        CancelOutcome.NOT_FOUND,
        RescheduleOutcome.TOO_LATE,
        RescheduleOutcome.NOT_FOUND,
    }
)


@dataclass(frozen=True, slots=True)
class Change(Generic[NamedT, RequestT, ResultsT, AnswerT]):
    """What is done with the messages that a call names.

    Attributes:
        name: As events of a trace have it.
        request: Builds a call; True: it is answered in part.
        read: Returns of a message's result its answer, its error, or the number of an outcome that
            this SDK does not know.
        unknown: The reason if it is not known what became of a message.
        method: Of the service.
    """

    name: str
    request: Callable[[Sequence[NamedT], bool], RequestT]
    read: Callable[[Any], AnswerT | pb.Error | int]
    unknown: Reason
    method: "Method[RequestT, ResultsT]"


# By their numbers in responses; a newer service may have others.
_CANCELLED: Final = {
    pb.CancelOutcome.Value(f"CANCEL_OUTCOME_{outcome}"): Cancelled(outcome)
    for outcome in CancelOutcome
}
_RESCHEDULE_OUTCOMES: Final = {
    pb.RescheduleOutcome.Value(f"RESCHEDULE_OUTCOME_{outcome}"): outcome
    for outcome in RescheduleOutcome
}
_COMMITTED: Final = {
    pb.CommitOutcome.Value(f"COMMIT_OUTCOME_{outcome}"): HalfCommitted(outcome)
    for outcome in CommitOutcome
}


def _cancelled(result: pb.MessageCancelled) -> Cancelled | pb.Error | int:
    if result.HasField("error"):
        return result.error
    cancelled = _CANCELLED.get(result.outcome)
    if cancelled is None:
        return result.outcome
    if result.HasField("due_ms"):
        return Cancelled(cancelled.outcome, result.due_ms)
    return cancelled


def _rescheduled(result: pb.MessageRescheduled) -> Rescheduled | pb.Error | int:
    if result.HasField("error"):
        return result.error
    outcome = _RESCHEDULE_OUTCOMES.get(result.outcome)
    if outcome is None:
        return result.outcome
    if outcome is not RescheduleOutcome.RESCHEDULED:
        return Rescheduled(outcome)
    return Rescheduled(outcome, Handle.parse(result.handle), result.due_ms)


def _committed(result: pb.HalfCommitted) -> HalfCommitted | pb.Error | int:
    if result.HasField("error"):
        return result.error
    return _COMMITTED.get(result.outcome, result.outcome)


COMMIT: Final[Change[pb.HalfRef, pb.CommitRequest, pb.CommitResponse, HalfCommitted]] = Change(
    "COMMIT",
    lambda halves, _: pb.CommitRequest(halves=halves),
    _committed,
    Reason.WHEEL_LOST,
    lambda stub: stub.Commit,
)
CANCEL: Final[Change[pb.MessageRef, pb.CancelRequest, pb.CancelResponse, Cancelled]] = Change(
    "CANCEL",
    lambda messages, partly: pb.CancelRequest(messages=messages, partly=partly),
    _cancelled,
    Reason.CANCEL_UNKNOWN,
    lambda stub: stub.Cancel,
)
RESCHEDULE: Final[Change[pb.NewDue, pb.RescheduleRequest, pb.RescheduleResponse, Rescheduled]] = (
    Change(
        "RESCHEDULE",
        lambda messages, partly: pb.RescheduleRequest(messages=messages, partly=partly),
        _rescheduled,
        Reason.RESCHEDULE_UNKNOWN,
        lambda stub: stub.Reschedule,
    )
)
ROLL_BACK: Final = replace(CANCEL, name="ROLL_BACK")
"""Of halves, whose transactions are rolled back."""


class NamedChanges(Generic[NamedT, RequestT, ResultsT, AnswerT]):
    """Messages to be cancelled or rescheduled with one call; an `Exchange`."""

    def __init__(
        self,
        change: Change[NamedT, RequestT, ResultsT, AnswerT],
        messages: Sequence[NamedT],
        on_settled: OnSettled[AnswerT] | None = None,
        doubts: Doubts | None = None,
    ) -> None:
        """Prepares.

        Args:
            change: What is done with the messages.
            messages: Up to `MESSAGES_AT_MOST`.
            on_settled: The call is answered in part, and this is called with the number of each
                message.
            doubts: The messages that an earlier call named, and all that may be changed by this.
        """
        self._change: Final = change
        self._on_settled: Final = on_settled
        self._messages: Final = messages
        self._settled: Final[list[AnswerT | DelaywheelError | None]] = [None] * len(messages)
        self._waiting = list(range(len(messages)))
        self._doubts: Final = Doubts() if doubts is None else doubts
        self._failed_attempts = 0
        self._obstacle: Final = Obstacle()

    @property
    def done(self) -> bool:
        """Whether every message is settled."""
        return not self._waiting

    @property
    def results(self) -> list[AnswerT | DelaywheelError]:
        """What became of each message, in order; only once done, and without those let go."""
        return [result for result in self._settled if result is not None]

    def request(self) -> RequestT:
        """Builds the next attempt from messages that are not settled."""
        self._waiting = self._doubts.begin(self._waiting)
        messages = [self._messages[row] for row in self._waiting]
        return self._change.request(messages, self._on_settled is not None)

    def answered(self, response: ResultsT) -> Report:
        """Settles messages that have an outcome, or are refused for good."""
        results = [self._change.read(result) for result in response.results]
        if len(results) != len(self._waiting):
            return self._defective(f"{len(results)} results for {len(self._waiting)}")
        passing: list[AttemptFailure] = []
        waiting: list[int] = []
        for row, result in zip(self._waiting, results, strict=True):
            if not isinstance(result, pb.Error):
                if self._goes_on(row, result):
                    waiting.append(row)
                continue
            failure = AttemptFailure.of_error(result)
            if self._row_failed(row, failure):
                passing.append(failure)
                waiting.append(row)
                self._let_go(row, failure)
        self._waiting = waiting if self._on_settled is None else []
        if passing:
            return self._report(passing, healthy=True)
        if waiting:
            return Report(
                healthy=True, retry_delay_s=_LATE_AGAIN_S, elsewhere=True, everywhere=True
            )
        return Report(healthy=True)

    def failed(self, failure: AttemptFailure) -> Report:
        """Applies a failed attempt to each of its messages."""
        waiting = [row for row in self._waiting if self._row_failed(row, failure)]
        self._waiting = self._doubts.end(waiting, str(failure))
        report = Report(healthy=True)
        if failure.verdict.retry:  # whether or not anybody waits for a message by now
            # A failure that is the cluster's says nothing against this address.
            is_healthy = failure.reason in OF_THE_CLUSTER
            # BACKPRESSURE may be the leader's node's, and concern changes alone: nothing is known.
            healthy = None if failure.reason is Reason.BACKPRESSURE else is_healthy
            report = self._report([failure], healthy=healthy)
        has_timed_out = failure.code is StatusCode.DEADLINE_EXCEEDED
        self._failed_attempts += has_timed_out or failure.reason is not None
        if self._on_settled is not None and self._failed_attempts > ELSEWHERE_AT_MOST:
            # The call serves several callers: their messages go on in other calls.
            waiting, self._waiting = self._waiting, []
            for row in waiting:
                self._let_go(row, failure)
        return report

    def give_up(self, why: str) -> None:
        """Settles the remaining messages: no time is left for another attempt."""
        text = f"not answered: {why}{self._obstacle}"
        for row in self._waiting:
            self._settle(row, TimedOutError(text, outcome_known=row not in self._doubts))
        self._waiting = []

    def _report(self, passing: Sequence[AttemptFailure], *, healthy: bool | None) -> Report:
        delays_s = [failure.retry_delay_s or 0.0 for failure in passing]
        return Report(
            healthy=healthy,
            retry_delay_s=max(delays_s),
            elsewhere=True,
            everywhere=any(failure.reason in _OF_THE_LEADERS_NODE for failure in passing),
        )

    def _let_go(self, row: int, failure: AttemptFailure) -> None:
        if self._on_settled is not None:
            is_doubtful = row in self._doubts
            again = Again(failure.retry_delay_s or 0.0, is_doubtful=is_doubtful, why=str(failure))
            self._on_settled(row, again)

    def _settle(self, row: int, result: AnswerT | DelaywheelError) -> None:
        self._settled[row] = result
        if self._on_settled is not None:
            self._on_settled(row, result)

    def _goes_on(self, row: int, answer: AnswerT | int) -> bool:
        """Applies an answer to one message; returns whether it still waits."""
        if isinstance(answer, int):
            if not answer and self._on_settled is not None:
                self._on_settled(row, Again())
                return False
            text = f"the service answered outcome {answer}, which this SDK does not know"
        elif row in self._doubts and answer.outcome in _IN_DOUBT:
            if answer.outcome in _LATE and self._doubts[row] < LATE_ASKED_AT_MOST:
                self._doubts[row] += 1
                if self._on_settled is not None:
                    again = Again(_LATE_AGAIN_S, is_late=True, why=f"{answer.outcome} in doubt")
                    self._on_settled(row, again)
                return True
            text = f"{answer.outcome} now, but an unanswered earlier attempt may have succeeded"
        else:
            self._settle(row, answer)
            return False
        self._settle(row, RefusedError(self._change.unknown, text, outcome_known=False))
        return False

    def _row_failed(self, row: int, failure: AttemptFailure) -> bool:
        """Applies a failure to one message; returns whether it still waits."""
        verdict = failure.verdict
        if not verdict.outcome_known:
            self._doubts.setdefault(row, 0)
        if verdict.retry:
            self._obstacle.met(failure)
            return True
        self._settle(row, failure.error(outcome_known=row not in self._doubts))
        return False

    def _defective(self, text: str) -> Report:
        for row in self._waiting:
            self._settle(row, CallFailedError(StatusCode.INTERNAL, text, outcome_known=False))
        self._waiting = []
        return Report(healthy=True)


def outcome_of(result: AnswerT | DelaywheelError) -> AnswerT:
    """Returns the outcome of one message, or raises the error."""
    if isinstance(result, DelaywheelError):
        raise result
    return result


def rolled_back(cancelled: Cancelled) -> RollbackOutcome:
    """Returns what a rollback came to, which is a cancel."""
    is_cancelled = cancelled.outcome is CancelOutcome.CANCELLED
    return RollbackOutcome.ROLLED_BACK if is_cancelled else RollbackOutcome.LEFT_TO_CHECK


def in_calls(messages: Sequence[NamedT]) -> list[Sequence[NamedT]]:
    """Splits messages into those of single calls."""
    return [
        messages[begin : begin + MESSAGES_AT_MOST]
        for begin in range(0, len(messages), MESSAGES_AT_MOST)
    ]


def many_rescheduled(
    dues: Sequence[pb.NewDue], results: Sequence[Rescheduled | DelaywheelError]
) -> list[RescheduleResult]:
    """Returns what became of each message."""
    return [
        RescheduleResult(Handle.parse(due.message.handle), None, result)
        if isinstance(result, DelaywheelError)
        else RescheduleResult(Handle.parse(due.message.handle), result, None)
        for due, result in zip(dues, results, strict=True)
    ]


def many_cancelled(
    handles: Sequence[Handle], results: Sequence[Cancelled | DelaywheelError]
) -> ManyCancelled:
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
