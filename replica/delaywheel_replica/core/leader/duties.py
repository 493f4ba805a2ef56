"""The duties of a leader: what it commits beside messages in its next transaction.

`duties` examines what is committed, the progress that the transaction will reach, and the nodes'
reports, and returns the control records that go with the transaction, in the order that
docs/PROTOCOL.md, "Duties", gives.

Each step sees what the steps before it have changed. A wheel registered in this very transaction
must not hold back its floor, and its first seal is the floor that the transaction commits. The
progress record itself goes last. What only the nodes can do is returned beside the records: fences,
limits and frames to be searched for.
"""

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from delaywheel.identity import WheelId
from delaywheel_replica.core.ingress.partition import unread_bound
from delaywheel_replica.core.leader.closing import (
    Close,
    Closing,
    HoldersWanted,
    closing,
    committed_limits,
    fences_wanted,
    is_registered,
    limits_wanted,
    wheels_to_close,
)
from delaywheel_replica.core.leader.failure_detector import SILENT_MS
from delaywheel_replica.core.leader.floor import (
    FloorView,
    FloorWatch,
    floor_after,
    floor_wait,
    published_seqs,
    reported_seals,
    watch_seals,
    wholly_below,
)
from delaywheel_replica.core.leader.halves import KNOWN_SINCE, are_known, nodes_behind
from delaywheel_replica.core.leader.lost_frames import Sought, frames_lost, frames_missing
from delaywheel_replica.core.leader.registration import RegistrationRefusal, register
from delaywheel_replica.core.leader.rescheduling import (
    Rescheduling,
    floor_below,
    reschedule_records,
)
from delaywheel_replica.core.protocol.control import (
    REMOVED,
    ControlRecord,
    ControlState,
    IngressPartition,
    IngressRecord,
    NodeRecord,
    ingress_record,
    lost_records,
    needs_record,
    node_record,
    progress_record,
    unregister_records,
    wheel_record,
)
from delaywheel_replica.core.protocol.frames import NO_FRAMES, FrameSet
from delaywheel_replica.core.protocol.heartbeat import Fence, Heartbeat, Promise
from delaywheel_replica.core.protocol.progress import Progress, SetBackRefusal, first_progress
from delaywheel_replica.core.protocol.status_files import FloorWait


@dataclass(frozen=True, slots=True)
class Cluster:
    """How the cluster is configured.

    Attributes:
        nodes: All nodes: the members of every new wheel.
        min_insync: W of new wheels.
        late_window_s: How long after its due a slot still accepts frames.
        floor_patience_s: A floor that is further behind is reported, once the leader has led for as
            long.
        halves: Half messages are wanted: no release that does not know them is to lead.
    """

    nodes: tuple[str, ...]
    min_insync: int
    late_window_s: int
    floor_patience_s: int = 300
    halves: bool = False


@dataclass(frozen=True, slots=True)
class Situation:
    """What a leader knows besides the control topic.

    Attributes:
        now_ms: Its wall clock.
        node: Its own id.
        heartbeats: The newest of each node, its own included.
        answers: The newest fence answer of each member for each origin.
        looked_for: Frames that were searched for.
        lacks: Member -> those of them that it does not have.
        silent: Nodes that are heard by too few.
        in_term_ms: For how long it has led: silence counts only after it could have heard.
        replacements: Node -> its new storage, as requested by the operator; `REMOVED`: none.
        set_back_from: The operator requests that w is set back to the clock, if it was set back
            this often so far; None: no request.
        ingress: How far each partition comes with the transaction, if it settles or announces
            something of that partition.
        ingress_slot: A slot that the floor must not pass because of announced records; None:
            announced records, if there are any, are not read.
        halves_objection: Why no group can be asked about half messages; None: it can.
        hears_answers: The ingress topic is read, by which groups answer about them.
    """

    now_ms: int
    node: str
    heartbeats: Mapping[str, Heartbeat]
    answers: Collection[Promise] = ()
    looked_for: FrameSet = NO_FRAMES
    lacks: Mapping[str, FrameSet] = field(default_factory=dict)
    silent: AbstractSet[str] = frozenset()
    in_term_ms: int = 0
    replacements: Mapping[str, str] = field(default_factory=dict)
    set_back_from: int | None = None
    ingress: Mapping[IngressPartition, IngressRecord] = field(default_factory=dict)
    ingress_slot: int | None = None
    rescheduling: Rescheduling = field(default_factory=Rescheduling)
    halves_objection: str | None = None
    hears_answers: bool = False


