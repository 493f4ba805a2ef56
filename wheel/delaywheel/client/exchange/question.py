"""One unary question over all its attempts: get, search, reschedule, describe.

Asking twice is harmless: reading changes nothing, and a message is rescheduled once or not at all.
But the answer to a second request says nothing about a first one whose reply was lost: that one may
have succeeded. After such an attempt, only an answer that rules this out settles the question.
"""

from collections.abc import Callable
from typing import Final, Generic, TypeVar

from delaywheel.client.exchange.answers import (
    Rescheduled,
    RescheduleOutcome,
    StoredMessage,
)
from delaywheel.client.exchange.endpoints import Report
from delaywheel.client.exchange.retry import Failure
from delaywheel.errors import DelaywheelError, RefusedError, TimedOutError
from delaywheel.message import Handle
from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
AnswerT = TypeVar("AnswerT")

# These keep a node from answering, but not from accepting messages.
OF_THE_CLUSTER: Final = frozenset(
    {
        Reason.NO_LEADER,
        Reason.NOT_UP_TO_DATE,
        Reason.CANCEL_UNKNOWN,
        Reason.RESCHEDULE_UNKNOWN,
        Reason.RESCHEDULES_BUSY,
    }
)


class Question(Generic[RequestT, ResponseT, AnswerT]):
    """A question until it is answered; an `Exchange`.

    `read` converts a response into the answer; its second argument says whether an earlier attempt
    may have had an effect.
    """

    def __init__(self, request: RequestT, read: Callable[[ResponseT, bool], AnswerT]) -> None:
        self._request: Final = request
        self._read: Final = read
        self._answer: AnswerT | None = None
        self._error: DelaywheelError | None = None
        self._obstacle: Failure | None = None
        self._doubtful = False
        self._done = False

    @property
    def done(self) -> bool:
        """Whether the question is answered, refused or given up."""
        return self._done

    def answer(self) -> AnswerT:
        """Returns the answer, or raises the final error."""
        if self._error is not None:
            raise self._error
        assert self._done, "the answer is asked for before there is one"
        return self._answer  # type: ignore[return-value]  # None only where AnswerT allows it

    def request(self) -> RequestT:
        """Returns the request, which is the same in every attempt."""
        return self._request

    def answered(self, response: ResponseT) -> Report:
        """Takes the answer."""
        self._done = True
        try:
            self._answer = self._read(response, self._doubtful)
        except DelaywheelError as error:
            self._error = error
        return Report(healthy=True)

    def failed(self, failure: Failure) -> Report:
        """Decides whether to ask again."""
        verdict = failure.verdict
        self._obstacle = failure
        self._doubtful = self._doubtful or not verdict.outcome_known
        if verdict.retry:
            return Report(
                healthy=failure.reason in OF_THE_CLUSTER,
                retry_delay_s=failure.retry_delay_s,
                elsewhere=True,
                everywhere=failure.reason is Reason.RESCHEDULES_BUSY,
            )
        self._done = True
        self._error = failure.error(outcome_known=not self._doubtful)
        return Report(healthy=True)

    def give_up(self, why: str) -> None:
        """Gives up for lack of time."""
        last = f"; last: {self._obstacle}" if self._obstacle else ""
        self._done = True
        self._error = TimedOutError(f"not answered: {why}{last}", outcome_known=not self._doubtful)


GetQuestion = Question[pb.GetMessageRequest, pb.GetMessageResponse, StoredMessage]


def get_question(message: pb.MessageRef, *, find_place: bool) -> GetQuestion:
    """Builds the question for a stored message and, if wanted, for its record in Kafka."""
    return Question(pb.GetMessageRequest(message=message, find_place=find_place), _read_get)


def search_question(
    request: pb.SearchRequest,
) -> Question[pb.SearchRequest, pb.SearchResponse, pb.SearchResponse]:
    """Builds the question for a page of pending messages."""
    return Question(request, lambda response, _doubtful: response)


def cancel_many_question(
    request: pb.CancelManyRequest,
) -> Question[pb.CancelManyRequest, pb.CancelManyResponse, pb.CancelManyResponse]:
    """Builds the question that cancels a page of messages; a retry reports what was done before."""
    return Question(request, lambda response, _doubtful: response)


def reschedule_question(
    message: pb.MessageRef, deliver_at_ms: int
) -> Question[pb.RescheduleRequest, pb.RescheduleResponse, Rescheduled]:
    """Builds the question that gives a message another due."""
    return Question(
        pb.RescheduleRequest(message=message, deliver_at_ms=deliver_at_ms), _read_reschedule
    )


def _read_reschedule(response: pb.RescheduleResponse, doubtful: bool) -> Rescheduled:
    names: dict[int, str] = {value: name for name, value in pb.RescheduleOutcome.items()}
    name = names.get(response.outcome, "").removeprefix("RESCHEDULE_OUTCOME_")
    outcome = RescheduleOutcome.__members__.get(name)
    in_doubt = {RescheduleOutcome.TOO_LATE, RescheduleOutcome.NOT_FOUND}
    if outcome is None or (doubtful and outcome in in_doubt):
        raise RefusedError(
            Reason.RESCHEDULE_UNKNOWN,
            f"{name or response.outcome}, but an unanswered earlier attempt may have succeeded",
            outcome_known=False,
        )
    if outcome is not RescheduleOutcome.RESCHEDULED:
        return Rescheduled(outcome)
    return Rescheduled(outcome, Handle.parse(response.handle), response.due_ms)


def _read_get(response: pb.GetMessageResponse, _doubtful: bool) -> StoredMessage:
    return StoredMessage.of(response.message)
