"""Time to live: a header, `ttl` unless a setting names another, of whole seconds, at least 1.

| value of the header | means |
|---|---|
| decimal digits, 19 at most | so many seconds |
| 8 other bytes | a big-endian long of seconds, as the usual clients write numbers |
| anything else, null, or less than 1 | no time to live: the header is the caller's own |

Eight digits are text: as a long they would be some hundred billion years. If several headers have
this name, the last one counts, as in Kafka's own clients. The header is never removed from the
message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from delaywheel.record_headers import last_of

TTL_HEADER = "ttl"
LONGEST_TTL_VALUE_BYTES = 19

_DIGITS = re.compile(rb"[0-9]{1,19}")


def read_ttl_s(value: bytes | None) -> int | None:
    """Returns the seconds that a `ttl` header states; None if it is invalid."""
    if value is None:
        return None
    if _DIGITS.fullmatch(value):
        ttl_s = int(value)
    elif len(value) == 8:
        ttl_s = int.from_bytes(value, "big", signed=True)
    else:
        return None
    return ttl_s if ttl_s >= 1 else None


def ttl_s_of(
    headers: Iterable[tuple[str, bytes | None]], ttl_header: str | None = TTL_HEADER
) -> int | None:
    """Returns how many seconds a message with these headers lives; None: forever.

    Args:
        headers: All of its headers.
        ttl_header: The name of the one that counts; empty or None: there is none.
    """
    return read_ttl_s(last_of(headers, ttl_header)) if ttl_header else None
