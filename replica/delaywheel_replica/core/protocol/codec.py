"""JSON documents from declarations: a dataclass's annotations are its encoding.

Everything stored or sent as JSON here (control records, status files, notes of the ledger) is
declared once, as a frozen dataclass. A malformed document raises one error that names the field,
and never a KeyError from inside a decision.

| annotation | JSON |
|---|---|
| int, str, bool, None | the same |
| `Annotated[..., check]` | the same, as the check returns it; refused if it raises |
| StrEnum | its text |
| a class with `to_json` and `from_json` | what these make of it |
| a class with `parse`, `Annotated[..., Text(...)]` | text, also as a key |
| dataclass | an object with a key for each field |
| NamedTuple, tuple[X, Y] | an array with an item for each |
| tuple[X, ...], frozenset[X] | an array; of a set, sorted |
| Mapping[K, V] | an object |

Every other field must be there; unknown ones are passed over, so a later release may add some.
Between nodes the same declarations are protobuf (`peers/encoding.py`), with the same checks.
msgspec would read a tuple, which a `WheelId` is, as an array even where it is a key; pydantic takes
each process 0.3 s at its start.
"""

import dataclasses
import json
import types
from collections.abc import Callable, Hashable, Iterable, Mapping, Sized
from enum import StrEnum
from functools import cache, lru_cache
from operator import attrgetter
from typing import Annotated, Any, Final, NamedTuple, TypeVar, Union, cast, get_args, get_origin
from typing import get_type_hints as type_hints

from delaywheel.identity import NameInvalidError, WheelId, check_name

_T = TypeVar("_T")
_Sized = TypeVar("_Sized", bound=Sized)


class MalformedError(ValueError):
    """A JSON document is missing a field, or a field has the wrong type or value."""


MOST: Final = 1 << 53
"""No counter grows beyond this; every reader of the JSON handles it exactly."""


def between(least: int, most: int = MOST) -> Callable[[int], int]:
    """Returns the check of an integer, for its annotation."""

    def check(number: int) -> int:
        if least <= number <= most:
            return number
        raise MalformedError(f"{number} is not from {least} to {most}")

    return check


def at_most(most: int) -> Callable[[_Sized], _Sized]:
    """Returns the check of how many characters or parts there are, for an annotation."""

    def check(parts: _Sized) -> _Sized:
        if len(parts) <= most:
            return parts
        raise MalformedError(f"{len(parts)} parts are more than {most}")

    return check


def _check_node(text: str) -> str:
    try:
        return check_name(text, what="node id")
    except NameInvalidError as error:
        raise MalformedError(str(error)) from error


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """How a type is encoded as text, in its annotation; `load` raises ValueError."""

    dump: Callable[[Any], str]
    load: Callable[[str], Any]


Natural = Annotated[int, between(0)]
"""An integer that is not negative."""
Positive = Annotated[int, between(1)]
"""An integer of 1 or more."""
NodeId = Annotated[str, _check_node]
"""A node's name."""
ShortText = Annotated[str, at_most(256)]
"""What nodes say of themselves."""


