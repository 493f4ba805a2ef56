"""Checks exactly-once acceptance of ingress records against every interleaving of two leaders."""

from unittest.mock import patch

import pytest

from delaywheel.seqset import SeqSet
from delaywheel_replica.core.ingress import partition
from delaywheel_replica.core.ingress.moment import Moment, RequestKind, TransactionRoom
from delaywheel_replica.core.ingress.partition import Intake
from delaywheel_replica.core.ingress.reading import Unfit
from delaywheel_replica.core.ingress.underway import IntakeStep, RecordAnswer, RecordUnderWay, Stage
from delaywheel_replica.core.protocol.seal import FROZEN
from sim.models.catalogue import INGRESSES, exhausted, name_of
from sim.models.ingress import IngressModel

ALONE = IngressModel(begins=1)
unfit = partition._unfit


def unbound(_self: Intake, _step: IntakeStep | None = None) -> None:
    """Floor and seals advance without limit."""


def doubtless(taken: RecordUnderWay, request: partition._Request, moment: Moment) -> Unfit | None:
    """Which server may have a record is forgotten."""
    taken.perhaps_held = False
    return unfit(taken, request, moment)


@pytest.mark.parametrize("model", INGRESSES, ids=name_of)
def test_each_record_is_delivered_once(model: IngressModel) -> None:
    found = exhausted(model).found
    assert found.wrong is None, str(found)


def test_a_due_from_the_clock_is_found() -> None:
    assert exhausted(IngressModel(due_by_clock=True)).found.wrong == "0 was delivered twice"


def test_an_offset_before_acceptance_is_found() -> None:
    answered = Intake.answered

    def trusting(self: Intake, taken: RecordUnderWay, answer: RecordAnswer) -> None:
        answered(self, taken, RecordAnswer.HELD if answer is RecordAnswer.UNKNOWN else answer)

    with patch.object(Intake, "answered", trusting):
        assert exhausted(ALONE).found.wrong == "0 is lost"


def test_a_record_handed_over_before_it_is_announced_is_found() -> None:
    plan = Intake.plan

    def hasty(self: Intake, moment: Moment, *, room: TransactionRoom) -> IntakeStep:
        for taken in self._taken:
            if taken.stage is Stage.READ:
                taken.stage = Stage.ANNOUNCED
        return plan(self, moment, room=room)

    with patch.object(Intake, "plan", hasty), patch.object(partition, "_unfit", doubtless):
        assert exhausted(IngressModel()).found.wrong == "0 was delivered twice"


def test_a_floor_past_an_uncommitted_offset_is_found() -> None:
    """An undecidable record is a dead letter, and only without that rule it is delivered twice."""
    with patch.object(Intake, "bound", unbound):
        assert exhausted(IngressModel()).found.wrong == "a dead letter"
        with patch.object(partition, "_unfit", doubtless):
            assert exhausted(IngressModel()).found.wrong == "0 was delivered twice"


def test_a_floor_that_does_not_wait_for_unread_records_is_found() -> None:
    bound = Intake.bound

    def unaware(self: Intake, step: IntakeStep | None = None) -> int | None:
        found = bound(self, step)
        return None if found == FROZEN else found

    with patch.object(Intake, "bound", unaware):
        assert exhausted(IngressModel()).found.wrong == "a dead letter"


def test_an_announcement_taken_back_of_what_a_server_may_have_is_found() -> None:
    take_back = Intake._take_back

    def doubtless_back(
        self: Intake, most: dict[RequestKind, int], draft: partition._Draft, spans: SeqSet
    ) -> tuple[list[RecordUnderWay], SeqSet]:
        for taken in self._taken if most else ():
            taken.perhaps_held = False
        return take_back(self, most, draft, spans)

    with patch.object(Intake, "_take_back", doubtless_back):
        assert exhausted(ALONE).found.wrong == "0 was delivered twice"


def test_announcements_are_taken_back_in_the_model() -> None:
    """Otherwise it would prove nothing about them."""
    back = set[int]()
    committed = Intake.committed

    def noting(self: Intake, step: IntakeStep) -> None:
        back.update(each.offset for each in step.taken_back)
        committed(self, step)

    with patch.object(Intake, "committed", noting):
        exhausted(IngressModel(records=2, begins=1))
    assert back == {0, 2}
