"""Commands that change a cluster for good: they show what it means, and ask first.

What is shown goes to stderr, so that stdout is the answer alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from delaywheel_replica.cli.failures import Failure


def show(lines: Iterable[str]) -> None:
    """Tells what it would mean."""
    for line in lines:
        print(line, file=sys.stderr)


def confirm(question: str, *, yes: bool) -> None:
    """Goes on if the operator says so, or has said so beforehand.

    Raises:
        Failure: They did not.
    """
    if yes:
        return
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise Failure("NOT_CONFIRMED", "nothing was changed; --yes confirms beforehand")
