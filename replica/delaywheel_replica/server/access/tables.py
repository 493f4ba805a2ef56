"""What the tables of the file of grants have in common: names of fields, texts, who is meant."""

from collections.abc import Collection, Iterable
from typing import Any, Final

from delaywheel_replica.patterns import Pattern, did_you_mean

ANONYMOUS: Final = "anonymous"
"""The name of callers who show none."""
KINDS: Final = ("uri", "dns", "cn", "token")
"""What the names of all others begin with, and a colon: how they are shown."""


def tables_of(document: dict[str, Any], name: str) -> list[Any]:
    """Returns the tables of a name; anything else is a ValueError."""
    tables = document.get(name, [])
    if not isinstance(tables, list):
        raise ValueError(f"{name}: write [[{name}]], with two brackets")  # noqa: TRY004 - a file's fault
    return tables


def checked(what: str, table: Any, fields: Collection[str]) -> dict[str, Any]:
    """Returns a table that has these fields at most; another is a ValueError."""
    if not isinstance(table, dict):
        raise ValueError(f"{what}: is no table")  # noqa: TRY004 - a file's fault
    if unknown := table.keys() - set(fields):
        name = min(unknown)
        raise ValueError(f"{what}: there is no {name}{did_you_mean(name, fields)}")
    return table


def texts(what: str, name: str, table: dict[str, Any]) -> list[str]:
    """Returns the texts of a field; a ValueError says that they are none, or no texts."""
    found = table.get(name)
    if not (isinstance(found, list) and found and all(isinstance(each, str) for each in found)):
        raise ValueError(f"{what}: {name} must be a list of texts, with one at least")
    if "" in found:
        raise ValueError(f"{what}: {name} has an empty text")
    return found


def patterns(what: str, name: str, table: dict[str, Any]) -> tuple[Pattern, ...]:
    """Returns the patterns of a field; see `texts`."""
    return tuple(map(Pattern, texts(what, name, table)))


def principals(what: str, table: dict[str, Any]) -> tuple[Pattern, ...]:
    """Returns the patterns of `who`; see `texts`.

    A pattern that says no kind is a ValueError: a common name may read like a URI.
    """
    names = texts(what, "who", table)
    for name in names:
        kind, colon, _ = name.partition(":")
        if name not in ("*", ANONYMOUS) and not (colon and kind in KINDS):
            known = ", ".join(f"{kind}:" for kind in KINDS)
            raise ValueError(
                f"{what}: who: {name!r} begins with no kind of name: {known} (or is *, {ANONYMOUS})"
            )
    return tuple(map(Pattern, names))


def is_meant(who: Iterable[Pattern], principal: str) -> bool:
    """Whether patterns mean a principal; `*` does not mean who shows no name."""
    if principal == ANONYMOUS:
        return any(each.text == ANONYMOUS for each in who)
    return any(each.fits(principal) for each in who)