@dataclass(frozen=True, slots=True)
class Duties:
    """What the next transaction carries, and which frames to request meanwhile.

    Attributes:
        records: To be produced before the progress record.
        progress: What to commit, last.
        watch: The `watch` of the next call.
        fences: To request from every member now.
        limits: Wheel -> up to where members may fetch what they have fenced, as committed before.
        missing: Frames that must exist and that no member shows: to be searched for.
        lost: The frames that the transaction gives up.
        closed: The wheels that the transaction closes, with their final seqs.
        refused: Nodes that want a wheel and get none.
        floor_wait: Set if the floor is far behind.
    """

    records: list[ControlRecord]
    progress: Progress
    watch: FloorWatch
    fences: list[Fence] = field(default_factory=list)
    limits: Mapping[WheelId, int] = field(default_factory=dict)
    missing: FrameSet = NO_FRAMES
    lost: FrameSet = NO_FRAMES
    closed: Mapping[WheelId, int] = field(default_factory=dict)
    unregistered: frozenset[WheelId] = frozenset()
    refused: Mapping[str, RegistrationRefusal] = field(default_factory=dict)
    floor_wait: FloorWait | None = None

    @property
    def all_records(self) -> list[ControlRecord]:
        """Returns the control records of the transaction in order, the progress record last."""
        return [*self.records, progress_record(self.progress)]


def duties(
    state: ControlState,
    progress: Progress | None,
    watch: FloorWatch,
    cluster: Cluster,
    situation: Situation,
) -> Duties:
    """Returns what accompanies a transaction that moves the committed progress to `progress`.

    Args:
        progress: What is done after the transaction; its floor is ignored. For an idle
            commit, the committed one.
        watch: That of the previous call; a new leader's is empty.
    """
    progress = _set_back(_begun(state, progress, cluster, situation), state, situation)
    records = _replaced(state, situation)
    endings = _endings(state.apply_all(records), progress, situation)
    records += endings.records
    after = state.apply_all(records)
    unregistered = _unregistered(state, after, progress, situation)
    for wheel in sorted(unregistered):
        records += unregister_records(after, wheel)
    progress = progress.without(unregistered)
    records += [ingress_record(*each) for each in sorted(situation.ingress.items())]
    records += _halves_records(state.apply_all(records), cluster, situation)
    # Once a wheel is unregistered, no record shows what of it was lost.
    known = replace(state, lost=state.lost | endings.lost)
    records += reschedule_records(known, progress, situation.rescheduling, situation.now_ms)
    after = state.apply_all(records)

    view = FloorView(
        progress=progress,
        wheels=after.wheels,
        reported=reported_seals(situation.heartbeats.values()),
        published=published_seqs(situation.heartbeats.values()),
        lost=after.lost,
        ingress_slot=unread_bound(after.ingress.values())
        if situation.ingress_slot is None
        else situation.ingress_slot,
    )
    watch = watch_seals(watch, view)
    floor = floor_below(after, floor_after(view, watch, late_window_s=cluster.late_window_s))
    floor = max(floor, progress.floor)
    registrations, refused = _registered(after, floor, cluster, situation)
    return Duties(
        records=records + registrations,
        progress=replace(progress, floor=floor),
        watch=watch,
        fences=fences_wanted(endings.closings),
        limits=committed_limits(state),
        missing=frames_missing(after, endings.ends, situation.heartbeats),
        lost=endings.lost,
        closed=endings.closed,
        unregistered=unregistered,
        refused=refused,
        floor_wait=_floor_wait(view, watch, floor, cluster, situation),
    )


def _floor_wait(
    view: FloorView, watch: FloorWatch, floor: int, cluster: Cluster, situation: Situation
) -> FloorWait | None:
    """Returns what the floor waits for if that takes long, and did not begin before this term."""
    patience_s = cluster.floor_patience_s
    if situation.in_term_ms < patience_s * 1000:
        return None
    return floor_wait(
        view, watch, floor, late_window_s=cluster.late_window_s, patience_s=patience_s
    )


def _halves_records(
    after: ControlState, cluster: Cluster, situation: Situation
) -> list[ControlRecord]:
    """Returns the record that bars releases from leading that do not know half messages.

    Not where all of these are refused: nothing is gained by closing the way back. And not before
    the ingress topic is read: what groups answer comes through it, and a leader that reads it has
    told checkers that it wants to know.
    """
    if not cluster.halves or situation.halves_objection is not None:
        return []
    if not situation.hears_answers:
        return []
    if are_known(after.needs):
        return []
    behind = nodes_behind(after, situation.heartbeats)
    unheard = set(cluster.nodes) - situation.heartbeats.keys()
    return [] if behind or unheard else [needs_record(KNOWN_SINCE)]


def _begun(
    state: ControlState, progress: Progress | None, cluster: Cluster, situation: Situation
) -> Progress:
    """Returns the next progress with the committed floor; for an empty cluster, the first one."""
    if progress is None:
        return first_progress(situation.now_ms, cluster.late_window_s)
    return progress if state.progress is None else replace(progress, floor=state.progress.floor)


def _set_back(progress: Progress, state: ControlState, situation: Situation) -> Progress:
    """Sets w back, never together with messages: they would be sent and not count as done."""
    if progress != state.progress or progress.set_backs != situation.set_back_from:
        return progress
    after = progress.set_back(situation.now_ms)
    return progress if isinstance(after, SetBackRefusal) else after


