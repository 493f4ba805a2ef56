"""How many partitions the messages of a step may go to."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from delaywheel.identity import WheelId
from delaywheel_replica.cleaner.due.rows import ABSENT, RECORD, DueRows

TOPICS = ("orders", "bills", "letters")
Row = tuple[int, int]


def rows_of(*rows: Row) -> DueRows:
    """Rows with these topics, by number, and partitions."""
    records = np.zeros(len(rows), RECORD)
    records["topic"] = [topic for topic, _ in rows]
    records["partition"] = [partition for _, partition in rows]
    return DueRows(records, TOPICS, [WheelId("a", 1)], [memoryview(b"")])


def one_by_one(rows: list[Row], most: dict[str, int]) -> int:
    """As many as there may be at most: each row goes to a new one as long as there is one."""
    touched: set[tuple[int, int]] = {row for row in rows if row[1] != ABSENT}
    anywhere = [sum(row == (topic, ABSENT) for row in rows) for topic in range(len(TOPICS))]
    return len(touched) + sum(
        min(count, most.get(name, count)) for name, count in zip(TOPICS, anywhere, strict=True)
    )


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(ABSENT, 3)), max_size=40),
    st.dictionaries(st.sampled_from(TOPICS), st.integers(1, 9)),
)
def test_partitions_are_counted_as_single_messages_are(
    rows: list[Row], most: dict[str, int]
) -> None:
    touched = rows_of(*rows).partitions_touched(most)
    assert touched == tuple(one_by_one(rows[::step], most) for step in (1, 2, 4))


def test_of_nothing_no_partition_is_touched() -> None:
    assert rows_of().partitions_touched({}) == (0, 0, 0)
