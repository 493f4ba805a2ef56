"""Deliberate errors of the protocol: ``scripts/sim --mutants`` has to find every one.

An error that no seed finds shows a missing check, or a fault that never happens.
"""

from __future__ import annotations

from sim.mutants.answers import ANSWERS
from sim.mutants.clocks import CLOCKS
from sim.mutants.closing import CLOSING
from sim.mutants.forwarding import FORWARDING
from sim.mutants.halves import HALVES
from sim.mutants.ingress import INGRESS
from sim.mutants.member import MEMBER
from sim.mutants.mutant import Mutant
from sim.mutants.term import TERM
from sim.mutants.topics import TOPICS
from sim.mutants.wheel import WHEEL

MUTANTS: dict[str, Mutant] = {
    **ANSWERS,
    **CLOCKS,
    **CLOSING,
    **FORWARDING,
    **HALVES,
    **INGRESS,
    **MEMBER,
    **TERM,
    **TOPICS,
    **WHEEL,
}
