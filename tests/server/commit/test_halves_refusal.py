"""Why a node takes no half messages: what it knows of them, and what the leader says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from delaywheel.reasons import Reason
from delaywheel_replica.core.protocol.heartbeat import LeaderTerm
from delaywheel_replica.core.protocol.status_files import (
    CleanerStatus,
    KnownPeer,
    Role,
    ServerStatus,
)
from delaywheel_replica.server.commit.halves_refusal import HalvesRefusals
from delaywheel_replica.server.node.node_view import CleanerView
from support.core.values import heartbeat
from support.server.views import node_view

NOW_MS = 1_000_000


def reasons(
    *,
    needs: int = 3,
    objection: str | None = None,
    is_leader: bool = False,
    are_wanted: bool = True,
) -> tuple[Reason | None, ...]:
    """Why node a refuses begins, and commits, while it or node b leads and says this."""
    terms = {"a": LeaderTerm(7, halves_objection=objection) if is_leader else None}
    terms["b"] = None if is_leader else LeaderTerm(7, halves_objection=objection)
    own, other = (replace(heartbeat(node), term=term) for node, term in terms.items())
    status = ServerStatus(own, 1, NOW_MS, peers={"b": KnownPeer(other, NOW_MS - 100)})
    cleaner = CleanerView(CleanerStatus("a", "boot", 1, 0, 0, Role.STANDBY, needs=needs))
    view = node_view(lambda: status, cleaner=cleaner)
    refusals = HalvesRefusals(view, are_wanted=are_wanted)
    begins, commits = refusals.of_begins(), refusals.of_commits()
    assert begins is None or begins.reason is not Reason.HALVES_UNAVAILABLE or begins.detail
    return tuple(None if each is None else each.reason for each in (begins, commits))


@pytest.mark.parametrize("is_leader", [False, True])
def test_where_nobody_can_be_asked_halves_are_committed_and_none_is_begun(
    *, is_leader: bool
) -> None:
    assert reasons(is_leader=is_leader) == (None, None)
    closed = reasons(objection="grant Create", is_leader=is_leader)
    assert closed == (Reason.HALVES_UNAVAILABLE, None)


def test_before_any_leader_has_known_halves_what_it_lacks_is_said_first() -> None:
    assert reasons(needs=2) == (Reason.HALVES_NOT_READY, Reason.HALVES_NOT_READY)
    closed = reasons(needs=2, objection="grant Create")
    assert closed == (Reason.HALVES_UNAVAILABLE, Reason.HALVES_NOT_READY)
    off = reasons(objection="grant Create", are_wanted=False)
    assert off == (Reason.HALVES_OFF, Reason.HALVES_OFF)
