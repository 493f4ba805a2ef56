"""Columns of changes of messages, from their final answers."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from delaywheel.errors import DelaywheelError
from delaywheel.trace.sent import status_of

ChangedFields: TypeAlias = tuple[str, bytes, int | None, int, str | DelaywheelError, int | None]
"""A message that somebody wanted to change, and what that came to: its topic and id; its due (None:
it was named by its handle, which has only the second), and the second of that; the outcome in one
word, or the error; the due that it has from now on (None: no other one)."""


def changed_rows(
    what: str, messages: Sequence[ChangedFields], time_ms: int, cost_us: int
) -> dict[str, list[Any]]:
    """Returns the columns of messages that were asked for together."""
    count = len(messages)
    nothing = [None] * count
    topics, ids, dues_ms, slots, outcomes, tos_ms = (
        zip(*messages, strict=True) if messages else ((),) * 6
    )
    return {
        "id": list(ids),
        "due_ms": list(dues_ms),
        "topic": list(topics),
        "time_ms": [time_ms] * count,
        "status": [each if isinstance(each, str) else status_of(each) for each in outcomes],
        "key": nothing,
        "tags": nothing,
        "root": nothing,
        "cost_us": [cost_us] * count,
        "what": [what] * count,
        "slot": list(slots),
        "to_ms": list(tos_ms),
    }
