"""The command line of `reconcile`: light, since help and completion use it too."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path

from delaywheel_replica.cli.parsing import Command, Parser
from delaywheel_replica.cli.values import parse_assignment, parse_duration_ms, parse_time_ms


def interval_ms(text: str) -> int:
    """Parses a duration greater than zero."""
    length = parse_duration_ms(text)
    if length == 0:
        raise ArgumentTypeError(f"{text!r}: a bucket has some length")
    return length


def _declare(parser: Parser) -> None:
    what = parser.add_argument_group("what is examined")
    parser.argument(
        "--from",
        group=what,
        dest="from_ms",
        type=parse_time_ms,
        metavar="TIME",
        help="from here on; default: from the first message",
    )
    parser.argument(
        "--to",
        group=what,
        dest="to_ms",
        type=parse_time_ms,
        metavar="TIME",
        help="up to before here; default: to the last message",
    )
    parser.argument(
        "--by",
        group=what,
        choices=("due", "accepted"),
        default="due",
        help="which time of a message range and buckets go by (%(default)s)",
    )
    parser.argument(
        "--topic",
        group=what,
        action="append",
        default=[],
        metavar="NAME",
        help="only this topic; may be repeated; default: all of the ledger",
    )
    parser.argument(
        "--interval",
        group=what,
        type=interval_ms,
        default="1m",
        metavar="LENGTH",
        help="length of a bucket (%(default)s)",
    )
    parser.argument(
        "--ends",
        group=what,
        action="store_true",
        help="judge also what programs counted that they sent and consumed, by group",
    )
    parser.argument(
        "--index",
        group=what,
        metavar="URI",
        help="an index of the trace: with --ends it names the messages",
    )
    strict = parser.add_argument_group("how strictly")
    parser.argument(
        "--late-tolerance",
        group=strict,
        type=parse_duration_ms,
        default="1s",
        metavar="LENGTH",
        help="later than this after its due is late (%(default)s)",
    )
    parser.argument(
        "--strict-late",
        group=strict,
        action="store_true",
        help="late messages make the exit code 1 too",
    )
    parser.argument(
        "--clock-tolerance",
        group=strict,
        type=parse_duration_ms,
        default="1s",
        metavar="LENGTH",
        help="how much clocks of nodes and brokers may differ (%(default)s)",
    )
    _add_places(parser)


def _add_places(parser: Parser) -> None:
    where = parser.add_argument_group("where")
    parser.argument(
        "--settings",
        "--config",
        group=where,
        type=Path,
        metavar="FILE",
        help="a node's settings: cluster, ledger, span and how Kafka is reached",
    )
    parser.argument("--cluster", group=where, metavar="ID", help="the cluster's id")
    parser.argument("--ledger", group=where, metavar="URI", help="where the ledger is published")
    parser.argument("--kafka", group=where, metavar="ADDRESS", help="Kafka's bootstrap servers")
    parser.argument(
        "--kafka-setting",
        group=where,
        dest="kafka_settings",
        type=parse_assignment,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the Kafka client; may be repeated",
    )
    parser.argument(
        "--kafka-margin",
        group=where,
        type=parse_duration_ms,
        default="1h",
        metavar="LENGTH",
        help="read Kafka from this long before --from (%(default)s); messages "
        "missing then are searched in all of it",
    )
    parser.argument(
        "--all-kafka",
        group=where,
        action="store_true",
        help="read the topics from their beginning: for messages with timestamps of their callers'",
    )
    parser.argument(
        "--kafka-to",
        group=where,
        type=parse_time_ms,
        metavar="TIME",
        help="do not read records with this timestamp or later; default: all",
    )
    parser.argument(
        "--span",
        group=where,
        type=parse_duration_ms,
        metavar="LENGTH",
        help="span_seconds of the cluster: spares reading older ledger files",
    )
    parser.argument(
        "--output",
        group=where,
        default="reconciliation",
        metavar="URI",
        help="folder of the tables, summary and page (./%(default)s); overwritten",
    )
    parser.argument(
        "--master", group=where, metavar="URL", help="Spark's master (all cores of this machine)"
    )
    parser.argument(
        "--memory",
        group=where,
        default="2g",
        metavar="SIZE",
        help="heap of the Spark process started here (%(default)s)",
    )
    parser.argument("--json", group=where, action="store_true", help="print the summary as JSON")
    parser.argument(
        "--no-page", group=where, dest="page", action="store_false", help="write no HTML page"
    )


COMMAND = Command(
    "Prove from ledger and Kafka that every message was forwarded once, on time.",
    "delaywheel_audit.cli:reconcile",
    _declare,
    "Exit code 0: the books balance; 1: they do not; 2: it could not run, and why.",
    """
        # The hour before last, with Kafka and the ledger from a node's settings
        delaywheel reconcile --settings node.toml --from now-2h --to now-1h

        # Without a node's settings
        delaywheel reconcile --kafka k:9092 --cluster a --ledger s3://books/a --output ./audit
    """,
    reads_itself=True,
)
