"""Messages that were given another due: what is committed about them, and what nodes exchange.

A message is its id and its due. Rescheduling it withdraws (id, due) and accepts (id, to) with the
same content, both or neither: one control record decides it, and stays until frames express the
same (core/leader/rescheduling.py).

The frames contain a cancel of (id, due) with a *mark* beside it, in the same frame: a cancel of a
message that does not exist, whose id is made of (id, due) and of the new due. So a reader that
finds the cancel knows that the message was rescheduled, and to which due.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Final

from delaywheel.identity import WheelId
from delaywheel_replica.core.protocol.codec import MalformedError, Text
from delaywheel_replica.core.protocol.progress import Position

_KEY: Final = re.compile(r"([0-9a-f]{32})/([1-9][0-9]{0,15})")


def _key_text(key: tuple[bytes, int]) -> str:
    id_, due_ms = key
    return f"{id_.hex()}/{due_ms}"


def _parse_key(text: str) -> tuple[bytes, int]:
    match = _KEY.fullmatch(text)
    if match is None:
        raise MalformedError(f"{text!r} is not <id>/<due>")
    return bytes.fromhex(match[1]), int(match[2])


MessageKey = Annotated[tuple[bytes, int], Text(_key_text, _parse_key)]
"""Id and due of a message."""

MARK_HASH_BYTES: Final = 8
"""A mark begins with this many bytes, which depend on the message alone."""
_DUE_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Reschedule:
    """The decision that a message has another due.

    Attributes:
        to_ms: The new due.
        place: Where a copy of the message lies, in a frame <= V.
        passed: Dues that it was given before, and that passed before a copy was there.
        is_written: Copy and cancel are <= V; only `passed` must still be remembered.
    """

    to_ms: int
    place: Position
    passed: tuple[int, ...] = ()
    is_written: bool = False


@dataclass(frozen=True, slots=True)
class RescheduleWish:
    """A request to give a message another due.

    Attributes:
        key: The message.
        to_ms: The new due.
        place: Where a copy of it lies.
        looked: Up to which seq of each wheel the server has read that no cancel of it exists.
    """

    key: MessageKey
    to_ms: int
    place: Position
    looked: tuple[tuple[WheelId, int], ...] = ()


@dataclass(frozen=True, slots=True)
class RescheduleWritten:
    """Reports that a decision is in frames, which enough members hold.

    Attributes:
        key: The message.
        to_ms: The due of the copy.
        copy: The copy lies in this wheel, in a frame up to this seq.
        cancel: Likewise the cancel with its mark; None: it cannot be written, because the second of
            the old due is sealed.
    """

    key: MessageKey
    to_ms: int
    copy: tuple[WheelId, int]
    cancel: tuple[WheelId, int] | None


def mark_of(key: MessageKey, to_ms: int) -> bytes:
    """Returns the 16 bytes that accompany the cancel of a rescheduled message."""
    return _hash(key) + to_ms.to_bytes(_DUE_BYTES, "big")


def mark_begin(key: MessageKey) -> bytes:
    """The bytes with which every mark of a message begins."""
    return _hash(key)


def marked_due_ms(key: MessageKey, ids: Iterable[bytes]) -> int | None:
    """Returns the due that a message was rescheduled to, if one of these ids is its mark.

    A due that passed before its copy was there leaves a mark too: the message was given a later due
    then.
    """
    begin = _hash(key)
    return max(
        (int.from_bytes(id_[MARK_HASH_BYTES:], "big") for id_ in ids if id_.startswith(begin)),
        default=None,
    )


def known_due_ms(stands: Reschedule | None, marked_ms: int | None) -> int | None:
    """Where a message went to, by its record and by its mark, of which either may be the newer.

    None: it has no other due; or it was lost with its frame before it had one.
    """
    is_lost = stands is None or stands.to_ms in stands.passed
    recorded_ms = None if stands is None or is_lost else stands.to_ms
    return max((due for due in (recorded_ms, marked_ms) if due is not None), default=None)


def _hash(key: MessageKey) -> bytes:
    id_, due_ms = key
    content = id_ + due_ms.to_bytes(_DUE_BYTES, "big")
    return blake2b(content, digest_size=MARK_HASH_BYTES, person=b"rescheduled").digest()
