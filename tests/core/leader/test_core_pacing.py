from math import exp
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel.transactional import MAX_CALL_MS
from delaywheel_replica.cleaner.leadership import MIN_CALL_MS
from delaywheel_replica.core.leader.pacing import (
    LEAST_PAUSE_MS,
    LONGEST_BEHIND_MS,
    LONGEST_COMMIT_MS,
    MOST_PAUSE_MS,
    STEADY_COMMITS,
    CapLimits,
    Pace,
    first_pace,
)

TOO_LONG_MS = LONGEST_COMMIT_MS * 5 // 4
LIMITS = CapLimits(frame_messages=100, frame_bytes=1_000, max_messages=1_000, max_bytes=20_000)


def test_full_transactions_double_up_to_the_most() -> None:
    pace = first_pace(LIMITS)
    caps = []
    for _ in range(6):
        caps.append((pace.cap_messages, pace.cap_bytes))
        pace = pace.after_commit(5, full=True)
    assert caps == [
        (100, 1_000),
        (200, 2_000),
        (400, 4_000),
        (800, 8_000),
        (1_000, 16_000),
        (1_000, 20_000),
    ]


def test_only_what_is_near_the_cap_fills_it() -> None:
    pace = Pace(LIMITS, cap_messages=400, cap_bytes=4_000)
    assert pace.is_filled_by(200, 0)
    assert pace.is_filled_by(1, 2_000)
    assert not pace.is_filled_by(199, 1_999)
    assert not pace.is_filled_by(0, 0), "a leader that waits for a second to be loaded"


def test_a_transaction_with_room_left_changes_nothing() -> None:
    pace = first_pace(LIMITS).after_commit(5, full=False)
    assert (pace.cap_messages, pace.cap_bytes) == (100, 1_000)


@pytest.mark.parametrize(
    ("duration_ms", "cap"), [(502, 800), (503, 400), (1_255, 400), (1_256, 200)]
)
def test_one_time_bounds_how_a_cap_grows_and_when_it_is_halved(duration_ms: int, cap: int) -> None:
    """Twice as many messages are expected to take 2 * 502 - 5 ms, and 2 * 503 - 5."""
    pace = Pace(LIMITS, cap_messages=400, cap_bytes=4_000, spare_ms=(5, 900, 7))
    assert pace.after_commit(duration_ms, full=True).cap_messages == cap


@given(st.integers(0, 400), st.integers(1, 7_700), st.integers(0, 10_000))
def test_a_steady_kafka_gets_a_steady_cap(least_ms: int, us_a_message: int, seed: int) -> None:
    """Neither halved and doubled in turns, nor ever larger while all transactions are full.

    7.7 ms a message is the slowest broker that was seen (decision 103).
    """
    limits = CapLimits(frame_messages=32, frame_bytes=1, max_messages=1 << 20, max_bytes=1 << 30)
    random, caps = Random(seed), list[int]()
    pace = first_pace(limits).after_commit(least_ms, full=False)  # a term begins idle
    for _ in range(100):
        is_full = random.random() < 0.9
        took_ms = least_ms + is_full * pace.cap_messages * us_a_message // 1000
        pace = pace.after_commit(took_ms, full=is_full)
        caps.append(pace.cap_messages)
    assert caps == sorted(caps)
    took_ms = least_ms + caps[-1] * us_a_message // 1000
    shortest_ms = least_ms + 32 * us_a_message // 1000
    assert caps[-1] == 32 or took_ms <= TOO_LONG_MS + shortest_ms


def test_a_kafka_that_becomes_slow_gets_smaller_transactions_while_they_are_quicker() -> None:
    pace = Pace(LIMITS, cap_messages=800, cap_bytes=8_000, spare_ms=(5,) * 16)
    for cap in (400, 200, 200):
        pace = pace.after_commit(4 * pace.cap_messages, full=True)  # 4 ms each
        assert pace.cap_messages == cap
    for _ in range(2):
        pace = pace.after_commit(pace.cap_messages, full=True)
    assert pace.cap_messages == 800


