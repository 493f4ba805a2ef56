"""Which events are kept."""

from hypothesis import given
from hypothesis import strategies as st

from delaywheel.trace.sampling import MOST_FAILURES, Sampling

IDS = [n.to_bytes(16, "big") for n in range(10_000)]


def test_all_ends_keep_the_same_ways_and_about_the_share() -> None:
    one, another = Sampling(0.01), Sampling(0.01)
    kept = one.of_sent(IDS, []).rows
    assert kept == another.of_others(IDS, []).rows
    assert kept is not None
    assert 50 < len(kept) < 200
    assert Sampling(1).of_sent(IDS, []).rows is None


@given(st.lists(st.binary(min_size=16, max_size=16), max_size=50), st.floats(0.01, 1))
def test_a_greater_share_keeps_what_a_smaller_one_does(ids: list[bytes], share: float) -> None:
    few, more = Sampling(share / 2).of_sent(ids, []).rows, Sampling(share).of_sent(ids, []).rows
    assert more is None or set(few or ()) <= set(more)


def test_refusals_do_not_become_more_than_a_hundred_a_second() -> None:
    now_s = 0.0
    sampling = Sampling(1, lambda: now_s)
    failed = list(range(1, len(IDS)))
    rows, dropped = sampling.of_sent(IDS, failed)
    assert rows == [0, *failed[:MOST_FAILURES]]
    assert dropped == len(failed) - MOST_FAILURES
    assert sampling.of_sent(IDS, [7]) == ([n for n in range(len(IDS)) if n != 7], 1)
    now_s = 1.0
    assert sampling.of_sent(IDS[:2], [1]) == ([0, 1], 0)
    sampling._failures = MOST_FAILURES + 7  # as threads leave it that count at once
    assert sampling.of_sent(IDS, [7, 8]) == ([n for n in range(len(IDS)) if n not in (7, 8)], 2)


def test_other_failures_are_kept_beside_the_sample() -> None:
    sampling = Sampling(0.01, lambda: 0.0)
    inside = sampling.of_others(IDS, []).rows
    assert inside is not None
    rows, dropped = sampling.of_others(IDS, list(range(len(IDS))))
    assert rows is not None
    assert set(inside) <= set(rows)
    assert len(rows) == len(inside) + MOST_FAILURES
    assert dropped == len(IDS) - len(rows)
    assert Sampling(1).of_others(IDS, list(range(len(IDS)))) == (None, 0)
