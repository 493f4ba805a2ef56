"""References to accepted messages: by handle, or by id and due."""

import uuid
from datetime import datetime

import uuid_utils

from delaywheel.errors import MessageInvalidError
from delaywheel.message import Handle, checked_id, unix_ms
from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb

Id = bytes | uuid.UUID | uuid_utils.UUID


def message_ref(
    handle: Handle | str | None, id_: Id | None, deliver_at: datetime | None
) -> pb.MessageRef:
    """Builds a reference from either a handle, or id and due.

    Raises:
        MessageInvalidError: Both are given, or neither, or one of them is malformed.
    """
    if handle is not None and id_ is None and deliver_at is None:
        known = handle if isinstance(handle, Handle) else Handle.parse(handle)
        return pb.MessageRef(handle=str(known))
    if handle is None and id_ is not None and deliver_at is not None:
        pair = pb.IdAndDue(id=checked_id(id_), due_ms=unix_ms(deliver_at))
        return pb.MessageRef(id_and_due=pair)
    raise MessageInvalidError(Reason.HANDLE_AMBIGUOUS, _what_is_wrong(handle, id_, deliver_at))


def _what_is_wrong(handle: object, id_: object, deliver_at: object) -> str:
    if handle is not None:
        return "Give a handle alone, or id and deliver_at instead of it."
    if id_ is not None:
        return "Give deliver_at too: an id alone does not say in which second the message is."
    if deliver_at is not None:
        return "Give id too: deliver_at alone may be of many messages."
    return "Say which message: give its handle, or its id and deliver_at."
