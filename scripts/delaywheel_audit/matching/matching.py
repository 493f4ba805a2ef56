"""Joins ledger, outcomes and Kafka: one row for each message.

Everything is aggregated before it is joined, so a message that comes a million times is one row
of the join. Both sides are spread by topic, id and due once and sorted; nothing is broadcast but
what is small by nature (wheels, runs of lost frames).
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from delaywheel_audit.matching.terms import Facts, Terms

KEY = ("topic", "id", "due_ms")
"""What a message is."""
INGRESS = "ingress"
"""What a message names in place of a wheel that went out directly (ingress.py)."""
PASSED_ON_BY = "passed on by "
"""How the wheel begins of what should have come back through an ingress topic, and did not; the
wheel that it was done in follows."""

_FRAME = (*KEY, "wheel", "seq", "accepted_at_ms")
_ENDS = {
    "cancelled": "cancelled",
    "dead-lettered": "dead",
    "committed": "committed",
    "asked": "asked",
    "deferred": "deferred",
}
"""Outcomes that end a message, whatever other copies of it there are, and the count of each."""
ENDS = tuple(_ENDS.values())
_FATES = {**_ENDS, "duplicate": "duplicates_dropped"}
_ANSWERS = {"undecided": 1, "rolled-back": 2, "committed": 3}
"""What a group says about a half. An undecided one may be asked about again, by hand: then the
other answer counts."""
_PIECE_SEQS = 65_536
"""Lost frames are reported in runs of any length; they are searched among those of one piece."""

_SUMS = (
    *("rows", *_FATES.values(), "open_rows", "lost_rows", "differs"),
    *("surplus", "ended_elsewhere"),
)

WHEELS = (
    "wheel string, done_seq long, split_seq long, first_seq long, last_seq long, from_ms long,"
    " to_ms long,"
    " complete boolean, closed boolean, end_seq long,"
    " holes array<struct<number: int, from_ms: long, to_ms: long>>"
)


def in_range(terms: Terms, due: Column, accepted: Column) -> Column:
    """Whether a message is within the requested range."""
    time = due if terms.by == "due" else accepted
    wanted = F.lit(col=True)
    if terms.from_ms is not None:
        wanted = wanted & (time >= terms.from_ms)
    if terms.to_ms is not None:
        wanted = wanted & (time < terms.to_ms)
    return wanted


def wheel_table(like: DataFrame, facts: Facts) -> DataFrame:
    """Returns what is known of each wheel."""
    done = facts.done
    rows = []
    for wheel in sorted({*done.seqs, *done.closed, *facts.extents}):
        extent = facts.extents.get(wheel)
        last_seq = extent.last_seq if extent else 0
        holes = [
            (number, hole.from_ms, hole.to_ms)
            for number, hole in enumerate(facts.holes)
            if hole.wheel == wheel
        ]
        rows.append(
            (
                wheel,
                done.seqs.get(wheel, 0),
                done.split_seqs.get(wheel, 0),
                extent.first_seq if extent else None,
                last_seq,
                extent.from_ms if extent else None,
                extent.to_ms if extent else None,
                last_seq >= done.closed.get(wheel, done.seqs.get(wheel, last_seq + 1)),
                wheel in done.closed,
                done.closed.get(wheel, done.seqs.get(wheel, 0)),
                holes,
            )
        )
    return like.sparkSession.createDataFrame(rows, WHEELS)


def acceptances(ledger: DataFrame, outcomes: DataFrame, terms: Terms, facts: Facts) -> DataFrame:
    """Returns one row for each message of the ledger: how often accepted, and its outcomes."""
    wanted = in_range(terms, F.col("due_ms"), F.col("accepted_at_ms"))
    if terms.topics:
        wanted = wanted & F.col("topic").isin(*terms.topics)
    nothing = F.lit(0).cast("long")
    fates = [F.col("outcome").eqNullSafe(name).cast("long").alias(c) for name, c in _FATES.items()]
    rows = ledger.where(wanted).select(
        *_FRAME, F.lit(1).cast("long").alias("rows"), *(nothing.alias(c) for c in _FATES.values()),
        nothing.alias("differs"), F.lit(None).cast("string").alias("dead_reason"),
        nothing.alias("answer"),
    )  # fmt: skip
    decided = outcomes.where(F.col("outcome").isin(*_FATES) & wanted).select(
        *_FRAME, nothing.alias("rows"), *fates,
        F.coalesce(F.col("content_differs"), F.lit(col=False)).cast("long").alias("differs"),
        F.when(F.col("outcome") == "dead-lettered", F.col("reason")).alias("dead_reason"),
        nothing.alias("answer"),
    )  # fmt: skip
    sums = ["rows", *_FATES.values(), "differs"]
    frames = (
        rows.unionByName(decided)
        .unionByName(_answers(outcomes, terms), allowMissingColumns=True)
        .fillna(0, sums)
        .repartition(*KEY)
        .groupBy(*_FRAME)
        .agg(
            *(F.sum(name).alias(name) for name in sums),
            F.max("dead_reason").alias("dead_reason"),
            F.max("answer").alias("answer"),
        )
    )
    return _by_message(_with_places(_capped(frames), outcomes, facts))


def _answers(outcomes: DataFrame, terms: Terms) -> DataFrame:
    """Returns what groups have answered about halves, which names no acceptance."""
    wanted = F.col("outcome") == "answered"
    if terms.by == "due":
        wanted = wanted & in_range(terms, F.col("due_ms"), F.col("accepted_at_ms"))
    code = F.coalesce(*(F.when(F.col("answer") == name, n) for name, n in _ANSWERS.items()))
    return outcomes.where(wanted).select(*_FRAME, code.cast("long").alias("answer"))


def with_answers(fated: DataFrame) -> DataFrame:
    """Adds what became of halves whose groups were asked."""
    asked, answer = F.col("asked"), F.coalesce("answer", F.lit(0))
    nothing = F.lit(0).cast("long")
    names = {**_ANSWERS, "open": 0}
    return fated.withColumns(
        {
            f"asked_{name.replace('-', '_')}": F.when(answer == code, asked).otherwise(nothing)
            for name, code in names.items()
        }
    )


def _capped(frames: DataFrame) -> DataFrame:
    """Limits a frame's outcomes to its acceptances, so that none counts for another frame.

    `surplus` is how many outcomes are too many. Of a frame that the ledger does not show (not
    published yet, or lost) only `ended_elsewhere` is kept: how many of it were ended for good.
    """
    rows, nothing = F.col("rows"), F.lit(0).cast("long")
    decided = ended() + F.col("duplicates_dropped")
    capped = (
        frames.withColumn("surplus", F.when(rows > 0, F.greatest(decided - rows, nothing)))
        .withColumn("ended_elsewhere", F.when(rows == 0, ended()))
        .fillna(0, ["surplus", "ended_elsewhere"])
        .withColumn("differs", F.when(rows > 0, F.col("differs")).otherwise(nothing))
    )
    left = rows
    for name in (*ENDS, "duplicates_dropped"):
        capped = capped.withColumn(name, F.least(name, left))
        left = left - F.col(name)
    return capped


def is_unread(wheel: Column) -> Column:
    """Whether it is the partition of a record that is unread (ingress.py)."""
    return wheel.contains("/")


def ended() -> Column:
    """Returns how many acceptances have an outcome that ends their message."""
    total = F.lit(0).cast("long")
    for name in ENDS:
        total = total + F.col(name)
    return total


def _with_places(frames: DataFrame, outcomes: DataFrame, facts: Facts) -> DataFrame:
    """Adds to frames their messages that are not done, and whether they were lost."""
    done = facts.done
    table = wheel_table(frames, facts)
    wheels = table.select("wheel", "done_seq", "split_seq")
    lost = _lost_frames(outcomes, table)
    rest = F.greatest(F.col("rows") - ended() - F.col("duplicates_dropped"), F.lit(0))
    due, seq = F.col("due_ms"), F.col("seq")
    taken = seq <= F.coalesce("done_seq", F.lit(0))
    split = (due == done.due_ms + 1) & (seq <= F.coalesce("split_seq", F.lit(0)))
    is_done = (due < done.floor * 1000) | (taken & ((due <= done.due_ms) | split))
    is_done = is_done | (F.col("wheel") == INGRESS)  # its record is settled
    is_done = is_done & ~is_unread(F.col("wheel"))
    is_lost = F.col("lost_reason").isNotNull()
    run = F.get(F.filter("runs", lambda run: seq.between(run["first"], run["last"])), 0)
    nothing = F.lit(0).cast("long")
    return (
        frames.join(F.broadcast(wheels), "wheel", "left")
        .withColumn("piece", F.expr(f"seq div {_PIECE_SEQS}"))
        .join(F.broadcast(lost), ["wheel", "piece"], "left")
        .withColumn("lost_reason", run["reason"])
        .withColumn("open_rows", F.when(is_done, nothing).otherwise(rest))
        .withColumn("lost_rows", F.when(is_lost, rest).otherwise(nothing))
    )


def _lost_frames(outcomes: DataFrame, wheels: DataFrame) -> DataFrame:
    """Returns the runs of lost frames of each wheel; none lie beyond the ledger."""
    known = F.broadcast(wheels.select("wheel", F.col("last_seq").alias("known_seq")))
    last = F.greatest("seq", F.least("last_seq", F.coalesce("known_seq", "seq")))
    run = F.struct(F.col("seq").alias("first"), last.alias("last"), "reason")
    pieces = f"explode(sequence(run.first div {_PIECE_SEQS}, run.last div {_PIECE_SEQS}))"
    return (
        outcomes.where("outcome = 'lost'")
        .join(known, "wheel", "left")
        .select("wheel", run.alias("run"))
        .select("wheel", "run", F.expr(pieces).alias("piece"))
        .groupBy("wheel", "piece")
        .agg(F.sort_array(F.collect_list("run")).alias("runs"))
    )


def _by_message(frames: DataFrame) -> DataFrame:
    row = F.when(F.col("rows") > 0, F.struct("accepted_at_ms", "wheel", "seq", "topic"))
    lost = F.struct("wheel", "seq", F.col("lost_reason").alias("reason"), "accepted_at_ms")
    dead = F.struct("accepted_at_ms", "wheel", "seq", F.col("dead_reason").alias("reason"))
    decided = frames.groupBy(*KEY).agg(
        *(F.sum(name).alias(name) for name in _SUMS),
        F.max("answer").alias("answer"),
        F.min(row).alias("row"),
        F.max(row).alias("last_row"),
        F.min(F.when(F.col("lost_rows") > 0, lost)).alias("lost_at"),
        F.min(F.when(F.col("dead") > 0, dead)).alias("dead_at"),
        F.max(F.when(F.col("differs") > 0, F.struct("accepted_at_ms", "wheel", "seq"))).alias(
            "differs_at"
        ),
    )
    return decided.where("rows > 0")  # the rest: outcomes of what is not published yet


def forwarded_ms() -> Column:
    """Returns when a record was forwarded; the caller's own timestamp does not show that."""
    return F.coalesce("dw_forwarded_ms", "timestamp_ms")


