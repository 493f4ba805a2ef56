"""Shows Spark's progress: one line on stderr, rewritten on a terminal."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, TextIO

_ON_TERMINAL_S = 0.5
_ELSEWHERE_S = 10.0


class Progress:
    """Reports how many tasks of the running stages are done."""

    def __init__(self, context: Any, stream: TextIO | None = None) -> None:
        self._tracker = context.statusTracker()
        self._stream = sys.stderr if stream is None else stream
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)
        self._rewrites = self._stream.isatty()

    def start(self) -> None:
        """Starts to report."""
        self._thread.start()

    def stop(self) -> None:
        """Stops, before Spark does."""
        self._ended.set()
        self._thread.join()
        if self._rewrites:
            print("\r\x1b[K", end="", file=self._stream, flush=True)

    def line(self) -> str | None:
        """Returns what runs now; None if nothing does."""
        parts = []
        for stage in sorted(self._tracker.getActiveStageIds()):
            info = self._tracker.getStageInfo(stage)
            if info is not None and info.numTasks > 1:
                parts.append(f"stage {stage}: {info.numCompletedTasks}/{info.numTasks} tasks")
        return "; ".join(parts) or None

    def _follow(self) -> None:
        began, printed = time.monotonic(), None
        while not self._ended.wait(_ON_TERMINAL_S if self._rewrites else _ELSEWHERE_S):
            line = self.line()
            if line is None or line == printed:
                continue
            printed = line
            text = f"[{time.monotonic() - began:6.0f} s] {line}"
            if self._rewrites:
                print(f"\r\x1b[K{text}", end="", file=self._stream, flush=True)
            else:
                print(text, file=self._stream, flush=True)
