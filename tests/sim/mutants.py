"""Deliberate errors of the protocol: ``scripts/sim --mutants`` has to find every one.

An error that no seed finds is a check that is missing, or a fault that never happens.
"""

from __future__ import annotations

from sim.mutant import Mutant
from sim.mutants_clocks import CLOCKS
from sim.mutants_closing import CLOSING
from sim.mutants_forwarding import FORWARDING
from sim.mutants_member import MEMBER
from sim.mutants_office import OFFICE
from sim.mutants_topics import TOPICS
from sim.mutants_verifying import VERIFYING
from sim.mutants_wheel import WHEEL

MUTANTS: dict[str, Mutant] = {
    **CLOCKS,
    **CLOSING,
    **FORWARDING,
    **MEMBER,
    **OFFICE,
    **TOPICS,
    **VERIFYING,
    **WHEEL,
}
