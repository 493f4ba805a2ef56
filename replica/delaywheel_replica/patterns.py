"""Patterns of names in settings."""

import re
from typing import Final


class Pattern:
    """A name, or several: `*` stands for any characters.

    Example:
        >>> Pattern("orders.*").fits("orders.eu"), Pattern("orders.*").fits("order")
        (True, False)
    """

    __slots__ = ("_expression", "fits_all", "text")

    def __init__(self, text: str) -> None:
        self.text: Final = text
        self.fits_all: Final = not text.strip("*") and bool(text)
        pieces = (re.escape(piece) for piece in re.split(r"\*+", text))
        self._expression: Final = re.compile(".*".join(pieces), re.DOTALL)

    def fits(self, name: str) -> bool:
        """Whether it stands for this name."""
        return self._expression.fullmatch(name) is not None
