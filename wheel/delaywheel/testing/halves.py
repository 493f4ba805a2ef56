"""Half messages of the service in memory: which are refused, what is sent, and what is asked."""

from __future__ import annotations

import re
from typing import Final

from delaywheel.ingress import halves_topic
from delaywheel.reasons import Reason
from delaywheel.record_headers import (
    DELIVERED_BY,
    GROUP_NAME,
    HALF_DELIVER_AT,
    HALF_GROUP,
    HALF_PARTITION,
    HALF_TIMESTAMP,
    HALF_TOPIC,
    LONGEST_HOLD_MS,
    is_reserved,
)
from delaywheel.testing.rows import OwnHeaders, SentMessage

CLUSTER: Final = "memory"
COMMIT_BEFORE_MS: Final = 100
"""A commit is left to the check if its half's hold ends within this time."""

_DUE: Final = re.compile(rb"[0-9]{1,15}")


def is_half(sent: SentMessage) -> bool:
    """Whether a message is a half."""
    return any(name == HALF_GROUP for name, _ in sent.headers)


def half_refusal(sent: SentMessage, now_ms: int) -> tuple[Reason, str] | None:
    """Returns why a message that `is_half` is refused; None: it is not."""
    ours = [(name, value or b"") for name, value in sent.headers if is_reserved(name)]
    given = dict(ours)
    if not given.keys() <= {HALF_GROUP, HALF_DELIVER_AT}:
        return Reason.HEADER_RESERVED, ""
    if len(ours) > len(given) or not GROUP_NAME.fullmatch(given[HALF_GROUP]):
        return Reason.HALF_INVALID, f"{HALF_GROUP} must be there once, and name a group"
    if sent.due_ms - now_ms > LONGEST_HOLD_MS:
        return Reason.HALF_INVALID, f"It is to be held for {sent.due_ms - now_ms:,} ms"
    text = given.get(HALF_DELIVER_AT)
    if text is not None and (not _DUE.fullmatch(text) or int(text) == sent.due_ms):
        return Reason.HALF_INVALID, f"{HALF_DELIVER_AT} must be Unix milliseconds, and another due"
    return None


def committed_message(sent: SentMessage, now_ms: int) -> SentMessage:
    """Returns the message of a committed half."""
    own = tuple((name, value) for name, value in sent.headers if not is_reserved(name))
    due_ms = max(now_ms, int(dict(sent.headers).get(HALF_DELIVER_AT) or now_ms))
    return sent._replace(headers=own, due_ms=due_ms)


def delivery_headers(sent: SentMessage, accepted_ms: int, wheel: str) -> OwnHeaders:
    """Returns what the service adds to each message."""
    return (
        ("dw-id", sent.id.hex().encode()),
        ("dw-due", b"%d" % sent.due_ms),
        ("dw-accepted", b"%d" % accepted_ms),
        (DELIVERED_BY, f"{CLUSTER}/{wheel}".encode()),
    )


def letter_of(sent: SentMessage, accepted_ms: int, wheel: str) -> SentMessage:
    """Returns the letter that asks about a half: docs/PROTOCOL.md."""
    ours = dict(sent.headers)
    told: list[tuple[str, bytes | None]] = [
        *((name, value) for name, value in sent.headers if not is_reserved(name)),
        *delivery_headers(sent, accepted_ms, wheel),
        (HALF_GROUP, ours[HALF_GROUP]),
        (HALF_TOPIC, sent.topic.encode()),
        (HALF_DELIVER_AT, ours.get(HALF_DELIVER_AT) or b"%d" % (sent.due_ms + 1)),
    ]
    for name, number in ((HALF_PARTITION, sent.partition), (HALF_TIMESTAMP, sent.timestamp_ms)):
        if number is not None:
            told.append((name, b"%d" % number))
    topic = halves_topic(CLUSTER)
    return sent._replace(topic=topic, headers=tuple(told), partition=0, timestamp_ms=None)
