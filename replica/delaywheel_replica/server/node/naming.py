"""Messages as rows, keys and handles: a message is its topic, its id and its due."""

from collections.abc import Collection

import numpy as np

from delaywheel.identity import WheelId
from delaywheel.storage.frames.columns import ID_LENGTH_BYTES, Columns
from delaywheel_replica.core.protocol.reschedules import MessageKey


def key_of(columns: Columns, row: int) -> MessageKey:
    """Returns which message a row is, or names."""
    return MessageKey(columns.ids[row].tobytes(), int(columns.due_ms[row]), columns.topic(row))


def rows_naming(keys: Collection[MessageKey]) -> Columns:
    """Returns rows that name these messages: cancels, commits or releases."""
    topics: dict[str, int] = {}
    numbers = [topics.setdefault(key.topic, len(topics)) for key in keys]
    ids = np.frombuffer(b"".join(key.id for key in keys), np.uint8)
    return Columns.of_names(
        np.array([key.due_ms for key in keys], np.int64),
        ids.reshape(-1, ID_LENGTH_BYTES),
        tuple(topics),
        np.array(numbers, np.uint32),
    )


def handle_of(wheel: WheelId | None, key: MessageKey) -> str:
    """Returns the handle of a message that lies in this wheel."""
    return f"{wheel}:{key.due_ms // 1000}:{key.id.hex()}:{key.topic}"
