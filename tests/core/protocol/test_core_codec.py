"""The documents that a declaration encodes, and those that it refuses, by field."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import pytest

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel_replica.core.protocol.codec import (
    MalformedError,
    Natural,
    Unchanged,
    decode,
    encode,
    from_json,
    to_json,
)
from delaywheel_replica.core.protocol.progress import Position
from delaywheel_replica.core.protocol.reschedules import MessageKey


class Colour(StrEnum):
    RED = "red"


class Pair(NamedTuple):
    wheel: WheelId
    number: int


@dataclass(frozen=True, slots=True)
class Inner:
    number: Natural = 0


@dataclass(frozen=True, slots=True)
class Outer:
    colour: Colour
    pair: Pair | None = None
    place: Position | None = None
    seqs: SeqSet = NO_SEQS
    wheels: frozenset[WheelId] = frozenset()
    keyed: Mapping[MessageKey, Inner] = field(default_factory=dict)
    parts: Mapping[str, Inner] = field(default_factory=dict)
    list: tuple[Inner, ...] = ()
    number: Natural = 7


A1, B2 = WheelId("a", 1), WheelId("b", 2)
FULL = Outer(
    Colour.RED,
    Pair(A1, 3),
    Position(A1, 5, 0),
    SeqSet([(4, 6), (9, 9)]),
    frozenset({B2, A1}),
    {MessageKey(bytes(16), 5, "orders"): Inner(1)},
    {"x": Inner(2)},
    (Inner(3), Inner(4)),
    8,
)
DOCUMENT: dict[str, Any] = {
    "colour": "red",
    "pair": ["a.1", 3],
    "place": "a.1/5/0",
    "seqs": [[4, 6], 9],
    "wheels": ["a.1", "b.2"],
    "keyed": {f"{'00' * 16}/5/orders": {"number": 1}},
    "parts": {"x": {"number": 2}},
    "list": [{"number": 3}, {"number": 4}],
    "number": 8,
}


def test_a_document_is_what_the_annotations_say() -> None:
    assert to_json(FULL) == DOCUMENT
    assert decode(Outer, encode(FULL)) == FULL
    assert encode(FULL).startswith(b'{"colour":"red","keyed":')


def test_every_field_must_be_there_and_what_a_later_release_adds_is_passed_over() -> None:
    assert from_json(Outer, DOCUMENT | {"of_later": 1}) == FULL
    for absent in ("parts", "number"):
        with pytest.raises(MalformedError, match=f"^{absent} is missing$"):
            from_json(Outer, {name: part for name, part in DOCUMENT.items() if name != absent})


@pytest.mark.parametrize(
    ("name", "part", "why"),
    [
        ("colour", "blue", "colour: 'blue' is none of"),
        ("pair", ["a.1"], "pair: .* is no list of 2"),
        ("pair", ["a.0", 3], "pair: wheel id 'a.0'"),
        ("place", "a.1/5", "place: .* is not <wheel>/<seq>/<row>"),
        ("seqs", "x", "seqs: "),
        ("seqs", 3, "seqs: "),
        ("seqs", [[]], "seqs: "),
        ("wheels", {"a.1": 1}, "wheels: .* is no list"),
        ("keyed", {"00/5": {"number": 1}}, "keyed: '00/5' is not <id>/<due>/<topic>"),
        ("parts", {"x": {"number": -1}}, "parts: number: -1 is not from 0"),
        ("parts", {"x": {"number": True}}, "parts: number: True is no integer"),
        ("parts", [], "parts: an object was expected, not list"),
        ("list", [{}], "list: number is missing"),
        ("number", None, "number: None is no integer"),
    ],
)
def test_a_wrong_field_is_named(name: str, part: object, why: str) -> None:
    with pytest.raises(MalformedError, match=why):
        from_json(Outer, DOCUMENT | {name: part})


def test_what_is_no_json_is_malformed() -> None:
    with pytest.raises(MalformedError, match="no JSON"):
        decode(Outer, b"{")


def test_parts_of_parts_are_kept_while_they_are_there() -> None:
    known = Unchanged()
    first = from_json(Outer, DOCUMENT, known)
    more = DOCUMENT | {"parts": {"x": {"number": 2}, "y": {"number": 2}}, "number": 9}
    second = from_json(Outer, more, known)
    assert second.list is first.list
    assert second.parts == {"x": Inner(2), "y": Inner(2)}
    gone = known.within("parts").within("y")
    from_json(Outer, DOCUMENT, known)
    assert known.within("parts").within("y") is not gone, "a name that left takes no memory"
