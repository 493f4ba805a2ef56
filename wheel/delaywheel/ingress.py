"""Delay through Kafka alone: the ingress topic's name, and the headers of its records.

docs/INGRESS.md is the contract. A number is decimal text or a big-endian long of 8 bytes; other
header values are UTF-8 text.
"""

import json
import re
from enum import StrEnum
from typing import Final, NamedTuple

from delaywheel.record_headers import TTL_HEADER

TOPIC: Final = "dw-topic"
"""The topic that the message goes to. Required, except for a cancel."""

DELAY_MS: Final = "dw-delay-ms"
"""Milliseconds from the record's timestamp. Give exactly one of `DUES`."""

DELIVER_AT: Final = "dw-deliver-at"
"""Unix milliseconds, among `PLAUSIBLE_MS`. Give exactly one of `DUES`."""

LEVEL: Final = "dw-level"
"""The name of a level, counted from the record's timestamp. Give exactly one of `DUES`."""

ID: Final = "dw-id"
"""16 bytes, or a UUID as text with or without its dashes. Without it the id follows from the
record's place."""

PLACE_ID_PREFIX: Final = b"dwin"
"""How the ids begin that follow from records' places. The service takes no such id from anybody:
whoever had sent a message under it before would have the record dropped as a duplicate."""

_MOVED_PREFIX: Final = b"dwmv"

PARTITION: Final = "dw-partition"
"""A number: the partition that the message goes to."""

TIMESTAMP: Final = "dw-timestamp"
"""A number: the timestamp, in Unix milliseconds, of the delivered record."""

PLAUSIBLE_MS: Final = range(100_000_000_000, 100_000_000_000_000)
"""1973 to 5138. Seconds or microseconds of our time, taken for milliseconds, lie outside."""

CANCEL: Final = "dw-cancel"
"""The id, as in `ID`, of a message to cancel; `TOPIC` and `DELIVER_AT` are then that message's."""

COMMIT: Final = "dw-commit"
"""The id, as in `ID`, of a half message to commit; `TOPIC` is then the half's, and `DELIVER_AT` its
due, the end of its hold. `delaywheel.record_headers` has the headers that make a half."""

ANSWER: Final = "dw-half-answer"
"""What a group has answered about a half message: a `HalfAnswer`. `TOPIC`, `ID` and `DELIVER_AT`
name the half. It decides nothing; the service notes it among its outcomes."""

HEADERS_MOST: Final = 10_000
"""A record has at most so many headers: each costs, however short it is."""

HEADER_BYTES: Final = 8
"""What a header that is passed on counts besides its name and value."""

DUES: Final = (DELAY_MS, DELIVER_AT, LEVEL)
"""A record has exactly one of these."""


def id_to_send_again(id_: bytes) -> bytes:
    """Returns an id that the service takes: for one of a place, always the same other one."""
    if id_.startswith(PLACE_ID_PREFIX):
        return _MOVED_PREFIX + id_.removeprefix(PLACE_ID_PREFIX)
    return id_


class HalfAnswer(StrEnum):
    """What became of a half message that its group was asked about."""

    COMMITTED = "committed"
    """Its message is in the ingress topic, by the same transaction."""
    ROLLED_BACK = "rolled-back"
    UNDECIDED = "undecided"
    """Its letter is a dead letter of the group."""


def ingress_topic(cluster_id: str) -> str:
    """Returns the ingress topic of a cluster, `delaywheel-main-ingress` for `main`."""
    return f"delaywheel-{cluster_id}-ingress"


def halves_topic(cluster_id: str) -> str:
    """Returns the topic in which a cluster asks about half messages, `delaywheel-main-halves`."""
    return f"delaywheel-{cluster_id}-halves"


def trace_topic(cluster_id: str) -> str:
    """Returns the topic of a cluster's events, `delaywheel-main-trace`."""
    return f"delaywheel-{cluster_id}-trace"


def counts_topic(cluster_id: str) -> str:
    """Returns the topic of what programs have sent and consumed, `delaywheel-main-counts`."""
    return f"delaywheel-{cluster_id}-counts"


_RESERVED = re.compile(
    r"delaywheel-.+-(control|outcomes|dead|dead-marks|halves|trace|counts)"
    r"|.+-dead(-.+)?-marks"
    r"|__(consumer_offsets|transaction_state|share_group_state|cluster_metadata"
    r"|remote_log_metadata)"
)


def is_reserved_topic(name: str) -> bool:
    """Whether no message may go to a topic, as a program keeps its own records there.

    These are the topics of any delaywheel cluster, the marks of any dead letters, and Kafka's own.
    """
    return _RESERVED.fullmatch(name) is not None


class IngressLimits(NamedTuple):
    """What a cluster takes from its ingress topics.

    The leader says it in the metadata of the offsets of the consumer group that has the ingress
    topic's name: whoever sends records can know it without asking a node.

    Attributes:
        span_ms: How far ahead a due may be.
        message_bytes: The most that key, value and passed-on headers have together; each header
            counts `HEADER_BYTES` more than its name and value.
        ttl_header: The header that states a message's time to live; empty: there is none.
        takes_answers: Whether records with `ANSWER` are understood.
        read: The partitions that are read, or many of them; empty: all are.
        is_read: Whether any is: the setting `ingress` is on, and not all are cut off.
    """

    span_ms: int
    message_bytes: int
    ttl_header: str = TTL_HEADER
    takes_answers: bool = False
    read: tuple[int, ...] = ()
    is_read: bool = True

    def as_note(self) -> str:
        """Returns the metadata."""
        return json.dumps(self._asdict())

    @classmethod
    def of_note(cls, note: str | None) -> "IngressLimits | None":
        """Returns what such metadata says; None if it says nothing."""
        try:
            said = json.loads(note or "")
            ttl_header = str(said.get("ttl_header", TTL_HEADER))
            takes_answers = said.get("takes_answers") is True
            span_ms, message_bytes = int(said["span_ms"]), int(said["message_bytes"])
            read = tuple(map(int, said.get("read", ())))
            is_read = said.get("is_read") is not False
            return cls(span_ms, message_bytes, ttl_header, takes_answers, read, is_read)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None
