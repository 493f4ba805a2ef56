"""The JSON of reading commands, made from protocol messages, whose names it keeps.

Bytes are base64, null stays null; states are lower case; absent fields are null, never left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from google.protobuf.message import Message

from delaywheel.ingress import id_to_send_again
from delaywheel.record_headers import HALF_DELIVER_AT, HALF_GROUP
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.cli.printing.text import base64_of
from delaywheel_replica.quantities import iso

_NULL_IF_EMPTY: Final = frozenset(
    {
        "access_fault",
        "certificate_fault",
        "failure",
        "insecure",
        "kafka",
        "kafka_error",
        "role",
        "settings_differ",
        "silent",
        "told_by",
        "unchecked",
        "undeletable_file",
    }
)
_BY_NAME: Final = frozenset({"Level", "QuotaRefusals", "ReasonCount", "WaitingCalls"})


def cluster(answer: pb.DescribeClusterResponse) -> dict[str, Any]:
    """Returns the document of `delaywheel status --json`."""
    fields = of(answer)
    del fields["trace_topic"], fields["counts_topic"]
    return {"cluster": fields.pop("cluster_id"), **fields, "limits": of(answer.limits)}


def of(message: Message) -> dict[str, Any]:
    """Returns what a message that tells of the cluster has, by the names of its fields.

    What has a name in its first field becomes one object by these names.
    """
    return {field.name: _value(message, field) for field in message.DESCRIPTOR.fields}


def _value(message: Message, field: Any) -> Any:
    # Two classes of descriptors have what is used of them, one of them is private.
    value = getattr(message, field.name)
    if field.is_repeated:
        if field.message_type is None:
            return list(value)
        is_by_name = field.message_type.name in _BY_NAME
        return dict(map(_named, value)) if is_by_name else [*map(of, value)]
    if (field.has_presence and not message.HasField(field.name)) or (
        field.name in _NULL_IF_EMPTY and not value
    ):
        return None
    if isinstance(value, pb.Error):
        return {"reason": value.reason, "message": value.message}
    if isinstance(value, Message):
        return of(value)
    enum = field.enum_type
    return value if enum is None else _state(enum.values_by_number[value].name)


def _named(message: Message) -> tuple[str, Any]:
    (_, name), *others = of(message).items()
    return name, others[0][1] if len(others) == 1 else dict(others)


def node_change(change: pb.NodeChange) -> dict[str, Any]:
    """Returns the document of `delaywheel node replace --json` and `node remove --json`."""
    return {
        "node": change.node,
        "storage_before": change.storage_before or None,
        "storage": change.storage or None,
        "wheels": [
            {
                "wheel": row.wheel,
                "frames_at_risk": row.frames,
                "alone_messages": row.alone_messages,
                "alone_on": row.alone_on or None,
            }
            for row in change.wheels
        ],
    }


def replica_state(row: pb.Replica) -> str:
    """Returns the state of a member's copy of a wheel."""
    return _state(pb.ReplicaState.Name(row.state))


def slot_list(answer: pb.ListSlotsResponse) -> dict[str, Any]:
    """Returns the document of `delaywheel slots --json`."""
    fields = of(answer)
    del fields["bucket_seconds"]
    return {**fields, "slots": [slot_row(row, answer.progress) for row in answer.slots]}


def pending(row: pb.SlotRow, progress: pb.Progress) -> int:
    """Returns how many messages of a second are pending, as the status counts them.

    A second is pending as a whole, until all of it is done. A cancel takes one message away; a
    message that was sent or cancelled twice is counted as two until its due.
    """
    done_slot = (progress.due_ms + 1) // 1000
    return 0 if row.slot < done_slot else max(0, row.messages - row.cancels)


def slot_row(row: pb.SlotRow, progress: pb.Progress) -> dict[str, Any]:
    """Returns one second of `delaywheel slots --json`, or one line of `--ndjson`."""
    return {**of(row), "pending": pending(row, progress)}


