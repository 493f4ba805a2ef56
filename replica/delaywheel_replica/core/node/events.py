"""Types of the member machine: its events and effects.

The machine (core/member/member.py) decides; its driver carries effects out in order, one after the
other. What is durable is known only from events: `Saved`, `Opened`, `Mirrored`, `Closed`,
`WheelDeleted`. `Failed` reports an effect that failed; if it is one that is answered, the later
ones of its list that are answered too are dropped with it. In all events `now_ms` is the monotonic
clock, `wall_ms` the wall clock read at the same moment.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.folder.node_state import NodeState, Spare
from delaywheel.storage.frames.bundle import FrameBundle
from delaywheel_replica.core.protocol.control import WheelRecord
from delaywheel_replica.core.protocol.frames import FrameSet
from delaywheel_replica.core.protocol.messages import PeerMessage, WheelCard
from delaywheel_replica.core.protocol.status_files import CleanerStatus

# --- events


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: at least every 100 ms."""

    now_ms: int
    wall_ms: int


@dataclass(frozen=True, slots=True)
class Received:
    """A message of another node."""

    sender: str
    message: PeerMessage
    now_ms: int
    wall_ms: int


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection to another node broke."""

    peer: str
    now_ms: int


@dataclass(frozen=True, slots=True)
class CleanerReported:
    """The newest status of this node's cleaner; None: the cleaner is not alive."""

    status: CleanerStatus | None
    now_ms: int
    wall_ms: int


@dataclass(frozen=True, slots=True)
class Saved:
    """`Save` was carried out: this state is durable."""

    state: NodeState


@dataclass(frozen=True, slots=True)
class Opened:
    """`OpenWheel` was carried out: this wheel may be written."""

    wheel: WheelId


@dataclass(frozen=True, slots=True)
class Written:
    """A group has ended: its frames, possibly none, were appended to the open wheel.

    Attributes:
        last_seq: The last frame that counts now.
        top_slot: The greatest slot of a frame of the wheel.
        least_due_ms: The least due of what was appended; 0: its caller waits for a commit, as with
            a cancel.
    """

    wheel: WheelId
    last_seq: int
    top_slot: int
    now_ms: int
    least_due_ms: int = 0


@dataclass(frozen=True, slots=True)
class Broken:
    """The medium refused a write to the open wheel, which accepts nothing more."""

    wheel: WheelId
    cause: str


@dataclass(frozen=True, slots=True)
class HeldWheel:
    """What a data folder holds of a wheel that this node does not write, or no longer writes.

    Attributes:
        applied: The greatest seq that has a row.
        top_slot: The greatest slot of a frame; -1: none.
        missing: Seqs up to `applied` that cannot be read.
        final_seq: T once it is closed.
        not_returned: Those of `missing` that were repaired in vain, and not read again since.
    """

    card: WheelCard
    applied: int
    top_slot: int
    missing: SeqSet = NO_SEQS
    final_seq: int | None = None
    not_returned: SeqSet = NO_SEQS


@dataclass(frozen=True, slots=True)
class Mirrored:
    """`Mirror` or `Repair` was carried out, or a left wheel was examined: this is held."""

    held: HeldWheel
    now_ms: int


@dataclass(frozen=True, slots=True)
class Left:
    """`LeaveWheel` was carried out, but the wheel could not be read; it must be verified."""

    wheel: WheelId


