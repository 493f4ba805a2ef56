"""A mutant: one deliberate error of the protocol, put into the real code for a while."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from inspect import Parameter, Signature, signature
from types import FunctionType
from typing import Any
from unittest.mock import patch

PACKAGES = ("delaywheel", "delaywheel_replica", "sim")

Patch = AbstractContextManager[Any]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A deliberate error.

    Attributes:
        error: what is wrong with it, in one line.
        patches: makes its patches; called each time.
        symptom: a regular expression for the violations that reveal it.
        profiles: those of `profiles.PROFILES` that are likely to find it, in turns.
        nodes: the number of nodes that it takes; None: chosen by the seed.
    """

    error: str
    patches: Callable[[], list[Patch]]
    symptom: str
    profiles: tuple[str, ...] = ("mixed",)
    nodes: int | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Puts the error into the code for the duration of the context."""
        with ExitStack() as stack:
            for each in self.patches():
                stack.enter_context(each)
            yield


def instead(owner: Any, name: str, replacement: Any) -> Patch:
    """Replaces a method or a module's function by one that can be called in the same ways."""
    real = getattr(owner, name)
    if isinstance(real, FunctionType) and isinstance(replacement, FunctionType):
        _check_parameters(signature(real), signature(replacement), name)
    patched: Patch = patch.object(owner, name, replacement)
    return patched


def _check_parameters(real: Signature, replacement: Signature, name: str) -> None:
    kinds = {each.kind for each in replacement.parameters.values()}
    by_place = {Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD}
    places = [
        sum(each.kind in by_place for each in one.parameters.values())
        for one in (real, replacement)
    ]
    assert Parameter.VAR_POSITIONAL in kinds or places[0] == places[1], name
    words = {each.name for each in real.parameters.values() if each.kind is Parameter.KEYWORD_ONLY}
    assert Parameter.VAR_KEYWORD in kinds or words <= replacement.parameters.keys(), name


def row(table: dict[Any, Any], key: Any, value: Any) -> Patch:
    """Replaces a row of one of the code's tables."""
    assert key in table, key
    patched: Patch = patch.dict(table, {key: value})
    return patched


@contextmanager
def everywhere(function: Callable[..., Any], replacement: Callable[..., Any]) -> Iterator[None]:
    """Replaces a function in every module that has imported it by name."""
    with ExitStack() as stack:
        for module in _modules():
            for name, value in list(vars(module).items()):
                if value is function:
                    stack.enter_context(patch.object(module, name, replacement))
        yield


def _modules() -> list[Any]:
    return [
        module
        for name, module in sorted(sys.modules.items())
        if name.partition(".")[0] in PACKAGES and not name.startswith("sim.mutants")
    ]
