"""Names of topics, and patterns of names in settings."""

import re
from typing import Final

_TOPIC = re.compile(r"(?!\.{1,2}\Z)[a-zA-Z0-9._-]{1,249}")


def is_topic_name(name: str) -> bool:
    """Whether Kafka could have a topic of this name.

    Results are not cached: matching costs no more than a lookup, and callers may send names of any
    length.
    """
    return _TOPIC.fullmatch(name) is not None


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
