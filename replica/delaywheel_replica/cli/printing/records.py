"""Formats records of Kafka: JSON for programs, a line for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from confluent_kafka import Message

from delaywheel.record_headers import COMMITTED, DELIVERED_HEADERS, headers_of
from delaywheel_replica.cli.printing.text import base64_of, bytes_text, one_line
from delaywheel_replica.quantities import about, iso


class _Delivery(NamedTuple):
    """What delaywheel's headers say; None: the record has no such header."""

    id: str | None
    due_ms: int | None
    accepted_at_ms: int | None
    wheel: str | None
    forwarded_ms: int | None
    committed_ms: int | None

    @property
    def lateness_ms(self) -> int | None:
        expected_ms = self.due_ms if self.committed_ms is None else self.committed_ms
        if expected_ms is None or self.forwarded_ms is None:
            return None
        return self.forwarded_ms - expected_ms


def shape(record: Message) -> dict[str, Any]:
    """Returns a record as JSON: bytes in base64, unknown values as null."""
    headers = headers_of(record)
    delivery = _delivery(record, headers or [])
    return {
        "topic": record.topic(),
        "partition": record.partition(),
        "offset": record.offset(),
        "timestamp_ms": _timestamp_ms(record),
        **delivery._asdict(),
        "lateness_ms": delivery.lateness_ms,
        "key": base64_of(record.key()),
        "value": base64_of(record.value()),
        "headers": None
        if headers is None
        else [{"name": name, "value": base64_of(value)} for name, value in headers],
    }


def line(record: Message) -> str:
    """Returns a record as one line: due, lateness, place, id, key, value, its own headers."""
    return "  ".join(_parts(record))


def _parts(record: Message) -> Iterator[str]:
    headers = headers_of(record)
    delivery = _delivery(record, headers or [])
    if delivery.due_ms is None:
        sent_ms = _timestamp_ms(record)
        yield "no due" if sent_ms is None else f"sent {iso(sent_ms)}, no due"
    else:
        yield f"due {iso(delivery.due_ms)}"
    if delivery.lateness_ms is not None:
        yield f"{about(delivery.lateness_ms)} late"
    yield f"{record.topic()}/{record.partition()}/{record.offset()}"
    if delivery.id is not None:
        yield f"id {one_line(delivery.id)}"
    yield f"key {bytes_text(record.key())}"
    yield f"value {bytes_text(record.value())}"
    if headers is None:
        yield "headers that cannot be decoded"
    for name, value in headers or []:
        if name not in DELIVERED_HEADERS or delivery.due_ms is None:
            yield f"header {one_line(name)} {bytes_text(value)}"


def _delivery(record: Message, headers: list[tuple[str, bytes | None]]) -> _Delivery:
    found = {name: value for name, value in headers if value is not None}
    due_ms = _number(found.get("dw-due"))
    forwarded_ms = _number(found.get("dw-forwarded"))
    if due_ms is not None and forwarded_ms is None:
        forwarded_ms = _timestamp_ms(record)
    return _Delivery(
        _text(found.get("dw-id")),
        due_ms,
        _number(found.get("dw-accepted")),
        _text(found.get("dw-wheel")),
        forwarded_ms,
        _number(found.get(COMMITTED)),
    )


def _timestamp_ms(record: Message) -> int | None:
    kind, timestamp_ms = record.timestamp()
    return timestamp_ms if kind else None


def _number(value: bytes | None) -> int | None:
    return int(value) if value and value.isdigit() and len(value) < 16 else None


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode(errors="replace")
