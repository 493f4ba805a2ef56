"""The quorum and fencing rules against every interleaving of a few nodes."""

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest

from delaywheel.identity import WheelId
from delaywheel_replica.core import closing, control, holding
from delaywheel_replica.core.beat import FenceAnswer
from sim import model_wheel
from sim.model import Explored, TooManyStatesError, explore
from sim.model_wheel import RULES, State, WheelModel

AT_MOST = 1_000_000


def explored(model: WheelModel) -> Explored[State]:
    return explore(model.start, model.moves, model.wrong, at_most=AT_MOST)


@pytest.fixture
def anew() -> Iterator[None]:
    """What the exchanged code decides is not remembered."""
    model_wheel.forget()
    yield
    model_wheel.forget()


SIZES = [
    *[WheelModel(nodes, w) for nodes in (1, 2) for w in range(1, nodes + 1)],
    *[WheelModel(2, w, frames=2, crashes=1) for w in (1, 2)],
    *[WheelModel(3, w, crashes=1) for w in (1, 2, 3)],
    *[WheelModel(3, w, replacements=0) for w in (1, 2, 3)],
    *[WheelModel(3, w, frames=2, crashes=1, replacements=0) for w in (1, 2, 3)],
    *[WheelModel(4, w, crashes=1, replacements=0) for w in (1, 2, 3, 4)],
    *[WheelModel(4, w, crashes=0) for w in (1, 2, 3, 4)],
]
LARGER = [
    *[WheelModel(2, w, frames=2) for w in (1, 2)],
    *[WheelModel(3, w) for w in (1, 2, 3)],
    WheelModel(3, 2, frames=2, replacements=0),
    *[WheelModel(4, w, crashes=1) for w in (1, 2, 3, 4)],
    *[WheelModel(5, w, crashes=1, replacements=0) for w in (1, 2, 3, 4, 5)],
]


def name_of(model: WheelModel) -> str:
    return (
        f"N={model.nodes} W={model.min_insync} frames={model.frames}"
        f" crashes={model.crashes} replacements={model.replacements}"
    )


@pytest.mark.parametrize("model", SIZES, ids=name_of)
def test_what_is_acknowledged_is_closed_in(model: WheelModel) -> None:
    assert explored(model).wrong is None


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", LARGER, ids=name_of)
def test_what_is_acknowledged_is_closed_in_with_more_of_everything(model: WheelModel) -> None:
    assert explored(model).wrong is None


BROKEN = {
    "fenced members take no more": WheelModel(2, 2),
    "promises outlive crashes": WheelModel(2, 2),
    "who fences itself stops": WheelModel(2, 1),
    "a fill is committed before it is told": WheelModel(3, 3, crashes=0, replacements=0),
    "a crash makes incomplete": WheelModel(2, 2),
    "complete again by what the origin has written": WheelModel(3, 3, replacements=0),
    "answers of an earlier boot do not count": WheelModel(3, 3, replacements=0),
    "replaced members do not count": WheelModel(2, 2),
}


@pytest.mark.parametrize("rule", sorted(RULES))
def test_without_any_one_rule_a_frame_is_lost(rule: str) -> None:
    model = replace(BROKEN[rule], rules=RULES - {rule})
    assert explored(model).wrong is not None


@pytest.mark.usefixtures("anew")
def test_too_few_answers_are_found() -> None:
    with patch.object(control, "required_answers", lambda members, w: max(1, members - w)):
        assert explored(WheelModel(3, 2)).wrong is not None


@pytest.mark.usefixtures("anew")
def test_an_incomplete_member_that_counts_is_found() -> None:
    with patch.object(FenceAnswer, "is_complete", lambda _self, _wheel: True):
        assert explored(WheelModel(2, 2)).wrong is not None


@pytest.mark.usefixtures("anew")
def test_the_least_answer_is_found() -> None:
    with patch.object(closing, "max", min, create=True):
        assert explored(WheelModel(2, 2)).wrong is not None


@pytest.mark.usefixtures("anew")
def test_forwarding_beyond_the_end_is_found() -> None:
    with patch.object(holding, "_limit", lambda *_: 99):
        assert explored(WheelModel(2, 2)).wrong == "1 is forwarded, the end is 0"


@pytest.mark.usefixtures("anew")
def test_a_second_close_that_counts_is_found() -> None:
    first = control._apply_wheel

    def last(
        state: control.ControlState, wheel: WheelId, value: bytes | None
    ) -> control.ControlState:
        return first(replace(state, wheels={}), wheel, value)

    with patch.object(control, "_apply_wheel", last):
        assert explored(WheelModel(2, 1)).wrong == "the end has moved"


def test_a_way_is_told() -> None:
    found = explore(
        0, lambda n: [("one more", n + 1)], lambda n: "too many" if n > 1 else None, at_most=9
    )
    assert str(found) == "too many, after\n  1 one more\n  2 one more\n2"
    assert str(explore(0, lambda _: [], lambda _: None, at_most=9)) == "1 states, all right"


def test_a_model_without_an_end_is_refused() -> None:
    with pytest.raises(TooManyStatesError, match="more than 9 states"):
        explore(0, lambda n: [("one more", n + 1)], lambda _: None, at_most=9)
