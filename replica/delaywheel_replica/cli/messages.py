"""`delaywheel get` and `delaywheel cancel`: one pending message, by handle or by id and due."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer

from delaywheel import CancelOutcome, Client
from delaywheel.client.references import message_ref
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.cli import shapes
from delaywheel_replica.cli.connection import ask
from delaywheel_replica.cli.failures import Failure
from delaywheel_replica.cli.options import (
    DEFAULT_SERVER,
    DEFAULT_TIMEOUT_S,
    AsJson,
    Server,
    Timeout,
)
from delaywheel_replica.cli.output import bytes_text, print_facts, print_json
from delaywheel_replica.cli.values import iso, parse_id, parse_time

Handle = Annotated[str | None, typer.Argument(metavar="[HANDLE]", help="As `produce` printed it.")]
Id = Annotated[
    str | None, typer.Option("--id", metavar="HEX", help="Without a handle: the id; needs --at.")
]
At = Annotated[
    str | None,
    typer.Option("--at", metavar="TIME", help="The due: ISO 8601, or Unix milliseconds."),
]

_UNKNOWN_END = "done: delivered or a dead letter, which is not known here; the outcomes topic knows"


def get(
    handle: Handle = None,
    message_id: Id = None,
    at: At = None,
    server: Server = DEFAULT_SERVER,
    as_json: AsJson = False,
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Show one message with its content, until its second is deleted."""
    request = pb.GetMessageRequest(message=message_ref(handle, *_id_and_due(message_id, at)))
    message = ask(server, lambda stub: stub.GetMessage(request, timeout=timeout_s)).message
    if as_json:
        print_json(shapes.stored_message(message, with_content=True))
        return
    headers = [
        (f"header {header.name}", bytes_text(header.value if header.HasField("value") else None))
        for header in message.headers
    ]
    shape = shapes.stored_message(message, with_content=False)
    print_facts(
        [
            ("handle", message.handle),
            ("state", _state(message)),
            ("due", shape["due"]),
            ("accepted", iso(message.accepted_at_ms)),
            ("topic", message.topic),
            ("partition", shape["partition"]),
            ("timestamp", shape["timestamp_ms"]),
            ("wheel, seq", f"{message.wheel}, {message.seq}"),
            ("key", bytes_text(message.key if message.HasField("key") else None)),
            *headers,
            ("value", bytes_text(message.value if message.HasField("value") else None)),
        ]
    )


def cancel(
    handle: Handle = None,
    message_id: Id = None,
    at: At = None,
    server: Server = DEFAULT_SERVER,
    as_json: AsJson = False,
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Withdraw a pending message; exit code 0 only if it is never delivered."""
    named_id, deliver_at = _id_and_due(message_id, at)
    with Client(server, timeout=timeout_s) as client:
        outcome = client.cancel(handle, id=named_id, deliver_at=deliver_at)
    if as_json:
        print_json({"outcome": outcome.value})
    if outcome is not CancelOutcome.CANCELLED:
        raise Failure(outcome.value, "the message was not withdrawn")
    if not as_json:
        print("CANCELLED: it is never delivered")


def _state(message: pb.StoredMessage) -> str:
    match message.state:
        case pb.MESSAGE_STATE_DONE:
            return _UNKNOWN_END
        case pb.MESSAGE_STATE_DEAD_LETTERED:
            return f"a dead letter: {message.dead_reason}"
        case _:
            return str(shapes.stored_message(message, with_content=False)["state"])


def _id_and_due(message_id: str | None, at: str | None) -> tuple[bytes | None, datetime | None]:
    return (
        None if message_id is None else parse_id(message_id),
        None if at is None else parse_time(at),
    )
