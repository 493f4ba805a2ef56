"""Asks before commands change a cluster for good, and shows the consequences.

What is shown goes to stderr, so that stdout is the answer alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from delaywheel_replica.cli.failures import CommandFailure
from delaywheel_replica.cli.printing.text import note


def show(lines: Iterable[str]) -> None:
    """Shows the consequences."""
    for line in lines:
        note(line)


def confirm(question: str, *, yes: bool) -> None:
    """Continues only if the operator agrees, or has agreed in advance."""
    if yes:
        return
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()
    if not (sys.stdin.isatty() and answer.endswith("\n")):  # nobody has ended the line
        print(file=sys.stderr)
    if answer.strip().lower() not in {"y", "yes"}:
        raise CommandFailure("NOT_CONFIRMED", "nothing was changed; --yes confirms beforehand")
