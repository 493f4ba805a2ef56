"""State shared by the parts of the member machine: what is known, and what was asked for.

One instance of each is shared by the parts. What is known (clocks, durable state, the cleaner's
status) is written by the machine itself (core/member/member.py), except for the durable state
(core/wheels/node_file.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from delaywheel.identity import WheelId
from delaywheel.storage.folder.node_state import NodeState
from delaywheel_replica.core.node.events import (
    Alone,
    Awaited,
    DiskState,
    Effect,
    MemberConfig,
    Mirror,
    OpenWheel,
    Repair,
    Save,
)
from delaywheel_replica.core.protocol.control import (
    ROLLED_BACK,
    ControlState,
    NodeRecord,
    WheelRecord,
)
from delaywheel_replica.core.protocol.frames import NO_FRAMES, FrameSet
from delaywheel_replica.core.protocol.progress import Progress, Reached
from delaywheel_replica.core.protocol.seal import FROZEN
from delaywheel_replica.core.protocol.status_files import CleanerStatus


@dataclass(slots=True)
class Registry:
    """The control topic's content, as the cleaner last read it to the end in this boot.

    Wheels and floor are of one moment: a wheel that is registered later accepts no frame for a slot
    below that floor.

    Attributes:
        floor: None: before the first leader.
        nodes: Every node that was ever given a wheel, or removed.
    """

    wheels: Mapping[WheelId, WheelRecord]
    floor: int | None
    nodes: Mapping[str, NodeRecord] = field(default_factory=dict)

    def holders(self, record: WheelRecord) -> Mapping[str, str]:
        """Returns who holds a registered wheel, or is to fetch it, with their storages."""
        return ControlState(nodes=self.nodes).holders(record)

    def is_gone(self, wheel: WheelId) -> bool:
        """Whether a wheel was registered and no longer is.

        Numbers ascend. If a later wheel of the same node is registered, a missing one is not merely
        still to be read.
        """
        if wheel in self.wheels:
            return False
        return any(w.node == wheel.node and w.number > wheel.number for w in self.wheels)


@dataclass(slots=True)
class Known:
    """What is known at one moment.

    Attributes:
        state: The durable state, as last saved.
        now_ms: The monotonic clock.
        cleaner: The cleaner's last status; None: it is not alive.
        registry: None until the control topic was read to its end in this boot.
        floor: The greatest committed floor heard of.
        reached: Likewise how far progress has come.
        lost: Frames that are committed as lost.
        leader_clock_ms: By which the leader lets wheels be sealed, at the last tick; None: they
            are not sealed, as no leader was heard.
        is_rolled_back: The folder is an older copy of itself (core/node/rolled_back.py).
    """

    config: MemberConfig
    state: NodeState
    now_ms: int
    wall_ms: int = 0
    cleaner: CleanerStatus | None = None
    registry: Registry | None = None
    floor: int | None = None
    reached: Reached | None = None
    lost: FrameSet = NO_FRAMES
    leader_clock_ms: int | None = None
    disk: DiskState = DiskState.ROOM
    is_rolled_back: bool = False

    @property
    def node(self) -> str:
        """This node's id."""
        return self.config.node

    @property
    def storage(self) -> str:
        """The uuid of its data folder, as others may believe it."""
        return ROLLED_BACK if self.is_rolled_back else self.state.storage

    @property
    def is_complete(self) -> bool:
        """Whether the node holds all that it ever acknowledged."""
        return not self.state.all_incomplete and not self.state.incomplete

    @property
    def living_cleaner(self) -> CleanerStatus | None:
        """The cleaner's status, if the cleaner is alive."""
        cleaner = self.cleaner
        return cleaner if cleaner is not None and cleaner.is_fresh(self.now_ms) else None

    @property
    def term(self) -> CleanerStatus | None:
        """The cleaner's status, if the cleaner is alive and leads."""
        cleaner = self.cleaner
        return cleaner if cleaner is not None and cleaner.is_in_term(self.now_ms) else None

    @property
    def sealing_clock_ms(self) -> int | None:
        """The clock by which wheels are sealed while this node leads; None: they are not sealed.

        It stops where an announced ingress record may have to be taken again.
        """
        term = self.term
        if term is None or term.progress is None or term.ingress_slot == FROZEN:
            return None
        # Not the own clock, which may just have jumped: w was checked before it was moved.
        due_ms = term.progress.due_ms
        if term.ingress_slot is None:
            return due_ms
        return min(due_ms, (term.ingress_slot + self.config.late_window_s) * 1000)

    @property
    def stands(self) -> bool:
        """Whether the cleaner is alive and a candidate that Kafka has answered."""
        cleaner = self.living_cleaner
        return cleaner is not None and cleaner.stands

    @property
    def ahead_slot(self) -> int | None:
        """The slot beyond which a sealed own wheel accepts less than a new wheel would.

        Set if a clock that was ahead has sealed wheels and w was set back since, until w has passed
        again what was done ahead; or if this node leads, and reads again an ingress record that was
        announced for that slot. None: neither.
        """
        progress = None if self.cleaner is None else self.cleaner.progress
        if progress is None:
            return None
        slots = [self.wall_ms // 1000] if progress.ahead else []
        term = self.term
        if term is not None and term.ingress_slot not in (None, FROZEN):
            slots.append(term.ingress_slot)
        return max(progress.floor, min(slots)) if slots else None

    def record(self, wheel: WheelId) -> WheelRecord | None:
        """Returns the record of a wheel if it is known to be registered."""
        return None if self.registry is None else self.registry.wheels.get(wheel)

    def note_progress(self, progress: Progress | None) -> None:
        """Notes a committed progress; one older than the known progress changes nothing.

        Kafka may have lost what was read before: some node must still know it then.
        """
        if progress is None:
            return
        reached = progress.reached
        if self.floor is None or progress.floor > self.floor:
            self.floor = progress.floor
        if self.reached is None or reached.order > self.reached.order:
            self.reached = reached


class PendingEffects:
    """Effects that were issued and have no answer yet, oldest first.

    If one fails, those after it in its list are dropped with it, but for those that stand alone:
    they take long, and run beside everything else. So effects requested together are remembered
    together: with a failure the machine learns everything that will not happen, and requests it
    again if it is still wanted.
    """

    def __init__(self) -> None:
        self._lists = 0
        self._asked: list[tuple[int, Awaited]] = []

    def asked(self, effects: list[Effect]) -> None:
        """Notes those effects of a list that will be answered; long ones are tracked separately."""
        self._lists += 1
        together = self._lists
        for effect in effects:
            if isinstance(effect, Alone):
                self._lists += 1
                self._asked.append((self._lists, effect))
            elif isinstance(effect, Awaited):
                self._asked.append((together, effect))

    def has(self, kind: type[Awaited], wheel: WheelId | None = None) -> bool:
        """Whether an effect of this kind, for this wheel, awaits its answer."""
        for _, effect in self._asked:  # mostly none: a generator would cost more than the loop
            if isinstance(effect, kind) and _wheel_of(effect) == wheel:
                return True
        return False

    def is_writing(self, wheel: WheelId) -> bool:
        """Whether frames of this wheel are being written to their files."""
        return bool(self._asked) and (self.has(Mirror, wheel) or self.has(Repair, wheel))

    def done(self, *kinds: type[Awaited], wheel: WheelId | None = None) -> Awaited | None:
        """Removes the oldest effect of one of these kinds for this wheel."""
        for index, (_, effect) in enumerate(self._asked):
            if isinstance(effect, kinds) and _wheel_of(effect) == wheel:
                del self._asked[index]
                return effect
        return None

    def failed(self, failed: Effect) -> list[Awaited]:
        """Removes an effect that failed, and those that were dropped with it."""
        number = next((number for number, effect in self._asked if effect is failed), None)
        if number is None:
            return []
        gone: list[Awaited] = []
        kept: list[tuple[int, Awaited]] = []
        for entry in self._asked:
            if entry[0] == number and (gone or entry[1] is failed):
                gone.append(entry[1])
            else:
                kept.append(entry)
        self._asked = kept
        return gone


def _wheel_of(effect: Awaited) -> WheelId | None:
    """Returns the wheel that an effect concerns; None if it concerns none."""
    match effect:
        case Save():
            return None
        case OpenWheel():
            return effect.spare.wheel
        case Mirror() | Repair():
            return effect.card.wheel
        case _:
            return effect.wheel
