"""Status files: what a node's two processes report to each other, always as a whole state.

The server writes `ServerStatus`, the cleaner `CleanerStatus`. A reader that missed some loses
nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from delaywheel.identity import WheelId
from delaywheel_replica.core.protocol.codec import Natural, Positive, between
from delaywheel_replica.core.protocol.control import ControlState, Leader, NodeRecord, WheelRecord
from delaywheel_replica.core.protocol.frames import NO_FRAMES, FrameSet
from delaywheel_replica.core.protocol.heartbeat import Fence, Heartbeat, Promise
from delaywheel_replica.core.protocol.histogram import Histogram
from delaywheel_replica.core.protocol.messages import PrevoteRequest
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.reschedules import MessageKey, Reschedule

SERVER_FRESH_MS = 500
"""A server that has not stamped its status for this long does not count as alive."""

CLEANER_FRESH_MS = 1_000
"""A cleaner that has not stamped its status for this long is not believed to lead."""


class Role(StrEnum):
    """What a cleaner is doing."""

    STANDBY = "standby"
    CANDIDATE = "candidate"
    RESTING = "resting"
    LEADING = "leading"


@dataclass(frozen=True, slots=True)
class KnownPeer:
    """What is known of another node.

    Attributes:
        heartbeat: Its newest, of the storage heard last; perhaps relayed by others.
        heard_ms: When it was last heard directly, by this node's monotonic clock; None: never.
    """

    heartbeat: Heartbeat
    heard_ms: int | None


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """The server's status: what its node reports, and what it knows of the others.

    Attributes:
        heartbeat: The node's report, made for this status.
        monotonic_ms: CLOCK_MONOTONIC when it was written, the same in all processes of a machine.
        peers: The other nodes, as far as they were heard of.
        leader_heard_ms: When another node was last heard to lead, or a vote was given to
            one, by the monotonic clock; None: never, or its connection broke since.
        answers: The newest answers to fences, own ones included: at most one for each member and
            origin.
        votes: The nodes that agreed to this node's newest round of asking, `vote_round`; 0: none.
        looked_for: Frames being searched for; if there are many ranges, some of each wheel.
        lacks: Member, including this node -> those of them that it does not have. Another member is
            named only after it has reported so.
        implausible_heartbeats: Relayed heartbeats of others that cannot have been theirs; since the
            start.
    """

    heartbeat: Heartbeat
    pid: int
    monotonic_ms: int
    peers: Mapping[str, KnownPeer] = field(default_factory=dict)
    leader_heard_ms: int | None = None
    answers: tuple[Promise, ...] = ()
    votes: frozenset[str] = frozenset()
    vote_round: Natural = 0
    looked_for: FrameSet = NO_FRAMES
    lacks: Mapping[str, FrameSet] = field(default_factory=dict)
    implausible_heartbeats: Natural = 0

    @property
    def heartbeats(self) -> dict[str, Heartbeat]:
        """The newest heartbeat of each node heard since this one started, including its own."""
        others = {node: known.heartbeat for node, known in self.peers.items()}
        return {**others, self.heartbeat.node: self.heartbeat}

    def is_fresh(self, now_monotonic_ms: int) -> bool:
        """Whether the status is recent enough for the server to be alive."""
        return now_monotonic_ms - self.monotonic_ms < SERVER_FRESH_MS


@dataclass(frozen=True, slots=True)
class FloorWait:
    """What keeps back a floor, for people, and how far it is below what w alone allows.

    Of many wheels the causes are those that are furthest behind.
    """

    behind_s: Positive
    causes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Standstill:
    """When progress last moved, by the wall clock, and what forwarding waits for, for people."""

    since_ms: Positive
    cause: str


@dataclass(frozen=True, slots=True)
class IngressStatus:
    """How far a leader has read the ingress topics.

    Counted beside it, in `CleanerStatus.counters`, of committed transactions: `ingress_settled`
    offsets, and of those `ingress_held` by W members, `ingress_forwarded` directly,
    `ingress_dead_letters`, `ingress_deleted` before they were read, and `ingress_cut_off` with the
    end of their partition; and `ingress_announced`.

    Attributes:
        partitions: How many are read.
        lag: Offsets of all of them that are not settled.
        lags: "<topic>/<partition>" -> the same of each; of many partitions the greatest.
        held_bytes: What is under way takes about so much memory.
        cut_off: Partitions that are not read, since they end before what was read of them.
        faults: Why topics are not read, or the records not handed over, for people.
        open_transactions: Partitions that a producer's open transaction holds up.
    """

    partitions: Natural = 0
    lag: Natural = 0
    lags: Mapping[str, Natural] = field(default_factory=dict)
    held_bytes: Natural = 0
    cut_off: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    open_transactions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class UnansweredHalves:
    """Half messages about which one group was asked, and that it has not read yet.

    `oldest_ms` is when the first of them was asked, in Unix milliseconds.
    """

    group: str
    letters: Natural
    oldest_ms: int


@dataclass(frozen=True, slots=True)
class UnavailableTopic:
    """A topic that takes nothing, or partitions of which do not.

    Attributes:
        partitions: These; none: all of them.
        since_ms: In Unix milliseconds.
        cause: For people.
        deferred: How many of its messages were deferred meanwhile.
    """

    topic: str
    partitions: tuple[int, ...]
    since_ms: int
    cause: str
    deferred: Natural


@dataclass(frozen=True, slots=True)
class CleanerStatus:
    """The cleaner's status: the control topic's content, how it forwards, what it wants of others.

    Attributes:
        monotonic_ms: CLOCK_MONOTONIC when it was written.
        epoch: Of its own leadership, while it rests or leads.
        leader: As far as it has read the control topic.
        progress: The committed one; None before the first leader.
        control_offset: How far it has read the control topic; -1: never.
        nodes: Every node that was ever given a wheel, or removed.
        lateness_ms: Wall clock minus the oldest due not done yet, or what it may be where that is
            not known; 0: nothing is overdue.
        kafka_error: Why it does not lead or forward, for people.
        kafka_warnings: What endangers its work, though it can lead, for people.
        started_ms: Its wall clock when the process started, which all that it counts is since.
        forwarded_by_topic: Messages forwarded, for a bounded number of topics, with all others as
            one.
        dead_by_topic: Dead letters by the topic they were meant for, likewise.
        lateness: How late messages were forwarded; None: not counted.
        commit_times: How long committed transactions took, likewise.
        unavailable: Topics whose messages are deferred, or become dead letters.
        fences: Promises that it wants of every member, while it leads.
        limits: Wheel -> the seq up to which members that have fenced it may still fetch it, while
            this node leads.
        prevote_request: Set while it asks for votes.
        stands: It is a candidate, and Kafka has answered it.
        unreadable: Frames that it could not read.
        lost: Frames that are committed as lost.
        ingress_slot: While this node leads, the seals of its wheels must not pass this slot,
            so that they accept again what was announced; 0: they do not move; None: no limit.
        ingress: None: it does not lead, or has no ingress topics.
        reschedules: Messages that have another due by now, while frames do not express it yet.
        needs: The version of control records that a leader must know.
        unanswered: Halves that wait for their groups' checkers, while this node leads; at most
            20 groups, those with the most first.
        halves_objection: Why no group can be asked about half messages, while this node leads;
            None: it can.
        floor_wait: Set if the floor is far behind, and this node leads.
        standstill: Set if progress has not moved for long, and this node leads.
        throttled: What a quota of Kafka's leaves to this leader, if it was throttled of late, for
            people.
    """

    node: str
    boot: str
    pid: int
    monotonic_ms: int
    wall_ms: int
    role: Role
    epoch: int | None = None
    leader: Leader | None = None
    progress: Progress | None = None
    control_offset: Annotated[int, between(-1)] = -1
    wheels: Mapping[WheelId, WheelRecord] = field(default_factory=dict)
    nodes: Mapping[str, NodeRecord] = field(default_factory=dict)
    lateness_ms: int = 0
    kafka_error: str | None = None
    kafka_warnings: tuple[str, ...] = ()
    started_ms: int = 0
    counters: Mapping[str, int] = field(default_factory=dict)
    forwarded_by_topic: Mapping[str, Natural] = field(default_factory=dict)
    dead_by_topic: Mapping[str, Natural] = field(default_factory=dict)
    dead_by_reason: Mapping[str, Natural] = field(default_factory=dict)
    lateness: Histogram | None = None
    commit_times: Histogram | None = None
    unavailable: tuple[UnavailableTopic, ...] = ()
    fences: tuple[Fence, ...] = ()
    limits: Mapping[WheelId, Natural] = field(default_factory=dict)
    prevote_request: PrevoteRequest | None = None
    stands: bool = False
    unreadable: FrameSet = NO_FRAMES
    lost: FrameSet = NO_FRAMES
    ingress_slot: Natural | None = None
    ingress: IngressStatus | None = None
    reschedules: Mapping[MessageKey, Reschedule] = field(default_factory=dict)
    needs: Positive = 1
    unanswered: tuple[UnansweredHalves, ...] = ()
    halves_objection: str | None = None
    floor_wait: FloorWait | None = None
    standstill: Standstill | None = None
    throttled: str | None = None

    @property
    def floor(self) -> int | None:
        """The committed floor, None before the first leader."""
        return None if self.progress is None else self.progress.floor

    @property
    def control(self) -> ControlState:
        """The committed state, without the id of the leader that committed it."""
        return ControlState(
            progress=self.progress,
            nodes=self.nodes,
            wheels=self.wheels,
            lost=self.lost,
            reschedules=self.reschedules,
            needs=self.needs,
        )

    def is_fresh(self, now_monotonic_ms: int) -> bool:
        """Whether the status is recent enough for the cleaner to be alive."""
        return now_monotonic_ms - self.monotonic_ms < CLEANER_FRESH_MS

    @property
    def has_term(self) -> bool:
        """Whether the cleaner led when it wrote this, even if it rested."""
        return self.role in {Role.RESTING, Role.LEADING}

    def is_in_term(self, now_monotonic_ms: int) -> bool:
        """Whether the cleaner is alive and leads, even if it rests."""
        return self.has_term and self.is_fresh(now_monotonic_ms)
