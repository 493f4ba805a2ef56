"""One unary question over all its attempts: get, search, describe, cancel what is found.

And references to the messages that it is about: by handle, or by topic, id and due.

Asking twice is harmless: reading changes nothing, and what a search finds again is reported as
cancelled.
"""

import uuid
from collections.abc import Callable
from datetime import datetime
from typing import Final, Generic, TypeVar

import uuid_utils

from delaywheel.client.exchange.answers import StoredMessage
from delaywheel.client.exchange.endpoints import Report
from delaywheel.client.exchange.retry import AttemptFailure, Obstacle
from delaywheel.errors import DelaywheelError, MessageInvalidError, TimedOutError
from delaywheel.message import Handle, checked_id, checked_topic, unix_ms
from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
AnswerT = TypeVar("AnswerT")

Id = bytes | uuid.UUID | uuid_utils.UUID

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

    Args:
        read: Makes the answer of a response.
        changes: An attempt may change something, as cancelling what is found does.
        changed: An earlier question of the same operation may have changed something.
    """

    def __init__(
        self,
        request: RequestT,
        read: Callable[[ResponseT], AnswerT],
        *,
        changes: bool = False,
        changed: bool = False,
    ) -> None:
        self._request: Final = request
        self._read: Final = read
        self._answer: AnswerT | None = None
        self._error: DelaywheelError | None = None
        self._obstacle: Final = Obstacle()
        self._changes: Final = changes
        self._doubtful = changed
        self.done = False
        """Whether the question is answered, refused or given up."""

    def answer(self) -> AnswerT:
        """Returns the answer, or raises the final error."""
        if self._error is not None:
            raise self._error
        assert self.done, "the answer is asked for before there is one"
        return self._answer  # type: ignore[return-value]  # None only where AnswerT allows it

    def request(self) -> RequestT:
        """Returns the request, which is the same in every attempt."""
        return self._request

    def answered(self, response: ResponseT) -> Report:
        """Takes the answer."""
        self.done = True
        try:
            self._answer = self._read(response)
        except DelaywheelError as error:
            self._error = error
        return Report(healthy=True)

    def failed(self, failure: AttemptFailure) -> Report:
        """Decides whether to ask again."""
        verdict = failure.verdict
        self._obstacle.met(failure)
        self._doubtful |= self._changes and not verdict.outcome_known
        if verdict.retry:
            return Report(
                healthy=failure.reason in OF_THE_CLUSTER,
                retry_delay_s=failure.retry_delay_s,
                elsewhere=True,
            )
        self.done = True
        self._error = failure.error(outcome_known=not self._doubtful)
        return Report(healthy=True)

    def give_up(self, why: str) -> None:
        """Gives up for lack of time."""
        self.done = True
        text = f"not answered: {why}{self._obstacle}"
        self._error = TimedOutError(text, outcome_known=not self._doubtful)


GetQuestion = Question[pb.GetMessageRequest, pb.GetMessageResponse, StoredMessage]


def get_question(message: pb.MessageRef, *, find_place: bool) -> GetQuestion:
    """Builds the question for a stored message and, if wanted, for its record in Kafka."""
    request = pb.GetMessageRequest(message=message, find_place=find_place)
    return Question(request, lambda response: StoredMessage.of(response.message))


def message_ref(
    handle: Handle | str | None, topic: str | None, id_: Id | None, due: datetime | None
) -> pb.MessageRef:
    """Builds a reference from either a handle, or topic, id and due.

    Raises:
        MessageInvalidError: Both are given, or neither, or one of them is malformed.
    """
    named = topic, id_, due
    if handle is not None and named == (None, None, None):
        known = handle if isinstance(handle, Handle) else Handle.parse(handle)
        return pb.MessageRef(handle=str(known))
    if handle is None and topic is not None and id_ is not None and due is not None:
        return pb.MessageRef(
            id_and_due=pb.IdAndDue(
                id=checked_id(id_), due_ms=unix_ms(due), topic=checked_topic(topic)
            )
        )
    raise MessageInvalidError(Reason.HANDLE_AMBIGUOUS, _what_is_wrong(handle, named))


def _what_is_wrong(handle: object, named: tuple[object, object, object]) -> str:
    if handle is not None:
        return "Give a handle alone, or topic, id and due instead of it."
    if named != (None, None, None):
        return "Give topic, id and due (--topic, --id, --due): a message is all three."
    return "Say which message: give its handle, or its topic, id and due (--topic, --id, --due)."
