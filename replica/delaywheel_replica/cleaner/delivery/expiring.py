"""Finds due messages that have expired: their time to live ended before they were forwarded.

It counts from the timestamp that the message is to have: its caller's, or else its due, the first
one if it was deferred. Both are the same in every copy of a retried message, unlike the time of
acceptance; and a consumer that reads the header counts from the same instant, except for the
lateness of forwarding.

Seconds are loaded with a mark on each message that may have such a header (due/seconds.py), so that
a step without one is checked in one pass of numpy.
"""

from __future__ import annotations

import numpy as np

from delaywheel.record_headers import ttl_s_of
from delaywheel_replica.cleaner.delivery.deferring import first_due_ms
from delaywheel_replica.cleaner.due.rows import ABSENT, DueRows

Expired = dict[int, str]
"""Number of a row -> when it expired, in words."""


def find_expired(rows: DueRows, now_ms: int, ttl_header: str) -> Expired:
    """Returns the rows that have expired, by the header for which rows were marked; empty: none."""
    marked = np.flatnonzero(rows.records["ttl"])
    if not len(marked):
        return {}
    chosen = rows.take(marked)
    given_ms = chosen.records["timestamp_ms"].tolist()
    found: Expired = {}
    candidates = zip(
        marked.tolist(), given_ms, chosen.dues_ms.tolist(), chosen.headers(), strict=True
    )
    for row, timestamp_ms, due_ms, headers in candidates:
        ttl_s = ttl_s_of(headers, ttl_header)
        start_ms = first_due_ms(headers, due_ms) if timestamp_ms == ABSENT else timestamp_ms
        if ttl_s is not None and now_ms >= start_ms + ttl_s * 1000:
            found[row] = f"its {ttl_header} of {ttl_s} s ended at {start_ms + ttl_s * 1000}"
    return found
