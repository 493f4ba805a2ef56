"""Spark for one job: one that is started here, or spark-submit's own."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from pyspark.sql import SparkSession

from delaywheel_audit.kafka.errors import KafkaSourceError
from delaywheel_audit.kafka.jars import JARS_VARIABLE, settings_of_the_connector


class CouldNotRun(Exception):
    """The job could not run; the text says why.

    Attributes:
        reason: Stable, UPPER_SNAKE_CASE.
        message: What happened, and what to do.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message


def exit_code_of(work: Callable[[], int], otherwise: int) -> int:
    """Does a job's work; says on standard error why it could not.

    Args:
        work: Returns the exit code.
        otherwise: The exit code if it could not: Python's own for what nobody expected would be 1.
    """
    try:
        return work()
    except (CouldNotRun, KafkaSourceError) as why:
        print(f"error: {why}", file=sys.stderr)
    except Exception as error:  # noqa: BLE001 - the last one there is
        if os.environ.get("DELAYWHEEL_TRACEBACK"):
            traceback.print_exc()
        print(f"error: DEFECT: {type(error).__name__}: {error}", file=sys.stderr)
    return otherwise


@contextmanager
def spark_session(
    name: str,
    settings: Mapping[str, str],
    *,
    master: str | None,
    memory: str,
    java: str,
    threads: str = "*",
) -> Iterator[SparkSession]:
    """Starts Spark, and stops it; what it says is shown if it fails.

    Args:
        name: The command's.
        settings: Of any session.
        master: Spark's; None: what spark-submit says, or this machine.
        memory: Of a Spark that is started here.
        java: Settings of its JVM.
        threads: How many run tasks there, if no master is named.

    Raises:
        CouldNotRun: SPARK_FAILED.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(f"delaywheel {name}")
    wanted: dict[str, bool | float | int | str | None] = {
        **settings,
        "spark.ui.showConsoleProgress": "false",
        # Else each column notes for errors which line of ours made it: two of three calls.
        "spark.python.sql.dataFrameDebugging.enabled": "false",
    }
    submitted = "SPARK_ENV_LOADED" in os.environ or "PYSPARK_GATEWAY_PORT" in os.environ
    said: IO[bytes] | None = None
    if not submitted:
        wanted |= {
            "spark.driver.memory": memory,
            "spark.driver.defaultJavaOptions": java,
            "spark.ui.enabled": "false",
            "spark.log.level": "ERROR",
            "spark.local.dir": os.environ.get("SPARK_LOCAL_DIRS", tempfile.gettempdir()),
        }
        try:
            wanted |= settings_of_the_connector()
        except OSError as error:
            raise CouldNotRun("SPARK_FAILED", f"{JARS_VARIABLE}: {error}") from error
        said = tempfile.NamedTemporaryFile(  # noqa: SIM115 - kept if Spark fails
            prefix=f"{name}-spark-", suffix=".log", delete=False
        )
    if not submitted or master is not None:
        builder = builder.master(master or f"local[{threads}]")
    try:
        with _stderr_to(said):
            spark = builder.config(map=wanted).getOrCreate()
    except Exception as error:
        more = f"; it said more in {said.name}" if said else ""
        raise CouldNotRun("SPARK_FAILED", f"Spark does not start: {error}{more}") from error
    is_wanted = True
    try:
        yield spark
        is_wanted = False
    except CouldNotRun as error:
        is_wanted = error.reason == "SPARK_FAILED"
        raise
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            spark.stop()
        if said is not None:
            said.close()
            if is_wanted:
                print(f"What Spark said: {said.name}", file=sys.stderr, flush=True)
            else:
                Path(said.name).unlink(missing_ok=True)


@contextmanager
def _stderr_to(file: IO[bytes] | None) -> Iterator[None]:
    """Redirects the standard error of processes started meanwhile; None: no change."""
    if file is None:
        yield
        return
    sys.stderr.flush()
    ours = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(ours, 2)
        os.close(ours)
