"""The trace's index beside a cluster on loopback, run as users do: `delaywheel trace-index`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from local.loopback.child import end_child, start_child
from local.loopback.kafka_jars import fetch_connector, find_java

_STOP_S: Final = 20.0
_AGAIN_S: Final = 5.0


class IndexJob:
    """The job, from one node's settings; a context manager that ends it.

    Attributes:
        index: Its folder.
        log: What it prints.
    """

    def __init__(self, settings: Path, folder: Path) -> None:
        self.index = folder / "trace-index"
        self.log = folder / "trace-index.log"
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._process is not None:
            end_child(self._process, patience_s=_STOP_S)

    def pids(self) -> dict[str, int]:
        """Returns the ids of its processes that run: `index`, and `index JVM`."""
        if self._process is None:
            return {}
        pid = self._process.pid
        found = {"index": pid}
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(FileNotFoundError):  # that thread has ended
                if children := task.read_text().split():
                    found["index JVM"] = int(children[0])
        return found

    def watch(self) -> None:
        """Starts it again if it has ended."""
        ended = self._process is None or self._process.poll() is not None
        if ended and time.monotonic() - self._started_s > _AGAIN_S:
            self._start()

    def _start(self) -> None:
        self._started_s = time.monotonic()
        command = [sys.executable, "-m", "delaywheel_trace.job.command"]
        command += ["--settings", str(self._settings), "--index", str(self.index)]
        self._process = start_child(command, log=self.log, environment=finds_spark())


def finds_spark() -> Mapping[str, str]:
    """The environment in which a job finds Java, and the jars by which Spark reads Kafka."""
    jars = os.environ.get("SPARK_KAFKA_JARS")
    return {
        "SPARK_KAFKA_JARS": str(fetch_connector()) if jars is None else jars,
        "JAVA_HOME": str(Path(find_java()).resolve().parent.parent),
    }