class Unchanged:
    """Caches what was read from parts of documents that mostly stay the same."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[Any, Any]] = {}
        self._parts: dict[str, Unchanged] = {}

    def within(self, name: str) -> "Unchanged":
        """Returns the cache for the parts within a part."""
        return self._parts.setdefault(name, Unchanged())

    def keep_only(self, names: Mapping[str, Any]) -> None:
        """Forgets all other parts."""
        for gone in [name for name in self._parts if name not in names]:
            del self._parts[gone]

    def of(self, name: str, part: Any, load: "_Load") -> Any:
        """Returns the object read from a part: the same one while the part is unchanged."""
        known = self._made.get(name)
        if known is None or known[0] != part:
            known = self._made[name] = part, load(part, self.within(name))
        return known[1]


_Dump = Callable[[Any], Any]
_Load = Callable[[Any, Unchanged | None], Any]


class _Codec(NamedTuple):
    """How a type is written and read.

    Attributes:
        dump: Never gets a None; None: the value is JSON already.
        load: Raises ValueError.
        is_plain: Reading it again costs no more than finding that it is unchanged.
    """

    dump: _Dump | None
    load: _Load
    is_plain: bool = False


def to_json(value: Any) -> Any:
    """Returns the JSON document of a value of a declared type."""
    dump = _codec(cast("Hashable", type(value))).dump
    return value if dump is None else dump(value)


def from_json(kind: type[_T], document: Any, known: Unchanged | None = None) -> _T:
    """Reads what `to_json` wrote, or raises MalformedError.

    Parts that are unchanged since the `known` documents are the same objects.
    """
    try:
        made: _T = _codec(cast("Hashable", kind)).load(document, known)
    except MalformedError:
        raise
    except ValueError as error:
        raise MalformedError(str(error)) from error
    return made


def encode(value: Any) -> bytes:
    """Writes one JSON document, compact, with sorted keys: equal values are equal bytes."""
    return json.dumps(to_json(value), separators=(",", ":"), sort_keys=True).encode()


def decode(kind: type[_T], data: bytes) -> _T:
    """Reads what `encode` wrote, or raises MalformedError."""
    try:
        document = json.loads(data)
    except ValueError as error:
        raise MalformedError(f"no JSON: {error}") from error
    return from_json(kind, document)


@lru_cache(8_192)
def parse_wheel(text: str) -> WheelId:
    """Parses a wheel id, or raises MalformedError; cached, since every document repeats them."""
    try:
        return WheelId.parse(text)
    except NameInvalidError as error:
        raise MalformedError(str(error)) from error


# --- types


@cache
def _codec(kind: Hashable) -> _Codec:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _annotated(args[0], args[1:])
    if origin in {Union, types.UnionType}:
        return _optional(args)
    if origin is tuple and args[-1] is not Ellipsis:
        return _items(args, tuple)
    if origin in {tuple, frozenset}:
        return _array(args[0], origin)
    if origin is not None:
        return _mapping(*args)
    return _class(kind)


def _class(kind: Any) -> _Codec:  # noqa: PLR0911 - one for each kind of class
    if kind in _SCALARS:
        return _Codec(None, _SCALARS[kind], is_plain=True)
    if hasattr(kind, "from_json"):
        return _Codec(kind.to_json, lambda document, _: kind.from_json(document))
    if issubclass(kind, StrEnum):
        return _enumeration(kind)
    if kind is WheelId:
        return _text(str, parse_wheel)
    if hasattr(kind, "parse"):
        return _text(str, kind.parse)
    if issubclass(kind, tuple):
        return _named_tuple(kind)
    return _dataclass(kind)


def _annotated(kind: Any, marks: tuple[Any, ...]) -> _Codec:
    for mark in marks:
        if isinstance(mark, Text):
            return _text(mark.dump, mark.load)
        if callable(mark):
            return _checked(_codec(kind), mark)
    return _codec(kind)


def _optional(kinds: tuple[Any, ...]) -> _Codec:
    (kind,) = (kind for kind in kinds if kind is not types.NoneType)
    dump, load, is_plain = _codec(kind)
    return _Codec(
        dump,
        lambda document, known: None if document is None else load(document, known),
        is_plain,
    )


def _checked(codec: _Codec, check: Callable[[Any], Any]) -> _Codec:
    return codec._replace(load=lambda document, known: check(codec.load(document, known)))


def _scalar(kind: type, name: str) -> _Load:
    def load(document: Any, _: Unchanged | None) -> Any:
        if type(document) is not kind:
            raise MalformedError(f"{document!r} is no {name}")
        return document

    return load


_string: Final = _scalar(str, "string")
_SCALARS: Final[Mapping[Any, _Load]] = {
    int: _scalar(int, "integer"),
    bool: _scalar(bool, "boolean"),
    str: _string,
}


def _text(dump: Callable[[Any], str], parse: Callable[[str], Any]) -> _Codec:
    def load(document: Any, _: Unchanged | None) -> Any:
        return parse(_string(document, None))

    return _Codec(dump, load, is_plain=True)


def _enumeration(kind: type[StrEnum]) -> _Codec:
    members = {member.value: member for member in kind}

    def load(document: Any, _: Unchanged | None) -> Any:
        text = _string(document, None)
        if text not in members:
            raise MalformedError(f"{text!r} is none of {list(members)}")
        return members[text]

    return _Codec(attrgetter("value"), load, is_plain=True)


def _list(document: Any) -> list[Any]:
    if not isinstance(document, list):
        raise MalformedError(f"{document!r} is no list")
    return document


def _object(document: Any) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise MalformedError(f"an object was expected, not {type(document).__name__}")
    return document


def _array(kind: Any, of: Callable[[Iterable[Any]], Any]) -> _Codec:
    dump, load, _ = _codec(kind)
    in_order: Callable[[Iterable[Any]], list[Any]] = sorted if of is frozenset else list
    return _Codec(
        in_order if dump is None else (lambda values: in_order(map(dump, values))),
        lambda document, _: of([load(item, None) for item in _list(document)]),
    )


def _mapping(key: Any, value: Any) -> _Codec:
    dump_key, load_key, _ = _codec(key)
    dump_value, load_value, is_plain = _codec(value)

    def dump(mapping: Mapping[Any, Any]) -> dict[str, Any]:
        keys = mapping if dump_key is None else map(dump_key, mapping)
        values = mapping.values() if dump_value is None else map(dump_value, mapping.values())
        return dict(zip(keys, values, strict=True))

    def load(document: Any, known: Unchanged | None) -> dict[Any, Any]:
        if known is None or is_plain:
            return {
                load_key(name, None): load_value(part, None)
                for name, part in _object(document).items()
            }
        known.keep_only(_object(document))
        return {
            load_key(name, None): load_value(part, known.within(name))
            for name, part in document.items()
        }

    return _Codec(dict if dump_key is dump_value is None else dump, load)


def _named_tuple(kind: Any) -> _Codec:
    hints = type_hints(kind, include_extras=True)
    return _items([hints[name] for name in kind._fields], kind._make)


def _items(kinds: Iterable[Any], make: Callable[[Iterable[Any]], Any]) -> _Codec:
    codecs = [_codec(kind) for kind in kinds]
    dumps, loads = [codec.dump for codec in codecs], [codec.load for codec in codecs]

    def dump(value: Any) -> list[Any]:
        return [
            item if dump_item is None else dump_item(item)
            for item, dump_item in zip(value, dumps, strict=True)
        ]

    def load(document: Any, _: Unchanged | None) -> Any:
        if len(_list(document)) != len(loads):
            raise MalformedError(f"{document!r} is no list of {len(loads)}")
        return make(item(part, None) for item, part in zip(loads, document, strict=True))

    return _Codec(dump, load, is_plain=True)


def _dataclass(kind: Any) -> _Codec:
    hints = type_hints(kind, include_extras=True)
    codecs = {field.name: _codec(hints[field.name]) for field in dataclasses.fields(kind)}
    loads = [(name, codec.load, codec.is_plain) for name, codec in codecs.items()]
    dumps = [(name, codec.dump) for name, codec in codecs.items() if codec.dump is not None]

    def dump(value: Any) -> dict[str, Any]:
        document = {name: getattr(value, name) for name in codecs}
        for name, dump_field in dumps:
            part = document[name]
            if part is not None:
                document[name] = dump_field(part)
        return document

    def load(document: Any, known: Unchanged | None) -> Any:
        parts = _object(document)
        return kind(*[_field(parts, known, *field) for field in loads])

    return _Codec(dump, load)


def _field(
    document: dict[str, Any], known: Unchanged | None, name: str, load: _Load, is_plain: bool
) -> Any:
    if name not in document:
        raise MalformedError(f"{name} is missing")
    try:
        if known is None or is_plain:
            return load(document[name], None)
        return known.of(name, document[name], load)
    except (ValueError, TypeError, IndexError) as error:
        raise MalformedError(f"{name}: {error}") from error
