from dataclasses import replace
from math import exp
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel.transactional import MAX_CALL_MS
from delaywheel_replica.cleaner.leadership import MIN_CALL_MS
from delaywheel_replica.core.leader.pacing import (
    BESIDE_SLOW_MS,
    LEAST_PAUSE_MS,
    LONGEST_BEHIND_MS,
    LONGEST_COMMIT_MS,
    MOST_PAUSE_MS,
    UNSAFE_COMMIT_MS,
    CapLimits,
    Load,
    Pace,
    first_pace,
)

LIMITS = CapLimits(frame_messages=100, frame_bytes=1_000, max_messages=1_000, max_bytes=20_000)
WIDE = CapLimits(frame_messages=32, frame_bytes=1 << 20, max_messages=10_000, max_bytes=1 << 30)
EACH_ITS_OWN = Load(0, 400, 200, 100)
"""Every message goes to another partition."""
THE_SAME = Load(0, 5, 5, 5)


def spread(messages: int, partitions: int) -> Load:
    """So many messages, each for any of so many partitions."""
    whole, half, quarter = (
        round(partitions * (1 - exp(-messages / n / partitions))) for n in (1, 2, 4)
    )
    return Load(messages * 200, whole, half, quarter)


def test_full_transactions_double_up_to_the_most() -> None:
    pace = first_pace(LIMITS)
    caps = []
    for _ in range(6):
        caps.append((pace.cap_messages, pace.cap_bytes))
        pace = pace.after_commit(5, EACH_ITS_OWN)
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
    pace = Pace(LIMITS, cap_messages=400, cap_bytes=4_000)
    for duration_ms in (5, UNSAFE_COMMIT_MS - 1):
        pace = pace.after_commit(duration_ms, None)
    assert (pace.cap_messages, pace.cap_bytes) == (400, 4_000)
    assert pace.after_commit(UNSAFE_COMMIT_MS, None).cap_messages == 200, "a call might not last"


