"""Writes to the topics of a service by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from confluent_kafka import Message, Producer

from support.kafka.read_committed import headers_of
from support.seeded.books import Sent

Header = tuple[str, str | bytes | None]


def own_headers(message: Sent, accepted_at_ms: int) -> list[Header]:
    """The headers that the service would add to a message."""
    return [
        ("dw-id", message.id.hex().encode()),
        ("dw-due", b"%d" % message.due_ms),
        ("dw-accepted", b"%d" % accepted_at_ms),
        ("dw-wheel", message.wheel.encode()),
    ]


class Hand:
    """Writes records, and returns when they are visible.

    Attributes:
        written: how many, by topic.
    """

    def __init__(self, bootstrap: str) -> None:
        """Connects when it is needed."""
        self.written: Counter[str] = Counter()
        self._producer = Producer({"bootstrap.servers": bootstrap})

    def write(self, topic: str, headers: Iterable[Header], *, at_ms: int = 0) -> None:
        """Writes a record with these headers, at the present time unless one is given."""
        self._write(topic, b"by hand", list(headers), at_ms)

    def write_again(self, record: Message) -> None:
        """Writes a record that was read again."""
        topic = record.topic()
        assert topic is not None
        self._write(topic, record.value(), list(headers_of(record)), at_ms=0)

    def _write(self, topic: str, value: bytes | None, headers: list[Header], at_ms: int) -> None:
        self._producer.produce(topic, value, headers=headers, timestamp=at_ms)
        assert self._producer.flush(60) == 0
        self.written[topic] += 1


def sent_as(record: Message) -> Sent:
    """The message that became a forwarded record."""
    headers = _texts(record)
    id_, due_ms = bytes.fromhex(headers["dw-id"]), int(headers["dw-due"])
    wheel = headers["dw-wheel"].partition("/")[2]
    return Sent(str(record.topic()), id_, due_ms, wheel)


def accepted_at_ms_of(record: Message) -> int:
    """When a forwarded record was accepted."""
    return int(_texts(record)["dw-accepted"])


def _texts(record: Message) -> dict[str, str]:
    return {name: (value or b"").decode() for name, value in headers_of(record)}
