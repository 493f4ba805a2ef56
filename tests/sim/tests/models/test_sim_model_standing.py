"""Interleavings 18 and 22: slow brokers, and candidates that fence each other.

A push has five ways of starting for each pace of the brokers, a night all twenty.
"""

from itertools import product, repeat

import pytest

from sim.models.standing import Standing
from sim.mutants.catalogue import MUTANTS
from support.process.night import NIGHT

LASTING_MS = 10_000
STARTS = [
    (0, *later) for nodes in (2, 3) for later in product((0, 50, 150, 1_000), repeat=nodes - 1)
]
SOME_STARTS = [(0, 50), (0, 1_000), (0, 50, 150), (0, 0, 1_000), (0, 1_000, 1_000)]


@pytest.mark.parametrize("commit_ms", [20, 400, 1_200, 2_500, 4_000, 5_000])
@pytest.mark.parametrize("init_ms", [100, 600, 2_000, 5_000])
def test_one_comes_to_lead_however_slow_the_brokers_are(init_ms: int, commit_ms: int) -> None:
    for starts in STARTS if NIGHT else SOME_STARTS:
        standing = Standing(starts, init_ms=init_ms, commit_ms=commit_ms)
        assert standing.run(120, lasting_ms=LASTING_MS), starts
        assert sum(each.candidacies for each in standing.candidates) == 1, starts


@pytest.mark.parametrize("commit_ms", [1_300, 2_500, 4_000, 5_000])
def test_a_leader_stays_in_term_however_long_commits_take(commit_ms: int) -> None:
    assert set(map(candidacies_until_one_stays, repeat(commit_ms), SOME_STARTS)) == {1}


@pytest.mark.parametrize("later_ms", [1_300, 2_500, 4_000, 5_000])
def test_commits_that_become_slow_end_one_term(later_ms: int) -> None:
    for starts in SOME_STARTS:
        standing = Standing(starts, init_ms=600, commit_ms=20)
        assert standing.run(60, lasting_ms=2 * LASTING_MS)
        standing.commit_ms = later_ms
        standing.run(210, lasting_ms=90_000)
        assert sum(each.candidacies for each in standing.candidates) <= 2, starts
        assert standing.lasted_ms >= 60_000, starts


@pytest.mark.parametrize("name", ["is not heard while it commits", "learns nothing from its marks"])
def test_a_leader_that_is_not_waited_for_is_found(name: str) -> None:
    with MUTANTS[name]():
        assert candidacies_until_one_stays(3_000, (0, 50, 150)) > 2


def candidacies_until_one_stays(commit_ms: int, starts: tuple[int, ...]) -> int:
    standing = Standing(starts, init_ms=600, commit_ms=commit_ms)
    standing.run(150, lasting_ms=60_000)
    return sum(each.candidacies for each in standing.candidates)


@pytest.mark.parametrize("check_ms", [100, 600, 800])
def test_nobody_disturbs_a_candidate_whom_kafka_answers_soon(check_ms: int) -> None:
    assert not disturbed(check_ms)


def test_a_vote_that_does_not_count_as_a_leader_heard_is_found() -> None:
    with MUTANTS["a vote given is no leader heard"]():
        assert disturbed(600)


def disturbed(check_ms: int) -> list[tuple[int, ...]]:
    found = []
    for starts in STARTS:
        standing = Standing(starts, init_ms=50, commit_ms=20, check_ms=check_ms)
        assert standing.run(30, lasting_ms=LASTING_MS), starts
        if sum(each.candidacies for each in standing.candidates) > 1:
            found.append(starts)
    return found
