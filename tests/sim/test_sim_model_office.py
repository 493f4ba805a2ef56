"""Candidacies against every interleaving of two nodes over two transactional ids."""

from unittest.mock import patch

import pytest

from delaywheel_replica.core.control import ControlState, LeaderRecord
from delaywheel_replica.core.election import Election
from delaywheel_replica.core.election_events import (
    TRANSITIONS,
    ControlRead,
    Effect,
    MarkReport,
    Phase,
    ReadControl,
)
from delaywheel_replica.core.progress import Progress
from delaywheel_replica.core.reports import ACTIONS, VERDICTS, Action, Answer, Call, Verdict
from sim.model import Explored, explore
from sim.model_office import OfficeModel, State

AT_MOST = 2_000_000


def explored(model: OfficeModel) -> Explored[State]:
    return explore(model.start, model.moves, model.wrong, at_most=AT_MOST)


@pytest.mark.parametrize(
    "model",
    [
        OfficeModel(candidacies=2, late=3),
        OfficeModel(candidacies=3, late=0),
        OfficeModel(candidacies=3, transactions=2, late=1),
        pytest.param(OfficeModel(candidacies=3), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_one_epoch_commits_at_a_time(model: OfficeModel) -> None:
    assert explored(model).wrong is None


def test_marks_with_one_id_alone_are_found() -> None:
    """Interleaving 1: two candidates init the two ids crosswise."""
    found = explored(OfficeModel(candidacies=2, late=0, ids=1))
    assert found.wrong == "progress 2 is committed over 2"


def test_going_on_after_inits_without_reading_is_found() -> None:
    """Interleaving 1: a leader inits again, and goes on from what it knew."""
    marked = Election._marked

    def blind(self: Election, report: MarkReport) -> list[Effect]:
        effects = marked(self, report)
        if effects != [ReadControl(self.token)]:
            return effects
        own = LeaderRecord("", self.token, 0)
        state = ControlState(progress=Progress(0, None), leaders={0: own, 1: own})
        return self._read(ControlRead(report.now_ms, self.token, state))

    after = {**TRANSITIONS, (Phase.MARKING, MarkReport): frozenset(Phase)}
    with patch.object(Election, "_marked", blind), patch.dict(TRANSITIONS, after):
        assert explored(OfficeModel(candidacies=2, late=0)).wrong is not None


def test_a_repeated_commit_that_counts_as_known_is_found() -> None:
    """Interleaving 20: the first copy of an end arrives in a later transaction of its id."""
    with patch.dict(VERDICTS, {(Call.COMMIT, Answer.OK_RETRIED): Verdict.COMMITTED}):
        found = explored(OfficeModel(candidacies=1, late=1))
    assert found.wrong == "message 1 is visible, and its progress is not"


def test_going_on_after_an_unknown_outcome_is_found() -> None:
    with patch.dict(ACTIONS, {Verdict.UNKNOWN: Action.GO_ON}):
        assert explored(OfficeModel(candidacies=1, late=1)).wrong is not None
