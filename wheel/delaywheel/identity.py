"""Names of wheels, and the text patterns of nodes, clusters, topics and addresses.

A wheel's name is ``<node>.<number>``: one node's append-only stream since one of its starts. A
number is never reused, so a name never means two streams.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Final, NamedTuple, Self

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")
_WHEEL = re.compile(r"(?P<node>[a-z0-9][a-z0-9-]{0,30})\.(?P<number>[1-9][0-9]{0,17})")
_TOPIC = re.compile(r"(?!\.{1,2}\Z)[a-zA-Z0-9._-]{1,249}")
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[^\s:,/]+):(?P<port>[0-9]{1,5})")
_WILDCARDS: Final = frozenset({"0.0.0.0", "[::]"})  # noqa: S104  nothing is bound to them


class NameInvalidError(ValueError):
    """A text is not a valid node id, cluster id or wheel id."""


def check_name(text: str, *, what: str = "name") -> str:
    """Returns `text` if it may name a node or a cluster; otherwise raises NameInvalidError."""
    if not _NAME.fullmatch(text):
        raise NameInvalidError(
            f"{what} {text!r}: 1 to 31 of a-z, 0-9 and '-', the first one not '-'"
        )
    return text


def is_topic_name(name: str) -> bool:
    """Whether Kafka could have a topic of this name; not cached, as names may be of any length."""
    return _TOPIC.fullmatch(name) is not None


class _Name(NamedTuple):
    node: str
    number: int


class WheelId(_Name):
    """The name of a wheel; ordered by node, then number.

    A tuple, because nothing else is hashed and compared as often.
    """

    __slots__ = ()

    def __new__(cls, node: str, number: int) -> Self:
        """Checks both parts; raises NameInvalidError, also for a number below 1."""
        check_name(node, what="node id")
        if number < 1:
            raise NameInvalidError(f"wheel number {number}: numbers start at 1")
        return super().__new__(cls, node, number)

    @classmethod
    def parse(cls, text: str) -> "WheelId":
        """Parses `<node>.<number>`; raises NameInvalidError for anything else."""
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


def parse_addresses(addresses: str | Sequence[str]) -> tuple[str, ...]:
    """Parses `"host:port,host:port"`, or a sequence of `"host:port"`; removes duplicates.

    Raises ValueError if there is none, or one is not `host:port` (IPv6: `[::1]:7420`).

    Example:
        >>> parse_addresses("a:7420, b:7420")
        ('a:7420', 'b:7420')
    """
    listed = addresses.split(",") if isinstance(addresses, str) else addresses
    if not isinstance(listed, Sequence) or not all(isinstance(one, str) for one in listed):
        raise TypeError(f"addresses {addresses!r}: 'host:port,host:port', or a sequence of texts")
    cleaned = tuple(dict.fromkeys(address.strip() for address in listed))
    for address in cleaned:
        if not _is_address(address):
            raise ValueError(f"address {address!r}: not host:port, such as delay-1:7420")
    if not cleaned:
        raise ValueError("no address: give at least one host:port")
    return cleaned


def leads_elsewhere(address: str) -> bool:
    """Whether an address that a node advertises is usable on another machine.

    Example:
        >>> leads_elsewhere("10.0.0.7:7420"), leads_elsewhere("0.0.0.0:7420")
        (True, False)
    """
    return _is_address(address) and address.rpartition(":")[0] not in _WILDCARDS


def _is_address(text: str) -> bool:
    match = _ADDRESS.fullmatch(text)
    return match is not None and 0 < int(match["port"]) < 65_536
