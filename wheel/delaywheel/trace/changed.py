"""Columns of changes of messages, from their final answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from delaywheel.errors import DelaywheelError
from delaywheel.trace.sent import status_of


class ChangedMessage(NamedTuple):
    """A message that somebody wanted to change, and what that came to.

    Attributes:
        due_ms: None: it was named by its handle, which has only the second.
        slot: That second.
        outcome: In one word, or the error.
        to_ms: The due that it has from now on; None: no other one.
    """

    topic: str
    id: bytes
    due_ms: int | None
    slot: int
    outcome: str | DelaywheelError
    to_ms: int | None


ChangedFields: TypeAlias = tuple[str, bytes, int | None, int, str | DelaywheelError, int | None]
"""The fields of a `ChangedMessage`, by who need not import it."""


def changed_rows(
    what: str, messages: Sequence[ChangedMessage], time_ms: int, cost_us: int
) -> dict[str, list[Any]]:
    """Returns the columns of messages that were asked for together."""
    count = len(messages)
    nothing = [None] * count
    return {
        "id": [message.id for message in messages],
        "due_ms": [message.due_ms for message in messages],
        "topic": [message.topic for message in messages],
        "time_ms": [time_ms] * count,
        "status": [
            message.outcome if isinstance(message.outcome, str) else status_of(message.outcome)
            for message in messages
        ],
        "key": nothing,
        "tags": nothing,
        "root": nothing,
        "cost_us": [cost_us] * count,
        "what": [what] * count,
        "slot": [message.slot for message in messages],
        "to_ms": [message.to_ms for message in messages],
    }