@dataclass(frozen=True, slots=True)
class Verified:
    """`VerifyWheel` was carried out: this is held."""

    held: HeldWheel


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Frames were found to be damaged; only those up to `applied` matter."""

    wheel: WheelId
    seqs: SeqSet


@dataclass(frozen=True, slots=True)
class FoundAgain:
    """`ReadAgain` was carried out: this is held, and these frames are no longer missing."""

    held: HeldWheel
    seqs: SeqSet


@dataclass(frozen=True, slots=True)
class Closed:
    """`CloseWheel` was carried out."""

    held: HeldWheel


@dataclass(frozen=True, slots=True)
class WheelDeleted:
    """`DeleteWheel` was carried out."""

    wheel: WheelId


@dataclass(frozen=True, slots=True)
class Published:
    """The ledger of a wheel is published up to this seq."""

    wheel: WheelId
    seq: int


@dataclass(frozen=True, slots=True)
class Drain:
    """The node stops cleanly: it accepts nothing more, leaves its open wheel, keeps the spare."""


class DiskState(StrEnum):
    """What a node's disk still accepts.

    | state | callers' messages | cancels | others' frames | saves, deletions |
    |---|---|---|---|---|
    | ROOM | yes | yes | yes | yes |
    | DISK_FULL | no | yes | yes | yes |
    | DISK_OUT | no | no | no | yes |
    | DISK_STALLED | no | no | no | when it moves again |

    Callers get DISK_FULL for both of the middle ones.

    Other nodes' frames are accepted for longer than callers' messages: if all disks fill alike,
    what was written last still gets its copies; otherwise the floor would rest for lack of them.
    """

    ROOM = "ROOM"
    """There is room."""
    DISK_FULL = "DISK_FULL"
    """It is at its reserve."""
    DISK_OUT = "DISK_OUT"
    """Only the end of its reserve is left, for work that frees space; or it refused a write."""
    DISK_STALLED = "DISK_STALLED"
    """It hangs: its last job is not done."""

    @property
    def is_out(self) -> bool:
        """Whether the disk accepts no frames of other nodes."""
        return self in {DiskState.DISK_OUT, DiskState.DISK_STALLED}


@dataclass(frozen=True, slots=True)
class DiskReported:
    """The disk has changed its state."""

    state: DiskState


@dataclass(frozen=True, slots=True)
class Failed:
    """An effect failed; the effects after it in its list were dropped."""

    effect: "Effect"
    cause: str


Event = (
    Tick
    | Received
    | Disconnected
    | CleanerReported
    | Saved
    | Opened
    | Written
    | Broken
    | Mirrored
    | Left
    | Verified
    | FoundAgain
    | Unreadable
    | Closed
    | WheelDeleted
    | Published
    | Drain
    | DiskReported
    | Failed
)

# --- effects


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a peer; it may be dropped."""

    peer: str
    message: PeerMessage


@dataclass(frozen=True, slots=True)
class Save:
    """Make this the durable content of node.json; answer Saved."""

    state: NodeState


@dataclass(frozen=True, slots=True)
class OpenWheel:
    """Make the folder of a wheel that node.json names as open; answer Opened."""

    spare: Spare


@dataclass(frozen=True, slots=True)
class LeaveWheel:
    """Stop writing the open wheel.

    Callers that wait for frames that are not acknowledged get an unknown outcome. Answer Mirrored
    with what it holds, or Left.
    """

    wheel: WheelId


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Acknowledge to every caller whose frames lie up to this seq."""

    wheel: WheelId
    high_watermark: int


@dataclass(frozen=True, slots=True)
class Mirror:
    """Append frames to the copy of a wheel, byte for byte; answer Mirrored.

    A frame whose checksum or place is wrong ends the list; what came before it is written.
    """

    card: WheelCard
    frames: FrameBundle


@dataclass(frozen=True, slots=True)
class Repair:
    """Write missing frames below `applied` to their places; answer Mirrored."""

    card: WheelCard
    frames: FrameBundle


@dataclass(frozen=True, slots=True)
class Serve:
    """Read frames `first_seq` to `last_seq` of a wheel and send them in one message.

    As `Frames` with this request number (0: pushed). If the first one cannot be read, or is not
    there, and request is not 0, send `Lacks` with the leading ones that cannot be read instead, but
    nothing of one that may be whole; a frame that turned out to be damaged, or unreadable for now,
    is also reported with Unreadable. Below the floor, a frame is sent without content. `again`:
    they were pushed before, and the mirror made no progress.
    """

    peer: str
    wheel: WheelId
    first_seq: int
    last_seq: int
    request: int = 0
    again: bool = False


@dataclass(frozen=True, slots=True)
class CloseWheel:
    """Note durably that a wheel is closed, and cut everything beyond; answer Closed."""

    wheel: WheelId
    final_seq: int


@dataclass(frozen=True, slots=True)
class ForgetLost:
    """Stop looking for these frames: they are committed as lost."""

    frames: FrameSet


@dataclass(frozen=True, slots=True)
class Sweep:
    """Delete every slot file below the floor, and index segments that refer to no other slot."""

    floor: int


@dataclass(frozen=True, slots=True)
class DeleteWheel:
    """Delete a wheel's folder; answer WheelDeleted."""

    wheel: WheelId


