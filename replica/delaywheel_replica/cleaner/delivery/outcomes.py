"""The records that Kafka gets for a message: itself, its dead letter, or its outcome.

Forwarded messages carry four headers behind the caller's own: `dw-id` (32 hex digits), `dw-due` and
`dw-accepted` (decimal Unix milliseconds), `dw-wheel` (`<cluster>/<wheel>`: several clusters may
deliver to one topic). The record's timestamp is the time of forwarding, unless the caller set one:
then a fifth header, `dw-forwarded`, has the time of forwarding. For a message that was in no wheel,
`dw-wheel` is `<cluster>/ingress`: it went out directly, and was accepted at that time. A dead
letter is the message as it would have been forwarded, with headers that say why it was not, so that
it can be sent again from there. The outcomes topic gets one JSON record for each message that was
done without being forwarded, and one for each range of lost frames; its key is the message's id, or
the first frame's name. Ingress records that were in no wheel are reported in records of other kinds
(ingress/letters.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from functools import lru_cache

from delaywheel.ingress import DELIVER_AT, TOPIC, id_to_send_again
from delaywheel.record_headers import HALF_TOPIC, OF_DEFERRAL, last_of
from delaywheel_replica.cleaner.due.given_up import LostFrames
from delaywheel_replica.cleaner.due.rows import (
    Direct,
    Dropped,
    DueMessage,
    DueRows,
    HalfState,
    MessageOutcome,
    MessageSource,
)
from delaywheel_replica.cleaner.ingress.letters import DETAIL_LENGTH, dead_outcome, outcome_record
from delaywheel_replica.cleaner.outside.ports import ANY_PARTITION, NOW, Record
from delaywheel_replica.core.ingress.place import IngressPlace
from delaywheel_replica.core.protocol.reschedules import MessageKey
from delaywheel_replica.kafka_settings import KafkaNames

_ID_DIGITS = 32


class DeadReason(StrEnum):
    """Why a message went to the dead-letter topic."""

    TOPIC_MISSING = "TOPIC_MISSING"
    TOPIC_ILLEGAL = "TOPIC_ILLEGAL"
    TOPIC_UNAVAILABLE = "TOPIC_UNAVAILABLE"
    """It accepted nothing for as long as was waited: the message may be sent again once it does."""
    PARTITION_UNKNOWN = "PARTITION_UNKNOWN"
    MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE"
    KEY_MISSING = "KEY_MISSING"
    """The topic is compacted."""
    TIMESTAMP_REFUSED = "TIMESTAMP_REFUSED"
    """The topic does not accept a timestamp that old, or that far ahead."""
    EXPIRED = "EXPIRED"
    """Its time to live ended before it could be forwarded."""
    HALVES_UNAVAILABLE = "HALVES_UNAVAILABLE"
    """The halves topic could not be used: the letter asks its group when it is replayed."""
    REFUSED = "REFUSED"
    """Kafka refused this message; the detail says how."""


_NO_WHEEL = "ingress"
_TO_INGRESS = frozenset({HalfState.PASSED_ON, HalfState.DEFERRED})


@lru_cache(maxsize=1024)
def _wheel_text(cluster_id: str, wheel: MessageSource) -> bytes:
    name = _NO_WHEEL if isinstance(wheel, Direct) else str(wheel)
    return f"{cluster_id}/{name}".encode()


def forwarded(names: KafkaNames, rows: DueRows, now_ms: int) -> Iterator[Record]:
    """Yields the records for messages that go to their topics."""
    if not len(rows):
        return
    records = rows.records
    ids = records["id"].tobytes().hex().encode()
    wheels = [("dw-wheel", _wheel_text(names.cluster_id, wheel)) for wheel in rows.wheels]
    accepted = {ms: ("dw-accepted", b"%d" % ms) for ms in records["accepted_at_ms"].tolist()}
    each_message = zip(
        rows.contents(),
        range(0, len(ids), _ID_DIGITS),
        records["due_ms"].tolist(),
        records["accepted_at_ms"].tolist(),
        records["wheel"].tolist(),
        records["half"].tolist(),
        strict=True,
    )
    for content, at, due_ms, accepted_at_ms, wheel, half in each_message:
        record = Record._make(content)
        headers = record.headers
        of_deferral: list[tuple[str, bytes | None]] = []
        if half == HalfState.DEFERRED:
            of_deferral = headers[-len(OF_DEFERRAL) :]
            del headers[-len(OF_DEFERRAL) :]
        headers += (
            ("dw-id", ids[at : at + _ID_DIGITS]),
            ("dw-due", b"%d" % due_ms),
            accepted[accepted_at_ms],
            wheels[wheel],
        )
        if record.timestamp_ms != NOW:
            headers.append(("dw-forwarded", b"%d" % now_ms))
        if half in _TO_INGRESS:  # there, these count only behind the last `dw-wheel`
            again = id_to_send_again(bytes.fromhex(ids[at : at + _ID_DIGITS].decode()))
            headers += (("dw-id", again.hex().encode()), *of_deferral)
        yield record


def dead_letter(
    names: KafkaNames, message: DueMessage, reason: DeadReason, detail: str | None
) -> list[Record]:
    """Returns the dead letter of a message, and its outcome."""
    headers: list[tuple[str, bytes | None]] = [
        *message.headers,
        ("dw-id", message.id.hex().encode()),
        ("dw-due", b"%d" % message.due_ms),
        ("dw-accepted", b"%d" % message.accepted_at_ms),
        ("dw-wheel", _wheel_text(names.cluster_id, message.wheel)),
        ("dw-dead-reason", reason.encode()),
        ("dw-dead-topic", message.topic.encode()),
    ]
    if message.partition != ANY_PARTITION:
        headers.append(("dw-dead-partition", b"%d" % message.partition))
    if message.timestamp_ms != NOW:
        headers.append(("dw-dead-timestamp", b"%d" % message.timestamp_ms))
    if detail:
        headers.append(("dw-dead-detail", detail[:DETAIL_LENGTH].encode()))
    # With the present time: the dead-letter topic may refuse the message's own timestamp as well.
    letter = Record(names.dead, message.key, message.value, headers)
    if isinstance(message.wheel, Direct):
        origin = IngressPlace(message.wheel.topic, message.wheel.partition, message.seq)
        key = MessageKey(message.id, message.due_ms, _destination(message))
        return [letter, dead_outcome(names, origin, reason.value, key)]
    outcome = {"outcome": "dead-lettered", "reason": reason.value, **_place(message)}
    outcome["topic"] = _destination(message)
    return [letter, outcome_record(names, message.id, outcome)]


def dropped(names: KafkaNames, rows: Iterable[Dropped]) -> Iterator[Record]:
    """Yields outcomes of messages that are done without being forwarded."""
    for row in rows:
        outcome: dict[str, object] = {"outcome": row.outcome.name.lower()}
        if row.outcome is MessageOutcome.DUPLICATE:
            outcome["content_differs"] = row.content_differs
        yield outcome_record(names, row.id, outcome | _place(row))


def lost(names: KafkaNames, runs: Iterable[LostFrames]) -> Iterator[Record]:
    """Yields outcomes of lost frames: one record for each range."""
    for run in runs:
        outcome = {
            "outcome": "lost",
            "reason": run.reason,
            "wheel": str(run.wheel),
            "seq": run.seq,
            "last_seq": run.last_seq,
            "slot": run.slot,
            "last_slot": run.last_slot,
            "messages": run.messages,
        }
        yield outcome_record(names, f"{run.wheel}/{run.seq}".encode(), outcome)


def committed(names: KafkaNames, rows: DueRows) -> Iterator[Record]:
    """Yields outcomes of halves that were committed, and whose messages are due later."""
    return _come_back(names, rows, "committed")


def deferred(names: KafkaNames, rows: DueRows) -> Iterator[Record]:
    """Yields outcomes of messages that come back later."""
    return _come_back(names, rows, "deferred")


def _come_back(names: KafkaNames, rows: DueRows, name: str) -> Iterator[Record]:
    """Yields outcomes of messages that are in the ingress topic, for `until_ms`.

    Of one that was in no wheel no acceptance ends, but its record does.
    """
    for message in rows:
        until_ms = int(last_of(message.headers, DELIVER_AT) or 0)
        told: dict[str, object] = {"topic": _destination(message), "until_ms": until_ms}
        if isinstance(message.wheel, Direct):
            origin = IngressPlace(message.wheel.topic, message.wheel.partition, message.seq)
            named = {"id": message.id.hex(), "due_ms": message.due_ms, "origin": str(origin)}
            outcome = {"outcome": f"ingress-{name}", **named, **told}
        else:
            outcome = {"outcome": name, **_place(message), **told}
        yield outcome_record(names, message.id, outcome)


def topic_asked_for(message: DueMessage) -> str:
    """Returns the topic of a message, also on its way to the ingress topic.

    A letter about a half is another message, in a topic of its own: the half is asked about again.
    """
    named = last_of(message.headers, TOPIC)
    return message.topic if named is None else named.decode()


def _destination(message: DueMessage) -> str:
    """Returns the topic that a message was accepted for: a half may go to a topic of ours."""
    named = last_of(message.headers, HALF_TOPIC)
    return topic_asked_for(message) if named is None else named.decode()


def _place(message: DueMessage | Dropped) -> dict[str, object]:
    return {
        "id": message.id.hex(),
        "due_ms": message.due_ms,
        "accepted_at_ms": message.accepted_at_ms,
        "topic": message.topic,
        "wheel": str(message.wheel),
        "seq": message.seq,
        "row": message.row,
    }
