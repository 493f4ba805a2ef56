"""Asks before commands change a cluster for good: on stderr, so that stdout is the answer alone."""

from __future__ import annotations

import sys

from delaywheel_replica.cli.failures import CommandFailure


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
