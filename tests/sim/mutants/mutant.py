"""What a mutant is: one deliberate error of the protocol, put into the real code for a while."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

PACKAGES = ("delaywheel", "delaywheel_replica", "sim")

Patch = AbstractContextManager[Any]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A deliberate error.

    Attributes:
        error: what is wrong with it, in a line.
        patches: puts it in; made anew each time.
        symptom: a regular expression: of the violations that tell of it.
        profiles: those of `profiles.PROFILES` that are likely to find it, in turns.
        nodes: how many it takes; None: as the seed says.
    """

    error: str
    patches: Callable[[], list[Patch]]
    symptom: str
    profiles: tuple[str, ...] = ("mixed",)
    nodes: int | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """The code has the error while this lasts."""
        with ExitStack() as stack:
            for each in self.patches():
                stack.enter_context(each)
            yield


def instead(owner: Any, name: str, replacement: Any) -> Patch:
    """A method or a module's own function becomes another one."""
    patched: Patch = patch.object(owner, name, replacement)
    return patched


def row(table: dict[Any, Any], key: Any, value: Any) -> Patch:
    """A row of one of the code's own tables becomes another one."""
    assert key in table, key
    patched: Patch = patch.dict(table, {key: value})
    return patched


@contextmanager
def everywhere(function: Callable[..., Any], replacement: Callable[..., Any]) -> Iterator[None]:
    """A function becomes another one in every module that has imported it by name."""
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
