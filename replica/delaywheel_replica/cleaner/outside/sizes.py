"""How large Kafka counts a record."""

from __future__ import annotations

from delaywheel_replica.cleaner.outside.ports import Record
from delaywheel_replica.kafka_settings import BATCH_HEADER_BYTES


def batch_bytes(record: Record) -> int:
    """Returns how large Kafka counts an uncompressed record batch with only this record."""
    body = 1 + 1 + 1 + _sized(record.key) + _sized(record.value) + _varint(len(record.headers))
    for name, value in record.headers:
        body += _sized(name.encode()) + _sized(value)
    return BATCH_HEADER_BYTES + _varint(body) + body


def _sized(value: bytes | None) -> int:
    return _varint(-1) if value is None else _varint(len(value)) + len(value)


def _varint(number: int) -> int:
    """Returns the length of a zigzag varint in bytes."""
    zigzag = number * 2 if number >= 0 else -number * 2 - 1
    return max(1, (zigzag.bit_length() + 6) // 7)
