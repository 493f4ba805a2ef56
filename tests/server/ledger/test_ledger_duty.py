"""Which wheels a node publishes, and how far: the table of ledger_duty.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from delaywheel.identity import WheelId
from delaywheel.seqset import SeqSet
from delaywheel_replica.core.protocol.control import REMOVED, NodeRecord, WheelRecord
from delaywheel_replica.core.protocol.frames import FrameSet
from delaywheel_replica.core.protocol.heartbeat import Heard, Heartbeat, WheelHeartbeat
from delaywheel_replica.core.protocol.status_files import (
    CleanerStatus,
    KnownPeer,
    Role,
    ServerStatus,
)
from delaywheel_replica.server.ledger.assignment import (
    LOST_MS,
    Publishable,
    publishable,
    registered,
)

OPEN, LEFT, CLOSED, ENDED, SPARE = (WheelId("n1", number) for number in (5, 2, 3, 4, 6))
THEIRS, THEIR_OPEN = WheelId("n2", 1), WheelId("n2", 2)
MEMBERS = {"n1": "s1", "n2": "s2", "n3": "s3"}
NOW_MS = 10_000_000


def held(applied: int, high_watermark: int, *missing: int, ledger: int = 0) -> WheelHeartbeat:
    return WheelHeartbeat(applied, high_watermark, 0, 0, ledger, 0, SeqSet.of(missing))


def heartbeat_of(node: str, storage: str | None = None, **wheels: WheelHeartbeat) -> Heartbeat:
    named = {WheelId.parse(name.replace("_", ".")): reported for name, reported in wheels.items()}
    storage = storage or f"s{node[1:]}"
    return Heartbeat(
        node, storage, "b", 0, None, None, 6, draining=False, complete=True, wheels=named
    )


def status_of(own: Heartbeat, *peers: Heartbeat, heard_ago_ms: int = 0) -> ServerStatus:
    known_peers = {
        heartbeat.node: KnownPeer(heartbeat, NOW_MS - heard_ago_ms) for heartbeat in peers
    }
    return ServerStatus(own, 1, NOW_MS, peers=known_peers)


def cleaner_of(records: dict[WheelId, int | None], **changes: object) -> CleanerStatus:
    wheels = {wheel: WheelRecord(MEMBERS, 2, 70, end) for wheel, end in records.items()}
    nodes = {node: NodeRecord(storage, 9) for node, storage in MEMBERS.items()}
    made = CleanerStatus("n1", "b", 1, 0, 0, Role.LEADING, wheels=wheels, nodes=nodes)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_own_wheels_are_published_as_far_as_they_are_acknowledged_or_closed() -> None:
    heartbeat = replace(
        heartbeat_of("n1"),
        open=OPEN,
        spare=SPARE,
        wheels={
            OPEN: held(9, 7, ledger=3),
            LEFT: held(9, 8),
            CLOSED: held(9, 2, 6),
            ENDED: held(4, 0),
            SPARE: held(0, 0),
            THEIRS: held(9, 9),
        },
    )
    lost = FrameSet.of({(ENDED, 5), (ENDED, 6)})
    cleaner = cleaner_of({CLOSED: 9, ENDED: 6, LEFT: None}, lost=lost)
    status = ServerStatus(heartbeat, 1, 0)
    found = publishable(status, cleaner, leads=False, heard_for_ms=0)
    assert found == {
        OPEN: Publishable(7, reported_seq=3),
        LEFT: Publishable(8, born_ms=70_000),
        # What is missing may still come; what is lost does not.
        CLOSED: Publishable(5, born_ms=70_000, is_sole=False),
        ENDED: Publishable(6, born_ms=70_000, is_sole=False, is_whole=True, lost=lost),
    }
    found = publishable(status, None, leads=False, heard_for_ms=0)
    assert {wheel: each.last_seq for wheel, each in found.items()} == {
        OPEN: 7,
        LEFT: 8,
        CLOSED: 2,
        ENDED: 0,
    }


LEADER = heartbeat_of("n1", n2_1=held(9, 4, ledger=4), n2_2=held(3, 3))
ENDS = {THEIRS: 9, THEIR_OPEN: None}
MINE = {THEIRS: Publishable(9, reported_seq=4, born_ms=70_000, is_sole=False, is_whole=True)}


@pytest.mark.parametrize(
    ("status", "heard_for_ms", "is_lost"),
    [
        (status_of(LEADER, heartbeat_of("n2")), LOST_MS, False),
        (status_of(LEADER, heartbeat_of("n2"), heard_ago_ms=LOST_MS - 1), 2 * LOST_MS, False),
        (status_of(LEADER, heartbeat_of("n2"), heard_ago_ms=LOST_MS), 2 * LOST_MS, True),
        # Never heard: the server may have started just now.
        (status_of(LEADER), LOST_MS - 1, False),
        (status_of(LEADER), LOST_MS, True),
        # It runs on another folder: the wheel's is gone, or elsewhere.
        (status_of(LEADER, heartbeat_of("n2", "other")), 0, True),
        # One link is down, and another node hears it.
        (
            status_of(LEADER, replace(heartbeat_of("n3"), heard={"n2": Heard("b", 100)})),
            LOST_MS,
            False,
        ),
        # What others heard long ago proves nothing about what this node could hear itself.
        (
            status_of(LEADER, replace(heartbeat_of("n3"), heard={"n2": Heard("b", 2 * LOST_MS)})),
            LOST_MS - 1,
            False,
        ),
        (
            status_of(LEADER, replace(heartbeat_of("n3"), heard={"n2": Heard("b", 2 * LOST_MS)})),
            LOST_MS,
            True,
        ),
    ],
)
def test_the_leaders_node_publishes_for_a_lost_one(
    status: ServerStatus, heard_for_ms: int, *, is_lost: bool
) -> None:
    expected = MINE if is_lost else {}
    cleaner = cleaner_of(ENDS)
    assert publishable(status, cleaner, leads=True, heard_for_ms=heard_for_ms) == expected
    assert publishable(status, cleaner, leads=False, heard_for_ms=heard_for_ms) == {}
    assert publishable(status, cleaner_of({}), leads=True, heard_for_ms=heard_for_ms) == {}


@pytest.mark.parametrize("storage", ["another", REMOVED])
def test_of_a_node_that_never_comes_back_nothing_is_waited_for(storage: str) -> None:
    cleaner = cleaner_of(ENDS)
    cleaner = replace(cleaner, nodes={**cleaner.nodes, "n2": NodeRecord(storage, 9)})
    status = status_of(LEADER, heartbeat_of("n2"))
    assert publishable(status, cleaner, leads=True, heard_for_ms=0) == MINE


def test_what_is_registered_is_known_only_of_one_who_has_read_it() -> None:
    assert registered(None) is None
    assert registered(cleaner_of(ENDS)) is None
    assert set(registered(cleaner_of(ENDS, control_offset=3)) or ()) == {THEIRS, THEIR_OPEN}


def test_a_node_on_a_new_folder_publishes_its_earlier_wheels_only_if_it_leads() -> None:
    """It has copied them; the leader publishes them for the folder that is gone."""
    own = WheelId("n1", 1)
    status = status_of(heartbeat_of("n1", "new", n1_1=held(9, 9)))
    nodes = {**{n: NodeRecord(s, 9) for n, s in MEMBERS.items()}, "n1": NodeRecord("new", 9)}
    cleaner = cleaner_of({own: 9}, nodes=nodes)
    assert publishable(status, cleaner, leads=False, heard_for_ms=0) == {}
    assert set(publishable(status, cleaner, leads=True, heard_for_ms=0)) == {own}
