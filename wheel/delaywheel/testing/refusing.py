"""What the service in memory refuses of a request before it looks for messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

from delaywheel.errors import MessageInvalidError
from delaywheel.identity import NameInvalidError, WheelId, is_topic_name
from delaywheel.message import Handle
from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb

SECONDS: Final = 1 << 32
"""Beyond every second."""
MOST_NAMED: Final = 1_000
"""The most messages in one call that names them."""

_TOKEN: Final = re.compile(r"(\d{1,18}):(\d{1,18})")

NamedT = TypeVar("NamedT")
ResultT = TypeVar("ResultT")


class MemoryRefusal(Exception):
    """A message, or a call, is refused."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        text = f"{detail}. {reason.advice}" if detail else reason.advice
        self.error: Final = pb.Error(code=reason.code_number, reason=reason, message=text)


def each_named(
    named: Sequence[NamedT],
    answer: Callable[[NamedT], ResultT],
    refused: Callable[[pb.Error], ResultT],
) -> Iterator[ResultT]:
    """Yields what is answered of each message of a call; of a single one, raises its refusal."""
    if not named:
        raise MemoryRefusal(Reason.HANDLE_AMBIGUOUS, "No message is named")
    if len(named) > MOST_NAMED:
        raise MemoryRefusal(Reason.TOO_MANY_MESSAGES, f"{len(named):,}, at most {MOST_NAMED:,}")
    for one in named:
        try:
            yield answer(one)
        except MemoryRefusal as refusal:
            if len(named) == 1 and not isinstance(one, pb.HalfRef):
                raise
            yield refused(refusal.error)


def check_reference(ref: pb.MessageRef) -> None:
    """Raises MemoryRefusal for what names no message."""
    if ref.HasField("id_and_due"):
        check_named(ref.id_and_due)
        return
    if not ref.HasField("handle"):
        raise MemoryRefusal(Reason.HANDLE_AMBIGUOUS, "Neither a handle nor topic, id and due")
    try:
        handle = Handle.parse(ref.handle)
        WheelId.parse(handle.wheel)
    except (MessageInvalidError, NameInvalidError):
        raise MemoryRefusal(Reason.HANDLE_INVALID, ref.handle[:60]) from None
    if not 0 <= handle.slot < SECONDS:
        raise MemoryRefusal(Reason.HANDLE_INVALID, f"Second {handle.slot}")


def check_named(named: pb.IdAndDue | pb.HalfRef) -> None:
    """Raises MemoryRefusal for what is no id, or beside it no topic or due."""
    check_id(named.id)
    if not is_topic_name(named.topic):
        raise MemoryRefusal(Reason.TOPIC_INVALID, named.topic[:60])
    if not 0 <= named.due_ms // 1000 < SECONDS:
        raise MemoryRefusal(Reason.DUE_INVALID, f"Due {named.due_ms}")


def check_id(id_: bytes) -> None:
    """Raises MemoryRefusal for what is no id."""
    if len(id_) != 16:
        raise MemoryRefusal(Reason.ID_INVALID, f"An id of {len(id_)} bytes")


def check_filter(wanted: pb.Filter) -> None:
    """Raises MemoryRefusal for conditions of a search that no message can meet."""
    if wanted.HasField("topic") and not is_topic_name(wanted.topic):
        raise MemoryRefusal(Reason.TOPIC_INVALID, wanted.topic[:60])
    if wanted.HasField("id"):
        check_id(wanted.id)
    to_ms = wanted.to_ms if wanted.HasField("to_ms") else SECONDS * 1000
    if not 0 <= wanted.from_ms < to_ms <= SECONDS * 1000:
        raise MemoryRefusal(Reason.DUE_INVALID, f"From {wanted.from_ms} to {to_ms}")
    if wanted.HasField("header") and not wanted.header.name:
        raise MemoryRefusal(Reason.HEADER_INVALID)


def place_of(token: str) -> tuple[int, int]:
    """Returns due and seq of the last message of the page before, or raises MemoryRefusal."""
    if not token:
        return 0, 0
    match = _TOKEN.fullmatch(token)
    if match is None:
        raise MemoryRefusal(Reason.PAGE_TOKEN_INVALID)
    return int(match[1]), int(match[2])
