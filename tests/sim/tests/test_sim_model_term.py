"""Candidacies against every interleaving of two nodes over two transactional ids."""

from dataclasses import replace
from unittest.mock import patch

import pytest

from delaywheel_replica.core.election.events import (
    TRANSITIONS,
    ControlRead,
    Effect,
    ElectionPhase,
    MarkReport,
    ReadControl,
)
from delaywheel_replica.core.election.id_turns import IdState, IdTurns
from delaywheel_replica.core.election.machine import Election
from delaywheel_replica.core.protocol.control import ControlState, LeaderRecord, LeftOut
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.transaction_outcomes import (
    ACTIONS,
    VERDICTS,
    Action,
    Call,
    LibraryAnswer,
    TransactionState,
)
from sim.models.catalogue import TERMS, exhausted, name_of
from sim.models.term import IDS, Kafka, TermModel, _seen


@pytest.mark.parametrize("model", TERMS, ids=name_of)
def test_one_epoch_commits_at_a_time(model: TermModel) -> None:
    assert exhausted(model).found.wrong is None


def test_marks_with_one_id_alone_are_found() -> None:
    """Interleaving 1: two candidates init the two ids crosswise."""
    found = exhausted(TermModel(candidacies=2, late=0, ids=1)).found
    assert found.wrong == "message 2 is visible after message 2"


def test_going_on_after_inits_without_reading_is_found() -> None:
    """Interleaving 1: a leader inits again, and continues from what it knew."""
    marked = Election._marked

    def blind(self: Election, report: MarkReport) -> list[Effect]:
        effects = marked(self, report)
        if effects != [ReadControl(self.token)]:
            return effects
        own = LeaderRecord("", self.token, 0)
        state = ControlState(progress=Progress(0, None), leaders={0: own, 1: own})
        return self._read(ControlRead(report.now_ms, self.token, state))

    after = {**TRANSITIONS, (ElectionPhase.MARKING, MarkReport): frozenset(ElectionPhase)}
    with patch.object(Election, "_marked", blind), patch.dict(TRANSITIONS, after):
        assert exhausted(TermModel(candidacies=2, late=0)).found.wrong is not None


def test_a_repeated_commit_whose_id_goes_on_is_found() -> None:
    """Interleaving 20: the first copy of an end arrives in a later transaction of its id."""
    with patch.dict(
        VERDICTS, {(Call.COMMIT, LibraryAnswer.OK_RETRIED): TransactionState.COMMITTED}
    ):
        found = exhausted(TermModel(candidacies=1, late=1)).found
    assert found.wrong == "message 1 is visible, and its progress is not"


def test_going_on_after_an_unknown_outcome_is_found() -> None:
    with patch.dict(ACTIONS, {TransactionState.UNKNOWN: Action.GO_ON}):
        assert exhausted(TermModel(candidacies=1, late=1)).found.wrong is not None


def test_going_on_in_the_epoch_of_what_was_not_answered_is_found() -> None:
    """A record of the abandoned transaction arrives late in the next one of its id."""
    unanswered = {(Call.FLUSH, LibraryAnswer.TIMED_OUT): TransactionState.ABORTED}
    with patch.dict(VERDICTS, unanswered):
        found = exhausted(TermModel(candidacies=1, transactions=2, late=1, renewals=1)).found
    assert found.wrong == "message 1 is visible after message 1"


def test_going_on_with_an_id_before_another_has_vouched_for_it_is_found() -> None:
    """A new leader has committed, and its predecessor inits that id once more."""

    def at_once(self: IdTurns, number: int, *, is_ready: bool) -> IdTurns:
        return self._with(number, IdState.SOUND if is_ready else IdState.ABANDONED)

    with patch.object(IdTurns, "renewed", at_once):
        found = exhausted(TermModel(transactions=2, candidacies=2, late=0, renewals=1)).found
    assert found.wrong == "message 1 is visible after message 1"


def test_doing_without_an_id_that_nobody_has_left_out_is_found() -> None:
    """Its owner goes on with it, and is not fenced."""

    def all_left_out(kafka: Kafka) -> ControlState:
        return replace(_seen(kafka), left_out=LeftOut(frozenset(range(IDS))))

    with patch("sim.models.term._seen", all_left_out):
        found = exhausted(TermModel(candidacies=2, transactions=2, late=0, held=1)).found
    assert found.wrong is not None


def test_going_on_with_an_id_that_was_left_out_is_found() -> None:
    def still_sound(self: IdTurns, number: int) -> IdTurns:
        return replace(self, abandoned=self.abandoned | {number})

    with patch.object(IdTurns, "kept", still_sound):
        found = exhausted(TermModel(candidacies=2, transactions=2, late=0, held=2)).found
    assert found.wrong is not None
