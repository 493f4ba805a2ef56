"""`scripts/reconcile`, `delaywheel reconcile`, and what spark-submit runs.

Exit codes: 0, the books balance; 1, they do not; 2, it could not run, and why.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from py4j.protocol import Py4JError
from pyspark import StorageLevel
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from delaywheel_audit.ends.report import Ends, EndsReport
from delaywheel_audit.kafka.client import ClientSettings
from delaywheel_audit.kafka.columns import with_own_headers
from delaywheel_audit.kafka.control import ControlMissingError, Done, read_done
from delaywheel_audit.kafka.errors import KafkaSourceError
from delaywheel_audit.kafka.plan import Plan
from delaywheel_audit.matching.findings import is_error
from delaywheel_audit.matching.ingress import (
    Asked,
    are_all_asked,
    ingress_requests,
    with_ingress,
)
from delaywheel_audit.matching.matching import in_range
from delaywheel_audit.matching.reconcile import Books, Inputs, Say, outcomes_of, reconcile
from delaywheel_audit.matching.retention import Deleted
from delaywheel_audit.matching.retention import deleted as find_deleted
from delaywheel_audit.matching.summary import COUNTS, Summary
from delaywheel_audit.matching.terms import Facts, Terms
from delaywheel_audit.options import Options
from delaywheel_audit.output import ENDS, SUMMARY, Output, OutputUnwritableError
from delaywheel_audit.progress import Progress
from delaywheel_audit.requests import SCHEMA
from delaywheel_audit.session import CouldNotRun, exit_code_of, spark_session
from delaywheel_audit.settings import Setting, SettingsUnreadableError
from delaywheel_audit.shipping import ship_packages
from delaywheel_audit.sources.hiding import shown_command
from delaywheel_audit.sources.inputs import HeldBackError, KafkaPlace, read_ledger, topics_in
from delaywheel_audit.sources.ledger_files import (
    END_MS,
    LedgerFolder,
    LedgerUnreadableError,
    Listing,
    moment,
)
from delaywheel_audit.terminal import print_summary
from delaywheel_replica.cli.failures import CommandFailure
from delaywheel_replica.hiding import shown
from delaywheel_replica.kafka_settings import KafkaNames

BALANCED, NOT_BALANCED, COULD_NOT_RUN = 0, 1, 2
_ROWS_PER_TASK = 250_000
_JAVA = (
    "-XX:+IgnoreUnrecognizedVMOptions -XX:Tier4InvocationThreshold=50000"
    " -XX:Tier4MinInvocationThreshold=6000 -XX:Tier4CompileThreshold=150000"
    " -XX:Tier4BackEdgeThreshold=400000"
)
"""The last stage of compilation begins ten times later than by default.

Planning runs much code once. To compile all of it well costs more than half of what a small
job costs in total; code that runs for each of many rows is compiled soon in any case.
"""
_RESTING_S = 10.0
"""A leader commits its progress three times a second, even without messages."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one reconciliation from a command line; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = Options.parse(given)
    except SystemExit:  # --help
        return BALANCED
    except CommandFailure as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return COULD_NOT_RUN
    command = shown_command(given)

    def work() -> int:
        with _session(options) as spark:
            summary = run(spark, options, command=command, say=_say)
        return BALANCED if summary.balanced else NOT_BALANCED

    return exit_code_of(work, COULD_NOT_RUN)


def run(
    spark: SparkSession, options: Options, *, command: str = "", say: Say = lambda _: None
) -> Summary:
    """Runs one reconciliation in an existing session; writes tables, summary and page.

    Args:
        spark: The session; only its number of tasks is changed.
        options: The checked options.
        command: The command line, for the summary.
        say: Called with the present step, for people.

    Raises:
        CouldNotRun: The job could not run; the text says why.
    """
    started = _Run(spark, options, command, say)
    try:
        return started.run()
    except KafkaSourceError as error:
        raise CouldNotRun(error.reason.value, error.message) from error
    except SettingsUnreadableError as error:
        raise CouldNotRun("SETTINGS_UNREADABLE", str(error)) from error
    except ControlMissingError as error:
        raise CouldNotRun("CONTROL_UNREADABLE", f"{error}; is --cluster right?") from error
    except LedgerUnreadableError as error:
        raise CouldNotRun("LEDGER_UNREADABLE", str(error)) from error
    except HeldBackError as error:
        raise CouldNotRun("KAFKA_HELD_BACK", str(error)) from error
    except OutputUnwritableError as error:
        raise CouldNotRun("OUTPUT_UNWRITABLE", str(error)) from error
    except (PySparkException, Py4JError) as error:
        source = started.why(error)
        if source is not None:
            raise CouldNotRun(source.reason.value, source.message) from error
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CouldNotRun("SPARK_FAILED", lines[0]) from error


