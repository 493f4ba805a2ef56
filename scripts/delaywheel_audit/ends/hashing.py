"""The 64-bit hash of a message, as `delaywheel.trace.counts` has it, in SQL; and its sums."""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

_ANSI: Final = "spark.sql.ansi.enabled"
_DUE: Final = 0x9E3779B97F4A7C15 - (1 << 64)
_HIGH: Final = 0xBF58476D1CE4E5B9 - (1 << 64)
_LOW: Final = 0x94D049BB133111EB - (1 << 64)
_HALF: Final = 0xFFFFFFFF


def with_hash(messages: DataFrame) -> DataFrame:
    """Adds `hash`, of `id` and `due_ms`; null where the id has not 16 bytes.

    Products wrap around. Where Spark would raise instead, it is told not to while it analyses this:
    an expression keeps the mode in which it was analysed.
    """
    mixed = (_eight(1).bitwiseXOR(F.col("due_ms") * F.lit(_DUE))) * F.lit(_HIGH)
    mixed = mixed + _eight(9) * F.lit(_LOW)
    conf = messages.sparkSession.conf
    before = conf.get(_ANSI)
    conf.set(_ANSI, "false")
    try:
        found = messages.withColumn("hash", F.when(F.length("id") == 16, mixed))
    finally:
        conf.set(_ANSI, str(before))
    return found.withColumn("hash", F.col("hash").bitwiseXOR(F.shiftrightunsigned("hash", 32)))


def sums(weight: str, name: str) -> list[Column]:
    """Returns the sum of hashes, each so often, and their xor, in halves: see `judging.SUMS`."""
    high = F.shiftrightunsigned("hash", 32)
    low = F.col("hash").bitwiseAND(F.lit(_HALF))
    times = F.col(weight)
    is_odd = times % 2 == 1
    return [
        F.sum(high * times).alias(f"{name}_sum_high"),
        F.sum(low * times).alias(f"{name}_sum_low"),
        F.bit_xor(F.when(is_odd, high)).alias(f"{name}_xor_high"),
        F.bit_xor(F.when(is_odd, low)).alias(f"{name}_xor_low"),
    ]


def halves(text: Column) -> tuple[Column, Column]:
    """Returns the halves of a number that is written in 16 hexadecimal digits."""
    high, low = F.substring(text, 1, 8), F.substring(text, 9, 8)
    return F.conv(high, 16, 10).cast("long"), F.conv(low, 16, 10).cast("long")


def _eight(first: int) -> Column:
    """Returns eight bytes of the id, big-endian, as a number."""
    high, low = (
        F.conv(F.hex(F.substring("id", at, 4)), 16, 10).cast("long") for at in (first, first + 4)
    )
    return F.shiftleft(high, 32).bitwiseOR(low)