def is_ours(kafka: DataFrame) -> DataFrame:
    """Returns records with any of our headers, each with a key to join by, or a unique one."""
    any_of_ours = F.col("dw_malformed")
    for name in ("dw_id", "dw_due_ms", "dw_accepted_ms", "dw_wheel"):
        any_of_ours = any_of_ours | F.col(name).isNotNull()
    place = F.concat_ws("/", "topic", "partition", "offset").cast("binary")
    return (
        kafka.where(any_of_ours)
        .withColumn("forwarded_ms", forwarded_ms())
        .withColumn("id", F.coalesce("dw_id", place))
        .withColumn("due_ms", F.coalesce("dw_due_ms", -1 - F.col("offset")))
    )


def copies(kafka: DataFrame, terms: Terms) -> DataFrame:
    """Returns one row for each message in Kafka: how often it is there, and where."""
    # What cannot be read of the time it was for counts where it was forwarded.
    due = F.coalesce("dw_due_ms", "forwarded_ms")
    accepted = F.coalesce("dw_accepted_ms", "forwarded_ms")
    ours = is_ours(kafka).where(in_range(terms, due, accepted))
    return by_key(ours)


def by_key(ours: DataFrame) -> DataFrame:
    """Combines the copies of a message into one row."""
    copy = copy_struct()
    return (
        ours.repartition(*KEY)
        .groupBy(*KEY)
        .agg(
            F.count(F.lit(1)).alias("copies"),
            F.min(copy).alias("copy"),
            F.max(copy).alias("last_copy"),
            F.max("dw_malformed").alias("malformed"),
        )
    )


def copy_struct() -> Column:
    """Returns all that is known of a record; the earliest sorts first."""
    by_broker = F.col("dw_forwarded_ms").isNull() & (F.col("timestamp_type") == "LOG_APPEND_TIME")
    return F.struct(
        "forwarded_ms",
        "topic",
        "partition",
        "offset",
        F.col("dw_wheel").alias("wheel"),
        F.col("dw_accepted_ms").alias("accepted_ms"),
        F.col("dw_due_ms").alias("due_ms"),
        F.col("dw_committed_ms").alias("committed_ms"),
        by_broker.alias("by_broker"),
    )


def messages(
    ledger: DataFrame, kafka: DataFrame, outcomes: DataFrame, terms: Terms, facts: Facts
) -> DataFrame:
    """Joins both sides of each message."""
    counted = [*_SUMS, "copies"]
    joined = acceptances(ledger, outcomes, terms, facts).join(
        copies(kafka, terms), list(KEY), "full_outer"
    )
    return joined.fillna(0, counted).fillna({"malformed": False})
