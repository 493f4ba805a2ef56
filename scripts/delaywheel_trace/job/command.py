"""`delaywheel trace-index`, and what spark-submit runs. Light: help and completion use it too."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from delaywheel_replica.cli.failures import CommandFailure, ExitCode
from delaywheel_replica.cli.parsing import Command, Parser
from delaywheel_replica.cli.values import parse_duration_ms
from delaywheel_trace.index.layout import HOUR_MS


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexOptions:
    """The checked options of one call.

    Attributes:
        settings: A node's settings file: cluster, Kafka, ledger.
        index: Where the index is.
        keep_ms: How long its hours are kept.
        from_now: What is in Kafka already is passed over.
        metrics_listen: Where health and metrics are served.
        master: Spark's; None: what spark-submit says, or this machine.
        memory: Heap of a Spark that is started here.
    """

    settings: Path
    index: str
    keep_ms: int
    from_now: bool = False
    metrics_listen: tuple[str, int] | None = None
    master: str | None = None
    memory: str = "512m"


def _address(text: str) -> tuple[str, int]:
    host, separator, port = text.rpartition(":")
    if not separator or not host or not port.isdecimal() or int(port) > 65_535:
        raise ArgumentTypeError(f"{text!r}: HOST:PORT")
    return host.strip("[]"), int(port)


def _some_hours(text: str) -> int:
    length = parse_duration_ms(text)
    if length < HOUR_MS:
        raise ArgumentTypeError(f"{text!r}: an hour at least")
    return length


def _declare(parser: Parser) -> None:
    parser.argument(
        "--settings",
        "--config",
        type=Path,
        required=True,
        metavar="FILE",
        help="a node's settings: cluster, ledger, and how Kafka is reached",
    )
    parser.argument(
        "--index", required=True, metavar="DIR", help="folder or URI of the index; made if needed"
    )
    parser.argument(
        "--keep",
        dest="keep_ms",
        type=_some_hours,
        default="7d",
        metavar="LENGTH",
        help="delete hours that are older (%(default)s)",
    )
    parser.argument(
        "--from-now",
        action="store_true",
        help="pass over what is in Kafka now, and note what time is missing: if records are gone",
    )
    parser.argument(
        "--metrics-listen",
        type=_address,
        metavar="HOST:PORT",
        help="serve /healthz and /metrics there",
    )
    parser.argument("--master", metavar="URL", help="Spark's master (two threads of this machine)")
    parser.argument(
        "--memory",
        default="512m",
        metavar="SIZE",
        help="heap of the Spark process started here (%(default)s)",
    )


COMMAND = Command(
    "Keep an index of the trace: what became of each message, searchable for days.",
    "delaywheel_trace.job.command:trace_index",
    _declare,
    "Runs until it is stopped (exit code 0). Exit code 2: it could not go on, and why.",
    """
        # Beside a cluster, from a node's settings
        delaywheel trace-index --settings node.toml --index /var/lib/trace

        # After Kafka has deleted what was not read yet: go on, and note what is missing
        delaywheel trace-index --settings node.toml --index /var/lib/trace --from-now
    """,
    reads_itself=True,
)

app = COMMAND


def trace_index(arguments: Sequence[str]) -> int:
    """Runs the job; returns its exit code."""
    try:
        # Only here: Spark is heavy.
        from delaywheel_trace.job.job import main  # noqa: PLC0415
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("pyspark", "py4j", "pyarrow"):
            raise
        raise CommandFailure(
            "SPARK_MISSING", "install delaywheel[trace-index]", ExitCode.USAGE
        ) from error
    return main(IndexOptions(**Parser("trace-index", COMMAND).read(arguments)))


if __name__ == "__main__":
    sys.exit(trace_index(sys.argv[1:]))
