"""References to the messages that are to be changed, as the protocol has them."""

from collections.abc import Iterable, Sequence
from datetime import datetime

from delaywheel.errors import MessageInvalidError
from delaywheel.levels import Duration
from delaywheel.message import ClockNs, Handle, due_ms_of
from delaywheel.reasons import Reason
from delaywheel.transactions.verdict import HalfName
from delaywheel_proto.v1 import delaywheel_pb2 as pb


def handles_of(handles: Iterable[Handle | str]) -> list[Handle]:
    """Parses handles.

    Raises:
        MessageInvalidError: One of them is malformed.
    """
    return [each if isinstance(each, Handle) else Handle.parse(each) for each in handles]


def references_of(handles: Sequence[Handle]) -> list[pb.MessageRef]:
    """Returns references to messages by their handles."""
    return [pb.MessageRef(handle=str(handle)) for handle in handles]


def new_due(
    message: pb.MessageRef, to: datetime | None, delay: Duration | None, clock: ClockNs
) -> pb.NewDue:
    """Returns a message with the due that it is to be given.

    Raises:
        MessageInvalidError: Both are given, or neither, or it has no time zone.
    """
    if (to is None) == (delay is None):
        reason = Reason.DUE_MISSING if to is None else Reason.DUE_AMBIGUOUS
        raise MessageInvalidError(reason, "Give the new due: either `to` or `delay`.")
    due_ms = due_ms_of(clock(), delay, to, None)
    assert due_ms is not None  # no level is given
    return pb.NewDue(message=message, deliver_at_ms=due_ms)


def new_dues(
    dues: Iterable[tuple[Handle | str, datetime | Duration]], clock: ClockNs
) -> list[pb.NewDue]:
    """Returns messages with the dues that they are to be given.

    Raises:
        MessageInvalidError: A handle is malformed, or a due has no time zone.
    """
    pairs = list(dues)
    named = references_of(handles_of(handle for handle, _ in pairs))
    return [
        new_due(message, when, None, clock)
        if isinstance(when, datetime)
        else new_due(message, None, when, clock)
        for message, (_, when) in zip(named, pairs, strict=True)
    ]


def half_reference(half: HalfName, handle: Handle) -> pb.HalfRef:
    """Returns the reference to a half that was accepted."""
    return pb.HalfRef(id=half.id, due_ms=half.due_ms, wheel=handle.wheel, topic=handle.topic)


def half_named(half: HalfName, handle: Handle) -> pb.MessageRef:
    """Returns the reference by which a half is cancelled."""
    named = pb.IdAndDue(id=half.id, due_ms=half.due_ms, topic=handle.topic)
    return pb.MessageRef(id_and_due=named)
