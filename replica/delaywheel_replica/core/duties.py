"""What a leader puts beside the messages in its next transaction.

`duties` looks at what is committed, at the progress that the transaction will reach and at the
beats, and says which control records go with it, in this order:

1. the first progress of an empty cluster;
2. frames that nobody can read are recorded as lost;
3. wheels that nobody writes any more are closed, where enough members answered;
4. closed wheels wholly below the floor are unregistered;
5. the floor moves;
6. nodes without a spare get one, sealed at that floor.

The order matters: a wheel registered in this very transaction must not hold back its floor, and
its first seal is the floor that the transaction commits. The progress record itself goes last.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from delaywheel.identity import WheelId
from delaywheel_replica.core.beat import Beat
from delaywheel_replica.core.closing import (
    Close,
    Fence,
    FenceAnswer,
    closing,
    fences_wanted,
    wheels_to_close,
)
from delaywheel_replica.core.control import (
    ControlRecord,
    ControlState,
    NodeRecord,
    lost_record,
    progress_record,
    unregister_records,
    wheel_record,
)
from delaywheel_replica.core.floor import (
    FloorView,
    FloorWatch,
    floor_after,
    ledger_told,
    seals_told,
    watch_seals,
    wholly_below,
)
from delaywheel_replica.core.progress import Progress, first_progress
from delaywheel_replica.core.registration import Refusal, register


class ControlIncompleteError(Exception):
    """The control topic lacks what was committed to it: part of it is gone, or all."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """How the cluster is configured.

    Attributes:
        nodes: the ids of all nodes: the members of every new wheel.
        min_insync: W of new wheels.
        late_window_s: how long after its due a slot still takes frames.
    """

    nodes: tuple[str, ...]
    min_insync: int
    late_window_s: int


@dataclass(frozen=True, slots=True)
class Situation:
    """What a leader knows besides the control topic.

    Attributes:
        now_ms: its wall clock.
        beats: the newest beat of each node, its own included.
        answers: the newest fence answer of each member for each origin.
        lost: frames that the transaction skips because no member can read them.
    """

    now_ms: int
    beats: Mapping[str, Beat]
    answers: Collection[FenceAnswer] = ()
    lost: Collection[tuple[WheelId, int]] = ()


@dataclass(frozen=True, slots=True)
class Duties:
    """What the next transaction carries, and what to ask for meanwhile.

    Attributes:
        records: control records, to be produced before the progress record.
        progress: what to commit, last.
        watch: to be given to the next call.
        fences: to be asked of every member now.
        closed: the wheels that the transaction closes, with their final seqs.
        unregistered: the wheels that the transaction removes.
        refused: nodes that want a wheel and get none.
    """

    records: list[ControlRecord]
    progress: Progress
    watch: FloorWatch
    fences: list[Fence] = field(default_factory=list)
    closed: Mapping[WheelId, int] = field(default_factory=dict)
    unregistered: frozenset[WheelId] = frozenset()
    refused: Mapping[str, Refusal] = field(default_factory=dict)

    @property
    def all_records(self) -> list[ControlRecord]:
        """The control records of the transaction in order, the progress record last."""
        return [*self.records, progress_record(self.progress)]


def duties(
    state: ControlState,
    progress: Progress | None,
    watch: FloorWatch,
    cluster: Cluster,
    situation: Situation,
) -> Duties:
    """What goes with a transaction that moves the committed progress on to `progress`.

    Args:
        state: what is committed.
        progress: what is done once the transaction is; its floor is not looked at. For an idle
            commit, the committed one.
        watch: from the call before; a new leader's is empty.
        cluster: how it is configured.
        situation: what else is known.

    Raises:
        ControlIncompleteError: there are wheels, but no progress was ever committed; or a node
            was given a wheel of which nothing is known.
    """
    _refuse_forgotten(state, situation)
    if progress is None:
        if state.wheels:
            raise ControlIncompleteError(f"{len(state.wheels)} wheels and no progress record")
        progress = first_progress(situation.now_ms, cluster.late_window_s)
    committed_floor = progress.floor if state.progress is None else state.progress.floor
    progress = replace(progress, floor=committed_floor)

    records = _lost(state, situation)
    closed = _closed(state, situation)
    records += [
        wheel_record(wheel, replace(state.wheels[wheel], closed_at=final_seq))
        for wheel, final_seq in closed.items()
    ]
    unregistered = _unregistered(state, progress, situation)
    for wheel in sorted(unregistered):
        records += unregister_records(state, wheel)
    progress = progress.without(unregistered)
    after = state.apply_all(records)

    view = FloorView(
        progress=progress,
        wheels=after.wheels,
        told=seals_told(situation.beats.values()),
        published=ledger_told(situation.beats.values()),
        lost=after.lost,
    )
    watch = watch_seals(watch, view)
    floor = floor_after(view, watch, late_window_s=cluster.late_window_s)
    progress = replace(progress, floor=floor)
    registrations, refused = _registered(after, floor, cluster, situation)
    return Duties(
        records=records + registrations,
        progress=progress,
        watch=watch,
        fences=fences_wanted(wheels_to_close(state, situation.beats), situation.answers, state),
        closed=closed,
        unregistered=unregistered,
        refused=refused,
    )


def _refuse_forgotten(state: ControlState, situation: Situation) -> None:
    """A node's last number is committed before the node can know it, and kept for ever.

    A topic that was lost or made anew would be taken for an empty cluster's: its wheels would
    never be forwarded, and the floor would pass them.
    """
    for node, beat in situation.beats.items():
        known = state.nodes.get(node, NodeRecord(beat.storage, 0))
        if known.storage == beat.storage and known.last_number < beat.last_number:
            raise ControlIncompleteError(
                f"node {node} was given wheel {node}.{beat.last_number}, and the control topic"
                f" knows of none above {known.last_number}: it was lost, or is another cluster's"
            )


def _lost(state: ControlState, situation: Situation) -> list[ControlRecord]:
    new = set(situation.lost) - state.lost
    return [lost_record(wheel, seq) for wheel, seq in sorted(new) if wheel in state.wheels]


def _closed(state: ControlState, situation: Situation) -> dict[WheelId, int]:
    closed: dict[WheelId, int] = {}
    for wheel in wheels_to_close(state, situation.beats):
        result = closing(wheel, state.wheels[wheel], situation.answers)
        if isinstance(result, Close):
            closed[wheel] = result.final_seq
    return closed


def _unregistered(
    state: ControlState, progress: Progress, situation: Situation
) -> frozenset[WheelId]:
    """Closed wheels that are done with; not while a millisecond is being split: V rests then."""
    if progress.position is not None:
        return frozenset()
    return frozenset(
        wheel
        for wheel, record in state.wheels.items()
        if record.closed_at is not None
        and progress.seq(wheel) >= record.closed_at
        and wholly_below(wheel, record, progress.floor, list(situation.beats.values()))
    )


def _registered(
    state: ControlState, floor: int, cluster: Cluster, situation: Situation
) -> tuple[list[ControlRecord], dict[str, Refusal]]:
    records: list[ControlRecord] = []
    refused: dict[str, Refusal] = {}
    members = _members(state, cluster, situation)
    if members is None:
        return records, refused
    for node, beat in sorted(situation.beats.items()):
        if not _wants_wheel(beat):
            continue
        answer = register(
            state.apply_all(records),
            node,
            beat.storage,
            beat.last_number,
            members=members,
            min_insync=cluster.min_insync,
            floor=floor,
        )
        if isinstance(answer, Refusal):
            refused[node] = answer
        else:
            records += answer.records
    return records, refused


def _wants_wheel(beat: Beat) -> bool:
    return beat.spare is None and not beat.draining


def _members(state: ControlState, cluster: Cluster, situation: Situation) -> dict[str, str] | None:
    """Every node with its storage; None until each was heard of once."""
    members: dict[str, str] = {}
    for node in cluster.nodes:
        if node in state.nodes:
            members[node] = state.nodes[node].storage
        elif node in situation.beats:
            members[node] = situation.beats[node].storage
        else:
            return None
    return members
