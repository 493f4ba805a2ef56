"""Programs that are cut out of a document, and run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"
PATIENCE_S = 60.0


def program_of(document: str, holding: str) -> str:
    """Returns the only Python program of a document in which this text stands."""
    text = (DOCS / document).read_text(encoding="utf-8")
    blocks: list[str] = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if holding in block]
    return found


class Program:
    """A program that runs until it is stopped."""

    def __init__(self, code: str, *, folder: Path | None = None) -> None:
        self.lines: list[str] = []
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=folder,
        )
        self._enough = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                with self._enough:
                    self.lines.append(line.strip())
                    self._enough.notify()

    def wait_for(self, count: int) -> list[str]:
        with self._enough:
            assert self._enough.wait_for(lambda: len(self.lines) >= count, PATIENCE_S), self.lines
        return self.lines

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(PATIENCE_S) == 0

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
