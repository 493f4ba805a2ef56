"""The options of `delaywheel reconcile`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from delaywheel_audit.arguments import COMMAND
from delaywheel_audit.matching.terms import Terms
from delaywheel_replica.cli.parsing import Parser, usage


@dataclass(frozen=True, slots=True)
class Options:
    """The checked options of one call.

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
        wants_ends: Whether both ends are judged.
        index: The trace's index, which names their messages; None: counts have to do.
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
    wants_ends: bool
    index: str | None
    wants_json: bool
    wants_page: bool

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> Options:
        """Parses a command line.

        Raises:
            Failure: USAGE, and what is wrong.
        """
        given = SimpleNamespace(**Parser("reconcile", COMMAND).read(arguments))
        if given.kafka is None and given.settings is None:
            raise usage("say which Kafka: --kafka ADDRESS, or --settings FILE")
        if given.settings is None and (given.cluster is None or given.ledger is None):
            raise usage("without --settings, say --cluster and --ledger")
        if given.to_ms is not None and given.from_ms is not None and given.to_ms <= given.from_ms:
            raise usage("--to is not after --from: the range is empty")
        if given.ends and given.by != "due":
            raise usage("--ends counts by due: leave out --by accepted")
        if given.index is not None and not given.ends:
            raise usage("--index is for --ends")
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
            wants_ends=given.ends,
            index=given.index,
            wants_json=given.json,
            wants_page=given.page,
        )
