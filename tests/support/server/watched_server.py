"""The real server process, and how late its event loop is because of itself (lateness.py).

Run in place of the server's program; each lateness of more than `REPORTED_S` is a line in a file.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Final

from delaywheel_replica.server.main import main
from delaywheel_replica.server.serving import Server
from support.process.lateness import Late, watch

REPORTED_S: Final = 0.02


def program(reported: Path) -> tuple[str, ...]:
    """The code that a `ServerProcess` runs instead; this package is not on a server's path."""
    here = str(Path(__file__).parents[2])
    code = f"import sys; sys.path.append({here!r}); from support.server.watched_server import run"
    return "-c", f"{code}; run({str(reported)!r})"


def read(path: Path) -> list[Late]:
    """The reports so far."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [Late(*json.loads(line)) for line in lines[:-1]]


def run(reported: str) -> None:
    """The server, watched; returns never.

    Args:
        reported: the file.
    """
    of_server = Server.run
    with Path(reported).open("a", buffering=1) as file:

        def report(late: Late) -> None:
            if late.own_s > REPORTED_S:
                file.write(json.dumps(late) + "\n")

        async def watched(self: Server, stop: asyncio.Event) -> None:
            watching = asyncio.create_task(watch(report))
            try:
                await of_server(self, stop)
            finally:
                watching.cancel()

        Server.run = watched  # type: ignore[method-assign]
        sys.exit(main())
