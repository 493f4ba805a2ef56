"""Due messages, as the columns of a step."""

from collections.abc import Sequence

import numpy as np

from delaywheel.headers import encode_headers
from delaywheel_replica.cleaner.due.rows import ABSENT, RECORD, DueMessage, DueRows


def due_rows(messages: Sequence[DueMessage]) -> DueRows:
    """Rows that iterate as these messages."""
    records = np.zeros(len(messages), RECORD)
    topics = sorted({message.topic for message in messages})
    wheels = sorted({message.wheel for message in messages}, key=str)
    blob = b""
    for record, message in zip(records, messages, strict=True):
        headers = encode_headers(message.headers)
        record["start"] = len(blob)
        blob += (message.key or b"") + (message.value or b"") + headers
        record["id"] = np.void(message.id)
        record["topic"] = topics.index(message.topic)
        record["wheel"] = wheels.index(message.wheel)
        record["key_length"] = ABSENT if message.key is None else len(message.key)
        record["value_length"] = ABSENT if message.value is None else len(message.value)
        record["headers_length"] = len(headers)
        for name in ("due_ms", "accepted_at_ms", "timestamp_ms", "partition", "seq", "row"):
            record[name] = getattr(message, name)
    return DueRows(records, topics, wheels, [blob])
