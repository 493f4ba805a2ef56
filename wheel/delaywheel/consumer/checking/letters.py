"""Letters about half messages: what they say, and the headers that send a committed half.

docs/PROTOCOL.md has the letter and the answers; its tables are the contract.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from delaywheel import ingress
from delaywheel.consumer.leaving import UnreadableError
from delaywheel.consumer.message import ReceivedMessage
from delaywheel.consumer.records import RecordHeaders
from delaywheel.record_headers import (
    HALF_DELIVER_AT,
    HALF_PARTITION,
    HALF_TIMESTAMP,
    HALF_TOPIC,
    is_reserved,
    number_of,
)

_ID: Final = re.compile(rb"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class AskedHalf:
    """A half message whose sender did not say what became of its local transaction.

    Attributes:
        due_ms: The end of its hold; with the id, of 16 bytes, it names the half.
        deliver_at_ms: When the message is due, if the transaction is committed, in Unix ms.
        attempt: How often it was asked about, with this time: 1 the first time.
        last_error: Why it was UNKNOWN the last time, as far as the check said it.
    """

    id: bytes
    due_ms: int
    topic: str
    key: bytes | None = field(repr=False)
    value: bytes | None = field(repr=False)
    headers: RecordHeaders = field(repr=False)
    deliver_at_ms: int
    attempt: int
    last_error: str | None


def half_of(letter: ReceivedMessage) -> AskedHalf:
    """Reads a letter; raises UnreadableError if it is none."""
    id_ = letter.header("dw-id") or b""
    topic = letter.header(HALF_TOPIC)
    if not _ID.fullmatch(id_) or topic is None:
        raise UnreadableError("no letter about a half: it lacks dw-id or dw-half-topic", letter)
    return AskedHalf(
        id=bytes.fromhex(id_.decode()),
        due_ms=_number(letter, "dw-due"),
        topic=topic.decode(errors="replace"),
        key=letter.key,
        value=letter.value,
        headers=[(name, value) for name, value in letter.headers if not is_reserved(name)],
        deliver_at_ms=_number(letter, HALF_DELIVER_AT),
        attempt=letter.attempt,
        last_error=letter.last_error,
    )


def committed_headers(letter: ReceivedMessage) -> RecordHeaders:
    """Returns the headers that send the message of a committed half: with its id, and its due.

    That is another message than the half, which has the same id with the end of its hold as due.
    """
    headers = [(name, value) for name, value in letter.headers if not is_reserved(name)]
    for name, told in (
        (ingress.TOPIC, HALF_TOPIC),
        (ingress.ID, "dw-id"),
        (ingress.DELIVER_AT, HALF_DELIVER_AT),
        (ingress.PARTITION, HALF_PARTITION),
        (ingress.TIMESTAMP, HALF_TIMESTAMP),
    ):
        value = letter.header(told)
        if value is not None:
            headers.append((name, value))
    return headers


def _number(letter: ReceivedMessage, name: str) -> int:
    number = number_of(letter.header(name))
    if number is None:
        raise UnreadableError(f"no letter about a half: {name} is no number", letter)
    return number
