"""What a client reports to its trace and its spans; nothing, if it has none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from delaywheel.client.changing.named_changes import (
    CANCEL,
    ROLL_BACK,
    AnswerT,
    Change,
    HalfCommitted,
    NamedT,
    rolled_back,
)
from delaywheel.client.exchange.answers import Cancelled, Rescheduled
from delaywheel.client.lifetime import WRITTEN_AT_EXIT
from delaywheel.errors import DelaywheelError
from delaywheel.message import Handle, Result
from delaywheel_proto.v1 import delaywheel_pb2 as pb

if TYPE_CHECKING:  # a program that does not trace imports nothing of it
    from delaywheel.trace.reports import EventReports
    from delaywheel.ways.spans import Spans


class ClientReports:
    """Hands final answers on; thread-safe, and never waits but in `flush`."""

    def __init__(self, trace: EventReports | None, spans: Spans | None = None) -> None:
        self._trace: Final = trace
        self._spans: Final = spans
        if trace is not None:
            WRITTEN_AT_EXIT.add(self)

    def sent(self, results: Sequence[Result], began_s: float, attempts: int) -> None:
        """Reports messages that were sent together."""
        if self._trace is not None:
            self._trace.sent(results, monotonic() - began_s, attempts)
        if self._spans is not None:
            self._spans.sent(results, monotonic() - began_s, attempts)

    def changed(
        self,
        change: Change[NamedT, Any, Any, AnswerT],
        messages: Sequence[NamedT],
        answers: Sequence[AnswerT | DelaywheelError],
        began_s: float,
    ) -> None:
        """Reports changes that were asked for together."""
        if self._trace is not None:
            named = map(_named, messages)
            many = [
                (*one, *_came_to(change, answer))
                for one, answer in zip(named, answers, strict=True)
            ]
            self._trace.changed(change.name, many, monotonic() - began_s)

    def each(
        self, change: Change[NamedT, Any, Any, AnswerT]
    ) -> Callable[[NamedT, AnswerT | DelaywheelError, float], None] | None:
        """Returns what reports single changes, with when they began."""
        if self._trace is None:
            return None
        return lambda message, answer, began_s: self.changed(change, [message], [answer], began_s)

    def cancelled(self, found: Iterable[tuple[str, int, str]], began_s: float) -> None:
        """Reports messages that were found and cancelled: handle, due and outcome of each."""
        if self._trace is not None:
            many = []
            for text, due_ms, outcome in found:
                handle = Handle.parse(text)
                many.append((handle.topic, handle.id, due_ms, due_ms // 1000, outcome, None))
            self._trace.changed(CANCEL.name, many, monotonic() - began_s)

    def flush(self) -> None:
        """Waits until all is written, 2 s at most."""
        if self._trace is not None:
            self._trace.flush()


def _named(message: pb.MessageRef | pb.NewDue | pb.HalfRef) -> tuple[str, bytes, int | None, int]:
    """Returns topic, id and due of a message, and the second of that; a handle has no due."""
    if isinstance(message, pb.NewDue):
        message = message.message
    if isinstance(message, pb.MessageRef) and message.HasField("handle"):
        handle = Handle.parse(message.handle)
        return handle.topic, handle.id, None, handle.slot
    named = message.id_and_due if isinstance(message, pb.MessageRef) else message
    return named.topic, named.id, named.due_ms, named.due_ms // 1000


def _came_to(
    change: Change[Any, Any, Any, Any],
    answer: Cancelled | Rescheduled | HalfCommitted | DelaywheelError,
) -> tuple[str | DelaywheelError, int | None]:
    """Returns the outcome, and the due that the message has now, if it is another one."""
    if isinstance(answer, DelaywheelError):
        return answer, None
    if isinstance(answer, HalfCommitted):
        return str(answer.outcome), None
    if change is ROLL_BACK and isinstance(answer, Cancelled):
        return str(rolled_back(answer)), None
    return str(answer.outcome), answer.due_ms
