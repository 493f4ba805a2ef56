r"""Keys and tags, which are any bytes of any length, as short text.

docs/TRACE.md, "Keys and tags", has the table. Whoever looks for a key makes its text in the same
way, and compares texts.
"""

from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from typing import Final, Literal, cast

from delaywheel.trace.schema import LONGEST_TEXT_BYTES

KeyMode = Literal["plain", "hash", "none"]
KEY_MODES: Final = ("plain", "hash", "none")

_LONGEST_CHARACTER_BYTES: Final = 4


def short_text(value: bytes) -> str:
    r"""Returns bytes as text.

    Example:
        >>> short_text(b"42"), short_text(b"\\d"), short_text(b"\xff")
        ('42', '\\t\\d', '\\xff')
    """
    if len(value) > LONGEST_TEXT_BYTES:
        return "\\c" + _text(_beginning(value))
    return _text(value)


def short_texts(values: Sequence[bytes | None]) -> list[str] | None:
    """Returns many at once, where all are short ASCII and stay as they are; None: look at each."""
    if not values or None in values:
        return None
    joined = b"\0".join(cast("Sequence[bytes]", values))
    if b"\\" in joined or joined.count(b"\0") >= len(values) or not joined.isascii():
        return None
    texts = joined.decode().split("\0")
    return texts if max(map(len, texts)) <= LONGEST_TEXT_BYTES else None


def hashed(key: bytes, secret: bytes) -> str:
    """Returns a key as the text of its hash, which only who has the secret can compute."""
    return "\\h" + blake2b(key, digest_size=16, key=secret).hexdigest()


def key_text(mode: KeyMode, secret: bytes) -> Callable[[bytes], str | None]:
    """Returns how keys are written."""
    if mode == "none":
        return lambda _key: None
    return short_text if mode == "plain" else partial(hashed, secret=secret)


def cut(text: str) -> str:
    """Returns words for people, cut."""
    encoded = text.encode(errors="replace")[:LONGEST_TEXT_BYTES]
    return encoded.decode(errors="ignore")


def _text(value: bytes) -> str:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return "\\x" + value.hex()
    return "\\t" + text if text.startswith("\\") else text


def _beginning(value: bytes) -> bytes:
    """Returns the first bytes: whole characters, if it is UTF-8 there."""
    for length in range(LONGEST_TEXT_BYTES, LONGEST_TEXT_BYTES - _LONGEST_CHARACTER_BYTES, -1):
        try:
            value[:length].decode()
        except UnicodeDecodeError:
            continue
        return value[:length]
    return value[:LONGEST_TEXT_BYTES]