def _replaced(state: ControlState, situation: Situation) -> list[ControlRecord]:
    """Replaces a storage. Wheel numbers continue: a name the old storage used is never reused.

    A node never takes itself out: it might be the last one able to take the operator's next word.
    """
    return [
        node_record(node, state.nodes[node].on(storage))
        for node, storage in sorted(situation.replacements.items())
        if node in state.nodes
        and state.nodes[node].storage != storage
        and (storage, node) != (REMOVED, situation.node)
    ]


@dataclass(frozen=True, slots=True)
class _Endings:
    records: list[ControlRecord]
    closings: Mapping[WheelId, Closing]
    ends: Mapping[WheelId, int]
    lost: FrameSet
    closed: Mapping[WheelId, int]


def _endings(state: ControlState, progress: Progress, situation: Situation) -> _Endings:
    """Returns the ends of wheels without lost frames, which no longer hold anything up."""
    closings = _closings(state, progress, situation)
    ends = _ends(state, progress, closings)
    lost = _lost(state, ends, situation)
    records = lost_records(state, lost)
    if lost:
        closings = _closings(state.apply_all(records), progress, situation)
    closed = {w: result.final_seq for w, result in closings.items() if isinstance(result, Close)}
    records += [
        wheel_record(wheel, replace(state.wheels[wheel], closed_at=final_seq))
        for wheel, final_seq in closed.items()
    ]
    records += [wheel_record(*limited) for limited in limits_wanted(state, closings).items()]
    return _Endings(records, closings, ends, lost, closed)


def _closings(
    state: ControlState, progress: Progress, situation: Situation
) -> dict[WheelId, Closing]:
    silent = situation.silent if situation.in_term_ms >= SILENT_MS else frozenset()
    return {
        wheel: closing(
            wheel, state, situation.answers, situation.heartbeats, taken=progress.seq(wheel)
        )
        for wheel in wheels_to_close(state, situation.heartbeats, silent)
    }


def _ends(
    state: ControlState, progress: Progress, closings: Mapping[WheelId, Closing]
) -> dict[WheelId, int]:
    """Returns the seq up to which each wheel's frames must be held."""
    ends: dict[WheelId, int] = {}
    for wheel, record in state.wheels.items():
        result = closings.get(wheel)
        found = result.final_seq if isinstance(result, HoldersWanted | Close) else 0
        ends[wheel] = max(progress.seq(wheel), found, record.closed_at or 0)
    return ends


def _lost(state: ControlState, ends: Mapping[WheelId, int], situation: Situation) -> FrameSet:
    if not situation.looked_for:
        return NO_FRAMES
    sought = Sought(
        situation.node,
        situation.heartbeats,
        situation.answers,
        situation.looked_for,
        situation.lacks,
    )
    return frames_lost(state, ends, sought)


def _unregistered(
    state: ControlState, after: ControlState, progress: Progress, situation: Situation
) -> frozenset[WheelId]:
    """Returns closed wheels that are done; none while one millisecond is split over transactions.

    Wheels closed in this very transaction are left out: their members must learn of it first.
    """
    if progress.position is not None:
        return frozenset()
    return frozenset(
        wheel
        for wheel, record in state.wheels.items()
        if record.closed_at is not None
        and progress.seq(wheel) >= record.closed_at
        and wholly_below(wheel, after, progress.floor, situation.heartbeats)
    )


def _registered(
    state: ControlState, floor: int, cluster: Cluster, situation: Situation
) -> tuple[list[ControlRecord], dict[str, RegistrationRefusal]]:
    records: list[ControlRecord] = []
    refused: dict[str, RegistrationRefusal] = {}
    members = _members(state, cluster, situation)
    if members is None:
        return records, refused
    after = state
    for node, heartbeat in sorted(situation.heartbeats.items()):
        if node not in members or node in situation.silent:
            continue
        if not _wants_wheel(state, heartbeat, members, cluster):
            continue
        answer = register(
            after,
            node,
            heartbeat.storage,
            heartbeat.last_number,
            saves=heartbeat.saves,
            members=members,
            min_insync=cluster.min_insync,
            floor=floor,
        )
        if isinstance(answer, RegistrationRefusal):
            refused[node] = answer
        else:
            records += answer.records
            after = after.apply_all(answer.records)
    records += [
        node_record(node, NodeRecord(storage, 0))
        for node, storage in sorted(members.items())
        if node not in after.nodes
    ]
    return records, refused


def _wants_wheel(
    state: ControlState, heartbeat: Heartbeat, members: Mapping[str, str], cluster: Cluster
) -> bool:
    """Whether a node needs a spare: it has none, or its spare has outdated members."""
    if heartbeat.draining:
        return False
    if heartbeat.spare is None or not is_registered(state, heartbeat):
        return True
    spare = state.wheels.get(heartbeat.spare)
    return spare is not None and (spare.members, spare.min_insync) != (members, cluster.min_insync)


def _members(state: ControlState, cluster: Cluster, situation: Situation) -> dict[str, str] | None:
    """Returns every node with its storage; None until each node has been heard once."""
    members: dict[str, str] = {}
    for node in cluster.nodes:
        if node in state.nodes:
            members[node] = state.nodes[node].storage
        elif node in situation.heartbeats:
            members[node] = situation.heartbeats[node].storage
        else:
            return None
    return members
