"""What header values say: numbers and ids, as text or in the binary forms of clients.

| bytes | as a number | as an id |
|---|---|---|
| 1 to 19 decimal digits | that number | no |
| any other 8, not all of them printable ASCII | a big-endian long | no |
| any 16 | no | these bytes |
| 32 hex digits | no | the bytes they stand for |
| a UUID with its dashes | no | the same |
| anything else | no | no |

8 characters of text read as a long would be 2.3e18 or more, which is no plausible delay or time. 16
bytes are never read as text.
"""

import re

_ID_BYTES = 16
_DIGITS_MOST = 19
_LONG_BYTES = 8
_TEXT = re.compile(rb"[ -~]*")
_HEX = re.compile(rb"[0-9a-fA-F]{32}")
_DASHED = re.compile(rb"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


def number_in(value: bytes | None) -> int | None:
    """Returns the number that a header holds; None if it holds none."""
    if value is None:
        return None
    if value.isdigit() and len(value) <= _DIGITS_MOST:
        return int(value)
    if len(value) == _LONG_BYTES and not _TEXT.fullmatch(value):
        return int.from_bytes(value, "big", signed=True)
    return None


def id_in(value: bytes | None) -> bytes | None:
    """Returns the 16 bytes of the id that a header holds; None if it holds none."""
    if value is None:
        return None
    if len(value) == _ID_BYTES:
        return value
    if _HEX.fullmatch(value) or _DASHED.fullmatch(value):
        return bytes.fromhex(value.replace(b"-", b"").decode())
    return None
