"""Dead letters and outcomes of ingress records that do not become messages.

A dead letter is the original record without the headers of an earlier dead letter, and with three
or four of ours appended. The dead-letter topic takes records as large as the largest message, and
an ingress record may be larger: then the letter omits its value, or its headers too, or its key;
`dw-dead-omitted` says so. The record itself stays where `dw-dead-origin` says, for as long
as Kafka keeps it.

| outcome | about |
|---|---|
| `ingress-dead-lettered` | a record whose dead letter is in the same transaction |
| `ingress-deferred` | a record that was due when it was read, and whose message comes back later |
| `ingress-deleted` | offsets that Kafka no longer had when they were to be read |
| `ingress-cut-off` | announced offsets after the end of a cut-off partition: accepted, or lost |
| `answered` | a half message that its group was asked about: what the group says that it has answered |
| `ingress-abandoned` | announced offsets of a topic that was recreated: accepted, or lost |
"""  # noqa: E501 - rows of a table

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from delaywheel.record_headers import DEAD_PREFIX, OMISSIONS, OMITTED_HEADER
from delaywheel_replica.cleaner.outside.ports import Record
from delaywheel_replica.core.ingress.place import IngressPlace
from delaywheel_replica.core.ingress.reading import CommittedRecord, Unfit
from delaywheel_replica.core.ingress.underway import (
    Deleted,
    DeletedRecords,
    GroupAnswered,
    Rejected,
)
from delaywheel_replica.core.protocol.control import IngressPartition, IngressRecord
from delaywheel_replica.core.protocol.reschedules import MessageKey
from delaywheel_replica.kafka_settings import KafkaNames

DETAIL_LENGTH = 200
"""Limit for the detail in a dead letter, in characters."""


def outcome_record(names: KafkaNames, key: bytes, fields: Mapping[str, object]) -> Record:
    """Returns the record of an outcome."""
    return Record(names.outcomes, key, json.dumps(fields, separators=(",", ":")).encode(), [])


def letter(names: KafkaNames, settled: Rejected, most_bytes: int) -> list[Record]:
    """Returns the dead letter of a record, of so many bytes at most, and its outcome."""
    record, request = settled.taken.record, settled.taken.request
    assert record is not None
    key = (
        None
        if isinstance(request, Unfit | DeletedRecords)
        else MessageKey(request.id, request.due_ms, request.topic)
    )
    *whole, smallest = _letters(names, record, settled.unfit)
    fitting = next((each for each in whole if each.batch_bytes <= most_bytes), smallest)
    return [fitting, dead_outcome(names, record.place, settled.unfit.reason.value, key)]


def dead_outcome(
    names: KafkaNames, origin: IngressPlace, reason: str, key: MessageKey | None
) -> Record:
    """Returns the outcome of a record that became a dead letter; its message, if known."""
    fields: dict[str, object] = {
        "outcome": "ingress-dead-lettered",
        "reason": reason,
        "origin": str(origin),
    }
    if key is not None:
        fields |= {"id": key.id.hex(), "due_ms": key.due_ms, "topic": key.topic}
    return _of_partition(names, origin.topic, origin.partition, fields)


def answered(names: KafkaNames, settled: GroupAnswered) -> Record:
    """Returns the outcome that says what a group has answered about a half."""
    id_, due_ms, topic, answer = settled.answered
    record = settled.taken.record
    assert record is not None
    fields: dict[str, object] = {
        "outcome": "answered",
        "answer": answer.value,
        "id": id_.hex(),
        "due_ms": due_ms,
        "topic": topic,
        "origin": str(record.place),
    }
    return outcome_record(names, id_, fields)


def deleted(names: KafkaNames, at: IngressPartition, gone: Deleted) -> Record:
    """Returns the outcome of offsets that were deleted before they were read."""
    first_offset, last_offset, is_cut_off = gone.deleted
    fields: dict[str, object] = {
        "outcome": "ingress-cut-off" if is_cut_off else "ingress-deleted",
        "topic": at[0],
        "partition": at[1],
        "first_offset": first_offset,
        "last_offset": last_offset,
    }
    return _of_partition(names, *at, fields)


def abandoned(names: KafkaNames, at: IngressPartition, record: IngressRecord) -> Record:
    """Returns the outcome of the announced records of a topic that was recreated."""
    fields = {
        "outcome": "ingress-abandoned",
        "topic": at[0],
        "partition": at[1],
        "topic_id": record.topic_id,
        "next_offset": record.next_offset,
        "announced": record.announced.to_json(),
    }
    return _of_partition(names, *at, fields)


def _letters(names: KafkaNames, record: CommittedRecord, unfit: Unfit) -> Iterator[Record]:
    """Yields the whole letter, then smaller ones, the last of which always fits."""
    headers: list[tuple[str, bytes | None]] = [
        (name.replace("\0", "\u2400"), value)
        for name, value in record.headers or ()
        if name and not name.startswith(DEAD_PREFIX)
    ]
    place = str(record.place).encode()
    detail = unfit.detail[:DETAIL_LENGTH].encode(errors="replace")
    unread = ("headers",) if record.headers is None else ()
    for left_out in OMISSIONS:
        omitted = tuple(dict.fromkeys([*left_out, *unread]))
        ours: list[tuple[str, bytes | None]] = [
            ("dw-dead-reason", unfit.reason.encode()),
            ("dw-dead-detail", detail),
            ("dw-dead-origin", place),
        ]
        if omitted:
            ours.append((OMITTED_HEADER, ",".join(omitted).encode()))
        if record.timestamp_ms >= 0:
            ours.append(("dw-dead-origin-timestamp", b"%d" % record.timestamp_ms))
        yield Record(
            names.dead,
            None if "key" in omitted else record.key,
            None if "value" in omitted else record.value,
            [*(() if "headers" in omitted else headers), *ours],
        )


def _of_partition(
    names: KafkaNames, topic: str, partition: int, fields: dict[str, object]
) -> Record:
    return outcome_record(names, f"{topic}/{partition}".encode(), fields)
