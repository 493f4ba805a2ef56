"""A record's headers, as in `delaywheel.record_headers`, which executors do not have."""

from __future__ import annotations

from typing import Any

from confluent_kafka import Message


def headers_of(message: Message) -> list[tuple[str, bytes | None]] | None:
    """Returns the headers of a record, in order; None: they cannot be read.

    A name that is no UTF-8 leaves an error behind, for which `map` looks at once, and a hole in
    the list, which is handed out without an error when it is asked for again: ask once.
    """
    try:
        (headers,) = map(Message.headers, (message,))
    except SystemError:
        return None
    found: Any = headers
    return found or []
