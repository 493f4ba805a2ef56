"""Simulated clusters from seeds: the real core and wheel code on a simulated everything else.

One seed is one run, the same every time (tests/sim). A seed that fails is reported with the command
that runs it again with its trace. With --mutants, deliberate protocol errors are inserted, one at a
time, and seeds are run until one fails: an error that no seed finds shows a missing check. With
--models, the exhaustive models of a few nodes are explored instead; with --drills, each seed is run
in every drill.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from sim.drills.catalogue import DRILLS
from sim.mutants.catalogue import MUTANTS
from sim.nodes.world import run
from sim.plans.hunt import hunt
from sim.plans.profiles import PROFILES
from sim.plans.run import Choice, Outcome, run_seeds, shrunk

PROGRESS_S = 10.0
FIRST_LINES = 12


def main() -> int:
    """Runs the requested plans; returns 1 if any failed."""
    options = argument_parser().parse_args()
    choice = Choice(nodes=options.nodes, steps=options.steps, profile=options.profile)
    first, last = options.seeds
    if options.mutants or options.mutant:
        names = [options.mutant] if options.mutant else sorted(MUTANTS)
        return _hunt(names, options.minutes, options.jobs)
    if options.models:
        return _exhaust(options.jobs)
    if options.trace or options.shrink:
        return max(_show(choice, seed, shrinks=options.shrink) for seed in range(first, last + 1))
    choices = [choice]
    if options.drills:
        choices = [replace(choice, profile=name) for name in sorted(DRILLS)]
    seeds = range(first, last + 1)
    return _run([(choice, seed) for choice in choices for seed in seeds], options.jobs)


def argument_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(prog="scripts/sim", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=_range, default=(1, 100), metavar="A..B")
    parser.add_argument("--nodes", type=int, choices=range(1, 6), metavar="N")
    parser.add_argument("--steps", type=int, metavar="S", help="no more steps of a plan than this")
    parser.add_argument("--profile", choices=sorted({**PROFILES, **DRILLS}), metavar="P")
    parser.add_argument("--drills", action="store_true", help="every rare situation, each seed")
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count(), metavar="J")
    parser.add_argument("--trace", action="store_true", help="show plan and trace of each seed")
    parser.add_argument("--shrink", action="store_true", help="shorten plans that fail first")
    parser.add_argument("--mutants", action="store_true", help="find deliberate protocol errors")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), metavar="M", help="only this one")
    parser.add_argument("--models", action="store_true", help="go through the exhaustive models")
    parser.add_argument("--minutes", type=float, default=20.0, metavar="M", help="for all mutants")
    return parser


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("..")
    return int(first), int(last or first)


def _run(runs: Sequence[tuple[Choice, int]], jobs: int) -> int:
    began = reported = time.monotonic()
    failed: list[str] = []
    for count, outcome in enumerate(run_seeds(runs, jobs=jobs), 1):
        if outcome.violations:
            failed.append(f"{outcome.seed} ({outcome.profile})")
            _print_failure(outcome)
        if time.monotonic() - reported > PROGRESS_S or count == len(runs):
            reported = time.monotonic()
            rate = 60 * count / (reported - began)
            print(f"{count} of {len(runs)} runs, {rate:.0f} a minute, {len(failed)} failed")
            sys.stdout.flush()
    if failed:
        print(f"failed: {', '.join(sorted(failed))}")
    return 1 if failed else 0


def _print_failure(outcome: Outcome) -> None:
    print(f"\nseed {outcome.seed} ({outcome.profile}) failed: {outcome.command}")
    for violation in outcome.violations[:2]:
        lines = violation.rstrip().splitlines()
        kept = lines if len(lines) <= FIRST_LINES else [lines[0], *lines[1 - FIRST_LINES :]]
        print("\n".join(f"  {line}" for line in kept))
    sys.stdout.flush()


def _show(choice: Choice, seed: int, *, shrinks: bool) -> int:
    """Runs one seed and prints everything."""
    result = run(choice.plan(seed))
    if result.violations and shrinks:
        result = shrunk(result)
    print(result.plan.text)
    print("\n".join(result.trace))
    print(f"\nseed {seed}: {result.seconds:.1f} simulated seconds, {result.delivered} delivered,")
    print(f"digest {result.digest:016x}")
    print("\n".join(result.violations) or "all is well")
    return 1 if result.violations else 0


def _exhaust(jobs: int) -> int:
    """Goes through all models and reports on each."""
    from sim.models.catalogue import ALL, exhaust  # noqa: PLC0415 - Hypothesis, too: not for seeds

    wrong = 0
    for exhausted in exhaust(ALL, jobs=jobs):
        wrong += exhausted.found.wrong is not None
        print(f"{exhausted.name:<60} {exhausted.took_s:5.0f} s  {exhausted.found}")
        sys.stdout.flush()
    print(f"{len(ALL) - wrong} of {len(ALL)} models are right in every state")
    return 1 if wrong else 0


def _hunt(names: list[str], minutes: float, jobs: int) -> int:
    """Hunts mutants and reports what each took; one that crashes a run shows no check."""
    missed = 0
    for hunted in hunt(names, minutes=minutes, jobs=jobs):
        took = f"{hunted.name:<44} {hunted.seeds:>4} seeds {hunted.took_s:5.0f} s "
        if hunted.outcome is None or hunted.choice is None:
            missed += 1
            print(f"{took} NOT FOUND")
            continue
        missed += hunted.has_crashed
        how = "CRASHED " if hunted.has_crashed else "" if hunted.is_as_expected else "(otherwise) "
        print(f"{took} {how}{hunted.why[:110]}")
        sys.stdout.flush()
    print(f"{len(names) - missed} of {len(names)} mutants found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
