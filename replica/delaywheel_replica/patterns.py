"""Names that people write: patterns of them, and what a wrong one may have meant."""

from collections.abc import Iterable
from typing import Final

_MISTYPED_AT_MOST: Final = 100


class Pattern:
    """A name, or several: `*` stands for any characters.

    No regular expression: of several `*` that would try all ways to divide a name, and callers
    choose the names.

    Example:
        >>> Pattern("orders.*").fits("orders.eu"), Pattern("orders.*").fits("order")
        (True, False)
    """

    __slots__ = ("_begin", "_end", "_least_length", "_middle", "fits_all", "text")

    def __init__(self, text: str) -> None:
        self.text: Final = text
        self.fits_all: Final = not text.strip("*") and bool(text)
        self._begin, *middle = text.split("*")
        self._end: Final = middle.pop() if middle else None
        self._middle: Final = [piece for piece in middle if piece]
        self._least_length: Final = len(self._begin) + len(self._end or "")

    def fits(self, name: str) -> bool:
        """Whether it stands for this name."""
        if self._end is None:
            return name == self.text
        if len(name) < self._least_length or not name.endswith(self._end):
            return False
        at, until = len(self._begin), len(name) - len(self._end)
        for piece in self._middle:  # the first place of each leaves most room for the next
            found = name.find(piece, at, until)
            if found < 0:
                return False
            at = found + len(piece)
        return name.startswith(self._begin)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a suggestion for a wrong name, to append to its error."""
    if len(name) > _MISTYPED_AT_MOST:  # a stranger's of 1 MB takes a second
        return ""
    # Only here: for mistyped names.
    from difflib import get_close_matches  # noqa: PLC0415

    near = get_close_matches(name, list(known), n=1)
    return f": did you mean {near[0]}?" if near else ""
