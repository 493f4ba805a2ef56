"""What `delaywheel reconcile` may be told."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from delaywheel_audit.terms import Terms
from delaywheel_replica.cli.moments import unix_ms

_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"(\d{1,12})(ms|s|m|h|d)")
_NOW = re.compile(r"now(?:-(?P<ago>\w+))?")


@dataclass(frozen=True, slots=True)
class Options:
    """One call, checked.

    Attributes:
        terms: What is asked of the books.
        cluster: Whose; None: the settings file says.
        ledger: Where the ledger is; None: the settings file says.
        kafka: Kafka client settings that win over the file's.
        settings: A node's settings file.
        output: Where tables and page go.
        master: Spark's master; None: what spark-submit says, or this machine.
        memory: Of the Spark process on this machine.
        kafka_margin_ms: How long before the range Kafka is read from; None: from its beginning.
        kafka_to_ms: Records with this timestamp or later are not read.
        is_late_an_error: Whether a late message makes the exit code 1.
        wants_json: Whether the summary is printed as JSON.
        wants_page: Whether a page is written.
    """

    terms: Terms
    cluster: str | None
    ledger: str | None
    kafka: dict[str, str]
    settings: Path | None
    output: str
    master: str | None
    memory: str
    kafka_margin_ms: int | None
    kafka_to_ms: int | None
    is_late_an_error: bool
    wants_json: bool
    wants_page: bool

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> Options:
        """Reads a command line; ends the program with exit code 2 where it is wrong."""
        parser = _parser()
        given = parser.parse_args(arguments)
        if given.kafka is None and given.settings is None:
            parser.error("say which Kafka: --kafka ADDRESS, or --settings FILE")
        if given.settings is None and (given.cluster is None or given.ledger is None):
            parser.error("without --settings, say --cluster and --ledger")
        if given.to_ms is not None and given.from_ms is not None and given.to_ms <= given.from_ms:
            parser.error("--to is not after --from: the range is empty")
        kafka = dict(given.kafka_settings)
        if given.kafka is not None:
            kafka["bootstrap.servers"] = given.kafka
        return cls(
            terms=Terms(
                by=given.by,
                from_ms=given.from_ms,
                to_ms=given.to_ms,
                topics=tuple(dict.fromkeys(given.topic)),
                interval_ms=given.interval,
                late_tolerance_ms=given.late_tolerance,
                clock_tolerance_ms=given.clock_tolerance,
                span_ms=given.span,
            ),
            cluster=given.cluster,
            ledger=given.ledger,
            kafka=kafka,
            settings=given.settings,
            output=given.output.rstrip("/"),
            master=given.master,
            memory=given.memory,
            kafka_margin_ms=None if given.all_kafka else given.kafka_margin,
            kafka_to_ms=given.kafka_to,
            is_late_an_error=given.strict_late,
            wants_json=given.json,
            wants_page=given.page,
        )


def duration_ms(text: str) -> int:
    """Reads ``500ms``, ``60s``, ``5m``, ``1h`` or ``7d``."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: a number with ms, s, m, h or d, as 90s")
    return int(match[1]) * _UNITS_MS[match[2]]


def interval_ms(text: str) -> int:
    """Reads a duration that is not empty."""
    length = duration_ms(text)
    if length == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: a bucket has some length")
    return length


def moment_ms(text: str) -> int:
    """Reads a time: ISO 8601 (UTC if no zone is named), Unix milliseconds, now or now-2h."""
    if text.isdecimal():
        try:
            return unix_ms(int(text))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    if match := _NOW.fullmatch(text):
        ago_ms = duration_ms(match["ago"]) if match["ago"] else 0
        return int(time.time() * 1000) - ago_ms
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: a time as 2026-05-01T10:00:00Z, Unix milliseconds, now or now-2h"
        ) from None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: NAME=VALUE")
    return name, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="reconcile",
        allow_abbrev=False,
        description="Prove from the ledger and from Kafka that every accepted message was "
        "forwarded once, on time. Exit code 0: the books balance; 1: they do not; 2: could not "
        "run, and why.",
    )
    what = parser.add_argument_group("what is looked at")
    what.add_argument(
        "--from",
        dest="from_ms",
        type=moment_ms,
        metavar="TIME",
        help="from here on; default: from the first message",
    )
    what.add_argument(
        "--to",
        dest="to_ms",
        type=moment_ms,
        metavar="TIME",
        help="up to before here; default: to the last message",
    )
    what.add_argument(
        "--by",
        choices=("due", "accepted"),
        default="due",
        help="which time of a message range and buckets go by (%(default)s)",
    )
    what.add_argument(
        "--topic",
        action="append",
        default=[],
        metavar="NAME",
        help="only this topic; may be repeated; default: all of the ledger",
    )
    what.add_argument(
        "--interval",
        type=interval_ms,
        default="1m",
        metavar="LENGTH",
        help="length of a bucket (%(default)s)",
    )
    strict = parser.add_argument_group("how strictly")
    strict.add_argument(
        "--late-tolerance",
        type=duration_ms,
        default="1s",
        metavar="LENGTH",
        help="later than this after its due is late (%(default)s)",
    )
    strict.add_argument(
        "--strict-late", action="store_true", help="late messages make the exit code 1 too"
    )
    strict.add_argument(
        "--clock-tolerance",
        type=duration_ms,
        default="1s",
        metavar="LENGTH",
        help="how much clocks of nodes and brokers may differ (%(default)s)",
    )
    _add_places(parser)
    return parser


def _add_places(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("where")
    where.add_argument(
        "--settings",
        "--config",
        type=Path,
        metavar="FILE",
        help="a node's settings: cluster, ledger, span and how Kafka is reached",
    )
    where.add_argument("--cluster", metavar="ID", help="the cluster's id")
    where.add_argument("--ledger", metavar="URI", help="where the ledger is published")
    where.add_argument("--kafka", metavar="ADDRESS", help="Kafka's bootstrap servers")
    where.add_argument(
        "--kafka-setting",
        dest="kafka_settings",
        type=_setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the Kafka client; may be repeated",
    )
    where.add_argument(
        "--kafka-margin",
        type=duration_ms,
        default="1h",
        metavar="LENGTH",
        help="read Kafka from this long before --from (%(default)s); what is missing "
        "then is looked for in all of it",
    )
    where.add_argument(
        "--all-kafka",
        action="store_true",
        help="read the topics from their beginning: for messages with timestamps of their callers'",
    )
    where.add_argument(
        "--kafka-to",
        type=moment_ms,
        metavar="TIME",
        help="do not read records with this timestamp or later; default: all",
    )
    where.add_argument(
        "--span",
        type=duration_ms,
        metavar="LENGTH",
        help="span_seconds of the cluster: spares reading older ledger files",
    )
    where.add_argument(
        "--output",
        default="reconciliation",
        metavar="URI",
        help="folder of the tables, summary and page (./%(default)s); overwritten",
    )
    where.add_argument("--master", metavar="URL", help="Spark's master (all cores of this machine)")
    where.add_argument(
        "--memory",
        default="2g",
        metavar="SIZE",
        help="heap of the Spark process started here (%(default)s)",
    )
    where.add_argument("--json", action="store_true", help="print the summary as JSON")
    where.add_argument("--no-page", dest="page", action="store_false", help="write no HTML page")
