"""Pending messages by topic: none is lost or counted twice, or counts long after it is done."""

from __future__ import annotations

from collections import Counter

from hypothesis import example, given
from hypothesis import strategies as st

from delaywheel_replica.process.topic_counts import OTHERS
from delaywheel_replica.server.node.pending_topics import BUCKETS, PendingTopics
from support.wheels.messages import Message, columns_of

START = 1_795_262_400
AHEAD_S = 7 * 86_400
WIDTH = -(-AHEAD_S // (BUCKETS - 2))
"""The width of a bucket that far ahead, in seconds."""
TOPICS = [f"topic-{number}" for number in range(5)]


def add(pending: PendingTopics, *messages: tuple[int, int]) -> None:
    made = [
        Message(slot * 1000, bytes(16), TOPICS[number], value=bytes(number))
        for number, slot in messages
    ]
    pending.add(columns_of(made))


# Messages, each with how far ahead of what is done it is due; or how much is done now.
steps = st.one_of(
    st.lists(st.tuples(st.integers(0, 4), st.integers(-100, 3_000)), max_size=20),
    st.integers(-10, 900),
)


@given(st.lists(steps, max_size=20))
def test_what_is_reported_is_right_to_a_bucket(reported: list[list[tuple[int, int]] | int]) -> None:
    pending = PendingTopics(AHEAD_S, START)
    done, added = START, list[tuple[int, int]]()
    for now in reported:
        if isinstance(now, list):
            messages = [(topic, done + ahead) for topic, ahead in now]
            add(pending, *messages)
            added += [(topic, max(slot, done)) for topic, slot in messages]
        else:
            done = max(done, done + now)
        counted = pending.read(done)
        for number, topic in enumerate(TOPICS):
            slots = [slot for its_number, slot in added if its_number == number]
            surely = sum(slot >= done + WIDTH for slot in slots)
            perhaps = sum(slot > done - WIDTH for slot in slots)
            assert surely <= counted.get(topic, 0) <= perhaps


@given(st.lists(steps, max_size=20))
@example([300, 900, [(2, 894)], 820, 75])  # between the seconds that its two bytes would be given
def test_sums_are_those_of_the_seconds_and_bytes_those_of_the_messages(
    reported: list[list[tuple[int, int]] | int],
) -> None:
    """Topic n's messages have n bytes: so its bytes are n times its messages at any moment."""
    pending = PendingTopics(AHEAD_S, START, counts_bytes=True)
    done = START
    for now in reported:
        if isinstance(now, list):
            add(pending, *((topic, done + ahead) for topic, ahead in now))
        else:
            done = max(done, done + now)
        for number, topic in enumerate(TOPICS):
            messages, length_bytes = pending.of(topic, done)
            assert messages == pending.read(done).get(topic, 0)
            assert length_bytes == number * messages
    table = pending._messages
    assert (table.near.sum(axis=1) + table.far.sum(axis=1) == table.sums).all()


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, WIDTH - 1)), max_size=50))
def test_what_is_near_is_exact(ahead: list[tuple[int, int]]) -> None:
    pending = PendingTopics(AHEAD_S, START)
    add(pending, *((topic, START + seconds) for topic, seconds in ahead))
    for past in range(0, WIDTH + 1, 7):
        expected = Counter(TOPICS[topic] for topic, seconds in ahead if seconds >= past)
        assert +Counter(pending.read(START + past)) == expected


def test_the_greatest_span_and_a_backlog_stay_within_bounds() -> None:
    year = 366 * 86_400
    pending = PendingTopics(year, START)
    add(pending, (0, START + year), (1, START + 2 * year), (2, START - year))
    assert pending.read(START) == {"topic-0": 1, "topic-1": 1, "topic-2": 1}
    assert pending.read(START + 1) == {"topic-0": 1, "topic-1": 1, "topic-2": 0}
    assert pending.read(START + year - 1) == {"topic-0": 1, "topic-1": 1, "topic-2": 0}
    assert sum(pending.read(START + 3 * year).values()) == 0
    assert pending._messages.far.shape == (101, BUCKETS)
    assert pending._messages.near.size < 101 * 10_000


def test_further_topics_are_one() -> None:
    pending = PendingTopics(7_200, START, most=2)
    add(pending, *((topic, START + 9) for topic in range(5)))
    assert pending.read(START) == {"topic-0": 1, "topic-1": 1, OTHERS: 3}
    assert pending.read(START, most=1) == {"topic-0": 1, OTHERS: 4}
    assert pending.of("topic-1", START)[0] == 1
    assert pending.of("topic-4", START)[0] == pending.of("any", START)[0] == 3
