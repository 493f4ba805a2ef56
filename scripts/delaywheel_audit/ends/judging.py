"""Judges what programs counted by the books: one row a topic, group and minute of the due.

Who says what of one minute, and what that comes to. `rows` are acceptances in the ledger, `copies`
records in Kafka; each side has sums of hashes beside its count.

| the minute's | is | when |
|---|---|---|
| sent messages | open | the floor has not passed its end, or records of ingress topics of that time
  are not settled |
| | unproven | the ledger has gaps, or acceptances that are not published |
| | `lost_before` | more are said to be sent than there are rows: each answer has one of its own |
| | `ids_differ` | as many, and the hashes differ |
| | whole | as many, and they do not |
| | untold | fewer: other programs sent some, or the service itself gave another due; or a retry
  has more than one row. A loss may hide behind these |
| consumed ones | open | as above; or the group's offsets have not passed all copies |
| | unproven | Kafka may lack some: they are missing, or not verifiable |
| | uncounted | it is due before the group's first reporter began, or after its last was heard; or a
  reporter has counted too little, by its own word |
| | `lost_after` | fewer than copies |
| | uncounted | the same, and a reporter of the group was killed about then |
| | `consumed_twice` | more than copies: counts never say too much |
| | `ids_differ` | as many, and the hashes differ |
| | whole | as many, and they do not |

So a reporter that is killed, a program without a trace, a topic of counts that begins late: none
of them is a loss. Only the last reporter of a group, or one whose messages went to no other, could
hide one, and is a finding itself, `reporter_ended`.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

KINDS: Final = ("lost_before", "lost_after", "consumed_twice", "ids_differ")
"""Kinds of findings that a row may have."""

_MASK: Final = 0xFFFFFFFF
SUMS: Final = ("sum_high", "sum_low", "xor_high", "xor_low")
"""A hash's halves, summed and combined: sums of whole ones would overflow."""

ROW: Final = (
    "direction string, topic string, group string, bucket_ms long, told long, refused long,"
    " unknown long, accepted long, witnessed long, forwarded long, is_closed boolean,"
    " is_proven boolean, is_counted boolean, is_excused boolean"
)
"""What is judged; beside it `SUMS`, of `told_` and of `witnessed_`."""


def judged(rows: DataFrame) -> DataFrame:
    """Adds to rows what they are: `state`, and how many messages that is about, `difference`."""
    told, witnessed = F.col("told"), F.col("witnessed")
    is_sent = F.col("direction") == "sent"
    fewer = F.when(is_sent, "untold").when(F.col("is_excused"), "uncounted").otherwise("lost_after")
    state = (
        F.when(~F.col("is_closed"), "open")
        .when(~F.col("is_proven"), "unproven")
        .when(~F.col("is_counted"), "uncounted")
        .when(told < witnessed, fewer)
        .when(told > witnessed, F.when(is_sent, "lost_before").otherwise("consumed_twice"))
        .when(_is_same("told", "witnessed"), "whole")
        .otherwise("ids_differ")
    )
    return rows.withColumn("state", state).withColumn("difference", F.abs(told - witnessed))


def _is_same(one: str, other: str) -> Column:
    """Whether two sides are of the same messages, by their hashes, modulo 2⁶⁴."""

    def of(side: str) -> tuple[Column, ...]:
        high, low = F.col(f"{side}_sum_high"), F.col(f"{side}_sum_low")
        carried = (high + F.shiftrightunsigned(low, 32)).bitwiseAND(F.lit(_MASK))
        xors = F.col(f"{side}_xor_high"), F.col(f"{side}_xor_low")
        return carried, low.bitwiseAND(F.lit(_MASK)), *xors

    first, *rest = (a == b for a, b in zip(of(one), of(other), strict=True))
    for each in rest:
        first = first & each
    return first