@dataclass(frozen=True, slots=True)
class VerifyWheel:
    """Recover a wheel of an earlier life, whose folder may lack its record; answer Verified."""

    wheel: WheelId
    record: WheelRecord | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class ReadAgain:
    """Look again at missing frames: restore lost rows, and read what is there; answer FoundAgain.

    Nothing else looks again at frames that no other node has.
    """

    wheel: WheelId
    seqs: SeqSet


@dataclass(frozen=True, slots=True)
class WriteStatus:
    """Write the status now, and wake the cleaner to read it."""


Effect = (
    Send
    | Save
    | OpenWheel
    | LeaveWheel
    | Acknowledge
    | Mirror
    | Repair
    | Serve
    | CloseWheel
    | ForgetLost
    | Sweep
    | DeleteWheel
    | VerifyWheel
    | ReadAgain
    | WriteStatus
)

AtOnce = Send | WriteStatus | Acknowledge
"""They cannot fail, and are done by the thread that has stepped the machine."""

Alone = DeleteWheel | VerifyWheel | ReadAgain
"""Those that concern any number of files: each runs in steps, beside everything else."""

Awaited = Save | OpenWheel | LeaveWheel | Mirror | Repair | CloseWheel | Alone
"""Each of them is answered with an event, or with Failed."""


def divide(effects: Iterable[Effect]) -> tuple[list[Effect], list[Effect], list[Effect]]:
    """Divides effects by how they are carried out, each part in order.

    The parts are: what is done at once, what follows one another (none after one that failed), and
    what stands for itself.
    """
    at_once: list[Effect] = []
    awaited: list[Effect] = []
    alone: list[Effect] = []
    for effect in effects:
        if isinstance(effect, AtOnce):
            at_once.append(effect)
        elif isinstance(effect, Awaited) and not isinstance(effect, Alone):
            awaited.append(effect)
        else:
            alone.append(effect)
    return at_once, awaited, alone


@dataclass(frozen=True, slots=True)
class MemberConfig:
    """How a node takes part.

    Attributes:
        nodes: The ids of all nodes, including its own.
        min_insync: W of the cluster as configured; R follows from it: how many must hear a leader.
        late_window_s: How long after its due a slot still accepts frames.
        span_seconds: The span of new wheels.
        insync_timeout_ms: A mirror that is missing what was the end this long ago leaves the set.
        fetch_timeout_ms: A fetch that was not answered for this long goes to another node.
        in_flight_frames: The most pushed frames that wait for one mirror's answer.
        batch_frames: The most frames in one message.
    """

    node: str
    nodes: tuple[str, ...]
    min_insync: int
    late_window_s: int
    span_seconds: int = 7_200
    insync_timeout_ms: int = 1_000
    fetch_timeout_ms: int = 1_000
    in_flight_frames: int = 4_096
    batch_frames: int = 512


@dataclass(frozen=True, slots=True)
class Started:
    """The initial state of a node, read from its recovered data folder.

    Attributes:
        state: The content of node.json, with this start counted and this boot's id, already saved.
        held: Wheels of the folder that are whole; none of them is written any more.
        unverified: All other wheels of the folder.
    """

    state: NodeState
    held: Mapping[WheelId, HeldWheel] = field(default_factory=dict)
    now_ms: int = 0
    unverified: frozenset[WheelId] = frozenset()
