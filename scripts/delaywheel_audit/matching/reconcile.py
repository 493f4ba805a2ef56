"""The reconciliation itself: DataFrames in, tables and a verdict out.

How it avoids false findings while the cluster runs. It looks in this order:

1. the control topic's newest progress record (read_committed): what was done then is in Kafka;
2. the names of the ledger's files: the rows of today;
3. Kafka's ends, each waited for until no transaction is open before it.

So an acceptance that was done at 1 must be found at 3, in its topic or among the outcomes, or it
is `missing`. One that was not done at 1 may be found, else it is `pending`.

A record without an acceptance is not `unexpected` yet: the ledger is published later than Kafka
gets the message. Its headers name the wheel and the time of acceptance, which never goes back
within a wheel; the names of the wheel's files say up to which seq and time it is published:

========================================================  ======================================
its acceptance would be                                   so the record is
========================================================  ======================================
in a hole of the ledger's files                           evidence of that `ledger_gap`
of a wheel that was never given                           `unexpected`
between the wheel's first and last published row          `unexpected`
behind the last, and all of the wheel that was done at 1  `unexpected`, if it was forwarded
is published                                              before 1; else unpublished
behind the last, due below the floor                      `ledger_gap`: the floor waits for books
behind the last                                           unpublished: counted, no finding
in files that were not read                               looked up: they are read too
========================================================  ======================================

The last of these is so where the cluster accepted farther ahead, or later, than its settings say
now: by due, the files to read are chosen by these. Then all is read again, with every file: what is
missing may have been accepted still earlier than what is found.

Every acceptance gets exactly one fate: forwarded, cancelled, duplicate dropped, dead, lost,
pending, not verifiable or missing. Outcomes name wheel, seq and row; so an outcome counts for the
acceptance that it names and for no other, and a retry that two nodes took is two acceptances: one
forwarded, one duplicate dropped. Rows of a frame that the outcomes call lost are lost, unless they
have another outcome or were forwarded before. Lost frames that no file covers are a finding
`lost` of their own, since nobody knows which messages were in them. A copy that fits no acceptance
of its id and due (wheel or time of acceptance differ) is that of an acceptance not published yet,
if the table above says so; else it is `changed`.

Missing messages are then searched in all of Kafka, whatever its time (`pairing`): a record of the
same id and acceptance is the same message, with another due or with damaged headers, and both
become `changed`. If they are too many for that, callers may have set their timestamps: all is
matched once more, with all of Kafka. What is missing then, and may have been among records that
Kafka has deleted, is not verifiable (`retention`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pyspark import StorageLevel
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from delaywheel_audit.matching.judging import BEFORE_FIRST, BEHIND_LAST, judged, with_findings
from delaywheel_audit.matching.letters import letter_findings
from delaywheel_audit.matching.matching import messages
from delaywheel_audit.matching.pairing import MAX_SOUGHT, pair, with_pairs
from delaywheel_audit.matching.retention import Deleted, with_deleted
from delaywheel_audit.matching.tables import (
    buckets,
    findings,
    gap_counts,
    gap_findings,
    outer_hole,
    totals,
    unbooked_losses,
)
from delaywheel_audit.matching.terms import Facts, Terms
from delaywheel_audit.sources.ledger_files import Hole, moment

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Books:
    """The result, before it is written.

    Attributes:
        buckets: The table.
        findings: The table.
        totals: Counts and percentiles of everything.
        gaps: Holes of the ledger that matter, with the messages of Kafka that fall into each.
        messages: What the tables are made of, judged: one a row.
        sought_too_many: Whether too much is missing to look for it record by record.
        release: Frees what was kept for the tables; called once they are written.
    """

    buckets: DataFrame
    findings: DataFrame
    totals: dict[str, Any]
    gaps: list[tuple[Hole, int]]
    messages: DataFrame
    sought_too_many: bool
    release: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Inputs:
    """The rows to reconcile.

    Attributes:
        ledger: Columns of the published files; each row once. All that was accepted in
            `Terms.accepted_range` and may be asked for; more does no harm. Beside them what was
            accepted through ingress, and was in no wheel (ingress.py).
        kafka: As `KafkaPlace.records` has them.
        outcomes: The records of the outcomes topic, `outcomes_schema`.
        all_kafka: The same as `kafka`, whatever the time; asked for only when something is
            missing.
        deleted: What Kafka has deleted of the topics; likewise.
        letters: Columns of the dead-letter topic, `letters.COLUMNS`; asked for only when there are
            dead letters.
        other_dues: The rest of what was accepted in that time, with dues that nobody asked for;
            None: there is none. Asked for only when something is missing.
    """

    ledger: DataFrame
    kafka: DataFrame
    outcomes: DataFrame
    all_kafka: Callable[[], DataFrame]
    deleted: Callable[[], Deleted]
    letters: Callable[[], DataFrame]
    other_dues: Callable[[], DataFrame | None] = lambda: None

    def whole_ledger(self) -> DataFrame:
        """Returns all that was accepted in the time, whenever it is due."""
        others = self.other_dues()
        return self.ledger if others is None else self.ledger.unionByName(others)


def outcomes_schema() -> str:
    """Returns the needed part of the JSON schema of the outcomes topic."""
    return (
        "outcome string, reason string, content_differs boolean, id string, due_ms long,"
        " accepted_at_ms long, topic string, wheel string, seq long, last_seq long,"
        " slot long, last_slot long, messages long, origin string, answer string, until_ms long"
    )


def outcomes_of(records: DataFrame) -> DataFrame:
    """Parses the outcomes topic's values into columns."""
    parsed = F.from_json(F.col("value").cast("string"), outcomes_schema())
    return records.select(parsed.alias("parsed")).select("parsed.*").withColumn("id", F.unhex("id"))


