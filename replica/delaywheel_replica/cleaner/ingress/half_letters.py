"""Letters that ask about half messages: docs/PROTOCOL.md has their headers."""

from __future__ import annotations

from collections.abc import Iterable

from delaywheel.headers import decode_headers, encode_headers
from delaywheel.record_headers import (
    HALF_DELIVER_AT,
    HALF_GROUP,
    HALF_PARTITION,
    HALF_TIMESTAMP,
    HALF_TOPIC,
)
from delaywheel_replica.cleaner.due.rows import ABSENT
from delaywheel_replica.core.ingress.underway import Forwarded
from delaywheel_replica.kafka_settings import KafkaNames

HeaderPairs = list[tuple[str, bytes | None]]


def split_headers(
    headers: Iterable[tuple[str, bytes | None]],
) -> tuple[HeaderPairs, bytes | None, int | None]:
    """Returns a half's own headers, its group, and when its message is due; None: at its commit."""
    pairs = list(headers)
    ours = {name: value for name, value in pairs if name in {HALF_GROUP, HALF_DELIVER_AT}}
    own = [each for each in pairs if each[0] not in ours]
    deliver_at = ours.get(HALF_DELIVER_AT)
    return own, ours.get(HALF_GROUP), None if deliver_at is None else int(deliver_at)


def letter_headers(
    headers: Iterable[tuple[str, bytes | None]],
    topic: str,
    due_ms: int,
    partition: int,
    timestamp_ms: int,
) -> HeaderPairs:
    """Returns the headers of the letter about a half, whose hold ends at `due_ms`.

    Partition and timestamp are those of its message, or ABSENT.
    """
    own, group, deliver_at_ms = split_headers(headers)
    if deliver_at_ms is None:
        # Another due than the half's: one id and due is delivered once.
        deliver_at_ms = due_ms + 1
    own.append((HALF_GROUP, group))
    own.append((HALF_TOPIC, topic.encode()))
    own.append((HALF_DELIVER_AT, b"%d" % deliver_at_ms))
    if partition != ABSENT:
        own.append((HALF_PARTITION, b"%d" % partition))
    if timestamp_ms != ABSENT:
        own.append((HALF_TIMESTAMP, b"%d" % timestamp_ms))
    return own


def asked(half: Forwarded, names: KafkaNames) -> Forwarded:
    """Returns the letter about a half that is due when read: of its commit nothing is known."""
    message = half.message
    headers = letter_headers(
        decode_headers(message.headers),
        message.topic,
        message.due_ms,
        message.partition,
        message.timestamp_ms,
    )
    letter = message._replace(
        topic=names.halves,
        headers=encode_headers(headers),
        partition=ABSENT,
        timestamp_ms=ABSENT,
    )
    return half._replace(message=letter)
