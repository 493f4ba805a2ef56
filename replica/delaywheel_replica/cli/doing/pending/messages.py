"""`delaywheel get`: one message, by handle or by topic, id and due."""

from __future__ import annotations

from datetime import datetime

from delaywheel.client.exchange.question import message_ref
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.cli.asking.connection import ask
from delaywheel_replica.cli.printing import shapes
from delaywheel_replica.cli.printing.messages import content_text
from delaywheel_replica.cli.printing.tables import print_facts, print_json
from delaywheel_replica.cli.printing.text import bytes_text
from delaywheel_replica.cli.reaching import Nodes
from delaywheel_replica.quantities import iso

_BY_OWN_DUE = "; if it was committed, its topic, id and own due find it"
_UNKNOWN_END = (
    "done: delivered, deferred or a dead letter, which is not known here; the outcomes topic knows"
)


def get(
    handle: str | None,
    *,
    topic: str | None,
    message_id: bytes | None,
    due: datetime | None,
    as_json: bool,
    server: Nodes,
    timeout_s: float,
) -> None:
    """Show one message with its content, until its second is deleted."""
    named = message_ref(handle, topic, message_id, due)
    request = pb.GetMessageRequest(message=named, find_place=True)
    message = ask(server, lambda stub: stub.GetMessage(request, timeout=timeout_s)).message
    if as_json:
        print_json(shapes.stored_message(message, with_content=True))
        return
    headers = [
        (f"header {header.name}", bytes_text(shapes.if_set(header, "value")))
        for header in message.headers
    ]
    shape = shapes.stored_message(message, with_content=False)
    print_facts(
        [
            ("handle", message.handle),
            ("state", _state(message)),
            *_place(message),
            *_dues(message),
            ("accepted", iso(message.accepted_at_ms)),
            ("topic", message.topic),
            ("partition", shape["partition"]),
            ("timestamp", shape["timestamp_ms"]),
            ("wheel, seq", f"{message.wheel}, {message.seq}"),
            ("key", content_text(message, "key")),
            *headers,
            ("value", content_text(message, "value")),
        ]
    )


def _place(message: pb.StoredMessage) -> list[tuple[str, str]]:
    """Returns where the message's record is, if it was found."""
    if not message.HasField("place"):
        return []
    place = message.place
    return [("in Kafka", f"{place.topic}, partition {place.partition}, offset {place.offset}")]


def _dues(message: pb.StoredMessage) -> list[tuple[str, str]]:
    """Returns when the message is due; of a half also how long nobody asks its group, and which."""
    due, half = iso(message.due_ms), shapes.half(message)
    if half is None:
        return [("due", due)]
    own_ms = half["deliver_at_ms"]
    return [
        ("half message of", str(half["group"])),
        ("hold ends", due),
        ("due", "at its commit" if own_ms is None else iso(own_ms)),
    ]


def _state(message: pb.StoredMessage) -> str:
    if message.HasField("rescheduled_to_ms"):
        return f"rescheduled to {iso(message.rescheduled_to_ms)}"
    match message.state:
        case pb.MESSAGE_STATE_DONE:
            half = shapes.half(message)
            has_own_due = half is not None and half["deliver_at_ms"] is not None
            return f"{_UNKNOWN_END}{_BY_OWN_DUE * has_own_due}"
        case pb.MESSAGE_STATE_DEAD_LETTERED:
            return f"a dead letter: {message.dead_reason}"
        case _:
            return str(shapes.stored_message(message, with_content=False)["state"])
