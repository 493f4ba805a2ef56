"""Stored messages as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.cli.printing import shapes
from delaywheel_replica.cli.printing.tables import print_table
from delaywheel_replica.cli.printing.text import bytes_text, note

_COLUMNS = ("handle", "due", "state", "bytes")
WHY_UNCHANGED: Final[Mapping[str, str]] = {
    "ALREADY_DELIVERED": "nothing was done: it is in its topic already, deferred, or a dead letter",
    "TOO_LATE": "nothing was done: it is about to be delivered, or was",
    "NOT_FOUND": "no such message was accepted",
}
"""By what became of a cancel or a reschedule."""
_OF_HALVES = frozenset(
    {
        pb.MESSAGE_STATE_HELD,
        pb.MESSAGE_STATE_COMMITTED,
        pb.MESSAGE_STATE_ROLLED_BACK,
        pb.MESSAGE_STATE_ASKED,
    }
)


def print_messages(messages: Sequence[pb.StoredMessage], *, with_content: bool, none: str) -> None:
    """Prints a row for each message, with key and value if requested; or that there is none."""
    print_table(
        [*_COLUMNS, "key", "value"] if with_content else _COLUMNS,
        [_cells(message, with_content=with_content) for message in messages],
        none=none,
    )
    if any(message.state in _OF_HALVES for message in messages):
        note("of a half message the due is the end of its hold; `delaywheel get` shows its own")
    if any(message.state == pb.MESSAGE_STATE_ASKED for message in messages):
        note("what groups have answered is not looked for here: `delaywheel get` says it")


def content_text(message: pb.StoredMessage, field: str) -> str:
    """Returns the key or the value as a text; or that it may not be read."""
    if message.content_withheld:
        return "may not be read"
    return bytes_text(shapes.if_set(message, field))


def _cells(message: pb.StoredMessage, *, with_content: bool) -> list[object]:
    shape = shapes.stored_message(message, with_content=False)
    lengths = (
        message.key_length_bytes,
        message.value_length_bytes,
        message.headers_length_bytes,
    )
    cells = [
        *(message.handle, shape["due"], shape["state"]),
        sum(max(length, 0) for length in lengths),
    ]
    if with_content:
        cells += [content_text(message, "key"), content_text(message, "value")]
    return cells
