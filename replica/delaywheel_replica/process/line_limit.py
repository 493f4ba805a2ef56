"""How many lines of a kind are logged: what strangers send costs a bounded number of bytes of log.

In a minute, the same line of a kind is written once, and so are `LINES_A_MINUTE` different ones.
All others are counted, and the count is told when the minute is over. Kinds are few, as programs
name them; beyond `_KINDS` they are one.

It uses the standard library alone, as the supervisor does.
"""

import time
from collections import Counter
from collections.abc import Callable
from typing import Final

LINES_A_MINUTE: Final = 10
TEXT_AT_MOST: Final = 300
"""Characters of a line of which strangers may choose some."""
MINUTE_S: Final = 60.0
_KINDS: Final = 32
_OTHERS: Final = "others"


class LineLimit:
    """Counts lines by kind. For one thread at a time."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic: Final = monotonic
        self._written: Final[dict[str, set[str]]] = {}
        self._left_out: Final = Counter[str]()
        self._ends_s = 0.0

    @property
    def due_s(self) -> float | None:
        """When a count is to be told, by the monotonic clock; None: nothing was left out."""
        return self._ends_s if self._left_out else None

    def take(self, kind: str, text: str) -> bool:
        """Returns whether to write a line of a kind; counts it if not."""
        now_s = self._monotonic()
        if now_s >= self._ends_s and not self._left_out:
            self._written.clear()
            self._ends_s = now_s + MINUTE_S
        if kind not in self._written and len(self._written) >= _KINDS:
            kind = _OTHERS
        written = self._written.setdefault(kind, set())
        if text in written or len(written) >= LINES_A_MINUTE:
            self._left_out[kind] += 1
            return False
        written.add(text)
        return True

    def counted(self, *, ended: bool = False) -> dict[str, int]:
        """Returns how many lines were left out, by kind, once the minute, or the process, ended."""
        if not self._left_out or (self._monotonic() < self._ends_s and not ended):
            return {}
        counts = dict(self._left_out)
        self._left_out.clear()
        self._ends_s = 0.0
        return counts


def cut(text: str, most: int = TEXT_AT_MOST) -> str:
    """Shortens a text, and says so by its last character."""
    return text if len(text) <= most else f"{text[:most]}…"
