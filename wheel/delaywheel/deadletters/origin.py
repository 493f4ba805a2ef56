"""Makes letters whole that lack a part of their record: it lies where their origin says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from confluent_kafka import Message

from delaywheel.deadletters.errors import DeadLettersError, DeadLettersReason
from delaywheel.deadletters.letter import Letter, Origin
from delaywheel.deadletters.reading import TopicReader
from delaywheel.record_headers import headers_of
from delaywheel.transactional import Outgoing

ORIGIN_MISSING = "ORIGIN_MISSING"
"""A letter lacks a part of its record, and the record cannot be read any more."""


class Origins:
    """The topics that incomplete letters come from."""

    def __init__(self, client: Mapping[str, Any], *, timeout_s: float) -> None:
        """Connects when first used."""
        self._client = client
        self._timeout_s = timeout_s
        self._readers: dict[str, TopicReader] = {}

    def whole(self, letter: Letter) -> Letter | str:
        """Returns the letter with all of its record, or why not; raises if Kafka is away."""
        if not letter.omitted:
            return letter
        origin = letter.origin
        lacks = " and ".join(sorted(letter.omitted))
        missing = f"{ORIGIN_MISSING}: the letter lacks its {lacks}, and"
        if origin is None:
            return f"{missing} has no origin"
        record = self._read(origin)
        if record is None:
            return f"{missing} {origin} is gone"
        headers = headers_of(record)
        if "headers" in letter.omitted and headers is None:
            return f"{missing} {origin} has a header whose name is not UTF-8"
        return letter.completed(Outgoing(origin.topic, record.key(), record.value(), headers or []))

    def close(self) -> None:
        """Closes the connections."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def _read(self, origin: Origin) -> Message | None:
        """Returns the record there; None if there is none, or another one."""
        reader = self._readers.get(origin.topic)
        if reader is None:
            reader = self._readers[origin.topic] = TopicReader(
                self._client, origin.topic, timeout_s=self._timeout_s
            )
        number, offset = origin.partition, origin.offset
        try:
            first, end = reader.bounds_of(number)
            if not first <= offset < end:
                return None
            found = list(reader.read({number: (offset, offset + 1)}))
        except DeadLettersError as error:
            if error.reason is DeadLettersReason.KAFKA_REFUSED:
                return None
            raise
        for message in found:
            if message.offset() == offset and _is_of(message, origin):
                return message
        return None


def _is_of(message: Message, origin: Origin) -> bool:
    """Whether a record is the one that the letter is of: a topic may have been recreated."""
    kind, timestamp_ms = message.timestamp()
    return origin.timestamp_ms is None or kind == 0 or timestamp_ms == origin.timestamp_ms
