"""`delaywheel produce`: through the SDK, as any program sends."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from delaywheel import Client, Message, Reason, RefusedError, Result
from delaywheel_replica.cli.doing.many import (
    UNCHECKED,
    message_of_json,
    opened,
    send,
    value_of_line,
)
from delaywheel_replica.cli.failures import CommandFailure, ExitCode
from delaywheel_replica.cli.parsing import usage
from delaywheel_replica.cli.printing.tables import print_json, print_ndjson
from delaywheel_replica.cli.printing.text import note, say
from delaywheel_replica.cli.reaching import Nodes
from delaywheel_replica.cli.values import bytes_given
from delaywheel_replica.quantities import iso


def produce(  # noqa: PLR0913 - as many as the command has
    topic: str | None,
    value: str | None,
    *,
    value_file: Path | None,
    key: str | None,
    headers: Sequence[tuple[str, bytes | None]],
    message_id: bytes | None,
    partition: int | None,
    timestamp: datetime | None,
    delay: timedelta | None,
    at: datetime | None,
    level: str | None,
    past_ok: bool,
    lines: Path | None,
    jsonl: Path | None,
    as_json: bool,
    as_ndjson: bool,
    server: Nodes,
    timeout_s: float,
) -> None:
    """Sends one message, or many; only handles go to standard output."""
    common: dict[str, Any] = {
        "topic": topic,
        "key": None if key is None else bytes_given(key),
        "headers": headers,
        "delay": delay,
        "deliver_at": at,
        "level": level,
        "id": message_id,
        "partition": partition,
        "timestamp": timestamp,
    }
    client = Client(
        server.addresses,
        tls=server.tls,
        timeout=timeout_s,
        trace=server.trace(),
        past_due="deliver" if past_ok else "reject",
    )
    source = lines or jsonl
    topics = [] if topic is None else [topic]
    if not topics and jsonl is None:
        raise usage("say which TOPIC")
    ways = sum(way is not None for way in (delay, at, level))
    if ways > 1 or (ways == 0 and jsonl is None):
        raise usage("say when it is due: one of --delay, --at and --level")
    if source is not None:
        _check_many(value, value_file, message_id, both=lines and jsonl, as_json=as_json)
        make = partial(value_of_line if lines else message_of_json, **common)
        with client, opened(source) as descriptor:
            send(client, descriptor, make, as_ndjson=as_ndjson)
        return
    message = Message(value=_value_bytes(value, value_file), **common)
    with client:
        result = _sent(client, message)
    due_ms = message.due_ms
    assert due_ms is not None  # fixed at the sending
    if as_json or as_ndjson:
        shape: dict[str, object] = {
            "handle": str(result.handle),
            "id": message.id.hex(),
            "due_ms": due_ms,
        }
        if message.has_own_id:
            shape["id_checked"] = result.id_checked
        print_json(shape) if as_json else print_ndjson([shape])
        return
    say(str(result.handle))
    note(f"due {iso(due_ms)}")
    if message.has_own_id and not result.id_checked:
        note(UNCHECKED)


def _check_many(
    value: str | None,
    value_file: Path | None,
    message_id: bytes | None,
    *,
    both: object,
    as_json: bool,
) -> None:
    if both:
        raise usage("give --lines or --jsonl, not both")
    if value is not None or value_file is not None or message_id is not None:
        raise usage("of many messages, each line says its own value and id")
    if as_json:
        raise usage("of many messages, write --ndjson instead of --json")


def _sent(client: Client, message: Message) -> Result:
    try:
        (result,) = client.produce_many([message])
        result.unwrap()
    except RefusedError as refused:
        if refused.reason is not Reason.DUE_PASSED:
            raise
        why = str(refused).removeprefix(f"{refused.reason}: ")
        text = f"{why}; nothing was sent. With --past-ok it would be due now"
        raise CommandFailure(str(refused.reason), text, ExitCode.USAGE) from refused
    return result


def _value_bytes(value: str | None, value_file: Path | None) -> bytes | None:
    if value_file is not None:
        if value is not None:
            raise usage("give VALUE or --value-file, not both")
        return value_file.read_bytes()
    if value == "-":
        return sys.stdin.buffer.read()
    return None if value is None else bytes_given(value)
