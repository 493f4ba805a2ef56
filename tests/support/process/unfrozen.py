"""Dataclasses that are declared frozen and are as quick to build as others.

A frozen one sets each attribute by a call of `object.__setattr__`, which is an eighth of all that a
drill of the simulation computes. Who assigns to one is found by mypy, and in nodes that tests start
as processes they are frozen. Their hash, order and equality stay the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_dataclass: Callable[..., Any] = dataclass


def unfrozen(
    cls: type | None = None, /, *, frozen: bool = False, eq: bool = True, **rest: Any
) -> Any:
    """As `dataclasses.dataclass`."""

    def decorate(one: type) -> Any:
        if frozen and eq and "__hash__" not in vars(one):
            return _dataclass(one, unsafe_hash=True, **rest)
        return _dataclass(one, eq=eq, **rest)

    return decorate if cls is None else decorate(cls)
