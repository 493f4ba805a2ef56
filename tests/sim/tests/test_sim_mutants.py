"""Every mutant changes existing code, and leaves nothing behind."""

import re
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import pytest

from sim.drills.catalogue import DRILLS
from sim.mutants.catalogue import MUTANTS
from sim.mutants.mutant import PACKAGES
from sim.plans.profiles import PROFILES

Place = tuple[str, ...]


@pytest.fixture(scope="module")
def before() -> dict[Place, Any]:
    """The code as it stays if every mutant leaves nothing behind."""
    return dict(code())


def code() -> Iterator[tuple[Place, Any]]:
    """Every function, method and table of the code, with its places."""
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] in PACKAGES and isinstance(module, ModuleType):
            for attribute, value in vars(module).items():
                yield (name, attribute), _content(attribute, value)
                if isinstance(value, type) and value.__module__ == name:
                    for method, inner in vars(value).items():
                        yield (name, attribute, method), _content(method, inner)


def _content(name: str, value: Any) -> Any:
    # Python's own objects, such as __builtins__, are never changed in place.
    if isinstance(value, dict) and not name.startswith("__"):
        return tuple(map(repr, value.items()))
    if isinstance(value, FunctionType):
        return id(value), id(value.__code__)
    return id(value)


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_mutant_is_put_in(name: str, before: dict[Place, Any]) -> None:
    with MUTANTS[name]():
        assert any(before.get(place) != content for place, content in code())


def test_mutants_are_taken_out(before: dict[Place, Any]) -> None:
    """Once for all of them: to look at all of the code takes a while."""
    for name in sorted(MUTANTS):
        with MUTANTS[name]():
            pass
    assert dict(code()) == before


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_mutant_says_what_it_is(name: str) -> None:
    mutant = MUTANTS[name]
    assert mutant.error
    assert mutant.profiles
    assert set(mutant.profiles) <= PROFILES.keys() | DRILLS.keys()
    assert re.compile(mutant.symptom)


def test_there_are_enough() -> None:
    assert len(MUTANTS) >= 22
