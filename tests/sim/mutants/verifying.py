"""Errors about wheels that a start has found and that are not verified yet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from delaywheel_replica.core.leader import holders as holding
from delaywheel_replica.core.member.own_heartbeat import OwnHeartbeat
from delaywheel_replica.core.protocol.heartbeat import Heartbeat
from delaywheel_replica.core.wheels.verifying import Verifying
from sim.mutants.mutant import Mutant, Patch, everywhere, instead


def fences_are_answered() -> list[Patch]:
    return [instead(Verifying, "bears_on", lambda *_: False)]


def complete_while_it_verifies() -> list[Patch]:
    real = OwnHeartbeat.heartbeat

    def heartbeat(self: OwnHeartbeat) -> Heartbeat:
        return replace(real(self), complete=self._known.is_complete)

    return [instead(OwnHeartbeat, "heartbeat", heartbeat)]


def holds_what_was_taken() -> list[Patch]:
    real = holding.held_prefix

    def held_prefix(state: Any, wheel: Any, heartbeat: Heartbeat) -> int:
        taken = 0 if state.progress is None else state.progress.seq(wheel)
        return (
            max(taken, real(state, wheel, heartbeat))
            if wheel in heartbeat.verifying
            else real(state, wheel, heartbeat)
        )

    return [everywhere(real, held_prefix)]


VERIFYING: dict[str, Mutant] = {
    "a fence is answered while it verifies": Mutant(
        "a member answers a fence by what it has found so far of what it ever took",
        fences_are_answered,
        "closed at|was never delivered|beyond",
        ("unverified_answer",),
    ),
    "complete while it verifies": Mutant(
        "a member that does not know its wheels yet counts as one that has nothing of them",
        complete_while_it_verifies,
        "reported not found",
        ("unverified_answer",),
    ),
    "holds what it verifies": Mutant(
        "a leader takes what its node found in its folder for what it held before",
        holds_what_was_taken,
        "progress is ahead|was never delivered|delivered twice|twice|pending",
        ("unverified_leader",),
    ),
}
