"""Makes a command's words of a request's JSON: its fields are the command's long options."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from delaywheel_replica.web.refusals import PageRefusal

Fields = Mapping[str, type]
"""What a request may have: a text, a number from 1, a truth, or a list of texts."""

_NOT_AS_IT_IS: Final = {"headers": "header"}


def parsed(body: bytes, fields: Fields) -> dict[str, Any]:
    """Returns a request, or refuses it as REQUEST_MALFORMED, with the place."""
    try:
        asked = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise malformed(str(error)) from error
    if not isinstance(asked, dict):
        raise malformed("send one JSON object")
    for name, value in asked.items():
        kind = fields.get(name)
        if kind is None:
            raise malformed(f"{name[:100]}: there is {', '.join(fields)}")
        is_fit = type(value) is kind and _are_texts(value)
        if not is_fit or (kind is int and value < 1):
            raise malformed(f"{name}: {_MEANT[kind]}")
    return asked


def words(asked: Mapping[str, Any], *, places: str) -> list[str]:
    """Returns options, and what `places` names as words of their own behind them."""
    own = asked.get(places, [])
    options = [
        option for name, value in asked.items() if name != places for option in _of(name, value)
    ]
    return [*options, *(["--", *own] if own else [])]


def malformed(text: str) -> PageRefusal:
    """Returns the refusal of what is not as it should be."""
    return PageRefusal(400, "REQUEST_MALFORMED", text[:500])


_MEANT: Final[Mapping[type, str]] = {
    str: "a text",
    int: "a whole number from 1",
    bool: "true or false",
    list: "a list of texts",
}


def _of(name: str, value: Any) -> Iterator[str]:
    flag = f"--{_NOT_AS_IT_IS.get(name, name).replace('_', '-')}"
    if isinstance(value, bool):
        if value:
            yield flag
    elif isinstance(value, list):
        for each in value:
            yield f"{flag}={each}"
    else:
        yield f"{flag}={value}"


def _are_texts(value: Any) -> bool:
    """Whether what is text in it can be written as UTF-8."""
    texts = value if isinstance(value, list) else [value] if isinstance(value, str) else []
    try:
        return all(isinstance(each, str) and each.encode() is not None for each in texts)
    except UnicodeEncodeError:
        return False
