"""`delaywheel reconcile`: joins the command line tool by its entry point."""

from __future__ import annotations

from collections.abc import Sequence

from delaywheel_audit.arguments import COMMAND
from delaywheel_replica.cli.failures import CommandFailure, ExitCode

app = COMMAND


def reconcile(arguments: Sequence[str]) -> int:
    """Runs the job on this machine; returns its exit code."""
    try:
        # Only here: Spark is heavy.
        from delaywheel_audit.job import main  # noqa: PLC0415
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("pyspark", "py4j", "pyarrow"):
            raise
        raise CommandFailure(
            "SPARK_MISSING", "install delaywheel[audit]", ExitCode.USAGE
        ) from error
    return main(arguments)
