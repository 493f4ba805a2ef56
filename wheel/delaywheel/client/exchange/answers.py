"""The answers of `cancel`, `reschedule` and `get`."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Self

from delaywheel.errors import DelaywheelError, RefusedError
from delaywheel.message import Handle
from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb


class CancelOutcome(StrEnum):
    """The outcome of a cancel."""

    CANCELLED = "CANCELLED"
    """It is never delivered."""
    ALREADY_DELIVERED = "ALREADY_DELIVERED"
    """It is in its topic, a dead letter, or deferred."""
    TOO_LATE = "TOO_LATE"
    """Due within the next 100 ms, or its second is finished and deleted; nothing was done."""
    NOT_FOUND = "NOT_FOUND"
    """It was never accepted."""
    RESCHEDULED = "RESCHEDULED"
    """It was rescheduled, and nothing was done: `Cancelled.due_ms` is its present due. Cancel it by
    its id and that due, or by the handle that the reschedule returned."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """What `Client.cancel` came to.

    Attributes:
        outcome: Whether it is cancelled.
        due_ms: The due that a message has which was rescheduled; None: it has no other one.
    """

    outcome: CancelOutcome
    due_ms: int | None = None


class RescheduleOutcome(StrEnum):
    """The outcome of a reschedule."""

    RESCHEDULED = "RESCHEDULED"
    """It has the due that is returned, and is delivered only then."""
    ALREADY_DELIVERED = "ALREADY_DELIVERED"
    """It is in its topic, a dead letter, or deferred."""
    TOO_LATE = "TOO_LATE"
    """Due within the next 100 ms, or its second is finished and deleted; nothing was done."""
    NOT_FOUND = "NOT_FOUND"
    """It was never accepted."""
    CANCELLED = "CANCELLED"
    """It was cancelled, and stays cancelled."""


@dataclass(frozen=True, slots=True)
class Rescheduled:
    """The result of `Client.reschedule`.

    Attributes:
        outcome: Whether it has another due.
        handle: The message's handle from now on; None: it has no other due.
        due_ms: Its due now: the one asked for, unless an earlier request gave it another one, or
            that due passed before it could be written; None: it has no other due.
    """

    outcome: RescheduleOutcome
    handle: Handle | None = None
    due_ms: int | None = None


class RescheduleResult(NamedTuple):
    """What became of one message of `Client.reschedule_many`: `rescheduled` or `error` is set.

    Attributes:
        handle: As it was named.
    """

    handle: Handle
    rescheduled: Rescheduled | None
    error: DelaywheelError | None

    def unwrap(self) -> Rescheduled:
        """Returns what it came to; raises the error if that is not known."""
        if self.rescheduled is not None:
            return self.rescheduled
        assert self.error is not None
        raise self.error


class MessageState(StrEnum):
    """The state of a stored message."""

    UNSPECIFIED = "UNSPECIFIED"
    """The service reports none, or one that is newer than this SDK."""
    PENDING = "PENDING"
    DONE = "DONE"
    """Delivered, deferred or a dead letter; which, only the outcomes topic knows."""
    CANCELLED = "CANCELLED"
    RESCHEDULED = "RESCHEDULED"
    """It has another due: `StoredMessage.rescheduled_to_ms`. Who asks by that finds it."""
    DELIVERED = "DELIVERED"
    """It is in its topic; known only for recently delivered messages."""
    DEAD_LETTERED = "DEAD_LETTERED"
    """It is in the dead-letter topic, see `StoredMessage.dead_reason`; likewise."""
    HELD = "HELD"
    """A half message; nobody has said yet what became of its transaction."""
    COMMITTED = "COMMITTED"
    """A half message that is committed and on its way. One with a delay stays so: its message has a
    due of its own, by which it is found."""
    ROLLED_BACK = "ROLLED_BACK"
    """A half message that is never delivered."""
    ASKED = "ASKED"
    """A half message that nobody committed in time; its group's checker is asked, or was."""
    UNDECIDED = "UNDECIDED"
    """A half message that no checker could decide: it is a dead letter of its group."""

    @classmethod
    def of(cls, number: int) -> Self:
        """Returns the state of a response."""
        names: dict[int, str] = {value: name for name, value in pb.MessageState.items()}
        name = names.get(number, "").removeprefix("MESSAGE_STATE_")
        return cls.__members__.get(name, cls.UNSPECIFIED)


