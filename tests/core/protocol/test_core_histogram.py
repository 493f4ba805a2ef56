import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel_replica.core.protocol.codec import MalformedError, decode, encode, from_json
from delaywheel_replica.core.protocol.histogram import (
    COMMIT_BOUNDS_US,
    LATENESS_BOUNDS_US,
    Histogram,
    Tally,
)
from support.core.values import histograms


@pytest.mark.parametrize("bounds", [LATENESS_BOUNDS_US, COMMIT_BOUNDS_US])
def test_bounds_ascend(bounds: tuple[int, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))


@given(st.lists(st.integers(0, 200)))
def test_each_bucket_holds_what_is_above_the_one_before_up_to_its_bound(values: list[int]) -> None:
    tally = Tally((10, 100))
    for value in values:
        tally.add(value)
    assert tally.read() == Histogram(
        (10, 100),
        (
            sum(value <= 10 for value in values),
            sum(10 < value <= 100 for value in values),
            sum(value > 100 for value in values),
        ),
        sum(values),
    )


def test_what_is_less_than_nothing_counts_as_nothing() -> None:
    tally = Tally((10,))
    tally.add(-5)
    assert tally.read() == Histogram((10,), (1, 0), 0)


def test_what_was_read_stays() -> None:
    tally = Tally((10,))
    before = tally.read()
    tally.add(3)
    tally.add_counted([1, 2], 50)
    assert before == Histogram((10,), (0, 0), 0)
    assert tally.read() == Histogram((10,), (2, 2), 53)


@given(histograms)
def test_it_survives_json(histogram: Histogram) -> None:
    assert decode(Histogram, encode(histogram)) == histogram


@pytest.mark.parametrize(
    ("field", "value"),
    [("counts", [1, 2]), ("counts", [1, 2, 3, 4]), ("bounds_us", [7, 7]), ("sum_us", -1)],
)
def test_what_does_not_fit_is_malformed(field: str, value: object) -> None:
    good = {"bounds_us": [5, 7], "counts": [1, 2, 3], "sum_us": 4}
    from_json(Histogram, good)
    with pytest.raises(MalformedError, match=field):
        from_json(Histogram, {**good, field: value})