def reconcile(
    read: Callable[[Terms], Inputs], terms: Terms, facts: Facts, say: Say = lambda _: None
) -> Books:
    """Reconciles ledger, outcomes and Kafka.

    Args:
        read: Gives the rows; asked again, for all times of acceptance, if Kafka has records
            that were accepted outside of `Terms.accepted_range`.
        terms: What is asked.
        facts: What was known before Kafka was read.
        say: Called with what is done next, for people.
    """
    asked = terms
    inputs, first, sums = _first_look(read, terms, facts, say)
    if sums["unread_from_ms"] is not None:
        first.unpersist()
        first_ms, last_ms = sums["unread_from_ms"], sums["unread_to_ms"]
        say(f"Kafka has what was accepted from {moment(first_ms)} to {moment(last_ms)}")
        terms = terms.reaching_all()
        inputs, first, sums = _first_look(read, terms, facts, say)
    if sums["missing"] > MAX_SOUGHT:
        first.unpersist()
        say(f"{sums['missing']:,} are missing: matching with all of Kafka, whatever its time")
        whole = replace(inputs, kafka=inputs.all_kafka())
        inputs, first, sums = _first_look(lambda _: whole, terms, facts, say)
    kept = [first]
    too_many = sums["missing"] > MAX_SOUGHT
    if sums["missing"] and not too_many:
        say(f"{sums['missing']:,} are missing: looking for them in all of Kafka")
        pairs = pair(first, inputs.all_kafka(), inputs.whole_ledger())
        sums = _keep(kept, with_findings(with_pairs(first, pairs), terms, facts))
    if sums["missing"]:
        deleted = inputs.deleted()
        if deleted:
            sums = _keep(kept, with_deleted(kept[-1], deleted, terms))
    found = kept[-1]
    gaps = _gaps(found, asked, facts)

    def release() -> None:
        for one in reversed(kept):
            one.unpersist()

    table = findings(found).unionByName(gap_findings(found, gaps))
    table = table.unionByName(unbooked_losses(inputs.outcomes, asked, facts))
    if sums["dead"]:
        table = table.unionByName(letter_findings(found, inputs.letters()))
    return Books(buckets(found, terms), table, sums.asDict(), gaps, found, too_many, release)


def _first_look(
    read: Callable[[Terms], Inputs], terms: Terms, facts: Facts, say: Say
) -> tuple[Inputs, DataFrame, Row]:
    """Judges all messages and persists them, since two tables use them and Kafka is read once."""
    inputs = read(terms)
    say("matching the ledger with Kafka")
    both = messages(inputs.ledger, inputs.kafka, inputs.outcomes, terms, facts)
    kept = judged(both, terms, facts).persist(StorageLevel.DISK_ONLY)
    return inputs, kept, _totals(kept)


def _keep(kept: list[DataFrame], found: DataFrame) -> Row:
    """Persists further knowledge about all messages, with the totals."""
    kept.append(found.persist(StorageLevel.DISK_ONLY))
    return _totals(kept[-1])


def _totals(fated: DataFrame) -> Row:
    sums = totals(fated).first()
    assert sums is not None
    return sums


def _gaps(found: DataFrame, terms: Terms, facts: Facts) -> list[tuple[Hole, int]]:
    """Returns holes that may contain requested messages."""
    evidence: dict[int, int] = {}
    outer: dict[tuple[str, int], tuple[Hole, int]] = {}
    for row in gap_counts(found).collect():
        if row["gap_at"] >= 0:
            evidence[row["gap_at"]] = evidence.get(row["gap_at"], 0) + row["messages"]
        else:
            hole = outer_hole(row["wheel"], row["gap_at"], row["from_ms"], row["to_ms"])
            outer[row["wheel"], row["gap_at"]] = hole, row["messages"]
    from_ms, to_ms = terms.accepted_range()
    inner = [
        (hole, evidence.get(number, 0))
        for number, hole in enumerate(facts.holes)
        if number in evidence or (hole.to_ms >= from_ms and hole.from_ms < to_ms)
    ]
    for missing in facts.uncovered(from_ms, to_ms):
        # Without a beginning, what is asked for is what the ledger has.
        is_asked = terms.from_ms is not None or not missing.is_before_first
        if is_asked and not missing.is_awaited:
            place = BEFORE_FIRST if missing.is_before_first else BEHIND_LAST
            known = outer.pop((missing.hole.wheel, place), None)
            inner.append((missing.hole, 0 if known is None else known[1]))
    return [*inner, *outer.values()]
