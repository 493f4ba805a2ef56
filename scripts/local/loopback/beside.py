"""What runs beside a cluster on loopback, as users run it: the trace's index, operators' page."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
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


class PageProcess:
    """`delaywheel web` on any free port; a context manager that ends it.

    Attributes:
        log: What it prints, the link with its secret too.
    """

    def __init__(self, nodes: Sequence[str], folder: Path, index: Path | None = None) -> None:
        self.log = folder / "web.log"
        self._nodes = nodes
        self._index = index
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.log.unlink(missing_ok=True)  # an earlier one has another secret
        self.log.touch(mode=0o600)
        command = [sys.executable, "-m", "delaywheel_replica.cli.app", "web"]
        command += ["--server", ",".join(self._nodes), "--listen", "127.0.0.1:0"]
        command += [] if self._index is None else ["--index", str(self._index)]
        self._process = start_child(command, log=self.log)
        return self

    def __exit__(self, *_error: object) -> None:
        if self._process is not None:
            end_child(self._process, patience_s=_STOP_S)

    @property
    def pid(self) -> int | None:
        """Its process id; None: it was not started."""
        return None if self._process is None else self._process.pid

    @property
    def link(self) -> str | None:
        """What opens it in a browser; None: it does not listen yet."""
        lines = self.log.read_text().splitlines()
        return next((line for line in lines if line.startswith("http")), None)


def finds_spark() -> Mapping[str, str]:
    """The environment in which a job finds Java, and the jars by which Spark reads Kafka."""
    jars = os.environ.get("SPARK_KAFKA_JARS")
    return {
        "SPARK_KAFKA_JARS": str(fetch_connector()) if jars is None else jars,
        "JAVA_HOME": str(Path(find_java()).resolve().parent.parent),
    }
