"""Which files and functions the ways of a message enter, in three simulated nodes.

`PYTHONPATH=scripts:tests python -m local.entered` prints, for each way, how many files and
functions of wheel and replica it enters, less those that are entered while nothing is asked. A way
begins and ends with a step of one plan, some seconds after the one before:

| way | from | to |
|---|---|---|
| accept | a caller sends a message to a node that does not lead | a second later |
| forward | a second before its due | a second after it |
| cancel | a caller cancels another message, at a node that does not lead | two seconds later |

What a module does when it is imported does not count, nor what the simulation enters to check what
lies on the disks; comprehensions and functions within functions count with the function they stand
in.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType

from sim.drills.script import Script
from sim.nodes.world import World
from sim.plans.plan import Plan

ROOT = Path(__file__).parents[2]
PRODUCT = tuple(f"{ROOT / room}/" for room in ("wheel", "replica"))
CHECKING = f"{ROOT}/tests/sim/checking/"
QUIET = ((12_500, 29_000), (41_500, 44_900))
"""Milliseconds in which nothing is asked: so long that what is done every few seconds is done."""

WAYS = {"accept": (30_000, 31_000), "forward": (39_000, 41_000), "cancel": (50_000, 52_000)}
DUE_MS = 40_000

Function = tuple[str, str]
"""A file's path from the root, and a function's qualified name."""


class Entered:
    """Notes the functions that are entered while it is switched on.

    Attributes:
        by_way: What each way has entered.
    """

    def __init__(self) -> None:
        self.by_way: dict[str, set[Function]] = {}
        self._codes: set[CodeType] = set()

    def begin(self) -> None:
        """Notes calls from now on."""
        self._codes = set()
        sys.setprofile(self._called)

    def end(self, way: str) -> None:
        """Notes what was called as that of a way."""
        sys.setprofile(None)
        self.by_way[way] = {
            (code.co_filename.removeprefix(f"{ROOT}/"), code.co_qualname.partition(".<locals>")[0])
            for code in self._codes
            if code.co_filename.startswith(PRODUCT) and code.co_name != "<module>"
        }

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code not in self._codes and not _is_checking(frame):
            self._codes.add(code)


def _is_checking(frame: FrameType) -> bool:
    """Whether the simulation calls this to check what the nodes did."""
    caller = frame.f_back
    while caller is not None and caller.f_code.co_filename.startswith(PRODUCT):
        caller = caller.f_back
    return caller is not None and caller.f_code.co_filename.startswith(CHECKING)


def trace(seed: int) -> Entered:
    """Runs the plan; returns what each way has entered, less what is entered at rest."""
    script = Script(seed)
    script.cluster("abc", 2)
    for at_ms in (5_000, 8_000):  # all that is done once is done
        early = script.send(at_ms, "b", delay_ms=3_000, count=2)
        script.cancel(at_ms + 1_500, early, "b")
    script.send(WAYS["accept"][0], "b", delay_ms=DUE_MS - WAYS["accept"][0])
    cancelled = script.send(45_000, "b", delay_ms=60_000)
    script.cancel(WAYS["cancel"][0], cancelled, "b")
    script.until_ms = 55_000
    plan = Plan(seed, "entered", script.settings, script.steps, script.until_ms)
    world, entered = World(plan), Entered()
    quiet = {f"quiet {number}": window for number, window in enumerate(QUIET)}
    for way, (begin_ms, end_ms) in {**quiet, **WAYS}.items():
        world.scheduler.call_at(begin_ms * 1_000, entered.begin)
        world.scheduler.call_at(end_ms * 1_000, entered.end, way)
    result = world.run()
    assert not result.violations, result.violations
    at_rest = set[Function]().union(*(entered.by_way.pop(window) for window in quiet))
    entered.by_way = {way: found - at_rest for way, found in entered.by_way.items()}
    return entered


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the counts, and what was entered on demand."""
    parser = argparse.ArgumentParser(prog="local.entered", description="Count what is entered.")
    parser.add_argument("--seed", type=int, default=1, help="of the simulation (default: 1)")
    parser.add_argument("--list", choices=sorted(WAYS), help="name what this way enters")
    options = parser.parse_args(arguments)
    by_way = trace(options.seed).by_way
    for way, found in by_way.items():
        print(f"{way:<8} {len({file for file, _ in found}):4} files {len(found):5} functions")
    for file, name in sorted(by_way[options.list]) if options.list else ():
        print(f"  {file}: {name}")


if __name__ == "__main__":
    main()
