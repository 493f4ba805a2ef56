"""The client's backoff follows the brokers' ends of transactions."""

from __future__ import annotations

from delaywheel_replica.core.election.repeating import (
    LEAST_BACKOFF_MS,
    MOST_BACKOFF_MS,
    EndTimes,
    may_be_repeated,
)


def test_quick_brokers_are_asked_again_soon() -> None:
    ends = EndTimes()
    assert ends.backoff_ms == LEAST_BACKOFF_MS
    for end_ms in (5, 8, 700, 6, 5):  # one slow end is no slow broker
        ends.add(end_ms)
    assert ends.backoff_ms == LEAST_BACKOFF_MS


def test_brokers_as_slow_as_ever_send_no_end_that_counts_as_repeated() -> None:
    for usual_ms in (40, 150, 2_000):
        ends = EndTimes()
        for _ in range(3):
            ends.add(usual_ms)
        assert not may_be_repeated(2 * usual_ms, ends.backoff_ms)
    assert ends.backoff_ms <= MOST_BACKOFF_MS
