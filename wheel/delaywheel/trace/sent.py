"""Columns of messages that were sent, from their final answers."""

from collections.abc import Mapping, Sequence
from typing import Any

from delaywheel.errors import (
    CallFailedError,
    ClientClosedError,
    DelaywheelError,
    RefusedError,
    TimedOutError,
)
from delaywheel.message import Message, Result
from delaywheel.record_headers import last_of
from delaywheel.trace.counts import Cell, CellKey, Counted, Direction, folded, sent_key
from delaywheel.trace.options import TraceOptions
from delaywheel.trace.schema import ACCEPTED, UNKNOWN


def status_of(error: DelaywheelError | None) -> str:
    """Returns why a message was not accepted, or changed, in one word."""
    match error:
        case DelaywheelError(outcome_known=False):
            return UNKNOWN
        case RefusedError():
            return str(error.reason)
        case TimedOutError():
            return "TIMED_OUT"
        case ClientClosedError():
            return "CLOSED"
        case CallFailedError():
            return error.code.name
        case _:
            return type(error).__name__


def sent_rows(
    options: TraceOptions,
    results: Sequence[Result],
    time_ms: int,
    cost_us: int,
    attempts: int,
) -> tuple[dict[str, list[Any]], int]:
    """Returns the columns of messages that were sent together, and the length of their texts."""
    messages = [result.message for result in results]
    count = len(messages)
    keys, length_bytes = options.keys([message.key for message in messages])
    tags, tags_bytes = tags_of(options, messages)
    handles = [result.handle for result in results]
    return {
        "id": [message.id for message in messages],
        "due_ms": [message.due_ms for message in messages],
        "topic": [message.topic for message in messages],
        "time_ms": [time_ms] * count,
        "status": [
            status_of(result.error) if result.handle is None else ACCEPTED for result in results
        ],
        "key": keys,
        "tags": tags,
        "root": [None] * count,
        "cost_us": [cost_us] * count,
        "attempts": [attempts] * count,
        "node": [None if handle is None else handle.wheel for handle in handles],
    }, length_bytes + tags_bytes


def sent_cells(
    results: Sequence[Result], messages: Sequence[Message], failed: Sequence[int]
) -> dict[CellKey, Cell]:
    """Returns what messages that were sent together add to the counts; `failed` are rows."""
    cells: dict[CellKey, Cell] = {}
    for row in failed:
        message, error = messages[row], results[row].error
        is_unknown = error is not None and not error.outcome_known
        cell = cells.setdefault(sent_key(message.topic, message.due_ms), Cell())
        cell.unknown += is_unknown
        cell.refused += not is_unknown
    accepted = messages
    if failed:
        accepted = [result.message for result in results if result.handle is not None]
    for topic, of_topic in _by_topic(accepted).items():
        dues_ms = [message.due_ms or 0 for message in of_topic]
        lengths = [len(one.key or b"") + len(one.value or b"") for one in of_topic]
        ids = [message.id for message in of_topic]
        for key, cell in folded(
            Counted(Direction.SENT, topic, None, ids, dues_ms, lengths)
        ).items():
            cells.setdefault(key, Cell()).add(cell)
    return cells


def _by_topic(messages: Sequence[Message]) -> Mapping[str, Sequence[Message]]:
    topics = {message.topic for message in messages}
    if len(topics) == 1:  # mostly
        return dict.fromkeys(topics, messages)
    found: dict[str, list[Message]] = {}
    for message in messages:
        found.setdefault(message.topic, []).append(message)
    return found


def tags_of(options: TraceOptions, messages: Sequence[Message]) -> tuple[list[bytes | None], int]:
    """Returns the tags of messages, and their length."""
    name = options.tags
    if name is None:
        return [None] * len(messages), 0
    tags = [last_of(message.headers, name) if message.headers else None for message in messages]
    return tags, sum(map(len, filter(None, tags)))
