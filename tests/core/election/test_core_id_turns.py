"""Which transactional ids a leader may use: the table of id_turns.py, one row after another."""

from __future__ import annotations

import pytest

from delaywheel_replica.core.election.id_turns import RESERVED, IdState, IdTurns
from delaywheel_replica.core.protocol.control import LeaderRecord, LeftOut
from delaywheel_replica.core.protocol.transaction_outcomes import TransactionState

SOUND, LOOSE, ABANDONED = IdState.SOUND, IdState.LOOSE, IdState.ABANDONED
RENEWING, RENEWED, TAKEN = IdState.RENEWING, IdState.RENEWED, IdState.TAKEN
COMMITTED, UNKNOWN = TransactionState.COMMITTED, TransactionState.UNKNOWN
CONTINUE = TransactionState.CONTINUE


def test_ids_take_turns() -> None:
    turns, used = IdTurns.begun(2), []
    for _ in range(4):
        assert turns.usable is not None
        used.append(turns.usable)
        turns = turns.ended(turns.usable, COMMITTED)
    assert used == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("verdict", "state"),
    [
        (COMMITTED, SOUND),
        (TransactionState.COMMITTED_LOOSE, LOOSE),
        (TransactionState.ABORTED, SOUND),
        (TransactionState.ABANDONED, ABANDONED),
        (TransactionState.TAKEN, TAKEN),
    ],
)
def test_how_a_transaction_ended_decides_what_its_id_is(
    verdict: TransactionState, state: IdState
) -> None:
    turns = IdTurns.begun(2).ended(0, verdict)
    assert turns.states == (state, SOUND)
    assert turns.to_renew == (None if state in {SOUND, TAKEN} else 0)
    assert turns.usable == 1


def test_an_id_that_was_inited_again_waits_for_a_commit_of_another() -> None:
    turns = IdTurns.begun(2, loose={0}).renewing(0)
    assert (turns.usable, turns.to_renew) == (1, None)
    turns = turns.renewed(0, CONTINUE)
    assert turns.states == (RENEWED, SOUND)
    assert turns.ended(1, TransactionState.ABORTED).states == (RENEWED, SOUND)
    assert turns.ended(1, COMMITTED).states == (SOUND, SOUND)
    assert turns.ended(1, TransactionState.COMMITTED_LOOSE).states == (SOUND, LOOSE)


def test_an_id_that_could_not_be_inited_is_inited_once_more() -> None:
    turns = IdTurns.begun(2, loose={0}).renewing(0).renewed(0, UNKNOWN)
    assert (turns.states, turns.to_renew) == ((ABANDONED, SOUND), 0)


def test_a_taken_id_is_inited_again_only_once_another_has_committed() -> None:
    turns = IdTurns.begun(3).ended(1, TransactionState.TAKEN)
    assert (turns.states, turns.to_renew, turns.left_out.ids) == (
        (SOUND, TAKEN, SOUND),
        None,
        frozenset({1}),
    )
    turns = turns.ended(2, COMMITTED)
    assert (turns.states[1], turns.to_renew, turns.is_replaced) == (ABANDONED, 1, False)
    turns = turns.renewing(1).renewed(1, TransactionState.FENCED)
    assert (turns.states[1], turns.to_renew) == (TAKEN, None)


def test_a_leader_all_of_whose_ids_are_taken_is_replaced() -> None:
    turns = IdTurns.begun(2).ended(0, TransactionState.TAKEN)
    assert not turns.is_lost
    turns = turns.ended(1, TransactionState.TAKEN)
    assert turns.is_replaced
    assert not IdTurns((ABANDONED, RENEWING)).is_replaced


def test_of_two_loose_ids_one_stays_to_vouch_with_one_record() -> None:
    turns = IdTurns.begun(2, loose={0, 1})
    assert (turns.usable, turns.to_renew, turns.voucher) == (None, 0, 0)
    turns = turns.renewing(0)
    assert (turns.to_renew, turns.voucher, turns.awaits_voucher) == (None, 1, False)
    turns = turns.renewed(0, CONTINUE)
    assert (turns.voucher, turns.awaits_voucher, turns.is_lost) == (1, True, False)
    turns = turns.ended(1, TransactionState.COMMITTED_LOOSE)
    assert (turns.states, turns.usable, turns.to_renew) == ((SOUND, LOOSE), 0, 1)


@pytest.mark.parametrize("other", [ABANDONED, RENEWING, RENEWED])
def test_nothing_is_left_once_no_id_can_vouch(other: IdState) -> None:
    turns = IdTurns((SOUND, other)).ended(0, TransactionState.ABANDONED)
    assert turns.is_lost
    assert (turns.usable, turns.voucher, turns.to_renew) == (None, None, None)


def test_a_loose_id_that_is_left_alone_ends_the_term_once_it_has_said_so() -> None:
    turns = IdTurns((LOOSE, ABANDONED, SOUND)).renewing(1).renewed(1, UNKNOWN)
    assert not turns.is_lost
    turns = turns.ended(2, TransactionState.ABANDONED)
    assert (turns.usable, turns.voucher, turns.is_lost) == (None, 0, False)
    turns = turns.renewing(2).ended(0, COMMITTED)
    assert not turns.is_lost  # the other one may still be inited
    assert turns.renewed(2, CONTINUE).awaits_voucher
    alone = turns.renewed(2, UNKNOWN)
    assert (alone.voucher, alone.is_lost, alone.is_replaced) == (0, True, False)
    assert alone.renewing(1).is_lost
    unsaid = IdTurns((LOOSE, SOUND)).ended(1, TransactionState.ABANDONED).renewing(1)
    unsaid = unsaid.renewed(1, UNKNOWN)
    assert not unsaid.is_lost
    assert unsaid.ended(0, COMMITTED).is_lost


