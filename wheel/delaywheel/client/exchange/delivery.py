"""One batch of messages over all attempts to deliver it. No I/O, no clock.

Each message is settled on its own, once:

| the message was | then |
|---|---|
| accepted | settled with its handle |
| refused, and a retry may help | part of the next attempt, with the same id and due |
| refused for good | settled with RefusedError |
| in an attempt that failed | as the tables in `retry` say |
| not settled before the deadline | settled with TimedOutError |

A message becomes *doubtful* with the first attempt whose outcome is unknown: whatever it is refused
with later, its error says `outcome_known = False`. Only an acceptance ends that.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from grpc import StatusCode

from delaywheel.client.exchange.encoding import AnswerInvalidError, decode_answer, encode_request
from delaywheel.client.exchange.endpoints import Report
from delaywheel.client.exchange.retry import AttemptFailure, Obstacle
from delaywheel.errors import CallFailedError, DelaywheelError, RefusedError, TimedOutError
from delaywheel.message import Handle, Message, PastDue, Result
from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb


class Delivery:
    """A batch under way; an `Exchange`.

    Invariant: every row is either waiting or settled, never both. `doubtful` rows are those of
    `waiting` that may have been accepted already.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages: Final = messages
        self._settled: Final[list[Result | None]] = [None] * len(messages)
        self._waiting = list(range(len(messages)))
        self._attempted: Sequence[int] = ()
        self._doubtful: Final[set[int]] = set()
        self._most_rows = max(1, len(messages))
        self._obstacle: Final = Obstacle()
        self.attempts = 0
        """How many were begun."""

    def fix_dues(self, now_ms: int, levels: Mapping[str, int], past_due: PastDue) -> None:
        """Fixes the dues of messages that are sent for the first time; refuses some of them."""
        for row in self._waiting:
            try:
                self._messages[row].fix_due(now_ms, levels, past_due)
            except RefusedError as refused:
                self._settle(row, error=refused)
        self._forget_settled()

    @property
    def done(self) -> bool:
        """Whether every message is settled."""
        return not self._waiting

    @property
    def results(self) -> list[Result]:
        """The results, one for each message, in order; only once done."""
        results = [result for result in self._settled if result is not None]
        assert len(results) == len(self._messages), "results are asked for before all are settled"
        return results

    def request(self) -> pb.DelayProduceRequest:
        """Builds the next attempt from waiting messages, as many as the service accepts at once."""
        self.attempts += 1
        self._attempted = self._waiting[: self._most_rows]
        return encode_request([self._messages[row] for row in self._attempted])

    def answered(self, response: pb.DelayProduceResponse) -> Report:
        """Settles messages that were accepted or finally refused."""
        try:
            outcomes = decode_answer([self._messages[row] for row in self._attempted], response)
        except AnswerInvalidError as invalid:
            return self._defective(str(invalid))
        passing: list[AttemptFailure] = []
        checked = {self._attempted[row] for row in response.columns.id_checked}
        for row, outcome in zip(self._attempted, outcomes, strict=True):
            if isinstance(outcome, Handle):
                self._settle(row, handle=outcome, id_checked=row in checked)
            elif self._row_failed(row, outcome):
                passing.append(outcome)
        self._forget_settled()
        delays_s = [failure.retry_delay_s or 0.0 for failure in passing]
        healthy: bool | None = not passing
        if passing and all(failure.reason is Reason.BACKPRESSURE for failure in passing):
            healthy = None  # of single messages that is of their topics
        return Report(healthy=healthy, retry_delay_s=max(delays_s, default=None))

    def failed(self, failure: AttemptFailure) -> Report:
        """Applies a failed attempt to each of its messages."""
        self._obstacle.met(failure)
        rows = self._attempted
        if failure.verdict.split and len(rows) > 1:
            if not failure.verdict.outcome_known:
                self._doubtful.update(rows)
            self._most_rows = len(rows) // 2
            return Report(healthy=True)
        waiting = [self._row_failed(row, failure) for row in rows]
        self._forget_settled()
        return Report(healthy=not any(waiting), retry_delay_s=failure.retry_delay_s)

    def give_up(self, why: str) -> None:
        """Settles the remaining messages: no time is left for another attempt."""
        for row in self._waiting:
            error = TimedOutError(
                f"not acknowledged: {why}{self._obstacle}",
                outcome_known=row not in self._doubtful,
                failed=self._messages[row],
            )
            self._settle(row, error=error)
        self._forget_settled()

    def refuse(self, error: DelaywheelError) -> None:
        """Settles the remaining messages with the same error; no attempt was made."""
        for row in self._waiting:
            self._settle(row, error=error.about(self._messages[row]))
        self._forget_settled()

    def _defective(self, text: str) -> Report:
        for row in self._attempted:
            error = CallFailedError(
                StatusCode.INTERNAL, text, outcome_known=False, failed=self._messages[row]
            )
            self._settle(row, error=error)
        self._forget_settled()
        return Report(healthy=True)

    def _row_failed(self, row: int, failure: AttemptFailure) -> bool:
        """Applies a failure to one message; returns whether it still waits."""
        verdict = failure.verdict
        if not verdict.outcome_known:
            self._doubtful.add(row)
        if verdict.retry:
            self._obstacle.met(failure)
            return True
        outcome_known = row not in self._doubtful
        error = failure.error(outcome_known=outcome_known, failed=self._messages[row])
        self._settle(row, error=error)
        return False

    def _settle(
        self,
        row: int,
        *,
        handle: Handle | None = None,
        error: DelaywheelError | None = None,
        id_checked: bool = False,
    ) -> None:
        self._settled[row] = Result(self._messages[row], handle, error, id_checked)

    def _forget_settled(self) -> None:
        self._waiting = [row for row in self._waiting if self._settled[row] is None]