class _Run:
    """One reconciliation, step by step."""

    def __init__(self, spark: SparkSession, options: Options, command: str, say: Say) -> None:
        self._spark = spark
        self._options = options
        self._command = command
        self._say = say
        self._began = time.time()
        self._notes: list[str] = []
        self._final = True
        self._topics: list[str] = []
        self._plan = Plan(())
        """The latest plan of a read of Kafka."""
        self._kept: list[DataFrame] = []
        self._place: KafkaPlace | None = None
        self._answers: Callable[[], str] = str
        """Says what is known of answers about halves that somebody was asked about."""

    def why(self, error: Exception) -> KafkaSourceError | None:
        """Returns what of Kafka made Spark fail; None: nothing of Kafka."""
        return None if self._place is None else self._place.why(error)

    def run(self) -> Summary:
        options = self._options
        setting = Setting.of(options)
        terms = setting.terms
        place = self._place = KafkaPlace(ClientSettings(setting.client), setting.cluster)
        output = Output(self._spark, options.output)
        output.check()
        if not str(self._spark.sparkContext.master).startswith("local"):
            ship_packages(self._spark)

        began_ms = int(self._began * 1000)
        self._say(f"reading the control topic of cluster {setting.cluster}")
        done = read_done(setting.cluster, setting.client)
        folder = LedgerFolder(setting.ledger)
        everything = folder.listing()
        _refuse_nothing(everything, done, setting.ledger)
        if not everything.files and not everything.given_up:
            self._note(
                f"no file of a ledger is at {shown(setting.ledger)}, and no wheel of now has taken "
                "anything: is it the right place, and mounted?"
            )
        facts = Facts(
            done, began_ms, folder.extents(everything), folder.holes(everything), setting.seal_ms
        )
        behind_s = (began_ms - done.due_ms) / 1000
        if behind_s > _RESTING_S:
            self._note(f"nothing was forwarded for {behind_s:,.0f} s when this began: does it run?")
        if terms.by == "due" and done.floor * 1000 < min(terms.end_ms, began_ms):
            self._final = False
            self._note(
                f"not final: the floor stands at {moment(done.floor * 1000)}, and acceptances of "
                "what is due later may still be unpublished; ask again when it is past the range"
            )
        self._judge_coverage(facts, terms)

        notes_before = len(self._notes)

        def read(terms: Terms) -> Inputs:
            del self._notes[notes_before:]  # those of the previous read
            if terms != setting.terms:
                self._note("some was accepted under other settings: the whole ledger was read")
            accepted = everything.between(*terms.accepted_range())
            by_due = terms.by == "due"
            chosen = accepted.due_between(terms.start_ms, terms.end_ms) if by_due else accepted
            self._say(
                f"ledger: {len(chosen.files):,} of {len(everything.files):,} files, some "
                f"{chosen.rows_guess:,} rows; done up to {moment(done.due_ms)}"
            )
            self._shape(chosen.rows_guess)
            if everything.files and not accepted.files:
                self._judge_emptiness(facts, terms)
            ledger = read_ledger(self._spark, folder, chosen)
            inputs = self._read_kafka(place, setting.cluster, ledger, terms, facts)
            rest = accepted.without(chosen)
            return replace(inputs, other_dues=lambda: read_ledger(self._spark, folder, rest))

        books = reconcile(read, terms, facts, self._say)
        try:
            ends = None
            if options.wants_ends:
                self._say("reading what programs have counted")
                ends = EndsReport(self._spark, place, terms, facts, options.index).of(
                    books.messages, has_gaps=bool(books.gaps)
                )
                self._kept += ends.kept
            return self._write(output, setting, place, books, ends, done.due_ms)
        finally:
            books.release()
            for rows in self._kept:
                rows.unpersist()

    def _judge_coverage(self, facts: Facts, terms: Terms) -> None:
        """Notes what may still be accepted or published for the range.

        By due, the floor waits for what is published; but not a file of a wheel is evidence
        that some are missing.
        """
        wheels = [
            one.hole.wheel
            for one in facts.uncovered(*terms.accepted_range())
            if one.is_awaited and (terms.by == "accepted" or one.hole.first_seq == 1)
        ]
        if wheels:
            self._final = False
            self._note(
                f"not final: the newest ledger files of {_some(wheels)} are not there yet; "
                f"nodes publish every {facts.seal_ms // 1_000} s, or soon after: ask again then"
            )
        passed_ms = min(facts.began_ms, facts.done.due_ms) - terms.clock_tolerance_ms
        if terms.by == "accepted" and passed_ms < terms.end_ms:
            self._final = False
            self._note(
                f"not final: what was accepted after {moment(max(0, passed_ms))} may be unknown; "
                "ask again when that is past the range"
            )

    def _judge_emptiness(self, facts: Facts, terms: Terms) -> None:
        """Decides whether an interval without files saw no messages, or predates the ledger."""
        from_ms, to_ms = terms.accepted_range()
        if facts.has_all_of(from_ms, to_ms):
            return
        text = "no ledger file is of this time: nothing of it is proven"
        if to_ms <= facts.began_ms:
            raise CouldNotRun(
                "LEDGER_OUT_OF_RANGE",
                f"{text}; its files are not published yet, or deleted (ledger_retention_hours)",
            )
        self._note(text)

    def _shape(self, rows: int) -> None:
        """Sets the number of tasks, so that each sorts in memory."""
        cores = self._spark.sparkContext.defaultParallelism
        tasks = max(cores, min(4_096, -(-rows // _ROWS_PER_TASK)))
        self._spark.conf.set("spark.sql.shuffle.partitions", str(tasks))

    def _read_kafka(
        self, place: KafkaPlace, cluster: str, ledger: DataFrame, terms: Terms, facts: Facts
    ) -> Inputs:
        options, spark = self._options, self._spark
        names = KafkaNames(cluster)
        outcomes_topic = names.outcomes
        place.wait_for_transactions([outcomes_topic])
        margin = options.kafka_margin_ms
        from_ms = None
        # A loss is known, and reported, when the frame should be read: perhaps long before its due.
        outcomes_from_ms = None
        if terms.from_ms is not None and margin is not None:
            from_ms = max(0, terms.start_ms - margin)
            outcomes_from_ms = max(0, terms.accepted_range()[0] - margin)
        outcomes = place.pin([outcomes_topic], outcomes_from_ms, None)
        ended = outcomes_of(place.read(spark, outcomes))
        asked = ended.where(in_range(terms, F.col("due_ms"), F.col("accepted_at_ms")))
        records = self._read_ingress(place, terms, facts)
        if records:  # these read them three times
            ended = ended.persist(StorageLevel.DISK_ONLY)
            self._kept.append(ended)
        wanted = in_range(terms, F.col("due_ms"), F.col("accepted_at_ms"))
        comes_back = in_range(terms, F.col("until_ms"), F.col("until_ms"))
        named = ended.where(wanted | comes_back)
        topics = list(terms.topics) or topics_in(ledger.where(wanted), named, records.asked)
        # After the outcomes: a message among them is decided in its topic as well.
        place.wait_for_transactions(topics)
        messages = place.pin(topics, from_ms, options.kafka_to_ms) if topics else Plan(())
        for line in (*messages.remarks(), *outcomes.remarks()):
            self._note(line)
        self._say(
            f"Kafka: {messages.size():,} offsets of {len(messages.topics)} topics, "
            f"{outcomes.size():,} outcomes"
        )

        def all_kafka() -> DataFrame:
            if from_ms is None and options.kafka_to_ms is None:
                return place.records(spark, messages)
            return place.records(spark, place.pin(topics, None, None))

        def deleted() -> Deleted:
            self._say("something is missing: looking for what Kafka has deleted")
            searched = [*topics, outcomes_topic]
            left, compacted = place.pin(searched, None, None), place.compacted(searched)
            return find_deleted(
                left, outcomes_topic, compacted, lambda plan: place.records(spark, plan)
            )

        def letters() -> DataFrame:
            place.wait_for_transactions([names.dead])
            return with_own_headers(place.read(spark, place.pin([names.dead], from_ms, None)))

        self._topics, self._plan = topics, messages
        self._answers = partial(_answers, asked, records, terms)
        kafka, books = place.records(spark, messages), ledger
        if records:  # these read it three times
            kafka = kafka.persist(StorageLevel.DISK_ONLY)
            self._kept.append(kafka)
            if not records.is_whole and not are_all_asked(records, kafka, terms):
                records = self._read_ingress(place, terms, facts, is_whole=True)
                self._answers = partial(_answers, asked, records, terms)
            books = with_ingress(ledger, records, kafka, ended, terms, facts)
        return Inputs(books, kafka, ended, all_kafka, deleted, letters)

    def _read_ingress(
        self, place: KafkaPlace, terms: Terms, facts: Facts, *, is_whole: bool = False
    ) -> Asked:
        """Reads the requests in settled records of ingress topics, of the range's time or all."""
        settled = facts.done.ingress
        nothing = self._spark.createDataFrame([], SCHEMA)
        if not settled:
            return Asked(nothing, nothing)
        margin, from_ms = self._options.kafka_margin_ms, None
        if terms.from_ms is not None and margin is not None and not is_whole:
            from_ms = max(0, terms.accepted_range()[0] - margin)
        names = sorted({topic for topic, _ in settled})
        plan = place.pin(names, from_ms, None)
        ranges = [range_ for topic in plan.topics for range_ in topic.ranges]
        since_ms = 0
        if any(each.cut or (from_ms is None and each.start) for each in ranges):
            since_ms = END_MS
            self._note(
                "Kafka has deleted records of ingress topics: what went out directly is taken at "
                "its word"
            )
        self._say(f"Kafka: {plan.size():,} offsets of ingress topics")
        asked = ingress_requests(place.read(self._spark, plan), settled)
        others = plan.beginning({at: record.next_offset for at, record in settled.items()})
        unread = ingress_requests(
            place.read(self._spark, others),
            {at: replace(record, next_offset=END_MS) for at, record in settled.items()},
        )
        is_held_back = any(each.open_until is not None for each in ranges)
        if is_held_back:
            self._note(
                "a transaction is open in an ingress topic: whether all came back from there that "
                "was deferred, or committed with a delay, is not known"
            )
        if is_whole and not since_ms:
            begun = place.read(self._spark, plan).groupBy("topic")
            rows = begun.agg(F.min("timestamp_ms").alias("begins_ms")).collect()
            begins: dict[str, int | None] = {row["topic"]: row["begins_ms"] for row in rows}
            since_ms = max(begins.get(name) or END_MS for name in names)
            self._note(
                "what went out directly before "
                + ("now" if since_ms == END_MS else moment(since_ms))
                + " is taken at its word if no record asks for it: an ingress topic begins then,"
                " and may have been made anew"
            )
        return Asked(
            asked,
            unread,
            is_used=True,
            is_held_back=is_held_back,
            since_ms=since_ms,
            is_whole=from_ms is None,
        )

    def _note(self, line: str) -> None:
        self._notes.append(line)
        self._say(line)

    def _write(
        self,
        output: Output,
        setting: Setting,
        place: KafkaPlace,
        books: Books,
        ends: Ends | None,
        progress_ms: int,
    ) -> Summary:
        self._say(f"writing the tables to {output.place}")
        output.begin()
        output.write_table("buckets", books.buckets)
        findings = books.findings
        if ends is not None:
            output.write_table(ENDS, ends.table)
            findings = findings.unionByName(ends.findings)
            for line in ends.notes:
                self._note(line)
        output.write_table("findings", findings)
        kinds = output.findings_by_kind()
        totals, terms = books.totals, setting.terms
        self._explain(books)
        place.confirm()
        summary = Summary(
            cluster=setting.cluster,
            from_ms=terms.from_ms,
            to_ms=terms.to_ms,
            by=terms.by,
            interval_ms=terms.interval_ms,
            late_tolerance_ms=terms.late_tolerance_ms,
            topics=self._topics,
            made_at_ms=int(self._began * 1000),
            progress_ms=progress_ms,
            kafka_ends=self._plan.ends(),
            counts={name: totals[name] for name in (*COUNTS, "unpublished", "unbooked")},
            lateness={name: totals[f"lateness_{name}_ms"] for name in ("p50", "p99", "max")},
            findings=kinds,
            ledger_gaps=[{**hole.to_json(), "messages": n} for hole, n in books.gaps],
            balanced=not any(self._is_error(kind) for kind in kinds),
            seconds=round(time.time() - self._began, 1),
            command=self._command,
            notes=self._notes,
            final=self._final and not totals["unpublished"] and not totals["pending"],
            ends=None if ends is None else output.ends_counts(),
        )
        output.write_text(SUMMARY, summary.to_json() + "\n")
        page = output.write_page(summary, setting.ledger) if self._options.wants_page else None
        print_summary(summary, output, page, as_json=self._options.wants_json)
        return summary

    def _explain(self, books: Books) -> None:
        """Adds remarks for readers of the figures."""
        totals = books.totals
        if totals["unpublished"]:
            self._note(
                f"{totals['unpublished']:,} messages were forwarded whose acceptance is not "
                "published yet: the ledger follows within ledger_seal_seconds"
            )
        if books.gaps:
            self._note(
                "The ledger is not whole, so these books cannot be proven: "
                f"{totals['unbooked']:,} forwarded messages fall into its gaps. They are neither "
                "lost nor unexpected"
            )
        if totals["not_verifiable"]:
            self._note(
                f"{totals['not_verifiable']:,} acceptances are of a time of which Kafka has "
                "deleted records: they are not verifiable, and not known to be missing"
            )
        if totals["asked"]:
            self._note(
                f"{totals['asked']:,} halves were not committed in time, and their groups are "
                f"asked: {totals['asked_committed']:,} were committed, "
                f"{totals['asked_rolled_back']:,} rolled back, "
                f"{totals['asked_undecided']:,} are undecided, {totals['asked_open']:,} have no "
                f"answer that the service was told; {self._answers()}"
            )
        if books.sought_too_many:
            self._note("too many are missing to look for each under another due")

    def _is_error(self, kind: str) -> bool:
        return is_error(kind) or (kind == "late" and self._options.is_late_an_error)


def _refuse_nothing(everything: Listing, done: Done, place: str) -> None:
    """Refuses an empty folder for a cluster whose wheels have taken something."""
    if everything.files or everything.given_up:
        return
    if any(done.closed.values()) or any(done.seqs.values()):
        raise LedgerUnreadableError(
            f"{shown(place)}: no file of a ledger, though wheels have taken messages; is it the "
            "right place, and mounted? A new cluster publishes within ledger_seal_seconds"
        )


def _answers(outcomes: DataFrame, records: Asked, terms: Terms) -> str:
    """Says what is known of answers about halves, by outcomes and requests in ingress topics."""
    if records and records.since_ms:
        return "what was answered is not known, as not all of the ingress topics was read"
    halves = outcomes.where("outcome = 'asked'")
    if terms.topics:
        halves = halves.where(F.col("topic").isin(*terms.topics))
    sent = records.asked.join(halves.select("id").distinct(), "id", "left_semi")
    committed = sent.select("id").distinct().count()
    return f"of {committed:,} of them the message is in an ingress topic: they were committed"


def _some(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def _session(options: Options) -> Iterator[SparkSession]:
    settings = {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.adaptive.enabled": "true",
        # A ledger has many small files: one task reads several.
        "spark.sql.files.openCostInBytes": str(256 * 1024),
    }
    with spark_session(
        "reconcile", settings, master=options.master, memory=options.memory, java=_JAVA
    ) as spark:
        progress = Progress(spark.sparkContext)
        progress.start()
        try:
            yield spark
        finally:
            progress.stop()


if __name__ == "__main__":
    sys.exit(main())
