"""How many partitions the messages of a step may go to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel.identity import WheelId
from delaywheel_replica.cleaner.due.rows import ABSENT, RECORD, STICKY_PARTITIONS, DueRows

TOPICS = ("orders", "bills", "letters")
Row = tuple[int, int, bool]


def rows_of(*rows: Row) -> DueRows:
    """Rows with these topics, by number, partitions, and keys or none."""
    records = np.zeros(len(rows), RECORD)
    records["topic"] = [topic for topic, _, _ in rows]
    records["partition"] = [partition for _, partition, _ in rows]
    records["key_length"] = [1 if has_key else ABSENT for _, _, has_key in rows]
    return DueRows(records, TOPICS, [WheelId("a", 1)], [memoryview(b"")])


def one_by_one(rows: list[Row], most: dict[str, int]) -> int:
    """As many as there may be: each row goes to a new one as long as there is one."""
    touched = len({row[:2] for row in rows if row[1] != ABSENT})
    for number, topic in enumerate(TOPICS):
        keyed = rows.count((number, ABSENT, True))
        together = min(rows.count((number, ABSENT, False)), STICKY_PARTITIONS)
        touched += min(keyed, most.get(topic, keyed)) + min(together, most.get(topic, together))
    return touched


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(ABSENT, 3), st.booleans()), max_size=40),
    st.dictionaries(st.sampled_from(TOPICS), st.integers(1, 9)),
)
def test_partitions_are_counted_as_single_messages_are(
    rows: list[Row], most: dict[str, int]
) -> None:
    whole, half, quarter = rows_of(*rows).partitions_touched(most)
    assert whole == one_by_one(rows, most)
    assert quarter <= half <= whole


@pytest.mark.parametrize("partitions", [2, 3, 4, 5, 8, 10, 13, 16, 21, 34, 50, 64])
def test_no_pattern_hides_what_half_of_the_messages_touch(partitions: int) -> None:
    """Messages for each partition by turns, as many producers send them."""
    rows = [(0, n % partitions, False) for n in range(16 * partitions)]
    whole, half, quarter = rows_of(*rows).partitions_touched({})
    assert whole == half == partitions
    assert quarter >= 0.9 * partitions


def test_of_nothing_no_partition_is_touched() -> None:
    assert rows_of().partitions_touched({}) == (0, 0, 0)
