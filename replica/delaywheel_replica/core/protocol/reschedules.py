"""Messages that were given another due: what is committed of them, and what is told on the way.

A message is its id and its due. To reschedule one is to withdraw (id, due) and to accept (id, to)
with the same content, both or neither: one control record decides it, and stands until frames say
the same (core/leader/rescheduling.py).

What the frames say: a cancel of (id, due) with a *mark* beside it, in the same frame: a cancel of a
message that nobody has, whose id is made of (id, due) and of the new due. So whoever finds the
cancel can tell that the message went elsewhere, and where to.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, Self

from delaywheel.identity import WheelId
from delaywheel_replica.core.protocol.fields import Fields
from delaywheel_replica.core.protocol.progress import Position

MessageKey = tuple[bytes, int]
"""Id and due of a message."""

MARK_HASH_BYTES: Final = 8
"""A mark begins with so many bytes, which the message alone gives it."""
_DUE_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Reschedule:
    """It is decided that a message has another due.

    Attributes:
        to_ms: the new one.
        place: where a copy of the message lies, in a frame <= V.
        passed: dues that it was given before, and that passed before a copy was there.
        is_written: copy and cancel are <= V; only what was passed is to be remembered yet.
    """

    to_ms: int
    place: Position
    passed: tuple[int, ...] = ()
    is_written: bool = False

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "to_ms": self.to_ms,
            "place": str(self.place),
            "passed": list(self.passed),
            "is_written": self.is_written,
        }

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Reads what `to_json` wrote.

        Raises:
            MalformedError: it is something else.
        """
        fields = document if isinstance(document, Fields) else Fields(document)
        return cls(
            fields.integer("to_ms"),
            Position.parse(fields.text("place")),
            tuple(int(due_ms) for due_ms in fields.items("passed")),
            fields.boolean("is_written"),
        )


@dataclass(frozen=True, slots=True)
class RescheduleWish:
    """Somebody wants a message to have another due.

    Attributes:
        key: the message.
        to_ms: the new due.
        place: where a copy of it lies.
    """

    key: MessageKey
    to_ms: int
    place: Position


@dataclass(frozen=True, slots=True)
class RescheduleWritten:
    """What was decided is in frames, which enough members hold.

    Attributes:
        key: the message.
        to_ms: the due of the copy.
        copy: the copy lies in this wheel, in a frame up to this seq.
        cancel: likewise the cancel with its mark; None: it cannot be written, for the second of
            the old due is sealed.
    """

    key: MessageKey
    to_ms: int
    copy: tuple[WheelId, int]
    cancel: tuple[WheelId, int] | None


def mark_of(key: MessageKey, to_ms: int) -> bytes:
    """The 16 bytes that stand beside the cancel of a message that went to another due."""
    return _hash(key) + to_ms.to_bytes(_DUE_BYTES, "big")


def marked_due_ms(key: MessageKey, ids: Iterable[bytes]) -> int | None:
    """Where the message went to, if one of these ids is its mark.

    A due that passed before its copy was there leaves a mark too: a later one was given then.
    """
    begin = _hash(key)
    return max(
        (int.from_bytes(id_[MARK_HASH_BYTES:], "big") for id_ in ids if id_.startswith(begin)),
        default=None,
    )


def _hash(key: MessageKey) -> bytes:
    id_, due_ms = key
    content = id_ + due_ms.to_bytes(_DUE_BYTES, "big")
    return blake2b(content, digest_size=MARK_HASH_BYTES, person=b"rescheduled").digest()