def test_an_id_whose_init_fails_at_once_holds_up_no_other() -> None:
    turns = IdTurns((SOUND, ABANDONED, ABANDONED))
    tried = []
    for _ in range(4):
        assert turns.to_renew is not None
        tried.append(turns.to_renew)
        turns = turns.renewing(turns.to_renew).renewed(turns.to_renew, UNKNOWN)
    assert tried == [1, 2, 1, 2]


def test_what_was_abandoned_is_left_out_until_another_commits_after_its_init() -> None:
    turns = IdTurns.begun(3).ended(0, TransactionState.ABANDONED)
    assert turns.left_out.ids == {0}
    turns = turns.renewing(0)
    assert turns.left_out.ids == {0}
    assert turns.usable == 1
    turns = turns.renewed(0, UNKNOWN).renewing(0).renewed(0, CONTINUE)
    assert turns.left_out.ids == set()
    assert turns.states[0] is RENEWED
    assert turns.ended(1, COMMITTED).states[0] is SOUND


def test_a_loose_id_is_not_left_out_for_its_short_init() -> None:
    turns = IdTurns.begun(3, loose={0}).renewing(0)
    assert turns.left_out.ids == set()
    assert turns.renewed(0, UNKNOWN).left_out.ids == {0}


def test_a_new_leader_uses_an_id_that_was_left_out_once_it_has_said_that_it_is_not() -> None:
    turns = IdTurns.begun(3, without=frozenset({0}), left_out={0, 1})
    assert turns.states == (ABANDONED, RENEWED, SOUND)
    assert turns.left_out == LeftOut(frozenset({0}), unmarked=frozenset({0}))
    turns = turns.ended(2, COMMITTED)
    assert turns.states == (ABANDONED, SOUND, SOUND)


def test_a_left_out_id_with_a_copy_of_its_marks_end_under_way_is_inited_again() -> None:
    turns = IdTurns.begun(2, loose={0}, left_out={0})
    assert (turns.states, turns.to_renew) == ((ABANDONED, SOUND), 0)
    assert turns.left_out == LeftOut(frozenset({0}))


def test_an_id_whose_markers_cannot_be_written_is_left_unless_it_is_the_last() -> None:
    turns = IdTurns.begun(3).kept(2)
    assert turns.states == (SOUND, SOUND, ABANDONED)
    assert turns.left_out.ids == {2}
    turns = turns.kept(0)
    assert turns.usable == 1
    assert turns.kept(1) == turns


def test_the_reserved_id_is_risked_only_where_no_other_is_sound() -> None:
    turns = IdTurns.begun(3)
    for usable, at_risk in [(0, 1), (2, 2), (0, 1)]:
        assert (turns.usable, turns.usable_at_risk) == (usable, at_risk)
        turns = turns.ended(at_risk, COMMITTED)
    turns = turns.renewing(1).renewing(2)
    assert (turns.usable_at_risk, turns.is_scarce, turns.vouches_first) == (RESERVED, False, None)
    turns = turns.renewed(2, CONTINUE)
    assert turns.vouches_first == RESERVED
    turns = turns.ended(RESERVED, COMMITTED)
    assert (turns.usable_at_risk, turns.vouches_first) == (2, None)


def test_the_last_one_that_can_vouch_does_so_before_it_is_risked() -> None:
    turns = IdTurns((RENEWING, SOUND, RENEWED))
    assert turns.vouches_first == 1
    assert turns.ended(1, COMMITTED).vouches_first is None
    assert IdTurns((SOUND, SOUND, RENEWED)).vouches_first is None


@pytest.mark.parametrize(
    ("states", "is_scarce"),
    [
        ((SOUND, SOUND, ABANDONED), False),
        ((LOOSE, SOUND, ABANDONED), False),
        ((RENEWING, SOUND, ABANDONED), True),
        ((ABANDONED, SOUND, SOUND), False),
        ((ABANDONED, SOUND, ABANDONED), True),
        ((SOUND, RENEWED, ABANDONED), True),
        ((SOUND, ABANDONED, ABANDONED), True),
        ((LOOSE, RENEWED, ABANDONED), True),
        ((SOUND,), False),
    ],
)
def test_while_ids_are_kept_neither_the_reserved_one_nor_the_last_is_risked(
    states: tuple[IdState, ...], *, is_scarce: bool
) -> None:
    abandoned = frozenset(each for each, state in enumerate(states) if state is ABANDONED)
    assert IdTurns(states, abandoned=abandoned).is_scarce == is_scarce


@pytest.mark.parametrize(
    ("verdict", "unsaid"),
    [
        (TransactionState.ABORTED, {1, 2}),
        (TransactionState.ABANDONED, {1, 2}),
        (TransactionState.TAKEN, {1, 2}),
        (TransactionState.UNKNOWN, {2}),
        (TransactionState.FENCED, {2}),
        (COMMITTED, {2}),
        (TransactionState.COMMITTED_LOOSE, {2}),
    ],
)
def test_what_may_have_been_left_out_is_not_the_processs_own_any_more(
    verdict: TransactionState, unsaid: set[int]
) -> None:
    """Another leader may do without it, and come to use it again, without a mark."""
    leaders = {each: LeaderRecord("a", "t", each) for each in range(3)}
    turns = IdTurns.begun(3, left_out={0}).ended(1, TransactionState.ABANDONED)
    assert turns.last_marks(leaders) == {1: "t", 2: "t"}
    turns = turns.ended(2, verdict)
    if verdict.is_committed:
        unsaid = unsaid | {0}
    assert turns.last_marks(leaders).keys() == unsaid
