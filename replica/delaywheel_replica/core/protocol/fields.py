"""Reads JSON objects that other processes wrote, checking that every field exists and its type.

Everything stored or sent as JSON here (control records, status files) is read through `Fields`, so
that a malformed document raises one error that names the field, and never a KeyError from inside a
decision.
"""

import json
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Any, Self, TypeVar

from delaywheel.identity import NameInvalidError, WheelId

_Choice = TypeVar("_Choice", bound=StrEnum)
_Made = TypeVar("_Made")


class MalformedError(ValueError):
    """A JSON document is missing a field, or a field has the wrong type or value."""


class Unchanged:
    """Caches what was parsed from parts of documents that mostly stay the same."""

    def __init__(self) -> None:
        """Begins with an empty cache."""
        self._made: dict[str, tuple[Any, Any]] = {}
        self._parts: dict[str, Unchanged] = {}

    def within(self, name: str) -> "Unchanged":
        """Returns the cache for the parts of one part."""
        return self._parts.setdefault(name, Unchanged())

    def of(self, name: str, part: Any, make: Callable[[Any], _Made]) -> _Made:
        """Returns the object made from a part: the same one while the part is unchanged."""
        known = self._made.get(name)
        if known is None or known[0] != part:
            known = self._made[name] = part, make(part)
        made: _Made = known[1]
        return made


class Fields:
    """One JSON object, read field by field."""

    def __init__(self, document: Any) -> None:
        if not isinstance(document, Mapping):
            raise MalformedError(f"an object was expected, not {type(document).__name__}")
        self._document: Mapping[str, Any] = document

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parses one JSON object."""
        try:
            return cls(json.loads(data))
        except ValueError as error:
            raise MalformedError(f"not a JSON object: {error}") from error

    def integer(self, name: str, *, at_least: int | None = None) -> int:
        """The integer of this name."""
        value = self._get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise MalformedError(f"{name}: {value!r} is no integer")
        if at_least is not None and value < at_least:
            raise MalformedError(f"{name}: {value} is less than {at_least}")
        return value

    def optional_integer(self, name: str, *, at_least: int | None = None) -> int | None:
        """The integer of this name, or None for null."""
        return None if self._get(name) is None else self.integer(name, at_least=at_least)

    def boolean(self, name: str) -> bool:
        """The boolean of this name."""
        value = self._get(name)
        if not isinstance(value, bool):
            raise MalformedError(f"{name}: {value!r} is no boolean")
        return value

    def text(self, name: str) -> str:
        """The string of this name."""
        value = self._get(name)
        if not isinstance(value, str):
            raise MalformedError(f"{name}: {value!r} is no string")
        return value

    def optional_text(self, name: str) -> str | None:
        """The string of this name, or None for null."""
        return None if self._get(name) is None else self.text(name)

    def choice(self, name: str, choices: type[_Choice]) -> _Choice:
        """The member of an enumeration, by its text."""
        value = self.text(name)
        try:
            return choices(value)
        except ValueError as error:
            raise MalformedError(f"{name}: {value!r} is none of {list(choices)}") from error

    def wheel(self, name: str) -> WheelId:
        """The wheel id of this name."""
        return parse_wheel(self.text(name))

    def optional_wheel(self, name: str) -> WheelId | None:
        """The wheel id of this name, or None for null."""
        return None if self._get(name) is None else self.wheel(name)

    def object(self, name: str) -> "Fields":
        """The object of this name."""
        return Fields(self._get(name))

    def optional_object(self, name: str) -> "Fields | None":
        """The object of this name, or None for null."""
        return None if self._get(name) is None else self.object(name)

    def texts(self, name: str) -> tuple[str, ...]:
        """The list of strings of this name."""
        value = self._get(name)
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise MalformedError(f"{name}: {value!r} is no list of strings")
        return tuple(value)

    def value(self, name: str) -> Any:
        """The value of this name, of any type."""
        return self._get(name)

    def items(self, name: str) -> list[Any]:
        """The list of this name, with items of any type."""
        value = self._get(name)
        if not isinstance(value, list):
            raise MalformedError(f"{name}: {value!r} is no list")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """The list of integers of this name."""
        value = self.items(name)
        if not all(isinstance(each, int) and not isinstance(each, bool) for each in value):
            raise MalformedError(f"{name}: {value!r} is no list of integers")
        return tuple(value)

    def pair(self, name: str) -> tuple[Any, Any]:
        """The list of exactly two items of this name."""
        return _pair(name, self._get(name))

    def pairs(self, name: str) -> list[tuple[Any, Any]]:
        """The list of pairs of this name."""
        return [_pair(name, value) for value in self.items(name)]

    def is_null(self, name: str) -> bool:
        """Whether the value of this name is null."""
        return self._get(name) is None

    def names(self) -> list[str]:
        """The names of all fields."""
        return list(self._document)

    def _get(self, name: str) -> Any:
        if name not in self._document:
            raise MalformedError(f"{name} is missing")
        return self._document[name]


def _pair(name: str, value: Any) -> tuple[Any, Any]:
    if not isinstance(value, list) or len(value) != 2:
        raise MalformedError(f"{name}: {value!r} is no list of two")
    first, second = value
    return first, second


@lru_cache(8_192)
def parse_wheel(text: str) -> WheelId:
    """Parses a wheel id; cached, since every document repeats the same ones.

    Raises:
        MalformedError: It is not a wheel id.
    """
    try:
        return WheelId.parse(text)
    except NameInvalidError as error:
        raise MalformedError(str(error)) from error


def dump(document: Mapping[str, Any]) -> bytes:
    """Writes one JSON object, compact, with sorted keys: equal documents are equal bytes."""
    return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()
