"""`delaywheel produce`: one message, through the SDK as any program sends it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from delaywheel import Client, Handle, Message, Reason, RefusedError
from delaywheel_replica.cli.failures import ExitCode, Failure
from delaywheel_replica.cli.options import (
    DEFAULT_SERVER,
    DEFAULT_TIMEOUT_S,
    AsJson,
    Server,
    Timeout,
)
from delaywheel_replica.cli.output import print_json
from delaywheel_replica.cli.values import (
    iso,
    parse_duration,
    parse_header,
    parse_id,
    parse_time,
)


def produce(  # noqa: PLR0913, PLR0917 - Typer makes an option of each
    topic: Annotated[str, typer.Argument(help="The Kafka topic.")],
    value: Annotated[
        str | None, typer.Argument(help="The value; - reads standard input; absent: null.")
    ] = None,
    value_file: Annotated[
        Path | None,
        typer.Option("--value-file", metavar="FILE", exists=True, help="The value, from a file."),
    ] = None,
    key: Annotated[str | None, typer.Option("--key", help="The key; absent: null.")] = None,
    headers: Annotated[
        list[str] | None,
        typer.Option("--header", metavar="NAME=VALUE", help="Repeatable; NAME alone: null."),
    ] = None,
    delay: Annotated[
        str | None, typer.Option("--delay", metavar="TIME", help="From now: 250ms, 30s, 5m, 2h.")
    ] = None,
    at: Annotated[
        str | None,
        typer.Option("--at", metavar="TIME", help="ISO 8601 with zone, or Unix milliseconds."),
    ] = None,
    past_ok: Annotated[
        bool, typer.Option("--past-ok", help="A time of --at that is past means now.")
    ] = False,
    level: Annotated[
        str | None, typer.Option("--level", help="A delay level of the service, such as 5m.")
    ] = None,
    message_id: Annotated[
        str | None,
        typer.Option("--id", metavar="HEX", help="16 bytes as hex, or a UUID; absent: a new one."),
    ] = None,
    partition: Annotated[
        int | None, typer.Option("--partition", min=0, help="Absent: chosen from the key.")
    ] = None,
    timestamp: Annotated[
        str | None,
        typer.Option("--timestamp", metavar="TIME", help="Of the record; absent: when forwarded."),
    ] = None,
    server: Server = DEFAULT_SERVER,
    as_json: AsJson = False,
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Send a message that becomes visible in its topic at its due; prints its handle."""
    message = Message(
        topic,
        _value_bytes(value, value_file),
        key=None if key is None else key.encode(),
        headers=[parse_header(header) for header in headers or ()],
        delay=None if delay is None else parse_duration(delay),
        deliver_at=None if at is None else parse_time(at),
        level=level,
        id=None if message_id is None else parse_id(message_id),
        partition=partition,
        timestamp=None if timestamp is None else parse_time(timestamp),
    )
    with Client(server, timeout=timeout_s, past_due="deliver" if past_ok else "reject") as client:
        handle = _sent(client, message)
    assert message.due_ms is not None  # fixed at the sending
    if as_json:
        print_json({"handle": str(handle), "id": message.id.hex(), "due_ms": message.due_ms})
    else:
        print(f"{handle}  due {iso(message.due_ms)}")


def _sent(client: Client, message: Message) -> Handle:
    try:
        return client.produce_many([message])[0].unwrap()
    except RefusedError as refused:
        if refused.reason is not Reason.DUE_PASSED:
            raise
        told = str(refused).removeprefix(f"{refused.reason}: ")
        text = f"{told}; nothing was sent. With --past-ok it would be due now"
        raise Failure(str(refused.reason), text, ExitCode.USAGE) from refused


def _value_bytes(value: str | None, value_file: Path | None) -> bytes | None:
    if value_file is not None:
        if value is not None:
            raise typer.BadParameter("give VALUE or --value-file, not both")
        return value_file.read_bytes()
    if value == "-":
        return sys.stdin.buffer.read()
    return None if value is None else value.encode()
