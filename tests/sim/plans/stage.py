"""What faults are drawn from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from sim.plans.plan import Action


@dataclass(frozen=True, slots=True)
class Stage:
    """What a fault is drawn from.

    Attributes:
        random: of the plan.
        nodes: who there is.
        until_ms: when everything heals.
        at_ms: when the fault happens.
        odd: whose clock may be wrong: two that agree would be right.
    """

    random: Random
    nodes: tuple[str, ...]
    until_ms: int
    at_ms: int
    odd: str

    @property
    def node(self) -> str:
        """Some node."""
        return self.random.choice(self.nodes)

    def ms(self, least: int, most: int) -> int:
        """Some time; short ones are as likely as long ones, by their logarithms."""
        return round(least * math.exp(math.log(most / least) * self.random.random()))

    def act(self, kind: str, **arguments: Any) -> list[Action]:
        """One action of now."""
        return [Action(self.at_ms, kind, arguments)]


Draw = Callable[[Stage], list[Action]]
