"""The job as users run it, killed by SIGKILL between its steps: each event once, at every moment.

A night's, since each start of Spark is some 15 CPU s. A push has every fault between two steps in
one Spark (test_trace_index_job.py), and each step of the merge interrupted without Spark
(test_keeping.py).
"""

from __future__ import annotations

import os
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pyspark
import pytest

from local.loopback.child import start_child
from local.loopback.kafka import KafkaBroker
from local.loopback.kafka_jars import fetch_connector, find_java
from support.kafka.told import Told
from support.process.night import at_night
from support.process.spark import cheap_start
from support.process.standalone import Standalone, standalone
from support.services.waiting import wait_until

pytestmark = [at_night, pytest.mark.kafka, pytest.mark.timeout(1_800)]

ROOT = Path(__file__).parents[3]
ROWS = 3
WITHIN_S = 300
KINDS = (
    ("after", "b"),  # between rename and checkpoint
    ("after", "c"),  # within compaction: half of a set is there, or all of it
    ("before", "b"),  # between write and rename
    ("before", "c"),  # within compaction: sorted, and nothing of it is there
)


class KilledJob:
    """Starts of the job on one index."""

    def __init__(self, told: Told, folder: Path) -> None:
        self.told = told
        self.log = folder / "log"
        self.environment: Mapping[str, str] = {
            **os.environ,
            # No SPARK_CONF_DIR: it is in the class path, and the class archive is of another then.
            **cheap_start(),
            "JAVA_HOME": str(Path(find_java()).resolve().parent.parent),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "TMPDIR": str(folder),  # Spark leaves its own there
        }

    def command(self, when: str = "after", kind: str = "b", nth: int = 0) -> list[str]:
        """A command line of the job."""
        own = ["--settings", str(self.told.settings), "--index", str(self.told.index)]
        module = "support.process.killed_index_job"
        return [sys.executable, "-m", module, when, kind, str(nth), *own]

    @contextmanager
    def started(self, command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
        """The job, which is killed if it does not end by itself."""
        process = start_child(command, log=self.log, environment=self.environment)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def wait_for(self, holds: Callable[[], bool]) -> None:
        """Waits."""
        wait_until(f"it holds: {self.log}", holds, timeout_s=WITHIN_S)


class Reader:
    """Reads the index again and again: no event is there twice, and none goes away."""

    def __init__(self, told: Told) -> None:
        self._told = told
        self._seen: set[tuple[str, int, int]] = set()
        self._ended = threading.Event()
        self.faults: list[str] = []
        self.looks = 0

    @property
    def count(self) -> int:
        """How many events it has seen."""
        return len(self._seen)

    def look(self) -> None:
        """Looks once."""
        try:
            events = self._told.events()
        except FileNotFoundError:  # merged meanwhile: the next look lists again
            return
        found = {(e["reporter"], e["number"], e["row"]) for e in events}
        if len(events) > len(found):
            self.faults.append(f"{len(events)} events of {len(found)}")
        if not self._seen <= found:
            self.faults.append(f"gone: {sorted(self._seen - found)[:3]}")
        self._seen |= found
        self.looks += 1

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Looks for as long as something else happens."""

        def run() -> None:
            while not self._ended.wait(0.1):
                self.look()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()


def kills() -> list[tuple[str, str, int]]:
    """Where the job is killed, run after run."""
    chance = random.Random(55)
    return [(*KINDS[number % len(KINDS)], chance.randint(1, 3)) for number in range(20)]


def test_killed_between_its_steps_each_event_is_there_once_at_every_moment(
    kafka: KafkaBroker, cluster_id: str, tmp_path: Path
) -> None:
    told = Told(kafka, cluster_id, tmp_path)
    job, reader = KilledJob(told, tmp_path), Reader(told)
    with reader.reading():
        for moment in kills():
            with job.started(job.command(*moment)) as process:
                deadline = time.monotonic() + WITHIN_S
                while process.poll() is None:
                    assert time.monotonic() < deadline, job.log.read_text()
                    if reader.count == ROWS * told.number:  # a file each, until it is killed
                        told.tell(ROWS)
                    time.sleep(0.3)
            assert process.returncode == -signal.SIGKILL, job.log.read_text()
            assert not reader.faults, moment
        with job.started(job.command()) as process:
            told.tell(ROWS)  # once these are there it has begun
            wait_until(
                "the job is so far",
                lambda: len(told.identities()) == ROWS * told.number,
                timeout_s=WITHIN_S,
            )
            while not any("/c-" in file.path for file in told.layout().counting):
                told.tell(ROWS)
                wait_until(
                    "the job is so far",
                    lambda: len(told.identities()) == ROWS * told.number,
                    timeout_s=WITHIN_S,
                )
            process.terminate()
            assert process.wait(WITHIN_S) == 0
    reader.look()
    assert not reader.faults
    assert reader.looks > len(kills())
    numbers = range(1, told.number + 1)
    assert told.identities() == {(told.reporter, n, row) for n in numbers for row in range(ROWS)}


def submitted(spark: Standalone, told: Told) -> list[str]:
    """The document's command line, with places of ours."""
    text = (ROOT / "docs" / "TRACE.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"`(spark-submit [^`]+)`", text)
    connector = f"org.apache.spark:spark-sql-kafka-0-10_2.13:{pyspark.__version__}"
    ours = {
        "spark-submit": str(spark.home / "bin" / "spark-submit"),
        "spark://host:7077": spark.url,
        "--packages": "--jars",
        connector: ",".join(map(str, fetch_connector().glob("*.jar"))),
        "scripts/delaywheel_trace/job/command.py": str(
            ROOT / "scripts/delaywheel_trace/job/command.py"
        ),
        "node.toml": str(told.settings),
        "s3://traces/shop": str(told.index),
    }
    words = shlex.split(shown)
    assert ours.keys() <= set(words)
    return [ours.get(word, word) for word in words]


def driver(submit: int) -> int:
    """The Python process that a spark-submit has started; Hadoop starts others, which end."""
    children = Path(f"/proc/{submit}/task").glob("*/children")
    pids = [int(pid) for one in children for pid in one.read_text().split()]
    (found,) = (pid for pid in pids if b"command.py" in _read(f"/proc/{pid}/cmdline"))
    return found


def has_ended(pid: int) -> bool:
    """Whether a process has; nobody may have asked yet what it ended with."""
    state = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return not state or state[0] == b"Z"


def _read(path: str) -> bytes:
    """Returns what a file has; one that is not there, nothing."""
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        return b""


def test_submitted_to_a_standalone_master_and_killed_each_event_is_there_once(
    kafka: KafkaBroker, cluster_id: str, tmp_path: Path
) -> None:
    told = Told(kafka, cluster_id, tmp_path)
    job, reader = KilledJob(told, tmp_path), Reader(told)
    killed = ({"spark-submit", "driver"}, {"spark-submit"}, {"driver"}, set[str]())
    with standalone(tmp_path) as spark, reader.reading():
        for start, dying in enumerate(killed, 1):
            command = submitted(spark, told)
            own = {**job.environment, **spark.environment, "PYSPARK_PYTHON": sys.executable}
            process = start_child(command, log=job.log, environment=own)
            try:
                for _ in range(2):  # the first has begun the query, the second is its next batch
                    told.tell(ROWS)
                    wait_until(
                        "the job is so far",
                        lambda: reader.count == ROWS * told.number,
                        timeout_s=WITHIN_S,
                    )
                if dying:
                    told.tell(ROWS)
                    pids = {"spark-submit": process.pid, "driver": driver(process.pid)}
                    for name in dying:
                        os.kill(pids[name], signal.SIGKILL)
                    process.wait(WITHIN_S)  # the other one ends, too
                    wait_until(
                        "the job is so far", partial(has_ended, pids["driver"]), timeout_s=WITHIN_S
                    )
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            assert spark.applications == start
            assert not reader.faults, dying
    numbers = range(1, told.number + 1)
    assert told.identities() == {(told.reporter, n, row) for n in numbers for row in range(ROWS)}