@pytest.mark.parametrize(
    ("duration_ms", "late_ms", "cap"),
    [
        (500, 0, 800),
        (501, 0, 400),
        (1_000, 0, 400),
        (1_001, 0, 200),
        (1_001, 1_001, 400),
        (750, 1_500, 800),
        (LONGEST_BEHIND_MS // 2, 1 << 40, 800),
        (LONGEST_BEHIND_MS // 2 + 1, 1 << 40, 400),
        (LONGEST_BEHIND_MS, 1 << 40, 400),
        (LONGEST_BEHIND_MS + 1, 1 << 40, 200),
        (1_001, -(1 << 40), 200),
    ],
)
def test_one_time_bounds_how_a_cap_grows_and_when_it_is_halved(
    duration_ms: int, late_ms: int, cap: int
) -> None:
    """A second, or as long as its messages were late, up to a bound that a call can last for."""
    pace = Pace(LIMITS, cap_messages=400, cap_bytes=4_000)
    assert pace.after_commit(duration_ms, EACH_ITS_OWN, late_ms=late_ms).cap_messages == cap
    assert 3 * LONGEST_BEHIND_MS <= MAX_CALL_MS


@pytest.mark.parametrize(
    ("duration_ms", "cap"), [(1_001, 800), (UNSAFE_COMMIT_MS - 1, 800), (UNSAFE_COMMIT_MS, 200)]
)
def test_what_takes_long_whatever_it_holds_holds_more_unless_a_call_might_not_last(
    duration_ms: int, cap: int
) -> None:
    pace = Pace(LIMITS, cap_messages=400, cap_bytes=4_000)
    assert pace.after_commit(duration_ms, THE_SAME).cap_messages == cap


def test_bytes_count_where_kafka_is_slow() -> None:
    """600,000 take 300 ms where Kafka is slowest: more than what is always in time."""
    large = replace(THE_SAME, length_bytes=600_000)
    pace = Pace(LIMITS, cap_messages=400, cap_bytes=4_000)
    assert pace.after_commit(700, large).cap_messages == 800
    assert pace.after_commit(701, large).cap_messages == 400
    assert pace.after_commit(1_500, replace(THE_SAME, length_bytes=2_000_000)).cap_messages == 200


@given(st.integers(0, 400), st.integers(1, 20_000), st.integers(1, 20_000), st.randoms())
def test_a_steady_kafka_gets_a_steady_cap(
    least_ms: int, us_a_partition: int, partitions: int, random: Random
) -> None:
    """Neither halved and doubled in turns, nor longer than it may by more than is always in time.

    A message costs 2 us, and a partition up to twice what the slowest broker took that was seen.
    """
    pace, took_ms, doubled_from_ms = first_pace(WIDE), 0, 0
    for _ in range(60):
        full = random.random() < 0.9
        load = spread(pace.cap_messages if full else 5, partitions)
        took_ms = least_ms + (load.partitions * us_a_partition + load.length_bytes // 100) // 1000
        if full and doubled_from_ms:
            rounded_ms = 3 + us_a_partition * 3 // 1000
            assert took_ms <= max(LONGEST_COMMIT_MS, doubled_from_ms + BESIDE_SLOW_MS) + rounded_ms
        before, pace = pace, pace.after_commit(took_ms, load if full else None)
        if full:
            doubled_from_ms = took_ms if pace.cap_messages > before.cap_messages else 0
        if pace.cap_messages < before.cap_messages:
            assert took_ms >= UNSAFE_COMMIT_MS
            return


def test_twice_as_much_is_expected_by_what_the_last_doublings_added() -> None:
    """Of 50 partitions: 19, 30 and 40 are touched, and with twice as many messages 48 will be."""
    load = Load(0, 40, 30, 19)
    assert load.doubled_ms(400) == 491
    assert load.halved_ms(400) == 300
    assert EACH_ITS_OWN.doubled_ms(400) == 800
    assert THE_SAME.doubled_ms(400) == 400


def test_a_kafka_that_becomes_slow_gets_smaller_transactions_while_they_are_quicker() -> None:
    pace = Pace(LIMITS, cap_messages=800, cap_bytes=8_000)
    for cap in (400, 200, 200):
        pace = pace.after_commit(4 * pace.cap_messages, EACH_ITS_OWN)  # 4 ms each
        assert pace.cap_messages == cap
    for cap in (400, 800, 800):
        pace = pace.after_commit(pace.cap_messages, EACH_ITS_OWN)
        assert pace.cap_messages == cap


def test_one_commit_that_hangs_is_made_good_by_the_next_ones() -> None:
    pace = Pace(WIDE, cap_messages=4_096, cap_bytes=1 << 30)
    pace = pace.after_commit(8_000, spread(4_096, 250), late_ms=60_000)
    assert pace.cap_messages == 2_048
    pace = pace.after_commit(2_900, spread(2_048, 250), late_ms=60_000)
    assert pace.cap_messages == 4_096


def test_transactions_that_take_long_because_of_what_they_hold_do_not_outgrow_a_call() -> None:
    limits = CapLimits(frame_messages=500, frame_bytes=1, max_messages=20_000, max_bytes=1 << 30)
    pace = first_pace(limits)
    took_ms = 5
    for _ in range(100):
        pace = pace.after_commit(took_ms, spread(pace.cap_messages, 1 << 30))
        took_ms = 5 + pace.cap_messages * 2 // 3  # each message goes to another partition
        assert took_ms < MIN_CALL_MS
    assert pace.cap_messages >= 500


@pytest.mark.parametrize("us_a_partition", [500, 2_800, 4_000, 8_000])
@pytest.mark.parametrize("partitions", [50, 250])
@pytest.mark.parametrize("sigma", [0.1, 0.4])
def test_a_leader_that_is_behind_catches_up(
    us_a_partition: int, partitions: int, sigma: float
) -> None:
    """2,000 a second for a minute, in partitions that cost up to 2 s if all are touched.

    By one second each, 170 to 280 messages would go with each transaction: 50 s late after a
    minute, and later ever after. How long commits take varies as on a machine that is busy.
    """
    us_a_partition *= 250 // partitions
    for seed in range(4):
        random, pace = Random(seed), first_pace(WIDE)
        now_ms, forwarded, latest_ms = 0, 0, 0
        while forwarded < 2 * 60_000:
            messages = min(pace.cap_messages, 2 * min(now_ms, 60_000) - forwarded)
            late_ms = now_ms - forwarded // 2
            load = spread(messages, partitions)
            took_ms = 5 + round(
                load.partitions * us_a_partition / 1e3 * random.lognormvariate(0, sigma)
            )
            full = load if messages == pace.cap_messages else None
            pace = pace.after_commit(took_ms, full, late_ms=late_ms)
            now_ms += max(25, took_ms)
            forwarded += messages
            latest_ms = max(latest_ms, late_ms)
        assert latest_ms < 30_000
        assert now_ms < 70_000


@given(st.lists(st.tuples(st.integers(0, 9_000), st.booleans(), st.integers(0, 500)), max_size=40))
def test_the_cap_stays_within_its_limits(commits: list[tuple[int, bool, int]]) -> None:
    pace = first_pace(LIMITS)
    for duration_ms, full, messages in commits:
        pace = pace.after_commit(duration_ms, spread(messages, 100) if full else None)
        assert LIMITS.frame_messages <= pace.cap_messages <= LIMITS.max_messages
        assert LIMITS.frame_bytes <= pace.cap_bytes <= LIMITS.max_bytes
        assert len(pace.recent_ms) <= 16


def paced(commits_ms: list[int]) -> Pace:
    pace = first_pace(LIMITS)
    for duration_ms in commits_ms:
        pace = pace.after_commit(duration_ms, None)
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