@dataclass(frozen=True, slots=True)
class KafkaPlace:
    """The place of one record in Kafka."""

    topic: str
    partition: int
    offset: int

    @classmethod
    def of(cls, place: pb.KafkaPlace) -> Self:
        """Converts a protocol message."""
        return cls(place.topic, place.partition, place.offset)


@dataclass(frozen=True, slots=True)
class MessageContent:
    """What a stored message carries."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]

    @classmethod
    def of(cls, stored: pb.StoredMessage) -> Self:
        """Converts a protocol message."""
        return cls(
            key=stored.key if stored.HasField("key") else None,
            value=stored.value if stored.HasField("value") else None,
            headers=tuple(
                (header.name, header.value if header.HasField("value") else None)
                for header in stored.headers
            ),
        )


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message as it is stored in the service; see `Client.get`.

    Attributes:
        seq: The number of its frame in its wheel.
        partition: None: chosen from the key when it is forwarded.
        timestamp_ms: None: the time of forwarding.
        key_length_bytes: None: the key is null; likewise of the value.
        content: None: the caller may not read it (the right `read`). `key`, `value` and `headers`
            raise then, as null would be an untruth.
        dead_reason: Why it is a dead letter; None: it is not known to be one.
        place: The place of its record or dead letter; None: not asked for, or not found.
        rescheduled_to_ms: The due that it was given later; the state is then RESCHEDULED. None: it
            was not rescheduled.
    """

    handle: Handle
    state: MessageState
    due_ms: int
    accepted_at_ms: int
    wheel: str
    seq: int
    topic: str
    partition: int | None
    timestamp_ms: int | None
    key_length_bytes: int | None
    value_length_bytes: int | None
    headers_length_bytes: int
    content: MessageContent | None
    dead_reason: str | None = None
    place: KafkaPlace | None = None
    rescheduled_to_ms: int | None = None

    @classmethod
    def of(cls, stored: pb.StoredMessage) -> Self:
        """Converts a protocol message."""
        return cls(
            handle=Handle.parse(stored.handle),
            state=_state_of(stored),
            due_ms=stored.due_ms,
            accepted_at_ms=stored.accepted_at_ms,
            wheel=stored.wheel,
            seq=stored.seq,
            topic=stored.topic,
            partition=stored.partition if stored.HasField("partition") else None,
            timestamp_ms=stored.timestamp_ms if stored.HasField("timestamp_ms") else None,
            key_length_bytes=None if stored.key_length_bytes < 0 else stored.key_length_bytes,
            value_length_bytes=None if stored.value_length_bytes < 0 else stored.value_length_bytes,
            headers_length_bytes=stored.headers_length_bytes,
            content=None if stored.content_withheld else MessageContent.of(stored),
            dead_reason=stored.dead_reason or None,
            place=KafkaPlace.of(stored.place) if stored.HasField("place") else None,
            rescheduled_to_ms=stored.rescheduled_to_ms
            if stored.HasField("rescheduled_to_ms")
            else None,
        )

    @property
    def key(self) -> bytes | None:
        """The key.

        Raises:
            RefusedError: FORBIDDEN: the caller may not read messages of this topic; likewise below.
        """
        return self._readable.key

    @property
    def value(self) -> bytes | None:
        """The value."""
        return self._readable.value

    @property
    def headers(self) -> tuple[tuple[str, bytes | None], ...]:
        """The headers, in their order."""
        return self._readable.headers

    @property
    def _readable(self) -> MessageContent:
        if self.content is None:
            text = f"you have no right 'read' in topic {self.topic}: the content may not be read"
            raise RefusedError(Reason.FORBIDDEN, text)
        return self.content


def _state_of(stored: pb.StoredMessage) -> MessageState:
    """Returns the state; of what was given another due, the service says CANCELLED."""
    is_moved = stored.HasField("rescheduled_to_ms")
    if is_moved and stored.state == pb.MESSAGE_STATE_CANCELLED:
        return MessageState.RESCHEDULED
    return MessageState.of(stored.state)
