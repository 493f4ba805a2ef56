"""What a program tells of its messages, checked once; and how that is written."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from delaywheel.trace.batch import Rows
from delaywheel.trace.schema import LONGEST_TEXT_BYTES
from delaywheel.trace.texts import KEY_MODES, KeyMode, cut, key_text, short_text, short_texts

_LONGEST_SECRET_BYTES: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """See the arguments of `delaywheel.trace.Trace`."""

    key: KeyMode = "plain"
    secret: bytes | None = None
    tags: str | None = None
    sample: float = 1.0

    def __post_init__(self) -> None:
        if self.key not in KEY_MODES:
            raise ValueError(f"key {self.key!r}: not one of {', '.join(KEY_MODES)}")
        if self.key == "hash":
            if not isinstance(self.secret, bytes):
                raise TypeError("key='hash' needs secret, as bytes")
            if not 0 < len(self.secret) <= _LONGEST_SECRET_BYTES:
                raise ValueError(
                    f"secret: {len(self.secret)} bytes, not 1 to {_LONGEST_SECRET_BYTES}"
                )
        elif self.secret is not None:
            raise ValueError("secret is for key='hash'")
        if self.tags is not None and (not isinstance(self.tags, str) or not self.tags):
            raise ValueError(f"tags {self.tags!r}: the name of a header")
        if not isinstance(self.sample, int | float) or isinstance(self.sample, bool):
            raise TypeError(f"sample must be a number, not {type(self.sample).__name__}")
        if not 0 < self.sample <= 1:
            raise ValueError(f"sample {self.sample}: above 0, at most 1; without a trace: none")

    def keys(self, keys: list[bytes | None]) -> tuple[list[bytes | None], int]:
        """Returns keys as they are gathered, and their length: of long ones what is needed."""
        if self.key == "none":
            return [None] * len(keys), 0
        length_bytes = sum(map(len, filter(None, keys)))
        if self.key == "plain" and length_bytes > LONGEST_TEXT_BYTES * len(keys):
            most = LONGEST_TEXT_BYTES + 1
            keys = [None if key is None else key[:most] for key in keys]
            length_bytes = sum(map(len, filter(None, keys)))
        return keys, length_bytes

    def prepared(self, rows: Rows) -> Rows:
        """Returns columns as they are sent, of those that were gathered."""
        known = dict(rows)
        keys = short_texts(rows["key"]) if self.key == "plain" else None
        known["key"] = keys or _mapped(rows["key"], key_text(self.key, self.secret or b""))
        known["tags"] = _mapped(rows["tags"], short_text)
        if "node" in rows:  # a wheel's name begins with its node's
            known["node"] = _mapped(rows["node"], lambda wheel: wheel.partition(".")[0])
        if "why" in rows:
            known["why"] = _mapped(rows["why"], cut)
        return known


def _mapped(column: Sequence[Any], to: Any) -> list[Any]:
    """Returns what each value becomes; equal ones are looked at once."""
    known = {value: to(value) for value in set(column) - {None}}
    return list(map(known.get, column))
