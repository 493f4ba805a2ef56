"""Demonstrates where messages were: whole ways, as `delaywheel trace` shows them to a user."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from delaywheel.trace import Trace
from local.loopback.beside import IndexJob
from local.loopback.cluster import ClusterError, LocalCluster

WITHIN_S: Final = 300.0
"""Only bounds a hang: Spark starts meanwhile, and the index has a file each five seconds."""
_PAUSE_S: Final = 1.0
_WITHOUT_NEWS_S: Final = 20.0


class Tracing:
    """What the demo's programs tell of messages, and the index that a job makes of it.

    Attributes:
        trace: For clients and consumers.
    """

    def __init__(self, cluster: LocalCluster, trace: Trace, job: IndexJob) -> None:
        self.trace = trace
        self._cluster = cluster
        self._job = job
        self._known: set[str] = set()
        self._asked_s = time.monotonic()

    @property
    def index(self) -> Path:
        """The index's folder."""
        return self._job.index

    def way(self, id_: bytes, last: str) -> str:
        """Returns what `delaywheel trace` prints of a message, once its way has come to an end.

        Args:
            id_: Of the message.
            last: How the way's last step begins.

        Raises:
            ClusterError: It does not come to that.
        """
        self.trace.flush()
        command = ["trace", id_.hex(), "--index", str(self._job.index)]
        command += ["--server", self._cluster.nodes[0].address]
        deadline = time.monotonic() + WITHIN_S
        while True:
            self._wait_for_news()
            asked = [sys.executable, "-m", "delaywheel_replica.cli.app", *command]
            shown = subprocess.run(asked, capture_output=True, text=True, check=False)
            if last in shown.stdout:
                self._asked_s = 0.0
                return f"$ delaywheel {' '.join(command[:2])}\n{shown.stdout}"
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"a way has not come to {last!r} within {WITHIN_S:.0f} s; see {self._job.log}, "
                    f"and what delaywheel trace says:\n{shown.stdout}{shown.stderr}"
                )

    def _wait_for_news(self) -> None:
        """Waits for files of the index that were not there at the last question, or for a while.

        A question is a process that loads all of DuckDB, and Spark takes long to start.
        """
        while True:
            files = {path.name for path in self._job.index.rglob("*.parquet")}
            if files - self._known or time.monotonic() - self._asked_s > _WITHOUT_NEWS_S:
                break
            self._cluster.watch()
            self._job.watch()
            time.sleep(_PAUSE_S)
        self._known, self._asked_s = files, time.monotonic()


@contextmanager
def tracing(cluster: LocalCluster) -> Iterator[Tracing]:
    """Has an index kept of what a trace tells, for a while."""
    with (
        IndexJob(cluster.nodes[0].config, cluster.folder) as job,
        Trace({"bootstrap.servers": cluster.kafka, "client.id": "demo"}) as trace,
    ):
        yield Tracing(cluster, trace, job)
