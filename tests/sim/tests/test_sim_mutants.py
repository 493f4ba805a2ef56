"""Every mutant changes the code that there is, and leaves nothing behind."""

import re
import sys
from types import FunctionType, ModuleType
from typing import Any

import pytest

from sim.drills.catalogue import DRILLS
from sim.mutants.catalogue import MUTANTS
from sim.mutants.mutant import PACKAGES
from sim.plans.profiles import PROFILES


def code() -> dict[tuple[str, ...], Any]:
    """Every function, method and table of the code, by its places."""
    found: dict[tuple[str, ...], Any] = {}
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] in PACKAGES and isinstance(module, ModuleType):
            for attribute, value in vars(module).items():
                found[name, attribute] = _content(value)
                if isinstance(value, type) and value.__module__ == name:
                    for method, inner in vars(value).items():
                        found[name, attribute, method] = _content(inner)
    return found


def _content(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(map(repr, value.items()))
    if isinstance(value, FunctionType):
        return id(value), id(value.__code__)
    return id(value)


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_mutant_is_put_in_and_taken_out(name: str) -> None:
    before = code()
    with MUTANTS[name]():
        assert code() != before
    assert code() == before


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_mutant_says_what_it_is(name: str) -> None:
    mutant = MUTANTS[name]
    assert mutant.error
    assert mutant.profiles
    assert set(mutant.profiles) <= PROFILES.keys() | DRILLS.keys()
    assert re.compile(mutant.symptom)


def test_there_are_enough() -> None:
    assert len(MUTANTS) >= 22
