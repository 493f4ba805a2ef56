from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel_replica.core.protocol.quorum import (
    held_by,
    high_watermark,
    required_answers,
)

SIZES = [(members, w) for members in range(1, 6) for w in range(1, members + 1)]


@pytest.mark.parametrize(("members", "min_insync"), SIZES)
def test_required_answers_is_the_least_that_meets_every_set_of_holders(
    members: int, min_insync: int
) -> None:
    everyone = range(members)
    holders = [set(chosen) for chosen in combinations(everyone, min_insync)]

    def always_meets(answers: int) -> bool:
        return all(
            set(asked) & held for asked in combinations(everyone, answers) for held in holders
        )

    assert required_answers(members, min_insync) == next(
        answers for answers in range(1, members + 1) if always_meets(answers)
    )


@pytest.mark.parametrize(("members", "min_insync"), [(1, 0), (1, 2), (3, 4), (0, 1)])
def test_impossible_sizes_are_refused(members: int, min_insync: int) -> None:
    with pytest.raises(ValueError, match="min_insync"):
        required_answers(members, min_insync)


@given(st.lists(st.integers(0, 5), max_size=5), st.integers(1, 5))
def test_held_by_agrees_with_counting(applied: list[int], holders: int) -> None:
    counted = [seq for seq in range(6) if sum(held >= seq for held in applied) >= holders]
    assert held_by(applied, holders) == max(counted, default=0)


@given(
    st.dictionaries(st.sampled_from("abcde"), st.integers(0, 5)),
    st.sets(st.sampled_from("abcde")),
    st.integers(1, 5),
)
def test_high_watermark_agrees_with_counting(
    applied: dict[str, int], in_sync: set[str], min_insync: int
) -> None:
    acknowledged = [
        seq
        for seq in range(6)
        if len(in_sync) >= min_insync and all(applied.get(node, 0) >= seq for node in in_sync)
    ]
    assert high_watermark(applied, in_sync, min_insync) == max(acknowledged, default=None)
