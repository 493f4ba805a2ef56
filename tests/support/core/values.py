"""Hypothesis strategies and short makers for the values of the core."""

from collections.abc import Collection, Iterable, Mapping
from typing import cast

from hypothesis import strategies as st

from delaywheel.identity import WheelId
from delaywheel.seqset import SeqSet
from delaywheel_replica.core.protocol.control import Leader, NodeRecord, WheelRecord
from delaywheel_replica.core.protocol.frames import FrameName, FrameRange, FrameSet
from delaywheel_replica.core.protocol.heartbeat import (
    Fence,
    Heard,
    Heartbeat,
    LeaderTerm,
    Promise,
    WheelHeartbeat,
)
from delaywheel_replica.core.protocol.histogram import Histogram
from delaywheel_replica.core.protocol.messages import PrevoteRequest
from delaywheel_replica.core.protocol.progress import Position, Progress, Reached
from delaywheel_replica.core.protocol.status_files import (
    CleanerStatus,
    FloorWait,
    KnownPeer,
    Role,
    ServerStatus,
    Standstill,
    UnavailableTopic,
)

NODES = ("a", "b", "c", "d", "e")

node_ids = st.sampled_from(NODES)
wheel_ids = st.builds(WheelId, node_ids, st.integers(1, 5))
seqs = st.integers(0, 2**40)
times_ms = st.integers(0, 2**43)
slots = st.integers(-200, 2**33)
positions = st.builds(Position, wheel_ids, st.integers(1, 9), st.integers(0, 9))
_never_set_back = st.builds(
    Progress,
    due_ms=times_ms,
    position=st.none() | positions,
    seqs=st.dictionaries(wheel_ids, seqs, max_size=4),
    floor=slots,
)
progresses = st.one_of(
    _never_set_back,
    _never_set_back.map(lambda progress: cast("Progress", progress.set_back(-1))),
)
wheel_beats = st.builds(
    WheelHeartbeat,
    applied=st.integers(99, 2**40),
    high_watermark=seqs,
    seal_slot=slots,
    seal_seq=seqs,
    ledger_seq=seqs,
    top_slot=st.integers(-1, 2**32 - 1),
    missing=st.sets(st.integers(1, 99), max_size=9).map(SeqSet.of),
)
fences = st.builds(Fence, node_ids, st.integers(1, 9))
terms = st.builds(
    LeaderTerm,
    epoch=seqs,
    fences=st.lists(fences, max_size=2).map(tuple),
    limits=st.dictionaries(wheel_ids, seqs, max_size=2),
    halves_objection=st.none() | st.text(min_size=1, max_size=8),
)
heard = st.builds(Heard, st.text(max_size=8), times_ms, st.text(max_size=8), seqs)
heartbeats = st.builds(
    Heartbeat,
    node=node_ids,
    storage=st.text(max_size=8),
    boot=st.text(max_size=8),
    wall_ms=times_ms,
    open=st.none() | wheel_ids,
    spare=st.none() | wheel_ids,
    last_number=st.integers(0, 9),
    draining=st.booleans(),
    complete=st.booleans(),
    wheels=st.dictionaries(wheel_ids, wheel_beats, max_size=3),
    start=st.integers(0, 9),
    count=seqs,
    floor=st.none() | slots,
    reached=st.none() | st.builds(Reached, st.integers(0, 9), times_ms, st.none() | positions),
    stands=st.booleans(),
    term=st.none() | terms,
    heard=st.dictionaries(node_ids, heard, max_size=2),
    disk_out=st.booleans(),
    control_version=st.integers(1, 9),
)
answers = st.builds(
    Promise,
    node=node_ids,
    storage=st.text(max_size=8),
    fence=fences,
    applied=st.dictionaries(wheel_ids, seqs, max_size=2),
    incomplete=st.frozensets(wheel_ids, max_size=2),
    all_incomplete=st.booleans(),
)
frame_sets = st.lists(
    st.builds(
        lambda wheel, first, more: FrameRange(wheel, first, first + more),
        wheel_ids,
        st.integers(1, 99),
        st.integers(0, 2**40),
    ),
    max_size=3,
).map(FrameSet)
server_statuses = st.builds(
    ServerStatus,
    heartbeat=heartbeats,
    pid=st.integers(1, 99),
    monotonic_ms=times_ms,
    peers=st.dictionaries(
        node_ids, st.builds(KnownPeer, heartbeats, st.none() | times_ms), max_size=2
    ),
    leader_heard_ms=st.none() | times_ms,
    answers=st.lists(answers, max_size=2).map(tuple),
    votes=st.frozensets(node_ids, max_size=2),
    vote_round=st.integers(0, 9),
    looked_for=frame_sets,
    lacks=st.dictionaries(node_ids, frame_sets, max_size=2),
    implausible_heartbeats=seqs,
)
wheel_records = st.dictionaries(node_ids, st.text(max_size=4), min_size=1).flatmap(
    lambda members: st.builds(
        WheelRecord,
        members=st.just(members),
        min_insync=st.integers(1, len(members)),
        seal_slot=slots,
        closed_at=st.none() | seqs,
        limit=seqs,
    )
)
histograms = st.lists(st.integers(0, 9), max_size=3, unique=True).flatmap(
    lambda bounds: st.builds(
        Histogram,
        bounds_us=st.just(tuple(sorted(bounds))),
        counts=st.lists(seqs, min_size=len(bounds) + 1, max_size=len(bounds) + 1).map(tuple),
        sum_us=seqs,
    )
)
cleaner_statuses = st.builds(
    CleanerStatus,
    node=node_ids,
    boot=st.text(max_size=8),
    pid=st.integers(1, 99),
    monotonic_ms=times_ms,
    wall_ms=times_ms,
    role=st.sampled_from(Role),
    epoch=st.none() | seqs,
    leader=st.none() | st.builds(Leader, node_ids, seqs),
    progress=st.none() | progresses,
    control_offset=st.integers(-1, 99),
    wheels=st.dictionaries(wheel_ids, wheel_records, max_size=3),
    nodes=st.dictionaries(
        node_ids, st.builds(NodeRecord, st.text(max_size=8), st.integers(0, 9)), max_size=3
    ),
    lateness_ms=st.integers(0, 99),
    kafka_error=st.none() | st.text(max_size=8),
    kafka_warnings=st.lists(st.text(max_size=8), max_size=2).map(tuple),
    halves_objection=st.none() | st.text(max_size=8),
    started_ms=times_ms,
    counters=st.dictionaries(st.text(max_size=8), seqs, max_size=3),
    forwarded_by_topic=st.dictionaries(st.text(max_size=8), seqs, max_size=3),
    dead_by_topic=st.dictionaries(st.text(max_size=8), seqs, max_size=3),
    dead_by_reason=st.dictionaries(st.text(max_size=8), seqs, max_size=3),
    lateness=st.none() | histograms,
    commit_times=st.none() | histograms,
    unavailable=st.lists(
        st.builds(
            UnavailableTopic,
            st.text(max_size=8),
            st.lists(st.integers(0, 9), max_size=2).map(tuple),
            times_ms,
            st.text(max_size=8),
            seqs,
        ),
        max_size=3,
    ).map(tuple),
    fences=st.lists(fences, max_size=2).map(tuple),
    limits=st.dictionaries(wheel_ids, seqs, max_size=2),
    prevote_request=st.none() | st.builds(PrevoteRequest, st.integers(1, 9), times_ms),
    stands=st.booleans(),
    unreadable=frame_sets,
    lost=frame_sets,
    standstill=st.none() | st.builds(Standstill, st.integers(1, 2**40), st.text(max_size=8)),
    floor_wait=st.none()
    | st.builds(
        FloorWait, st.integers(1, 99), st.lists(st.text(max_size=8), max_size=2).map(tuple)
    ),
)


