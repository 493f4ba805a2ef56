"""Parses a reference to a message: a handle, or id and due."""

from typing import NamedTuple, Self

from delaywheel.errors import MessageInvalidError
from delaywheel.identity import NameInvalidError, WheelId
from delaywheel.message import Handle
from delaywheel.reasons import Reason
from delaywheel.storage.frames.columns import ID_LENGTH_BYTES
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.quantities import counted
from delaywheel_replica.server.node.refusals import RequestRefusedError, quoted

SLOT_BEYOND = 1 << 32


class Reference(NamedTuple):
    """A reference to one message: a tuple, as a thousand come with a call, and each is hashed.

    Attributes:
        id: Its 16 bytes.
        due_ms: Its due; None: a handle gives only the second.
        wheel: The wheel that accepted it, from a handle; None: only id and due are given.
    """

    slot: int
    id: bytes
    due_ms: int | None
    wheel: WheelId | None = None

    @classmethod
    def of(cls, id_: bytes, due_ms: int, wheel: WheelId | None = None) -> Self:
        """Returns the reference to the message with this id and due."""
        return cls(due_ms // 1000, id_, due_ms, wheel)


def reference_of(message: pb.MessageRef) -> Reference:
    """Parses a reference.

    Raises:
        RequestRefusedError: HANDLE_INVALID, HANDLE_AMBIGUOUS, ID_INVALID, DUE_INVALID.
    """
    if text := message.handle:  # nearly all are of this kind
        return _of_handle(text)
    match message.WhichOneof("ref"):
        case "handle":
            raise RequestRefusedError(Reason.HANDLE_INVALID, quoted(text))
        case "id_and_due":
            both = message.id_and_due
            if len(both.id) != ID_LENGTH_BYTES:
                raise RequestRefusedError(
                    Reason.ID_INVALID, f"An id of {counted(len(both.id), 'byte')}"
                )
            return Reference(_slot(both.due_ms // 1000, Reason.DUE_INVALID), both.id, both.due_ms)
        case _:
            raise RequestRefusedError(Reason.HANDLE_AMBIGUOUS, "Neither a handle nor id and due")


def _of_handle(text: str) -> Reference:
    try:
        handle = Handle.parse(text)
        wheel = WheelId.parse(handle.wheel)
    except (MessageInvalidError, NameInvalidError) as error:
        raise RequestRefusedError(Reason.HANDLE_INVALID, quoted(text)) from error
    return Reference(_slot(handle.slot, Reason.HANDLE_INVALID), handle.id, None, wheel)


def _slot(slot: int, reason: Reason) -> int:
    if not 0 <= slot < SLOT_BEYOND:
        raise RequestRefusedError(reason, f"Second {slot}")
    return slot
