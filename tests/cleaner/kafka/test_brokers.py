"""Risks to the control topic with which a node may still lead."""

from __future__ import annotations

import pytest

from delaywheel_replica.cleaner.kafka.brokers import control_warnings


@pytest.mark.parametrize(
    ("copies", "brokers", "wanted", "reported"),
    [
        (1, 1, None, None),
        (1, 2, None, "1 of 2 copies"),
        (1, 5, None, "1 of 3 copies"),
        (2, 3, None, "2 of 3 copies"),
        (3, 5, None, None),
        (1, 3, 1, None),
        (3, 5, 5, "3 of 5 copies"),
    ],
)
def test_too_few_copies(
    copies: int, brokers: int, wanted: int | None, reported: str | None
) -> None:
    """It was created when there were fewer brokers, perhaps."""
    config = {"min.insync.replicas": str(max(1, copies - 1))}
    found = control_warnings("c", copies=copies, brokers=brokers, wanted=wanted, config=config)
    assert [reported is not None and reported in warning for warning in found] == [True] * (
        reported is not None
    )


def test_settings_with_which_it_may_lose_its_end() -> None:
    config = {"min.insync.replicas": "1", "unclean.leader.election.enable": "true"}
    found = control_warnings("c", copies=3, brokers=3, wanted=None, config=config)
    assert len(found) == 2
    assert "unclean" in found[0]
    assert "min.insync.replicas=1 of 3 copies" in found[1]


def test_without_the_brokers_time_clocks_cannot_be_compared() -> None:
    config = {"min.insync.replicas": "2", "message.timestamp.type": "CreateTime"}
    found = control_warnings("c", copies=3, brokers=3, wanted=None, config=config)
    assert len(found) == 1
    assert "LogAppendTime" in found[0]