def heartbeat(
    node: str = "a",
    *,
    open_: WheelId | None = None,
    spare: WheelId | None = None,
    last_number: int | None = None,
    draining: bool = False,
    storage: str | None = None,
    wheels: dict[WheelId, WheelHeartbeat] | None = None,
    wall_ms: int = 0,
    heard: dict[str, int] | None = None,
) -> Heartbeat:
    """A heartbeat of a node whose storage is named after it; `heard` says how long ago."""
    named = [wheel.number for wheel in (open_, spare) if wheel is not None]
    return Heartbeat(
        node=node,
        storage=f"disk-{node}" if storage is None else storage,
        boot="boot",
        wall_ms=wall_ms,
        open=open_,
        spare=spare,
        last_number=max(named, default=0) if last_number is None else last_number,
        draining=draining,
        complete=True,
        wheels=wheels or {},
        heard={peer: Heard("boot", ago_ms) for peer, ago_ms in (heard or {}).items()},
    )


def wheel_heartbeat(
    applied: int = 0,
    *,
    seal: tuple[int, int] = (0, 0),
    ledger_seq: int | None = None,
    top_slot: int = -1,
    missing: Iterable[int] = (),
    high_watermark: int | None = None,
) -> WheelHeartbeat:
    """The seq up to which a wheel is held; published and acknowledged up to it by default."""
    return WheelHeartbeat(
        applied=applied,
        high_watermark=applied if high_watermark is None else high_watermark,
        seal_slot=seal[0],
        seal_seq=seal[1],
        ledger_seq=applied if ledger_seq is None else ledger_seq,
        top_slot=top_slot,
        missing=missing if isinstance(missing, SeqSet) else SeqSet.of(missing),
    )


def wheel_record_of(
    *nodes: str,
    min_insync: int = 1,
    seal_slot: int = 0,
    closed_at: int | None = None,
    limit: int = 0,
) -> WheelRecord:
    """A registered wheel whose members' storages are named after them."""
    return WheelRecord(
        members={node: f"disk-{node}" for node in nodes or ("a",)},
        min_insync=min_insync,
        seal_slot=seal_slot,
        closed_at=closed_at,
        limit=limit,
    )


def looked_for(lacks: Mapping[FrameName, Collection[str]]) -> tuple[FrameSet, dict[str, FrameSet]]:
    """Wanted frames and, by member, those that it is missing, as rows report them.

    Args:
        lacks: frame -> the members that do not have it.
    """
    members = sorted({node for nodes in lacks.values() for node in nodes})
    by_member = {
        node: FrameSet.of(frame for frame, nodes in lacks.items() if node in nodes)
        for node in members
    }
    return FrameSet.of(lacks), by_member


def missing_members(status: ServerStatus) -> dict[FrameName, str]:
    """For each frame that is searched for, the members that do not have it."""
    return {
        frame: "".join(node for node, frames in status.lacks.items() if frame in frames)
        for frame in status.looked_for
    }
