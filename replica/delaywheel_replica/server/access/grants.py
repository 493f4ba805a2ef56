"""The file of grants: who may do what, in which topics, and how much (quotas.py).

docs/SECURITY.md has an example. Whoever is named in no grant may do nothing. `*` means everybody
who shows a certificate or a token; who shows neither is `anonymous`, and has what is granted to
that name alone.
"""

import tomllib
from functools import lru_cache
from typing import Any, Final, Self

from delaywheel_replica.patterns import Pattern, did_you_mean
from delaywheel_replica.rights import Granted, Right, Rights
from delaywheel_replica.server.access.quotas import Quotas
from delaywheel_replica.server.access.tables import (
    checked,
    is_meant,
    patterns,
    principals,
    tables_of,
    texts,
)

_FIELDS: Final = ("who", "may", "topics", "groups")
_PRINCIPALS_AT_MOST: Final = 4_096
"""Principals that are kept: an authority may have signed any number of names."""

_TABLES: Final = ("grant", "quota", "topic_quota")


class Grants:
    """All grants. For any thread."""

    def __init__(self, grants: list[tuple[tuple[Pattern, ...], Granted]], quotas: Quotas) -> None:
        self._grants = grants
        self.quotas: Final = quotas
        self._found: Final = lru_cache(_PRINCIPALS_AT_MOST)(self._find)
        self._of_grants: Final[dict[tuple[int, ...], Rights]] = {}
        """The rights by numbers of grants: who is named by the same ones shares decisions."""

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """Reads the content of a file; a ValueError says what is wrong."""
        document = tomllib.loads(content.decode())
        if unknown := document.keys() - set(_TABLES):
            name = min(unknown)
            known = ", ".join(f"[[{each}]]" for each in _TABLES)
            raise ValueError(f"{name}: only {known} are known{did_you_mean(name, _TABLES)}")
        tables = enumerate(tables_of(document, "grant"), 1)
        grants, quotas = [_grant(*each) for each in tables], Quotas.parse(document)
        if not grants:
            raise ValueError("it has no [[grant]], so nobody could do anything: is it complete?")
        return cls(grants, quotas)

    def rights_of(self, principal: str) -> Rights:
        """Returns what a principal may do."""
        return self._found(principal)

    def _find(self, principal: str) -> Rights:
        numbers = tuple(
            number for number, (who, _) in enumerate(self._grants) if is_meant(who, principal)
        )
        known = self._of_grants.get(numbers)
        if known is None:
            known = Rights(self._grants[number][1] for number in numbers)
            self._of_grants[numbers] = known
        return known


def _grant(number: int, table: Any) -> tuple[tuple[Pattern, ...], Granted]:
    what = f"grant {number}"
    fields = checked(what, table, _FIELDS)
    who, may = principals(what, fields), texts(what, "may", fields)
    topics = patterns(what, "topics", fields) if "topics" in fields else (Pattern("*"),)
    known = [right.value for right in Right]
    for name in may:
        if name not in known:
            meant = did_you_mean(name, known)
            raise ValueError(f"{what}: may: there is no right {name!r}{meant}")
    if (Right.HALF in may) != ("groups" in fields):
        raise ValueError(f"{what}: groups: of checkers, with the right 'half', and only then")
    groups = patterns(what, "groups", fields) if "groups" in fields else ()
    return who, Granted(frozenset(Right(name) for name in may), topics, groups)
