"""Messages are counted by topic: no number is lost, and only few topics have their own."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from delaywheel_replica.process.topic_counts import OTHERS, TOPICS_AT_MOST, TopicCounts

TOPICS = [f"topic-{number}" for number in range(8)]
batches = st.lists(st.lists(st.integers(0, len(TOPICS) - 1), max_size=30), max_size=10)


@given(batches, st.integers(0, 9))
def test_batches_are_counted_as_single_messages_are(counted: list[list[int]], most: int) -> None:
    counts, expected = TopicCounts(most=most), Counter[str]()
    named = set[str]()
    for batch in counted:
        before = counts.read()
        counts.add(TOPICS, np.array(batch, np.uint32))
        expected.update(TOPICS[number] for number in batch)
        reported = counts.read()
        assert all(reported[topic] >= number for topic, number in before.items())
        assert named <= reported.keys() - {OTHERS}
        named = reported.keys() - {OTHERS}
    reported = counts.read()
    assert len(named) == min(most, len(expected))
    assert all(reported[topic] == expected[topic] for topic in named)
    assert reported.get(OTHERS, 0) == expected.total() - sum(reported[topic] for topic in named)


def test_a_caller_of_many_topics_makes_no_more_samples() -> None:
    counts = TopicCounts()
    topics = [f"t{number}" for number in range(20_000)]
    counts.add(topics, np.arange(len(topics)))
    assert len(counts.read()) == TOPICS_AT_MOST + 1
    assert sum(counts.read().values()) == 20_000