def stored_message(row: pb.StoredMessage, *, with_content: bool) -> dict[str, Any]:
    """Returns one message of `delaywheel slot --json` or `delaywheel get --json`.

    Of a message that may not be read it has `content_withheld` in place of the content.
    """
    document: dict[str, Any] = {
        "handle": row.handle,
        "id": row.id.hex(),
        "due_ms": row.due_ms,
        "due": iso(row.due_ms),
        "topic": row.topic,
        "partition": if_set(row, "partition"),
        "timestamp_ms": if_set(row, "timestamp_ms"),
        "accepted_at_ms": row.accepted_at_ms,
        "wheel": row.wheel,
        "seq": row.seq,
        "state": _state(pb.MessageState.Name(row.state)),
        "dead_reason": row.dead_reason or None,
        "place": if_set(row, "place", of),
        "rescheduled_to_ms": if_set(row, "rescheduled_to_ms"),
        "key_length_bytes": row.key_length_bytes,
        "value_length_bytes": row.value_length_bytes,
        "headers_length_bytes": row.headers_length_bytes,
    }
    if with_content and row.content_withheld:
        document["content_withheld"] = True
    elif with_content:
        document["key"] = if_set(row, "key", base64_of)
        document["value"] = if_set(row, "value", base64_of)
        document["headers"] = [
            {"name": header.name, "value": if_set(header, "value", base64_of)}
            for header in row.headers
        ]
        document["half"] = half(row)
    return document


def half(row: pb.StoredMessage) -> dict[str, Any] | None:
    """Returns what a half message is beside its content, which must be given; None if it is none.

    Its due is the end of its hold; `deliver_at_ms` is its own, None if that is its commit.
    """
    headers = {header.name: header.value for header in row.headers}
    if HALF_GROUP not in headers:
        return None
    own = headers.get(HALF_DELIVER_AT)
    return {
        "group": headers[HALF_GROUP].decode(errors="replace"),
        "deliver_at_ms": None if own is None else int(own),
    }


def message_line(row: pb.StoredMessage) -> dict[str, Any]:
    """Returns one line of `delaywheel export`, which `produce --jsonl` takes.

    The value is in each, null or not; other fields are left out if they are not set.
    """
    line: dict[str, Any] = {
        "handle": row.handle,
        "topic": row.topic,
        "id": id_to_send_again(row.id).hex(),
        "at": row.due_ms,
        **(_text_or_base64("key", row.key) if row.HasField("key") else {}),
        **_text_or_base64("value", if_set(row, "value")),
    }
    for name in ("partition", "timestamp_ms"):
        if row.HasField(name):
            line[name] = getattr(row, name)
    if row.headers:
        line["headers"] = [
            (header.name, _header_text(if_set(header, "value"))) for header in row.headers
        ]
    return line


def _text_or_base64(name: str, content: bytes | None) -> dict[str, str | None]:
    if content is None:
        return {name: None}
    try:
        return {name: content.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64_of(content)}


def _header_text(content: bytes | None) -> Any:
    if content is None:
        return None
    try:
        return content.decode()
    except UnicodeDecodeError:
        return {"base64": base64_of(content)}


def cancelled_many(row: pb.CancelManyResponse, *, dry_run: bool) -> dict[str, Any]:
    """Returns the document of `delaywheel cancel --json` for many messages."""
    unspecified = "pending" if dry_run else "unknown"
    return {
        "dry_run": dry_run,
        "messages": [
            {
                "handle": each.handle,
                "due_ms": each.due_ms,
                "topic": each.topic,
                "outcome": _state(pb.CancelOutcome.Name(each.outcome))
                if each.outcome
                else unspecified,
                "cancelled_before": each.cancelled_before,
            }
            for each in row.results
        ],
        "halves": row.halves,
        "looked": of(row.looked),
    }


def if_set(message: Any, field: str, shape: Callable[[Any], Any] | None = None) -> Any:
    """Returns a field, in its shape if it has one; null if it is not set."""
    if not message.HasField(field):
        return None
    value = getattr(message, field)
    return value if shape is None else shape(value)


def _state(name: str) -> str:
    """Returns a value of an enum without the two words that all of its values begin with."""
    return name.split("_", 2)[2].lower()
