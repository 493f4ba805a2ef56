"""Types of the election machine: its phases, events and effects.

`TRANSITIONS` and `ENDINGS` are the tables that `delaywheel_replica.core.election.machine` runs on.
In all events `now_ms` is the monotonic clock, `wall_ms` the wall clock read at the same moment, and
`token` that of the candidacy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from delaywheel_replica.core.protocol.control import ControlState
from delaywheel_replica.core.protocol.status_files import Role
from delaywheel_replica.core.protocol.transaction_outcomes import TransactionState


class ElectionPhase(StrEnum):
    """How far a node is on the way from standby to leader."""

    STANDBY = "standby"
    ASKING = "asking"
    INITIALISING = "initialising"
    MARKING = "marking"
    READING = "reading"
    RESTING = "resting"
    LEADING = "leading"
    STOPPED = "stopped"

    @property
    def role(self) -> Role:
        """The role that is reported to others."""
        return _ROLES[self]


_ROLES = {
    ElectionPhase.STANDBY: Role.STANDBY,
    ElectionPhase.ASKING: Role.STANDBY,
    ElectionPhase.INITIALISING: Role.CANDIDATE,
    ElectionPhase.MARKING: Role.CANDIDATE,
    ElectionPhase.READING: Role.CANDIDATE,
    ElectionPhase.RESTING: Role.RESTING,
    ElectionPhase.LEADING: Role.LEADING,
    ElectionPhase.STOPPED: Role.STANDBY,
}

CANDIDATE = frozenset({ElectionPhase.INITIALISING, ElectionPhase.MARKING, ElectionPhase.READING})
IN_TERM = frozenset({ElectionPhase.RESTING, ElectionPhase.LEADING})


class EndReason(StrEnum):
    """Why a candidacy or a leadership ended."""

    KAFKA_AWAY = "KAFKA_AWAY"
    INIT_FAILED = "INIT_FAILED"
    MARK_FAILED = "MARK_FAILED"
    READ_FAILED = "READ_FAILED"
    MARK_OVERWRITTEN = "MARK_OVERWRITTEN"
    CONTROL_INCOMPLETE = "CONTROL_INCOMPLETE"
    FENCED = "FENCED"
    OVERTAKEN = "OVERTAKEN"
    UNKNOWN_OUTCOME = "UNKNOWN_OUTCOME"
    COMMITS_TOO_OLD = "COMMITS_TOO_OLD"
    SERVER_STALE = "SERVER_STALE"
    UNHEARD = "UNHEARD"
    CLOCK_JUMPED = "CLOCK_JUMPED"
    CLOCK_OFF = "CLOCK_OFF"
    HANDED_OVER = "HANDED_OVER"
    TAKEN_OUT = "TAKEN_OUT"
    STORAGE_ROLLED_BACK = "STORAGE_ROLLED_BACK"
    STOPPED = "STOPPED"


@dataclass(frozen=True, slots=True)
class ElectionTick:
    """Time has passed: given at least every 100 ms, and before a transaction.

    While it stands by and hears a leader, every 250 ms are enough.

    Attributes:
        server_fresh: The server has stamped its status recently.
        holds_progress: Every frame <= V at or above the floor is held, except lost ones.
        due_ms: W of the committed progress; None: there is none.
        heard_ms: When another leader was last heard, or a vote given to one, by the monotonic
            clock; None: never, or the connection to it broke.
        hears_enough: R members are heard, including itself.
        overtaken: Another node has read what this leader does not know
            (core/election/witnesses.py).
        unfit: Why this node should not lead, though it could (core/election/eligibility.py).
        votes: Which other nodes said, in the round of asking `vote_round`, that they hear no
            leader.
        control_quiet_ms: How long nothing new has appeared in the control topic.
        answered_ms: When Kafka last answered a transaction of this leader, or will, as it
            throttles, by the monotonic clock.
    """

    now_ms: int
    wall_ms: int
    server_fresh: bool
    holds_progress: bool = False
    due_ms: int | None = None
    heard_ms: int | None = None
    hears_enough: bool = True
    overtaken: bool = False
    unfit: EndReason | None = None
    votes: frozenset[str] = frozenset()
    vote_round: int = 0
    control_quiet_ms: int = 0
    answered_ms: int = 0


@dataclass(frozen=True, slots=True)
class InitsDone:
    """Every transactional id has been inited, but for some that may be done without.

    `last_marks` are the tokens of ids that this process used last (`IdTurns.last_marks`).
    """

    now_ms: int
    token: str
    without: frozenset[int] = frozenset()
    last_marks: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InitFailed:
    """Not every transactional id has been inited.

    Attributes:
        verdict: What the calls meant, FENCED if one was.
        touched: An id may have been inited. False only if no init was even requested: Kafka did not
            answer, or a check before the inits refused.
    """

    now_ms: int
    token: str
    verdict: TransactionState
    touched: bool = True


@dataclass(frozen=True, slots=True)
class MarkReport:
    """How the transaction with the leader record of one id ended."""

    now_ms: int
    token: str
    index: int
    verdict: TransactionState


@dataclass(frozen=True, slots=True)
class ControlRead:
    """The control topic, read to its last stable offset after the marks.

    It is incomplete if nodes had read in it what it no longer contains.
    """

    now_ms: int
    token: str
    state: ControlState
    incomplete: bool = False


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """The control topic could not be read."""

    now_ms: int
    token: str


@dataclass(frozen=True, slots=True)
class TransactionReport:
    """How a transaction of a resting or leading leader ended.

    How long the commit took counts only if it is committed.
    """

    now_ms: int
    token: str
    verdict: TransactionState
    commit_ms: int = 0


@dataclass(frozen=True, slots=True)
class Stop:
    """The process ends; its last transaction has been reported."""

    now_ms: int


Event = (
    ElectionTick
    | InitsDone
    | InitFailed
    | MarkReport
    | ControlRead
    | ReadFailed
    | TransactionReport
    | Stop
)


@dataclass(frozen=True, slots=True)
class InitProducers:
    """Make the producers and init every id, in parallel; answer InitsDone or InitFailed."""

    token: str


@dataclass(frozen=True, slots=True)
class CommitMark:
    """Commit ``leader/<index>`` with this token, with this id; answer MarkReport."""

    token: str
    index: int


@dataclass(frozen=True, slots=True)
class ReadControl:
    """Read the control topic to its last stable offset; answer ControlRead or ReadFailed."""

    token: str


@dataclass(frozen=True, slots=True)
class BecomeLeader:
    """Take the lead with this state of the control topic. Forward nothing yet."""

    epoch: int
    state: ControlState


@dataclass(frozen=True, slots=True)
class StartForwarding:
    """Start forwarding: this node holds all that counts as done, and its time has passed."""


@dataclass(frozen=True, slots=True)
class IdleCommit:
    """Commit the progress record now, with whatever duties wait; answer TransactionReport."""

    token: str


@dataclass(frozen=True, slots=True)
class DestroyProducers:
    """Destroy every producer; nothing more is sent in their epoch."""

    reason: EndReason


Effect = (
    InitProducers
    | CommitMark
    | ReadControl
    | BecomeLeader
    | StartForwarding
    | IdleCommit
    | DestroyProducers
)

TRANSITIONS: dict[tuple[ElectionPhase, type[Event]], frozenset[ElectionPhase]] = {
    (ElectionPhase.STANDBY, ElectionTick): frozenset(
        {ElectionPhase.STANDBY, ElectionPhase.ASKING, ElectionPhase.INITIALISING}
    ),
    (ElectionPhase.ASKING, ElectionTick): frozenset(
        {ElectionPhase.ASKING, ElectionPhase.STANDBY, ElectionPhase.INITIALISING}
    ),
    (ElectionPhase.INITIALISING, InitsDone): frozenset({ElectionPhase.MARKING}),
    (ElectionPhase.INITIALISING, InitFailed): frozenset({ElectionPhase.STANDBY}),
    (ElectionPhase.MARKING, MarkReport): frozenset(
        {ElectionPhase.MARKING, ElectionPhase.READING, ElectionPhase.STANDBY}
    ),
    (ElectionPhase.READING, ControlRead): frozenset({ElectionPhase.RESTING, ElectionPhase.STANDBY}),
    (ElectionPhase.READING, ReadFailed): frozenset({ElectionPhase.STANDBY}),
    (ElectionPhase.RESTING, ElectionTick): frozenset(
        {ElectionPhase.RESTING, ElectionPhase.LEADING, ElectionPhase.STANDBY}
    ),
    (ElectionPhase.RESTING, TransactionReport): frozenset(
        {ElectionPhase.RESTING, ElectionPhase.STANDBY}
    ),
    (ElectionPhase.LEADING, ElectionTick): frozenset(
        {ElectionPhase.LEADING, ElectionPhase.STANDBY}
    ),
    (ElectionPhase.LEADING, TransactionReport): frozenset(
        {ElectionPhase.LEADING, ElectionPhase.STANDBY}
    ),
} | {
    (phase, Stop): frozenset({ElectionPhase.STOPPED})
    for phase in ElectionPhase
    if phase is not ElectionPhase.STOPPED
}
"""(phase, event) -> the phases that may follow. Any other pair changes nothing."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What follows when a candidacy or leadership ends.

    Attributes:
        doubles: The required silence doubles.
        rivals: Another node stands: the whole silence must pass, even for a node alone.
        stands_at_once: A leader that had lasted stands again without waiting.
        yields: Another node should lead: this one waits longer than those.
    """

    doubles: bool = True
    rivals: bool = False
    stands_at_once: bool = False
    yields: bool = False


ENDINGS: dict[EndReason, Ending] = {
    EndReason.KAFKA_AWAY: Ending(doubles=False),
    EndReason.INIT_FAILED: Ending(),
    EndReason.MARK_FAILED: Ending(),
    EndReason.READ_FAILED: Ending(),
    EndReason.MARK_OVERWRITTEN: Ending(rivals=True),
    EndReason.CONTROL_INCOMPLETE: Ending(),
    EndReason.FENCED: Ending(rivals=True),
    EndReason.OVERTAKEN: Ending(rivals=True),
    EndReason.UNKNOWN_OUTCOME: Ending(stands_at_once=True),
    EndReason.COMMITS_TOO_OLD: Ending(),
    EndReason.SERVER_STALE: Ending(),
    EndReason.UNHEARD: Ending(),
    EndReason.CLOCK_JUMPED: Ending(yields=True),
    EndReason.CLOCK_OFF: Ending(doubles=False, yields=True),
    EndReason.HANDED_OVER: Ending(doubles=False, yields=True),
    EndReason.TAKEN_OUT: Ending(doubles=False, yields=True),
    EndReason.STORAGE_ROLLED_BACK: Ending(doubles=False, yields=True),
}
"""While Kafka is away nothing doubles: no id was touched, no node was disturbed, and a long outage
must not be followed by a minute in which no node stands."""
