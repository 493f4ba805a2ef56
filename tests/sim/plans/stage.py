"""The stage on which faults are drawn."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from sim.plans.plan import Action


@dataclass(frozen=True, slots=True)
class Stage:
    """The stage on which a fault is drawn.

    Attributes:
        random: the plan's random stream.
        nodes: the nodes.
        until_ms: when everything heals.
        at_ms: when the fault happens.
        odd: the node whose clock may be wrong: with two, both would agree.
    """

    random: Random
    nodes: tuple[str, ...]
    until_ms: int
    at_ms: int
    odd: str

    @property
    def node(self) -> str:
        """Draws a node."""
        return self.random.choice(self.nodes)

    def ms(self, least: int, most: int) -> int:
        """Draws a time, uniformly by its logarithm."""
        return round(least * math.exp(math.log(most / least) * self.random.random()))

    def act(self, kind: str, /, **arguments: Any) -> list[Action]:
        """Creates an action at this time."""
        return [Action(self.at_ms, kind, arguments)]


Draw = Callable[[Stage], list[Action]]
