"""Every mutant changes existing code, and leaves nothing behind."""

import re
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import pytest

from sim.drills.catalogue import DRILLS
from sim.mutants.catalogue import MUTANTS
from sim.mutants.mutant import PACKAGES
from sim.plans.profiles import PROFILES

Table = Mapping[Any, Any]


@pytest.fixture(scope="module")
def before() -> list[tuple[Table, dict[Any, Any]]]:
    """The code as it stays if every mutant leaves nothing behind."""
    return [(table, dict(table)) for table in code()]


def code() -> Iterator[Table]:
    """What names mean in every module and class of the code, and its tables."""
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] in PACKAGES and isinstance(module, ModuleType):
            yield vars(module)
            for attribute, value in vars(module).items():
                if isinstance(value, type) and value.__module__ == name:
                    yield vars(value)
                # Python's own objects, such as __builtins__, are never changed in place.
                elif isinstance(value, dict) and not attribute.startswith("__"):
                    yield value


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_mutant_is_put_in(name: str, before: list[tuple[Table, dict[Any, Any]]]) -> None:
    with MUTANTS[name]():
        assert any(table != content for table, content in before)
    assert all(table == content for table, content in before)


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_mutant_says_what_it_is(name: str) -> None:
    mutant = MUTANTS[name]
    assert mutant.error
    assert mutant.profiles
    assert set(mutant.profiles) <= PROFILES.keys() | DRILLS.keys()
    assert re.compile(mutant.symptom)


def test_there_are_enough() -> None:
    assert len(MUTANTS) >= 22
