"""Lists the models and their sizes: those of the tests, and larger ones.

Each size is explored completely; `scripts/sim --models` runs all of them.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from sim.models.halves import HalvesModel
from sim.models.halves import State as HalfState
from sim.models.ingress import IngressModel
from sim.models.ingress import State as IngressState
from sim.models.model import Explored, explore
from sim.models.term import State as TermState
from sim.models.term import TermModel
from sim.models.wheel import State as WheelState
from sim.models.wheel import WheelModel

WHEELS = [
    *[WheelModel(nodes, w) for nodes in (1, 2) for w in range(1, nodes + 1)],
    *[WheelModel(2, w, frames=2, crashes=1) for w in (1, 2)],
    *[WheelModel(3, w, crashes=1) for w in (1, 2, 3)],
    *[WheelModel(3, w, replacements=0) for w in (1, 2, 3)],
    WheelModel(4, 3, crashes=0),
]
LARGER_WHEELS = [
    *[WheelModel(3, w, frames=2, crashes=1, replacements=0) for w in (1, 2, 3)],
    *[WheelModel(4, w, crashes=1, replacements=0) for w in (1, 2, 3, 4)],
    *[WheelModel(4, w, crashes=0) for w in (1, 2, 4)],
    *[WheelModel(2, w, frames=2) for w in (1, 2)],
    *[WheelModel(3, w) for w in (1, 2, 3)],
    WheelModel(3, 2, frames=2, replacements=0),
    *[WheelModel(4, w, crashes=1) for w in (1, 2, 3, 4)],
    *[WheelModel(5, w, crashes=1, replacements=0) for w in (1, 2, 3, 4, 5)],
]
TERMS = [
    # Every fault that a push makes in test_sim_model_term.py is found within these bounds.
    TermModel(candidacies=2, transactions=2, late=1),
    TermModel(candidacies=3, transactions=2, late=0),
    TermModel(candidacies=1, transactions=2, late=1, renewals=1),
    TermModel(candidacies=2, transactions=1, late=0, renewals=1),
    TermModel(candidacies=2, transactions=2, late=0, held=2),
]
LARGER_TERMS = [
    TermModel(candidacies=3, late=0),
    TermModel(candidacies=2, transactions=2, late=0, renewals=1),
    TermModel(candidacies=3, transactions=2, late=0, held=1),
    TermModel(candidacies=2, late=3),
    TermModel(candidacies=3, transactions=2, late=1),
    TermModel(candidacies=3),
    TermModel(candidacies=1, late=3, renewals=3),
    TermModel(candidacies=2, transactions=2, late=1, renewals=2),
    TermModel(candidacies=2, transactions=2, late=0, renewals=1, held=2),
]
INGRESSES = [
    IngressModel(),
    IngressModel(records=2, begins=1),
]
LARGER_INGRESSES = [
    IngressModel(records=2),
    IngressModel(begins=3),
]
HALVES = [
    HalvesModel(cancels=0),
    HalvesModel(says=1, ends=0),
    HalvesModel(copies=1, says=1, ends=0, ahead=True),
    HalvesModel(copies=1, says=1, ends=0, losses=1),
]
LARGER_HALVES = [
    HalvesModel(),
    HalvesModel(copies=1, ahead=True),
    HalvesModel(says=1, ends=0, ahead=True),
    HalvesModel(says=1, ends=0, losses=1),
]
Model: TypeAlias = WheelModel | TermModel | IngressModel | HalvesModel
Found: TypeAlias = (
    Explored[WheelState] | Explored[TermState] | Explored[IngressState] | Explored[HalfState]
)
ALL: list[Model] = [
    *WHEELS, *TERMS, *INGRESSES, *HALVES,
    *LARGER_WHEELS, *LARGER_TERMS, *LARGER_INGRESSES, *LARGER_HALVES,
]  # fmt: skip
WHEEL_STATES, TERM_STATES, INGRESS_STATES = 1_000_000, 2_000_000, 1_000_000
HALF_STATES = 1_000_000
"""Limit for the states; a model with more has grown."""


@dataclass(frozen=True, slots=True)
class Exhausted:
    """A model that was explored.

    Attributes:
        name: its kind and size.
        found: the result.
        took_s: how long that took.
    """

    name: str
    found: Found
    took_s: float


def exhausted(model: Model) -> Exhausted:
    """Explores every state of a model, until one is wrong."""
    began = time.monotonic()
    found: Found
    if isinstance(model, WheelModel):
        found = explore(model.start, model.moves, model.wrong, at_most=WHEEL_STATES)
    elif isinstance(model, TermModel):
        found = explore(model.start, model.moves, model.wrong, at_most=TERM_STATES)
    elif isinstance(model, HalvesModel):
        uncached = replace(model)
        found = explore(uncached.start, uncached.moves, uncached.wrong, at_most=HALF_STATES)
    else:
        forgetful = replace(model)  # caches may be of code that another exploration has changed
        found = explore(forgetful.start, forgetful.moves, forgetful.wrong, at_most=INGRESS_STATES)
    return Exhausted(name_of(model), found, time.monotonic() - began)


def exhaust(models: Sequence[Model], *, jobs: int) -> Iterator[Exhausted]:
    """Explores models on several processes; yields each when it is done."""
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(exhausted, models)


def name_of(model: Model) -> str:
    """The kind and the size of a model."""
    if not isinstance(model, WheelModel):
        return str(model)
    return (
        f"N={model.nodes} W={model.min_insync} frames={model.frames}"
        f" crashes={model.crashes} replacements={model.replacements}"
    )
