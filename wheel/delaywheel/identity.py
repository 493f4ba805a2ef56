"""Names of wheels, and the text patterns of nodes and clusters.

A wheel's name is ``<node>.<number>``: one node's append-only stream since one of its starts. A
number is never reused, so a name never means two streams.
"""

import re
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple, Self

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")
_WHEEL = re.compile(r"(?P<node>[a-z0-9][a-z0-9-]{0,30})\.(?P<number>[1-9][0-9]{0,17})")


class NameInvalidError(ValueError):
    """A text is not a valid node id, cluster id or wheel id."""


def check_name(text: str, *, what: str = "name") -> str:
    """Returns ``text`` if it is a valid name of a node or a cluster.

    Raises:
        NameInvalidError: The text is not a valid name.
    """
    if not _NAME.fullmatch(text):
        raise NameInvalidError(
            f"{what} {text!r}: 1 to 31 of a-z, 0-9 and '-', the first one not '-'"
        )
    return text


class _Name(NamedTuple):
    node: str
    number: int


class WheelId(_Name):
    """The name of a wheel; ordered by node, then number.

    A tuple, because nothing else is hashed and compared as often.
    """

    __slots__ = ()

    def __new__(cls, node: str, number: int) -> Self:
        """Creates a wheel's name.

        Raises:
            NameInvalidError: `node` is not a node id, or `number` is below 1.
        """
        check_name(node, what="node id")
        if number < 1:
            raise NameInvalidError(f"wheel number {number}: numbers start at 1")
        return super().__new__(cls, node, number)

    @classmethod
    def parse(cls, text: str) -> "WheelId":
        """Parses ``<node>.<number>``.

        Raises:
            NameInvalidError: The text is not a wheel id.
        """
        wheel = _parsed(text)
        if wheel is None:
            raise NameInvalidError(f"wheel id {text!r}: not <node>.<number>")
        return wheel

    def __str__(self) -> str:
        return f"{self.node}.{self.number}"

    @property
    def hash64(self) -> int:
        """The hash that frames carry instead of the name: it identifies a wheel in eight bytes."""
        return _hash64(str(self))


@lru_cache(maxsize=1024)
def _parsed(text: str) -> WheelId | None:
    match = _WHEEL.fullmatch(text)
    return None if match is None else WheelId(match["node"], int(match["number"]))


@lru_cache(maxsize=1024)
def _hash64(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
