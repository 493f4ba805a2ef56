"""`delaywheel trace-index`, which merges at once, and ends by SIGKILL at a moment.

    python -m support.process.killed_index_job WHEN KIND NTH …     the job's own arguments behind

WHEN is `before` or `after` a file is moved to its place, KIND the letter that its name begins with,
NTH which such file it is, from 1; 0: the job is not killed. A merged set has two parts or more, so
that it is there in half after the first.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from delaywheel_trace.index.folder import IndexFolder
from delaywheel_trace.job import job, keeping, sorting
from delaywheel_trace.job.command import trace_index


def main(arguments: Sequence[str]) -> int:
    """Runs the job."""
    when, kind, nth, *own = arguments
    job._TRIGGER = "100 milliseconds"  # type: ignore[misc]
    keeping._TICK_S = 0.05  # type: ignore[misc]
    keeping._MANY_BATCHES = 3  # type: ignore[misc]
    keeping._GRACE_S = 1.0  # type: ignore[misc]
    sorting.PART_ROWS = 5  # type: ignore[misc]
    sorting.RANGE_ROWS = 2  # type: ignore[misc]
    move, left = IndexFolder._move, int(nth)

    def moved(self: IndexFolder, path: str, final: str) -> None:
        nonlocal left
        is_one = final.rpartition("/")[2].startswith(f"{kind}-")
        left -= is_one
        if is_one and not left and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        move(self, path, final)
        if is_one and not left:
            os.kill(os.getpid(), signal.SIGKILL)

    IndexFolder._move = moved  # type: ignore[method-assign]
    return trace_index(own)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
