"""`delaywheel produce --lines` and `--jsonl`: a message a line, thousands in a request.

Lines are sent as they come: all available lines go together, up to a bound, so that a slow writer
does not wait for others and a file goes in large requests.
"""

from __future__ import annotations

import json
import os
import select
import sys
import textwrap
from argparse import ArgumentTypeError
from base64 import b64decode
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any, Final, TypeAlias

from delaywheel import Client, DelaywheelError, Handle, Message
from delaywheel_replica.cli.asking.sdk_failures import failure_of
from delaywheel_replica.cli.failures import CommandFailure, ExitCode, discard_output
from delaywheel_replica.cli.options import STANDARD_INPUT
from delaywheel_replica.cli.printing.tables import print_ndjson
from delaywheel_replica.cli.printing.text import note
from delaywheel_replica.cli.values import parse_duration, parse_id, parse_time
from delaywheel_replica.quantities import counted, from_ms

MOST_MESSAGES: Final = 5_000
MOST_BYTES: Final = 8 * 1024 * 1024
LONGEST_LINE_BYTES: Final = 128 * 1024 * 1024
_READ_BYTES: Final = 1024 * 1024

Make: TypeAlias = Callable[[bytes], Message | None]
"""Makes the message of a line; None: the line is blank.

Raises:
    ValueError, TypeError, ArgumentTypeError, DelaywheelError: it is none.
"""

UNCHECKED: Final = (
    "it is not known whether this id and due were used before; delaywheel get shows it"
)
"""What is said of a message that was accepted without a look for earlier ones."""

_WORST_FIRST: Final = (ExitCode.UNKNOWN_OUTCOME, ExitCode.UNAVAILABLE, ExitCode.REFUSED)


@dataclass(frozen=True, slots=True)
class _Sent:
    """The outcome of one line."""

    line: int
    message: Message | None
    handle: Handle | None
    failure: CommandFailure | None
    id_checked: bool = False

    @property
    def said(self) -> str:
        """Returns what is said of it on standard error, if anything."""
        if self.failure is not None:
            return str(self.failure)
        is_own_id = self.message is not None and self.message.has_own_id
        return UNCHECKED if is_own_id and not self.id_checked else ""

    @property
    def shape(self) -> dict[str, Any]:
        """Returns one line of `--ndjson`."""
        if self.failure is not None:
            return {"line": self.line, "error": self.failure.reason, "message": str(self.failure)}
        assert self.message is not None
        accepted = {"handle": str(self.handle), "id": self.message.id.hex()}
        own_id = {"id_checked": self.id_checked} if self.message.has_own_id else {}
        return {"line": self.line, **accepted, "due_ms": self.message.due_ms, **own_id}


@contextmanager
def opened(source: Path) -> Iterator[int]:
    """Opens line-by-line input for reading, and yields its descriptor."""
    if source == STANDARD_INPUT:
        yield sys.stdin.fileno()
        return
    with source.open("rb") as file:
        yield file.fileno()


def send(client: Client, source: int, make: Make, *, as_ndjson: bool) -> None:
    """Sends all lines of a file or pipe, and reports on each in order.

    With `as_ndjson` standard output gets an object a line, also of what failed. What was not
    accepted, standard error says as well.

    Raises:
        CommandFailure: Something was not accepted.
    """
    accepted, codes, is_read = 0, set[ExitCode](), True
    for first, lines in batches(source):
        sent = _send(client, first, lines, make)
        is_read = is_read and _print(sent, as_ndjson=as_ndjson)
        codes.update(one.failure.exit_code for one in sent if one.failure is not None)
        for said, lines_in_a_row in groupby(sent, lambda one: one.said):
            if said:
                numbers = [one.line for one in lines_in_a_row]
                more = f"s {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f" {numbers[0]}"
                note(f"line{more}: {said}")
        accepted += sum(one.handle is not None for one in sent)
        if sent and not any(one.handle for one in sent) and ExitCode.UNAVAILABLE in codes:
            raise _failed(accepted, codes, f"; stopped behind line {first + len(lines) - 1:,}")
    if codes:
        raise _failed(accepted, codes, "")
    unread = "" if is_read else "; standard output was closed before all of it was written"
    note(f"{counted(accepted, 'message')} accepted{unread}")


def value_of_line(line: bytes, **common: Any) -> Message:
    """Returns a message whose value is a line."""
    return Message(value=line.removesuffix(b"\r"), **common)


def message_of_json(line: bytes, **common: Any) -> Message | None:
    """Returns the message that a JSON object describes, with the common options as defaults."""
    text = line.removeprefix(BOM_UTF8).strip()
    if not text:
        return None
    read = _read_json(text)
    own: dict[str, Any] = {}
    for name, value in read.items():
        if value is not None:
            field, take = _FIELDS[name]
            if field is None:
                continue
            if field in own:
                raise ValueError(f"{field} is given twice")
            own[field] = take(value)
    if "topic" not in own and common["topic"] is None:
        raise ValueError("it names no topic, and the command none for all")
    if own.keys() & _DUES:
        common = {name: value for name, value in common.items() if name not in _DUES}
    return Message(**{"value": None, **common, **own})


