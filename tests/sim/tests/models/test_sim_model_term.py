"""Candidacies against every interleaving of two nodes over two transactional ids."""

from collections.abc import Mapping
from dataclasses import replace
from unittest.mock import patch

import pytest

from delaywheel_replica.core.election.events import (
    IN_TERM,
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
from sim.models.term import IDS, Kafka, State, TermModel, _seen
from support.process.night import at_night


@pytest.mark.parametrize("model", TERMS, ids=name_of)
def test_one_epoch_commits_at_a_time(model: TermModel) -> None:
    assert exhausted(model).found.wrong is None


def test_marks_with_one_id_alone_are_found() -> None:
    """Interleaving 1: two candidates init the two ids crosswise."""
    found = exhausted(TermModel(candidacies=2, late=0, ids=1)).found
    assert found.wrong == "message 1 is visible after message 1"


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


def test_a_term_that_lasts_with_one_loose_id_left_is_found() -> None:
    """Kafka keeps the other one, and the broker that keeps it never comes back."""
    with patch.object(IdTurns, "_is_left_alone", new=False):
        found = exhausted(TermModel(candidacies=1, transactions=2, late=2)).found
    assert found.wrong == "a stands still while Kafka keeps [0]"


def test_going_on_in_the_epoch_of_what_was_not_answered_is_found() -> None:
    """A record of the abandoned transaction arrives late in the next one of its id."""
    unanswered = {(Call.FLUSH, LibraryAnswer.TIMED_OUT): TransactionState.ABORTED}
    with patch.dict(VERDICTS, unanswered):
        found = exhausted(TermModel(candidacies=1, transactions=2, late=1, renewals=1)).found
    assert found.wrong == "message 1 is visible after message 1"


@at_night  # the fault is found within a push's bounds
def test_going_on_with_an_id_before_another_has_vouched_for_it_is_found() -> None:
    """A new leader has committed, and its predecessor inits that id once more."""

    def at_once(self: IdTurns, number: int, verdict: TransactionState) -> IdTurns:
        is_ready = verdict is TransactionState.CONTINUE
        return self._with(number, IdState.SOUND if is_ready else IdState.ABANDONED)

    with patch.object(IdTurns, "renewed", at_once):
        found = exhausted(TermModel(candidacies=2, transactions=1, late=0, renewals=1)).found
    assert found.wrong == "message 1 is visible after message 1"


def test_doing_without_an_id_that_nobody_has_left_out_is_found() -> None:
    """Its owner goes on with it, and is not fenced."""

    def all_left_out(kafka: Kafka) -> ControlState:
        return replace(_seen(kafka), left_out=LeftOut(frozenset(range(IDS))))

    with patch("sim.models.term._seen", all_left_out):
        found = exhausted(TermModel(candidacies=2, transactions=2, late=0, held=1)).found
    assert found.wrong is not None


@at_night  # the same
def test_going_on_with_an_id_that_was_left_out_is_found() -> None:
    def still_sound(self: IdTurns, number: int) -> IdTurns:
        return replace(self, abandoned=self.abandoned | {number})

    with patch.object(IdTurns, "kept", still_sound):
        found = exhausted(TermModel(candidacies=2, transactions=2, late=0, held=2)).found
    assert found.wrong is not None


@at_night  # a push looks at the way of the next but one alone
def test_doing_without_an_id_that_another_has_marked_since_is_found() -> None:
    """The process has led before, but not last: who leads goes on with that id."""

    def whoever_led(self: Election, state: ControlState, number: int) -> bool:
        return number in state.left_out.ids or number in self._last_marks

    with patch.object(Election, "_may_lack", whoever_led):
        found = exhausted(TermModel(candidacies=3, transactions=2, late=0, held=1)).found
    assert found.wrong == "message 2 is visible after message 2"


def led(model: TermModel, state: State, *moves: str) -> State:
    """Carries out moves of these names; `commits` stands for a whole transaction."""
    for move in moves:
        name, is_whole = move.removesuffix(" commits"), move.endswith(" commits")
        while True:
            found = dict(model.moves(state))
            produces = [each for each in found if each.startswith(f"{name} produces ")]
            plain = [each for each in produces if "hears" not in each]
            state = found[(plain or [f"{name} commits: ok"])[0] if is_whole else move]
            if not (is_whole and plain):
                break
    return state


def test_doing_without_an_id_of_which_it_was_said_that_it_is_left_out_is_found() -> None:
    """The next leader has taken it in again, goes on with it, and has never marked it."""
    model = TermModel(transactions=9, renewals=1, held=3)
    way = (
        *("a stands", "a inits 0", "a inits 1", "a commits", "a commits", "a reads"),
        *("a leaves 1 out", "a goes on", "a commits"),
        *("b stands", "b inits 0", "b init 1 is held", "b commits", "b reads"),
        *("b begins to init 1 again", "b inits 1 again", "b has inited 1 again"),
        *("b goes on", "b commits", "a goes on", "a produces: fenced"),
        *("a has no id left", "a stands", "a inits 0", "a init 1 is held", "a commits", "a reads"),
    )

    def everything(self: IdTurns, leaders: Mapping[int, LeaderRecord]) -> dict[int, str]:
        del self
        return {each: mark.token for each, mark in leaders.items()}

    with patch.object(IdTurns, "last_marks", everything):
        state = led(model, model.start, *way)
        state = led(model, state, "a goes on", "a commits", "b goes on", "b commits")
    assert state.kafka.wrong == "message 3 is visible after message 3"
    assert "a goes on" not in dict(model.moves(led(model, model.start, *way)))


def test_a_late_copy_of_an_init_of_its_own_costs_a_leader_no_term() -> None:
    model = TermModel(late=1, renewals=1)
    state = led(
        *(model, model.start, "a stands", "a inits 0", "a gives up, init 1 is late"),
        *("a stands", "a inits 0", "a inits 1", "a commits", "a commits", "a reads"),
        *("late: init_transactions 1 a-1", "a goes on", "a commits"),
        *("a goes on", "a produces: fenced", "a goes on", "a commits"),
        *("a begins to init 1 again", "a inits 1 again", "a has inited 1 again"),
        *("a goes on", "a commits"),
    )
    leader = state.candidates[0]
    assert leader.machine.election.phase in IN_TERM
    assert leader.turns.states == (IdState.SOUND, IdState.SOUND)


def test_a_leader_that_was_replaced_inits_nothing_again() -> None:
    model = TermModel(transactions=9, renewals=2)
    state = led(
        *(model, model.start, "a stands", "a inits 0", "a inits 1", "a commits", "a commits"),
        *("a reads", "b stands", "b inits 0", "b inits 1", "b commits", "b commits", "b reads"),
        *("a goes on", "a produces: fenced"),
    )
    assert "a begins to init 0 again" not in dict(model.moves(state))
    state = led(model, state, "a goes on", "a produces: fenced", "a has no id left")
    assert state.candidates[0].machine.election.phase is ElectionPhase.STANDBY
