"""Shortens a failing plan for as long as it still fails."""

from __future__ import annotations

from collections.abc import Callable

from sim.plans.plan import Plan, Step

Fails = Callable[[Plan], bool]


def shrink(plan: Plan, fails: Fails) -> Plan:
    """Drops steps, many at a time, then fewer, while the rest still fails.

    Args:
        plan: a failing plan.
        fails: runs a plan; returns whether it fails, too.
    """
    size = max(1, len(plan.steps) // 2)
    while size:
        shorter = _without_some(plan, size, fails)
        if shorter is plan:
            size //= 2
        plan = shorter
        size = min(size, len(plan.steps))
    return plan


def _without_some(plan: Plan, size: int, fails: Fails) -> Plan:
    """Drops runs of this many steps, wherever possible."""
    begin = 0
    while begin < len(plan.steps):
        steps: tuple[Step, ...] = plan.steps[:begin] + plan.steps[begin + size :]
        shorter = plan.only(steps)
        if fails(shorter):
            plan = shorter
        else:
            begin += size
    return plan
