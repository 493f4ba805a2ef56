"""A record's headers, as in `delaywheel.record_headers`, which executors do not have."""

from __future__ import annotations

from typing import Any

from confluent_kafka import Message


def headers_of(message: Message) -> list[tuple[str, bytes | None]] | None:
    """Returns the headers of a record, in order; None: they cannot be read.

    A name that is not UTF-8 sets an error, which `map` notices at once, and leaves a hole in
    the list, which a second call returns without an error: so call it only once.
    """
    try:
        (headers,) = map(Message.headers, (message,))
    except SystemError:
        return None
    found: Any = headers
    return found or []
