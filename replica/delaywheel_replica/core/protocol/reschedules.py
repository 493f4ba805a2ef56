"""Messages that were given another due: what is committed about them, and what nodes exchange.

docs/PROTOCOL.md, "Another due", says what it means, and what a *mark* beside a cancel is. A reader
that finds the cancel knows by it that the message was rescheduled, and to which due; of several
marks the latest due is the newest, as a message is put off to later ones alone.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, NamedTuple, Self

from delaywheel.identity import WheelId
from delaywheel_replica.core.protocol.codec import MalformedError, Natural
from delaywheel_replica.core.protocol.progress import Position

_KEY: Final = re.compile(r"([0-9a-f]{32})/([1-9][0-9]{0,15})/([a-zA-Z0-9._-]+)")


class MessageKey(NamedTuple):
    """What a message is: whatever has the same three is the same message, whoever sent it."""

    id: bytes
    due_ms: int
    topic: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses `<id>/<due>/<topic>`, or raises MalformedError."""
        match = _KEY.fullmatch(text)
        if match is None:
            raise MalformedError(f"{text!r} is not <id>/<due>/<topic>")
        return cls(bytes.fromhex(match[1]), int(match[2]), match[3])

    def __str__(self) -> str:
        return f"{self.id.hex()}/{self.due_ms}/{self.topic}"

    def at(self, due_ms: int) -> Self:
        """Returns the message that this one is with another due."""
        return self._replace(due_ms=due_ms)


MARK_HASH_BYTES: Final = 8
"""A mark begins with this many bytes, which depend on the message alone."""
_DUE_BYTES: Final = 8
_DUE_BITS: Final = 48
"""How many of a mark's bits are a due: the years up to 10889. In the others, earlier releases count
how often w had been set back."""


@dataclass(frozen=True, slots=True)
class Reschedule:
    """The decision that a message has another due.

    Attributes:
        place: Where a copy of the message lies, in a frame <= V.
        passed: Dues that it was given before, and that passed before a copy was there.
        is_written: Copy and cancel are <= V; only `passed` must still be remembered.
        chosen_ms: Nothing, like `set_backs`: earlier releases expect them.
    """

    to_ms: int
    place: Position
    passed: tuple[int, ...] = ()
    is_written: bool = False
    chosen_ms: int | None = None
    set_backs: Natural = 0


@dataclass(frozen=True, slots=True)
class RescheduleProposal:
    """A request to give a message, of which a copy lies at this place, another due.

    `looked` says up to which seq of each wheel the server has read that no cancel of it exists.
    """

    key: MessageKey
    to_ms: int
    place: Position
    looked: tuple[tuple[WheelId, int], ...] = ()


@dataclass(frozen=True, slots=True)
class RescheduleWritten:
    """Reports that a decision is in frames, which enough members hold.

    Attributes:
        copy: The copy lies in this wheel, in a frame up to this seq.
        cancel: Likewise the cancel with its mark; None: it cannot be written, because the second of
            the old due is sealed.
    """

    key: MessageKey
    to_ms: int
    copy: tuple[WheelId, int]
    cancel: tuple[WheelId, int] | None


def mark_begin(key: MessageKey) -> bytes:
    """The bytes with which every mark of a message begins."""
    content = key.id + key.due_ms.to_bytes(_DUE_BYTES, "big") + key.topic.encode()
    return blake2b(content, digest_size=MARK_HASH_BYTES, person=b"rescheduled").digest()


def mark_of(key: MessageKey, to_ms: int) -> bytes:
    """Returns the 16 bytes that accompany the cancel of a message that was given this due."""
    return mark_begin(key) + to_ms.to_bytes(_DUE_BYTES, "big")


def marked_due(key: MessageKey, ids: Iterable[bytes]) -> int | None:
    """Returns the due that a message was rescheduled to, if one of these ids is its mark.

    A due that passed before its copy was there leaves a mark too.
    """
    begin = mark_begin(key)
    marks = (int.from_bytes(id_[MARK_HASH_BYTES:], "big") for id_ in ids if id_.startswith(begin))
    newest = max(marks, default=None)
    return None if newest is None else newest % (1 << _DUE_BITS)


def known_due_ms(record: Reschedule | None, marked_ms: int | None) -> int | None:
    """Where a message went to, by its record and by its mark, of which either may be the newer.

    None: it has no other due; or it was lost with its frame before it had one.
    """
    is_lost = record is None or record.to_ms in record.passed
    recorded_ms = None if record is None or is_lost else record.to_ms
    return max((due_ms for due_ms in (recorded_ms, marked_ms) if due_ms is not None), default=None)