def _read_json(text: bytes) -> dict[str, Any]:
    try:
        read = json.loads(text.decode(), object_pairs_hook=_fields)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} (character {error.pos + 1:,})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start + 1:,}): write value_base64") from None
    except RecursionError:
        raise ValueError("not a message: nested too deeply") from None
    if not isinstance(read, dict):
        raise TypeError("not a JSON object")
    if unknown := read.keys() - _FIELDS.keys():
        raise ValueError(f"no such field: {', '.join(sorted(unknown))}")
    if not read.keys() & {"value", "value_base64"}:
        raise ValueError('it has no value: write "value": null where there is to be none')
    return read


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice} is given twice; headers may be a list of pairs")
    return fields


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{_shown(value)} is no text")
    return value


def _shown(value: object) -> str:
    return textwrap.shorten(json.dumps(value), 60, placeholder="…")


def _encoded(value: object) -> bytes:
    try:
        return _text(value).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{_shown(value)} has half of a surrogate pair: no character") from None


def _decoded(value: object) -> bytes:
    try:
        return b64decode(_text(value), validate=True)
    except ValueError:
        raise ValueError(f"{_shown(value)} is not base64") from None


def _headers(value: object) -> list[tuple[str, bytes | None]]:
    """Parses `{"name": "text"}`, or `[["name", "text"], …]` for repeated names; null is null.

    Instead of a text there may be `{"base64": "…"}`.
    """
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
    ):
        raise TypeError(f"headers are an object or a list of pairs, not {_shown(value)}")
    return [(_text(name), None if text is None else _header_value(text)) for name, text in pairs]


def _header_value(value: object) -> bytes:
    if isinstance(value, dict):
        if value.keys() != {"base64"}:
            raise ValueError(f"{_shown(value)} is neither a text nor an object with base64")
        return _decoded(value["base64"])
    return _encoded(value)


def _number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{_shown(value)} is no whole number")
    return value


def _time(value: object) -> datetime:
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        return parse_time(str(value))
    raise TypeError(f"{_shown(value)} is no time: a text, or Unix milliseconds")


def _moment(value: object) -> datetime:
    return from_ms(_number(value))


_FIELDS: Final[Mapping[str, tuple[str | None, Callable[[Any], object]]]] = {
    "topic": ("topic", _text),
    "value": ("value", _encoded),
    "value_base64": ("value", _decoded),
    "key": ("key", _encoded),
    "key_base64": ("key", _decoded),
    "headers": ("headers", _headers),
    "delay": ("delay", lambda value: parse_duration(_text(value))),
    "at": ("deliver_at", _time),
    "level": ("level", _text),
    "id": ("id", lambda value: parse_id(_text(value))),
    "partition": ("partition", _number),
    "timestamp": ("timestamp", _time),
    "timestamp_ms": ("timestamp", _moment),
    "handle": (None, _text),  # of an export: where it came from
}
_DUES: Final = frozenset({"delay", "deliver_at", "level"})


def _send(client: Client, first: int, lines: Sequence[bytes], make: Make) -> list[_Sent]:
    messages: dict[int, Message] = {}
    failures: dict[int, CommandFailure] = {}
    for number, line in enumerate(lines, start=first):
        try:
            message = make(line)
            if message is not None:
                messages[number] = message
        except DelaywheelError as error:
            failures[number] = failure_of(error) or _unreadable(error)
        except (ValueError, TypeError, ArgumentTypeError) as error:
            failures[number] = _unreadable(error)
    handles: dict[int, Handle] = {}
    checked = set[int]()
    for number, result in zip(messages, client.produce_many(messages.values()), strict=True):
        if result.handle is not None:
            handles[number] = result.handle
            checked |= {number} if result.id_checked else set()
        elif result.error is not None:
            failures[number] = failure_of(result.error) or _unreadable(result.error)
    return [
        _Sent(
            number,
            messages.get(number),
            handles.get(number),
            failures.get(number),
            id_checked=number in checked,
        )
        for number in sorted(messages.keys() | failures.keys())
    ]


def _print(sent: Iterable[_Sent], *, as_ndjson: bool) -> bool:
    """Prints what became of lines; False if the reader has closed standard output."""
    try:
        if as_ndjson:
            print_ndjson(one.shape for one in sent)
        else:
            sys.stdout.writelines(f"{one.handle}\n" for one in sent if one.handle)
            sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
        return False
    return True


def _unreadable(error: Exception) -> CommandFailure:
    return CommandFailure("LINE_INVALID", str(error), ExitCode.USAGE)


def _failed(accepted: int, codes: set[ExitCode], more: str) -> CommandFailure:
    code = next((code for code in _WORST_FIRST if code in codes), ExitCode.REFUSED)
    return CommandFailure(
        "NOT_ALL_ACCEPTED", f"{counted(accepted, 'message')} accepted{more}", code
    )


def batches(source: int) -> Iterator[tuple[int, list[bytes]]]:
    """Yields the available whole lines in batches, each with the number of its first line."""
    number, rest, at_end = 1, b"", False
    while not at_end:
        pieces, length_bytes = [rest], 0
        while not at_end and length_bytes < MOST_BYTES:
            if length_bytes and not select.select([source], [], [], 0)[0]:
                break  # nothing is there now; of a file there always is
            piece = os.read(source, _READ_BYTES)
            at_end = not piece
            pieces.append(piece)
            length_bytes += len(piece)
        *lines, rest = b"".join(pieces).split(b"\n")
        if len(rest) > LONGEST_LINE_BYTES:
            raise CommandFailure(
                "LINE_INVALID", f"line {number + len(lines)} has no end", ExitCode.USAGE
            )
        if at_end and rest:
            lines.append(rest)
        for place in range(0, len(lines), MOST_MESSAGES):
            yield number + place, lines[place : place + MOST_MESSAGES]
        number += len(lines)