def test_a_kafka_that_becomes_slow_whatever_a_transaction_holds_gets_smaller_ones_once() -> None:
    pace = Pace(LIMITS, cap_messages=800, cap_bytes=8_000, spare_ms=(5,) * 16)
    for cap in (400, 400, 400):
        pace = pace.after_commit(1_500, full=True)
        assert pace.cap_messages == cap
    pace = pace.after_commit(1_500, full=True, late_ms=1_500)
    assert pace.cap_messages == 800, "its messages are late, and less at once did not help"
    for _ in range(3):  # nor is a call risked for them
        pace = pace.after_commit(LONGEST_BEHIND_MS * 3 // 2, full=True, late_ms=10_000)
    assert pace.cap_messages == 100
    for _ in range(16):  # by now it is known that their size is not the reason
        pace = pace.after_commit(900, full=True)
    assert pace.cap_messages > 100


def test_transactions_that_take_long_because_of_what_they_hold_do_not_outgrow_a_call() -> None:
    limits = CapLimits(frame_messages=500, frame_bytes=1, max_messages=20_000, max_bytes=1 << 30)
    pace = first_pace(limits)
    took_ms = 5
    for _ in range(100):
        pace = pace.after_commit(took_ms, full=True)
        took_ms = 5 + pace.cap_messages * 2 // 3  # each message goes to another partition
        assert took_ms < MIN_CALL_MS
    assert pace.cap_messages >= 500


@pytest.mark.parametrize(
    ("us_a_partition", "noise"), [(500, 0.2), (1_000, 0.2), (2_000, 0.2), (2_800, 0.0)]
)
def test_messages_for_the_same_partitions_again_do_not_count_twice(
    us_a_partition: int, noise: float
) -> None:
    """2,000 a second for 50 topics of 5 partitions were too many for a broker just started.

    A partition costs 0.5 ms on a broker at its pace, 2 to 4 ms on one that was just started
    (decision 76). By what twice as many might cost, 2.8 ms allowed 512 messages each 0.6 s.
    """
    for seed in range(10):
        random, limits = Random(seed), CapLimits(32, 1 << 20, 10_000, 1 << 30)
        pace, took_ms = first_pace(limits).after_commit(5, full=False), 0
        for _ in range(60):
            touched = 250 * (1 - exp(-pace.cap_messages / 250))
            took_ms = 5 + round(touched * us_a_partition / 1_000 * random.uniform(1 - noise, 1))
            assert took_ms - 5 <= TOO_LONG_MS, "it is never halved"
            pace = pace.after_commit(took_ms, full=True)
        assert pace.cap_messages / took_ms > 2


@pytest.mark.parametrize("us_a_partition", [4_000, 6_000, 8_000])
@pytest.mark.parametrize("noise", [0.2, 0.8])
def test_a_leader_that_is_behind_catches_up(us_a_partition: int, noise: float) -> None:
    """2,000 a second for a minute, in 250 partitions that cost 1 to 2 s if all are touched.

    By one second each, 170 to 280 messages would go with each transaction: 50 s late after a
    minute, and later ever after.
    """
    for seed in range(4):
        random, limits = Random(seed), CapLimits(32, 1 << 20, 10_000, 1 << 30)
        pace = first_pace(limits).after_commit(5, full=False)
        now_ms, forwarded, latest_ms = 0, 0, 0
        while forwarded < 2 * 60_000:
            messages = min(pace.cap_messages, 2 * min(now_ms, 60_000) - forwarded)
            late_ms = now_ms - forwarded // 2
            touched = 250 * (1 - exp(-messages / 250))
            took_ms = 5 + round(touched * us_a_partition / 1e3 * random.uniform(1 - noise, 1))
            pace = pace.after_commit(took_ms, full=messages == pace.cap_messages, late_ms=late_ms)
            now_ms += max(25, took_ms)
            forwarded += messages
            latest_ms = max(latest_ms, late_ms)
        assert latest_ms < 30_000
        assert now_ms < 80_000


def test_what_is_allowed_to_a_leader_that_is_behind_is_bounded() -> None:
    """However late it is; and three commits in a row must say that twice as much is in time."""
    enough_ms = (LONGEST_BEHIND_MS + 5) // 2
    for late_ms in (LONGEST_BEHIND_MS, 1 << 40):
        for last_ms, cap in ((enough_ms, 400), (enough_ms + 1, 200)):
            pace = Pace(LIMITS, cap_messages=200, cap_bytes=2_000, spare_ms=(5,))
            for duration_ms in (enough_ms, enough_ms):
                pace = pace.after_commit(duration_ms, full=True, late_ms=late_ms)
                assert pace.cap_messages == 200
            assert pace.after_commit(last_ms, full=True, late_ms=late_ms).cap_messages == cap
    assert 3 * LONGEST_BEHIND_MS <= MAX_CALL_MS
    assert pace.after_commit(1_300, full=True, late_ms=-(1 << 40)).cap_messages == 100


def test_what_a_cap_took_once_is_forgotten_while_a_leader_is_far_behind() -> None:
    """One commit of six seconds, and commits of three from then on: half a cap for ever."""
    pace = Pace(LIMITS, cap_messages=800, cap_bytes=8_000, spare_ms=(5,))
    pace = pace.after_commit(6_000, full=True, late_ms=60_000)
    assert pace.cap_messages == 400
    for _ in range(STEADY_COMMITS):
        assert pace.cap_messages == 400
        pace = pace.after_commit(3_020, full=True, late_ms=60_000)
    assert pace.cap_messages == 800


def test_a_kafka_that_became_slow_before_the_first_message_gets_larger_ones() -> None:
    """Nothing but the idle commits was quick: 32 messages each 0.6 s, for 16 commits."""
    pace = first_pace(LIMITS)
    for duration_ms in [40] * 16 + [1_100] * 6:
        pace = pace.after_commit(duration_ms, full=duration_ms > 1_000)
    assert pace.cap_messages > 100


def test_a_kafka_that_is_slow_whatever_a_transaction_holds_gets_larger_ones() -> None:
    pace = Pace(LIMITS, cap_messages=100, cap_bytes=1_000, spare_ms=(900,) * 16)
    assert pace.after_commit(910, full=True).cap_messages == 200


@given(st.lists(st.tuples(st.integers(0, 5_000), st.booleans()), max_size=40))
def test_the_cap_stays_within_its_limits(commits: list[tuple[int, bool]]) -> None:
    pace = first_pace(LIMITS)
    for duration_ms, full in commits:
        pace = pace.after_commit(duration_ms, full=full)
        assert LIMITS.frame_messages <= pace.cap_messages <= LIMITS.max_messages
        assert LIMITS.frame_bytes <= pace.cap_bytes <= LIMITS.max_bytes
        assert len(pace.recent_ms) <= 16


def paced(commits_ms: list[int]) -> Pace:
    pace = first_pace(LIMITS)
    for duration_ms in commits_ms:
        pace = pace.after_commit(duration_ms, full=False)
    return pace


@pytest.mark.parametrize(
    ("commits_ms", "pause_ms"),
    [([], 25), ([1], 20), ([10], 20), ([11], 22), ([12], 24), ([13], 25), ([3_000], 25)],
)
def test_transactions_are_as_far_apart_as_the_table_says(
    commits_ms: list[int], pause_ms: int
) -> None:
    assert paced(commits_ms).pause_ms == pause_ms


@given(st.lists(st.integers(0, 5_000), max_size=40), st.lists(st.integers(0, 100), max_size=40))
def test_slower_commits_never_bring_transactions_closer(
    commits_ms: list[int], more_ms: list[int]
) -> None:
    slower_ms = [a + b for a, b in zip(commits_ms, more_ms, strict=False)]
    quick, slow = paced(commits_ms[: len(slower_ms)]), paced(slower_ms)
    assert LEAST_PAUSE_MS <= quick.pause_ms <= slow.pause_ms <= MOST_PAUSE_MS


@given(st.integers(0, 12), st.lists(st.integers(0, 5_000), max_size=7), st.randoms())
def test_a_few_commits_that_hang_change_nothing(
    usual_ms: int, others_ms: list[int], random: Random
) -> None:
    commits_ms = [usual_ms] * 9 + [usual_ms + other for other in others_ms]
    random.shuffle(commits_ms)
    assert paced(commits_ms).pause_ms == paced([usual_ms]).pause_ms


def test_once_kafka_is_quick_again_so_are_transactions() -> None:
    assert paced([400] * 50 + [5] * 9).pause_ms == LEAST_PAUSE_MS
