import re

import pytest
from grpc import StatusCode

from delaywheel import errors, levels, reasons
from delaywheel.levels import DEFAULT_LEVELS, ROCKETMQ_LEVELS, duration_ms
from delaywheel.reasons import Reason


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_is_stable_text_with_code_and_advice(reason: Reason) -> None:
    assert reason.value == reason.name == str(reason)
    assert re.fullmatch(r"[A-Z]+(_[A-Z]+)*", reason)
    assert reason.code is not StatusCode.OK
    assert reason.code_number == reason.code.value[0]
    assert reason.advice.endswith(".")
    assert len(reason.advice) < 100


@pytest.mark.parametrize("reason", list(Reason))
def test_only_what_a_retry_may_mend_leaves_the_outcome_open(reason: Reason) -> None:
    assert reason.outcome_known or reason.retry_helps


def test_an_unknown_reason_is_none() -> None:
    assert Reason.of("OF_TOMORROW") is None
    assert Reason.of("DRAINING") is Reason.DRAINING


def test_the_default_levels_and_rocketmq_s() -> None:
    assert len(DEFAULT_LEVELS) == 12
    assert len(ROCKETMQ_LEVELS) == 18
    assert list(ROCKETMQ_LEVELS)[3 - 1] == "10s"
    for table in (DEFAULT_LEVELS, ROCKETMQ_LEVELS):
        delays = list(table.values())
        assert delays == sorted(delays)
    assert (DEFAULT_LEVELS["5s"], DEFAULT_LEVELS["2h"]) == (5_000, 7_200_000)


@pytest.mark.parametrize("text", ["", "5", "s", "5 s", "-5s", "1.5s", "5w", "٣s"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        duration_ms(text)


def test_every_error_is_in_the_one_tree() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    ours = [kind for kind in kinds if kind.__module__ == errors.__name__]
    assert len(ours) == 6
    assert all(issubclass(kind, errors.DelaywheelError) for kind in ours)


def test_the_examples_in_the_docstrings_hold() -> None:
    import doctest  # noqa: PLC0415  only here

    from delaywheel import identity, message  # noqa: PLC0415  beside it

    for module in (reasons, levels, message, identity):
        outcome = doctest.testmod(module)
        assert outcome.attempted
        assert not outcome.failed
