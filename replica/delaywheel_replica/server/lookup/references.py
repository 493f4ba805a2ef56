"""Parses a reference to a message: a handle, or topic, id and due."""

from typing import NamedTuple, Self

from delaywheel.errors import MessageInvalidError
from delaywheel.identity import NameInvalidError, WheelId, is_topic_name
from delaywheel.message import Handle
from delaywheel.reasons import Reason
from delaywheel.storage.frames.columns import ID_LENGTH_BYTES
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.protocol.reschedules import MessageKey
from delaywheel_replica.quantities import counted
from delaywheel_replica.server.node.refusals import RequestRefusedError, quoted

SLOT_BEYOND = 1 << 32


class Reference(NamedTuple):
    """A reference to one message: a tuple, as a thousand come with a call, and each is hashed.

    Attributes:
        due_ms: None: a handle gives only the second.
        wheel: The wheel that accepted it, from a handle; None: no handle is given.
    """

    slot: int
    id: bytes
    topic: str
    due_ms: int | None
    wheel: WheelId | None = None

    @classmethod
    def of(cls, key: MessageKey, wheel: WheelId | None = None) -> Self:
        """Returns the reference to a message."""
        return cls(key.due_ms // 1000, key.id, key.topic, key.due_ms, wheel)

    def at(self, due_ms: int) -> MessageKey:
        """Returns the message that is meant, if it has this due."""
        return MessageKey(self.id, due_ms, self.topic)

    @property
    def key(self) -> MessageKey:
        """The message that is meant; only of a reference with a due."""
        assert self.due_ms is not None
        return self.at(self.due_ms)


def reference_of(message: pb.MessageRef) -> Reference:
    """Parses a reference.

    Refuses: HANDLE_INVALID, HANDLE_AMBIGUOUS, and as `named_by`.
    """
    if text := message.handle:  # nearly all are of this kind
        try:
            handle = Handle.parse(text)
            wheel = WheelId.parse(handle.wheel)
        except (MessageInvalidError, NameInvalidError) as error:
            raise RequestRefusedError(Reason.HANDLE_INVALID, quoted(text)) from error
        slot = _slot(handle.slot, Reason.HANDLE_INVALID)
        return Reference(slot, handle.id, handle.topic, None, wheel)
    match message.WhichOneof("ref"):
        case "handle":
            raise RequestRefusedError(Reason.HANDLE_INVALID, quoted(text))
        case "id_and_due":
            return named_by(message.id_and_due)
        case _:
            raise RequestRefusedError(
                Reason.HANDLE_AMBIGUOUS, "Neither a handle nor topic, id and due"
            )


def named_by(named: pb.IdAndDue | pb.HalfRef) -> Reference:
    """Returns the reference to a message that is named in full.

    Refuses: ID_INVALID, DUE_INVALID, TOPIC_INVALID.
    """
    if len(named.id) != ID_LENGTH_BYTES:
        raise RequestRefusedError(Reason.ID_INVALID, f"An id of {counted(len(named.id), 'byte')}")
    if not is_topic_name(named.topic):
        raise RequestRefusedError(Reason.TOPIC_INVALID, quoted(named.topic))
    slot = _slot(named.due_ms // 1000, Reason.DUE_INVALID)
    return Reference(slot, named.id, named.topic, named.due_ms)


def _slot(slot: int, reason: Reason) -> int:
    if not 0 <= slot < SLOT_BEYOND:
        raise RequestRefusedError(reason, f"Second {slot}")
    return slot
