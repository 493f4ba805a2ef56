"""The three kinds of events and their columns; docs/TRACE.md is the contract, a test compares.

Columns are gathered, sent and read as columns: of equal length, with null for what is not known.
Readers keep columns that they do not know as they are, so that a later version may add some. What
changes the meaning of a column raises `VERSION`.
"""

from enum import StrEnum
from typing import Final, NamedTuple

VERSION: Final = 1

LONGEST_TEXT_BYTES: Final = 200
"""What is longer is cut: keys, tags, and reasons in words."""


class EventKind(StrEnum):
    """What has happened to a message; one batch has events of one kind."""

    SENT = "sent"
    """A client has the final answer to a message that it sent."""
    CHANGED = "changed"
    """A client has the final answer to a change of a message: it knows who asked, and when."""
    PROCESSED = "processed"
    """A consumer has committed what became of a record."""


ACCEPTED: Final = "ACCEPTED"
WRITTEN: Final = "WRITTEN"
UNKNOWN: Final = "UNKNOWN"
"""Statuses; any other one is an outcome, or the reason why nothing was done."""


class Form(StrEnum):
    """How the values of a column are written."""

    ID = "id"
    """32 hexadecimal digits."""
    NAME = "name"
    """A number: the place, from 0, in the batch's list `names`."""
    NUMBER = "number"
    TEXT = "text"


class Column(NamedTuple):
    """One column: its form, and the kinds of events that have it."""

    form: Form
    kinds: tuple[EventKind, ...]


_ALL: Final = tuple(EventKind)
_ASKED: Final = (EventKind.SENT, EventKind.CHANGED)

COLUMNS: Final = {
    "id": Column(Form.ID, _ALL),
    "due_ms": Column(Form.NUMBER, _ALL),
    "topic": Column(Form.NAME, _ALL),
    "time_ms": Column(Form.NUMBER, _ALL),
    "status": Column(Form.NAME, _ALL),
    "key": Column(Form.TEXT, _ALL),
    "tags": Column(Form.TEXT, _ALL),
    "root": Column(Form.TEXT, _ALL),
    "cost_us": Column(Form.NUMBER, _ASKED),
    "attempts": Column(Form.NUMBER, (EventKind.SENT,)),
    "node": Column(Form.NAME, (EventKind.SENT,)),
    "what": Column(Form.NAME, (EventKind.CHANGED,)),
    "slot": Column(Form.NUMBER, (EventKind.CHANGED,)),
    "to_ms": Column(Form.NUMBER, (EventKind.CHANGED, EventKind.PROCESSED)),
    "next_id": Column(Form.ID, (EventKind.PROCESSED,)),
    "partition": Column(Form.NUMBER, (EventKind.PROCESSED,)),
    "offset": Column(Form.NUMBER, (EventKind.PROCESSED,)),
    "forwarded_ms": Column(Form.NUMBER, (EventKind.PROCESSED,)),
    "group": Column(Form.NAME, (EventKind.PROCESSED,)),
    "attempt": Column(Form.NUMBER, (EventKind.PROCESSED,)),
    "handler_us": Column(Form.NUMBER, (EventKind.PROCESSED,)),
    "why": Column(Form.NAME, (EventKind.PROCESSED,)),
}
