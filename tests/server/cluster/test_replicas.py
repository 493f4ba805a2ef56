"""How much each member holds of each wheel, and its lag, as one node reports it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from delaywheel.identity import WheelId
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.protocol.control import REMOVED, ControlState, NodeRecord, WheelRecord
from delaywheel_replica.core.protocol.frames import FrameSet
from delaywheel_replica.core.protocol.heartbeat import Heartbeat
from delaywheel_replica.core.protocol.status_files import KnownPeer, ServerStatus
from delaywheel_replica.server.cluster.replicas import Lags, replicas_of
from support.core.values import heartbeat, wheel_heartbeat, wheel_record_of
from support.wheels.messages import BASE_SLOT, columns_of, message
from support.wheels.wheels import ACCEPTED_AT_MS, new_wheel

A1, A2 = WheelId("a", 1), WheelId("a", 2)
NOW_MS = 50_000
OWN = heartbeat("a", open_=A1, wheels={A1: wheel_heartbeat(20)})
IN_SYNC, BEHIND, INCOMPLETE, AWAY, GONE = range(1, 6)


def reported(
    other: Heartbeat | None,
    *,
    own: Heartbeat = OWN,
    heard_ago_ms: int = 80,
    record: WheelRecord | None = None,
    control: ControlState | None = None,
    in_sync: str = "a",
) -> pb.Replica:
    """The report of node a, which writes wheel a.1, about b's copy."""
    peers = {} if other is None else {"b": KnownPeer(other, NOW_MS - heard_ago_ms)}
    status = ServerStatus(own, 1, NOW_MS, peers=peers)
    registered = {A1: record or wheel_record_of("a", "b")}
    control = replace(control or ControlState(), wheels=registered)
    rows = replicas_of(control, status, frozenset(in_sync))[A1]
    assert [row.node for row in rows] == ["a", "b"]
    return rows[1]


def of_b(applied: int, **changes: object) -> Heartbeat:
    missing = changes.pop("missing", ())
    made = heartbeat("b", wheels={A1: wheel_heartbeat(applied, missing=missing)})  # type: ignore[arg-type]
    return replace(made, **changes)  # type: ignore[arg-type]


def test_whom_the_wheels_node_waits_for_is_in_sync() -> None:
    row = reported(of_b(18), in_sync="ab")
    assert (row.state, row.held_seq, row.lag_frames) == (IN_SYNC, 18, 2)
    assert row.told_ago_ms == 80
    row = reported(of_b(20), in_sync="ab")
    assert (row.lag_frames, row.lag_ms) == (0, 0)


def test_whom_it_does_not_wait_for_is_behind_though_it_holds_all() -> None:
    assert reported(of_b(18)).state == BEHIND
    assert reported(of_b(20)).state == BEHIND


def test_frames_that_cannot_be_read_or_may_be_lost_are_incomplete() -> None:
    row = reported(of_b(20, missing=(5, 9)))
    assert (row.state, row.held_seq, row.lag_frames) == (INCOMPLETE, 4, 16)
    assert reported(of_b(18, complete=False)).state == INCOMPLETE
    # Frames known to be lost are missing nowhere.
    lost = ControlState(lost=FrameSet.of({(A1, 5), (A1, 9)}))
    assert reported(of_b(20, missing=(5, 9)), control=lost).lag_frames == 0


def test_who_is_not_heard_is_away_and_its_word_old() -> None:
    row = reported(of_b(20), heard_ago_ms=1_000, in_sync="ab")
    assert (row.state, row.held_seq, row.told_ago_ms) == (AWAY, 20, 1_000)
    row = reported(None, in_sync="ab")
    assert row.state == AWAY
    assert row == pb.Replica(node="b", state=pb.REPLICA_STATE_AWAY), "nothing else is known"


def test_another_folder_knows_nothing_of_the_registered_one() -> None:
    row = reported(of_b(20, storage="new"), in_sync="ab")
    assert (row.state, row.HasField("held_seq")) == (AWAY, False)
    for storage in ("new", REMOVED):
        control = ControlState(nodes={"b": NodeRecord(storage, 1)})
        row = reported(of_b(20, storage="new"), control=control)
        assert (row.state, row.HasField("lag_frames")) == (GONE, False)


def test_a_wheel_that_is_not_written_is_held_by_whoever_has_all() -> None:
    later = replace(OWN, open=A2)
    assert reported(of_b(20), own=later).state == IN_SYNC
    assert reported(of_b(19), own=later).state == BEHIND
    # The end is the greatest that any node reported, and of a closed wheel what was committed.
    assert reported(of_b(22), own=later).state == IN_SYNC
    closed = wheel_record_of("a", "b", closed_at=19)
    assert reported(of_b(19, complete=False), own=later, record=closed).state == IN_SYNC
    assert reported(of_b(17), own=later, record=closed).lag_frames == 2


def test_an_open_wheel_of_which_no_set_is_known_yet() -> None:
    assert reported(of_b(20), in_sync="").state == IN_SYNC
    assert reported(of_b(19), in_sync="").state == BEHIND


def replica(held: int, lag: int) -> pb.Replica:
    return pb.Replica(node="b", held_seq=held, lag_frames=lag)


@pytest.mark.parametrize(
    ("held", "lag", "floor", "lag_ms"),
    [
        (1, 3, 0, 4_000),
        (0, 4, 0, 5_000),
        (0, 4, BASE_SLOT + 2, 3_000),  # the first two are finished
        (1, 3, BASE_SLOT + 10, 0),
        (4, 3, 0, None),  # not here
        (4, 0, 0, None),  # was reported before, without a look
    ],
)
def test_the_lag_is_the_age_of_the_oldest_frame_that_is_missing(
    tmp_path: Path, held: int, lag: int, floor: int, lag_ms: int | None
) -> None:
    disk = PosixDisk()
    wheel = new_wheel(disk, tmp_path)
    for number in range(4):
        columns = columns_of([message(number, slot=BASE_SLOT + number)])
        wheel.append(columns, accepted_at_ms=ACCEPTED_AT_MS + number * 1_000)
    row = replica(held, lag)
    Lags(disk, tmp_path, wall_ms=lambda: ACCEPTED_AT_MS + 5_000).add_lags(wheel.wheel, [row], floor)
    assert (row.lag_ms if row.HasField("lag_ms") else None) == lag_ms


def test_the_lag_of_what_cannot_be_read_is_not_reported(tmp_path: Path) -> None:
    disk = PosixDisk()
    wheel = new_wheel(disk, tmp_path)
    for number in range(2):
        columns = columns_of([message(number, slot=BASE_SLOT + number)])
        wheel.append(columns, accepted_at_ms=ACCEPTED_AT_MS)
    next(tmp_path.rglob(f"{BASE_SLOT}.slot")).unlink()
    rows = [replica(0, 2), replica(1, 1)]
    Lags(disk, tmp_path, wall_ms=lambda: ACCEPTED_AT_MS + 9).add_lags(wheel.wheel, rows, 0)
    assert not rows[0].HasField("lag_ms")
    assert rows[1].lag_ms == 9
    gone = replica(0, 2)
    Lags(disk, tmp_path, wall_ms=lambda: 0).add_lags(WheelId("node-1", 9), [gone], 0)
    assert not gone.HasField("lag_ms")
