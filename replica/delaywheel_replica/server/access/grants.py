"""The file of grants: who may do what, in which topics.

```toml
[[grant]]
who = ["spiffe://shop/*", "billing"]     # principals; `*` in a name stands for any characters
may = ["produce", "change", "inspect"]
topics = ["orders.*"]                    # all topics, if it is left out
```

Whoever is named in no grant may do nothing. `*` means everybody who shows a certificate or a token;
who shows neither is `anonymous`, and has what is granted to that name alone.
"""

import tomllib
from typing import Any, Final, Self

from delaywheel_replica.config_faults import did_you_mean
from delaywheel_replica.patterns import Pattern
from delaywheel_replica.server.access.rights import Granted, Right, Rights

ANONYMOUS: Final = "anonymous"
_FIELDS: Final = ("who", "may", "topics")
_PRINCIPALS_AT_MOST: Final = 4_096
"""Principals whose rights are kept together: an authority may have signed any number of names."""


class Grants:
    """All grants. For any thread."""

    def __init__(self, grants: list[tuple[tuple[Pattern, ...], Granted]]) -> None:
        self._grants = grants
        self._rights: dict[str, Rights] = {}

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """Reads the content of a file.

        Raises:
            ValueError: It is not in order; says what is wrong.
        """
        document = tomllib.loads(content.decode())
        if unknown := document.keys() - {"grant"}:
            name = min(unknown)
            raise ValueError(f"{name}: only [[grant]] is known{did_you_mean(name, ['grant'])}")
        tables = document.get("grant", [])
        if not isinstance(tables, list):
            raise ValueError("grant: write [[grant]], with two brackets")  # noqa: TRY004 - a file's fault
        return cls([_grant(number, table) for number, table in enumerate(tables, 1)])

    def rights_of(self, principal: str) -> Rights:
        """Returns what a principal may do."""
        known = self._rights.get(principal)
        if known is None:
            known = Rights(granted for who, granted in self._grants if _is_meant(who, principal))
            if len(self._rights) >= _PRINCIPALS_AT_MOST:
                self._rights.clear()
            self._rights[principal] = known
        return known


def _is_meant(who: tuple[Pattern, ...], principal: str) -> bool:
    if principal == ANONYMOUS:
        return any(each.text == ANONYMOUS for each in who)
    return any(each.fits(principal) for each in who)


def _grant(number: int, table: Any) -> tuple[tuple[Pattern, ...], Granted]:
    what = f"grant {number}"
    if not isinstance(table, dict):
        raise ValueError(f"{what}: is no table")  # noqa: TRY004 - a file's fault
    if unknown := table.keys() - set(_FIELDS):
        name = min(unknown)
        raise ValueError(f"{what}: there is no {name}{did_you_mean(name, _FIELDS)}")
    who, may = _texts(what, "who", table), _texts(what, "may", table)
    topics = _texts(what, "topics", table) if "topics" in table else ["*"]
    known = [right.value for right in Right]
    for name in may:
        if name not in known:
            meant = did_you_mean(name, known)
            raise ValueError(f"{what}: may: there is no right {name!r}{meant}")
    rights = frozenset(Right(name) for name in may)
    return tuple(map(Pattern, who)), Granted(rights, tuple(map(Pattern, topics)))


def _texts(what: str, name: str, table: dict[str, Any]) -> list[str]:
    texts = table.get(name)
    if not (isinstance(texts, list) and texts and all(isinstance(each, str) for each in texts)):
        raise ValueError(f"{what}: {name} must be a list of texts, with one at least")
    if "" in texts:
        raise ValueError(f"{what}: {name} has an empty text")
    return texts
