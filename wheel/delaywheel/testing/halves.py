"""Half messages of the service in memory: which are refused, what is sent, and what is asked."""

from __future__ import annotations

from typing import Final

from delaywheel.deadletters.topic import dead_letter_topic
from delaywheel.ingress import halves_topic
from delaywheel.record_headers import (
    DEAD_REASON,
    DELIVERED_BY,
    HALF_DELIVER_AT,
    HALF_GROUP,
    HALF_PARTITION,
    HALF_TIMESTAMP,
    HALF_TOPIC,
    is_reserved,
)
from delaywheel.testing.rows import OwnHeaders, SentMessage

CLUSTER: Final = "memory"
COMMIT_BEFORE_MS: Final = 100
"""A commit is left to the check if its half's hold ends within this time."""


def is_half(sent: SentMessage) -> bool:
    """Whether a message is a half."""
    return any(name == HALF_GROUP for name, _ in sent.headers)


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
        (HALF_GROUP, ours[HALF_GROUP]),
        (HALF_TOPIC, sent.topic.encode()),
        (HALF_DELIVER_AT, ours.get(HALF_DELIVER_AT) or b"%d" % (sent.due_ms + 1)),
    ]
    for name, number in ((HALF_PARTITION, sent.partition), (HALF_TIMESTAMP, sent.timestamp_ms)):
        if number is not None:
            told.append((name, b"%d" % number))
    told += delivery_headers(sent, accepted_ms, wheel)
    topic = halves_topic(CLUSTER)
    return sent._replace(topic=topic, headers=tuple(told), partition=0, timestamp_ms=None)


def dead_letter_of(
    sent: SentMessage, accepted_ms: int, wheel: str, reason: str, detail: str
) -> SentMessage:
    """Returns the dead letter of a message, as the service writes it."""
    told: list[tuple[str, bytes | None]] = [
        *sent.headers,
        *delivery_headers(sent, accepted_ms, wheel),
        (DEAD_REASON, reason.encode()),
        ("dw-dead-topic", sent.topic.encode()),
    ]
    numbers = (("dw-dead-partition", sent.partition), ("dw-dead-timestamp", sent.timestamp_ms))
    told += [(name, b"%d" % number) for name, number in numbers if number is not None]
    told.append(("dw-dead-detail", detail.encode()))
    topic = dead_letter_topic(CLUSTER)
    return sent._replace(topic=topic, headers=tuple(told), partition=None, timestamp_ms=None)
