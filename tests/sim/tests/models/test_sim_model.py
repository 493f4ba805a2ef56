"""Checks the quorum and fencing rules against every interleaving of a few nodes."""

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest

from delaywheel.identity import WheelId
from delaywheel_replica.core.leader import closing
from delaywheel_replica.core.leader import holders as holding
from delaywheel_replica.core.protocol import control
from delaywheel_replica.core.protocol.heartbeat import Promise
from sim.models import wheel as model_wheel
from sim.models.catalogue import WHEELS, exhaust, exhausted, name_of
from sim.models.model import TooManyStatesError, explore
from sim.models.wheel import RULES, WheelModel


@pytest.fixture
def anew() -> Iterator[None]:
    """Forgets cached decisions of exchanged code."""
    model_wheel.forget()
    yield
    model_wheel.forget()


@pytest.mark.parametrize("model", WHEELS, ids=name_of)
def test_what_is_acknowledged_is_closed_in(model: WheelModel) -> None:
    assert exhausted(model).found.wrong is None


def test_models_are_gone_through_by_others() -> None:
    by_name = {done.name: done.found for done in exhaust([WHEELS[0], WHEELS[1]], jobs=1)}
    assert set(by_name) == {name_of(WHEELS[0]), name_of(WHEELS[1])}
    assert all(str(found).endswith("states, all right") for found in by_name.values())


BROKEN = {
    "fenced members take no more": WheelModel(2, 2),
    "promises outlive crashes": WheelModel(2, 2),
    "who fences itself stops": WheelModel(2, 1),
    "a limit is committed before it is sent": WheelModel(3, 3, crashes=0, replacements=0),
    "a crash makes incomplete": WheelModel(2, 2),
    "complete again by what the origin has written": WheelModel(3, 3, replacements=0),
    "answers of an earlier boot do not count": WheelModel(3, 3, replacements=0),
    "replaced members do not count": WheelModel(2, 2),
}


@pytest.mark.parametrize("rule", sorted(RULES))
def test_without_any_one_rule_a_frame_is_lost(rule: str) -> None:
    model = replace(BROKEN[rule], rules=RULES - {rule})
    assert exhausted(model).found.wrong is not None


@pytest.mark.usefixtures("anew")
def test_too_few_answers_are_found() -> None:
    with patch.object(control, "required_answers", lambda members, w: max(1, members - w)):
        assert exhausted(WheelModel(3, 2)).found.wrong is not None


@pytest.mark.usefixtures("anew")
def test_an_incomplete_member_that_counts_is_found() -> None:
    with patch.object(Promise, "is_complete", lambda _self, _wheel: True):
        assert exhausted(WheelModel(2, 2)).found.wrong is not None


@pytest.mark.usefixtures("anew")
def test_the_least_answer_is_found() -> None:
    with patch.object(closing, "max", min, create=True):
        assert exhausted(WheelModel(2, 2)).found.wrong is not None


@pytest.mark.usefixtures("anew")
def test_forwarding_beyond_the_end_is_found() -> None:
    with patch.object(holding, "_limit", lambda *_: 99):
        assert exhausted(WheelModel(2, 2)).found.wrong == "1 is forwarded, the end is 0"


@pytest.mark.usefixtures("anew")
def test_a_second_close_that_counts_is_found() -> None:
    first = control._apply_wheel

    def last(
        state: control.ControlState, wheel: WheelId, value: bytes | None
    ) -> control.ControlState:
        return first(replace(state, wheels={}), wheel, value)

    with patch.object(control, "_apply_wheel", last):
        assert exhausted(WheelModel(2, 1)).found.wrong == "the end has moved"


def test_a_way_is_reported() -> None:
    found = explore(
        0, lambda n: [("one more", n + 1)], lambda n: "too many" if n > 1 else None, at_most=9
    )
    assert str(found) == "too many, after\n  1 one more\n  2 one more\n2"
    assert str(explore(0, lambda _: [], lambda _: None, at_most=9)) == "1 states, all right"


def test_a_model_without_an_end_is_refused() -> None:
    with pytest.raises(TooManyStatesError, match="more than 9 states"):
        explore(0, lambda n: [("one more", n + 1)], lambda _: None, at_most=9)
