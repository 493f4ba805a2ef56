"""Which transactional ids a leader may use: the table of id_turns.py, one row after another."""

from __future__ import annotations

import pytest

from delaywheel_replica.core.election.id_turns import IdState, IdTurns
from delaywheel_replica.core.protocol.transaction_outcomes import TransactionState

SOUND, LOOSE, ABANDONED = IdState.SOUND, IdState.LOOSE, IdState.ABANDONED
RENEWING, RENEWED = IdState.RENEWING, IdState.RENEWED
COMMITTED = TransactionState.COMMITTED


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
    ],
)
def test_how_a_transaction_ended_decides_what_its_id_is(
    verdict: TransactionState, state: IdState
) -> None:
    turns = IdTurns.begun(2).ended(0, verdict)
    assert turns.states == (state, SOUND)
    assert turns.to_renew == (None if state is SOUND else 0)
    assert turns.usable == 1


def test_an_id_that_was_inited_again_waits_for_a_commit_of_another() -> None:
    turns = IdTurns.begun(2, loose={0}).renewing(0)
    assert (turns.usable, turns.to_renew) == (1, None)
    turns = turns.renewed(0, is_ready=True)
    assert turns.states == (RENEWED, SOUND)
    assert turns.ended(1, TransactionState.ABORTED).states == (RENEWED, SOUND)
    assert turns.ended(1, COMMITTED).states == (SOUND, SOUND)
    assert turns.ended(1, TransactionState.COMMITTED_LOOSE).states == (SOUND, LOOSE)


def test_an_id_that_could_not_be_inited_is_inited_once_more() -> None:
    turns = IdTurns.begun(2, loose={0}).renewing(0).renewed(0, is_ready=False)
    assert (turns.states, turns.to_renew) == ((ABANDONED, SOUND), 0)


def test_of_two_loose_ids_one_stays_to_vouch_with_one_record() -> None:
    turns = IdTurns.begun(2, loose={0, 1})
    assert (turns.usable, turns.to_renew, turns.voucher) == (None, 0, 0)
    turns = turns.renewing(0)
    assert (turns.to_renew, turns.voucher, turns.awaits_voucher) == (None, 1, False)
    turns = turns.renewed(0, is_ready=True)
    assert (turns.voucher, turns.awaits_voucher, turns.is_lost) == (1, True, False)
    turns = turns.ended(1, TransactionState.COMMITTED_LOOSE)
    assert (turns.states, turns.usable, turns.to_renew) == ((SOUND, LOOSE), 0, 1)


@pytest.mark.parametrize("other", [ABANDONED, RENEWING, RENEWED])
def test_nothing_is_left_once_no_id_can_vouch(other: IdState) -> None:
    turns = IdTurns((SOUND, other)).ended(0, TransactionState.ABANDONED)
    assert turns.is_lost
    assert (turns.usable, turns.voucher, turns.to_renew) == (None, None, None)
