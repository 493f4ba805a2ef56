"""Status files: what a node's two processes report to each other, always as a whole state.

`ServerStatus` is written by the server: its node's heartbeat, and what it knows of the other nodes.
`CleanerStatus` is written by the cleaner: the content of the control topic, the state of
forwarding, and what a leader or candidate wants of the other nodes. A reader that missed some loses
nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from delaywheel.identity import WheelId
from delaywheel_replica.core.protocol.control import ControlState, Leader, NodeRecord, WheelRecord
from delaywheel_replica.core.protocol.fields import Fields, Unchanged, parse_wheel
from delaywheel_replica.core.protocol.frames import NO_FRAMES, FrameSet
from delaywheel_replica.core.protocol.heartbeat import Fence, FenceAnswer, Heartbeat
from delaywheel_replica.core.protocol.histogram import Histogram
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
class VoteWish:
    """A standby's question whether the others hear no leader either.

    Attributes:
        round: This node's round of asking, ascending since its cleaner started.
        silence_ms: A node agrees if it has heard no leader for this long.
    """

    round: int
    silence_ms: int


@dataclass(frozen=True, slots=True)
class PeerSight:
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
        heartbeat: What the node reports, made anew for this status.
        pid: The server process.
        monotonic_ms: CLOCK_MONOTONIC when it was written; the same clock in all processes of one
            machine.
        peers: The other nodes, as far as they were heard of.
        leader_heard_ms: When another node was last heard to lead, or a vote was given to
            one, by the monotonic clock; None: never, or its connection broke since.
        answers: The newest answers to fences, own ones included: at most one for each member and
            origin.
        votes: The nodes that agreed to this node's newest round of asking; see `vote_round`.
        vote_round: See `votes`; 0: none.
        looked_for: Frames that are looked for; if there are many ranges, some of each wheel.
        lacks: Member, including this node -> those of them that it does not have. Another member is
            named only after it has reported so.
        implausible_beats: Relayed heartbeats of others that cannot have been theirs; since the
            start.
    """

    heartbeat: Heartbeat
    pid: int
    monotonic_ms: int
    peers: Mapping[str, PeerSight] = field(default_factory=dict)
    leader_heard_ms: int | None = None
    answers: tuple[FenceAnswer, ...] = ()
    votes: frozenset[str] = frozenset()
    vote_round: int = 0
    looked_for: FrameSet = NO_FRAMES
    lacks: Mapping[str, FrameSet] = field(default_factory=dict)
    implausible_heartbeats: int = 0

    @property
    def heartbeats(self) -> dict[str, Heartbeat]:
        """The newest heartbeat of each node heard since this one started, including its own."""
        others = {node: sight.heartbeat for node, sight in self.peers.items()}
        return {**others, self.heartbeat.node: self.heartbeat}

    def is_fresh(self, now_monotonic_ms: int) -> bool:
        """Whether the status is recent enough for the server to be alive."""
        return now_monotonic_ms - self.monotonic_ms < SERVER_FRESH_MS

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON object."""
        return self.heartbeat.to_json() | {
            "pid": self.pid,
            "monotonic_ms": self.monotonic_ms,
            "peers": {
                node: {"beat": sight.heartbeat.to_json(), "heard_ms": sight.heard_ms}
                for node, sight in self.peers.items()
            },
            "leader_heard_ms": self.leader_heard_ms,
            "answers": [answer.to_json() for answer in self.answers],
            "votes": sorted(self.votes),
            "vote_round": self.vote_round,
            "looked_for": self.looked_for.to_json(),
            "lacks": {node: frames.to_json() for node, frames in self.lacks.items()},
            "implausible_beats": self.implausible_heartbeats,
        }

    @classmethod
    def from_json(cls, document: Any, known: Unchanged | None = None) -> Self:
        """Reads what `to_json` wrote.

        Args:
            document: What was written.
            known: Earlier documents: unchanged parts are the same objects.

        Raises:
            MalformedError: It is something else.
        """
        fields, known = Fields(document), known or Unchanged()
        peers = fields.object("peers")
        lacks = fields.object("lacks")
        return cls(
            heartbeat=Heartbeat.from_json(fields, known),
            pid=fields.integer("pid"),
            monotonic_ms=fields.integer("monotonic_ms"),
            peers={name: _sight(peers.object(name), known.within(name)) for name in peers.names()},
            leader_heard_ms=fields.optional_integer("leader_heard_ms"),
            answers=tuple(map(FenceAnswer.from_json, fields.items("answers"))),
            votes=frozenset(fields.texts("votes")),
            vote_round=fields.integer("vote_round", at_least=0),
            looked_for=known.of("looked_for", fields.items("looked_for"), FrameSet.from_json),
            lacks={name: FrameSet.from_json(lacks.items(name)) for name in lacks.names()},
            implausible_heartbeats=fields.integer("implausible_beats", at_least=0),
        )


@dataclass(frozen=True, slots=True)
class IngressStatus:
    """How far a leader has taken in the ingress topics.

    Counted beside it, in `CleanerStatus.counters`, of committed transactions: `ingress_settled`
    offsets, and of those `ingress_held` by W members, `ingress_forwarded` directly,
    `ingress_dead_letters` and `ingress_deleted` before they were read; and `ingress_announced`.

    Attributes:
        partitions: How many are read.
        lag: Offsets of all of them that are not settled.
        lags: "<topic>/<partition>" -> the same of each; of many partitions the greatest.
        held_bytes: What is under way takes about so much memory.
        cut_off: Partitions that are not read, since they end before what was read of them.
        faults: Why topics are not read, or the records not handed over, for people.
    """

    partitions: int = 0
    lag: int = 0
    lags: Mapping[str, int] = field(default_factory=dict)
    held_bytes: int = 0
    cut_off: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON object."""
        return {
            "partitions": self.partitions,
            "lag": self.lag,
            "lags": dict(self.lags),
            "held_bytes": self.held_bytes,
            "cut_off": list(self.cut_off),
            "faults": list(self.faults),
        }

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Reads what `to_json` wrote.

        Raises:
            MalformedError: It is something else.
        """
        fields = document if isinstance(document, Fields) else Fields(document)
        return cls(
            partitions=fields.integer("partitions", at_least=0),
            lag=fields.integer("lag", at_least=0),
            lags=_counts(fields.value("lags")),
            held_bytes=fields.integer("held_bytes", at_least=0),
            cut_off=fields.texts("cut_off"),
            faults=fields.texts("faults"),
        )


@dataclass(frozen=True, slots=True)
class CleanerStatus:
    """The cleaner's status.

    Attributes:
        node: Its id.
        boot: The machine's boot id.
        pid: The cleaner process.
        monotonic_ms: CLOCK_MONOTONIC when it was written.
        wall_ms: Its wall clock then.
        role: What it is doing.
        epoch: The epoch of its own leadership, while it rests or leads.
        leader: The leader, as far as it has read the control topic.
        progress: The committed one; None before the first leader.
        control_offset: How far it has read the control topic; -1: never.
        wheels: The registered wheels.
        nodes: Every node that was ever given a wheel, or removed.
        lateness_ms: Wall clock minus the oldest due not done yet; 0: nothing is overdue.
        kafka_error: Why it does not lead or forward, for people.
        kafka_warnings: What endangers the control topic, for people.
        started_ms: Its wall clock when the process started.
        counters: Counts since the process started.
        forwarded_by_topic: Messages forwarded since then, for a bounded number of topics, with all
            others as one.
        dead_by_topic: Dead letters since then, by the topic they were meant for, likewise.
        dead_by_reason: Dead letters since then, by reason.
        lateness: How late messages were forwarded since then; None: not counted.
        commit_times: How long transactions took that were committed since then, likewise.
        unavailable_topics: Topics whose messages become dead letters until they answer again.
        fences: Promises that it wants of every member, while it leads.
        fills: Reported by a term as `fills`.
        vote_wish: Set while it asks for votes.
        stands: It is a candidate, and Kafka has answered it.
        call_since_ms: Since when, by the monotonic clock, it has waited for a transaction to end;
            None: it does not, or not for long.
        unreadable: Frames that it could not read.
        lost: Frames that are committed as lost.
        ingress_slot: While this node leads, the seals of its wheels must not pass this slot,
            so that they accept again what was announced; 0: they rest; None: no limit.
        ingress: How far it takes in the ingress topics; None: it does not lead, or has none.
        reschedules: Messages that have another due by now, while frames do not express it yet.
        needs: The version of control records that a leader must know.
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
    control_offset: int = -1
    wheels: Mapping[WheelId, WheelRecord] = field(default_factory=dict)
    nodes: Mapping[str, NodeRecord] = field(default_factory=dict)
    lateness_ms: int = 0
    kafka_error: str | None = None
    kafka_warnings: tuple[str, ...] = ()
    started_ms: int = 0
    counters: Mapping[str, int] = field(default_factory=dict)
    forwarded_by_topic: Mapping[str, int] = field(default_factory=dict)
    dead_by_topic: Mapping[str, int] = field(default_factory=dict)
    dead_by_reason: Mapping[str, int] = field(default_factory=dict)
    lateness: Histogram | None = None
    commit_times: Histogram | None = None
    unavailable_topics: tuple[str, ...] = ()
    fences: tuple[Fence, ...] = ()
    fills: Mapping[WheelId, int] = field(default_factory=dict)
    vote_wish: VoteWish | None = None
    stands: bool = False
    call_since_ms: int | None = None
    unreadable: FrameSet = NO_FRAMES
    lost: FrameSet = NO_FRAMES
    ingress_slot: int | None = None
    ingress: IngressStatus | None = None
    reschedules: Mapping[MessageKey, Reschedule] = field(default_factory=dict)
    needs: int = 1

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

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON object."""
        leader = self.leader
        return {
            "node": self.node,
            "boot": self.boot,
            "pid": self.pid,
            "monotonic_ms": self.monotonic_ms,
            "wall_ms": self.wall_ms,
            "role": self.role.value,
            "epoch": self.epoch,
            "leader": None if leader is None else {"node": leader.node, "epoch": leader.epoch},
            "progress": None if self.progress is None else self.progress.to_json(),
            "control_offset": self.control_offset,
            "wheels": {str(wheel): record.to_json() for wheel, record in self.wheels.items()},
            "nodes": {node: record.to_json() for node, record in self.nodes.items()},
            "lateness_ms": self.lateness_ms,
            "kafka_error": self.kafka_error,
            "kafka_warnings": list(self.kafka_warnings),
            "started_ms": self.started_ms,
            "counters": dict(self.counters),
            "forwarded_by_topic": dict(self.forwarded_by_topic),
            "dead_by_topic": dict(self.dead_by_topic),
            "dead_by_reason": dict(self.dead_by_reason),
            "lateness": None if self.lateness is None else self.lateness.to_json(),
            "commit_times": None if self.commit_times is None else self.commit_times.to_json(),
            "unavailable_topics": list(self.unavailable_topics),
            "fences": [[fence.origin, fence.upto] for fence in self.fences],
            "fills": {str(wheel): seq for wheel, seq in self.fills.items()},
            "vote_wish": None
            if self.vote_wish is None
            else [self.vote_wish.round, self.vote_wish.silence_ms],
            "stands": self.stands,
            "call_since_ms": self.call_since_ms,
            "unreadable": self.unreadable.to_json(),
            "lost": self.lost.to_json(),
            "ingress_slot": self.ingress_slot,
            "ingress": None if self.ingress is None else self.ingress.to_json(),
            "reschedules": [
                [id_.hex(), due_ms, stands.to_json()]
                for (id_, due_ms), stands in self.reschedules.items()
            ],
            "needs": self.needs,
        }

    @classmethod
    def from_json(cls, document: Any, known: Unchanged | None = None) -> Self:
        """Reads what `to_json` wrote.

        Args:
            document: What was written.
            known: Earlier documents: unchanged parts are the same objects.

        Raises:
            MalformedError: It is something else.
        """
        fields, known = Fields(document), known or Unchanged()
        leader = fields.optional_object("leader")
        progress = fields.optional_object("progress")
        counters = fields.object("counters")
        fills = fields.object("fills")
        return cls(
            node=fields.text("node"),
            boot=fields.text("boot"),
            pid=fields.integer("pid"),
            monotonic_ms=fields.integer("monotonic_ms"),
            wall_ms=fields.integer("wall_ms"),
            role=fields.choice("role", Role),
            epoch=fields.optional_integer("epoch"),
            leader=None if leader is None else _leader(leader),
            progress=None if progress is None else Progress.from_json(progress),
            control_offset=fields.integer("control_offset", at_least=-1),
            wheels=known.of("wheels", fields.value("wheels"), _wheels),
            nodes=known.of("nodes", fields.value("nodes"), _nodes),
            lateness_ms=fields.integer("lateness_ms"),
            kafka_error=fields.optional_text("kafka_error"),
            kafka_warnings=fields.texts("kafka_warnings"),
            started_ms=fields.integer("started_ms"),
            counters={name: counters.integer(name) for name in counters.names()},
            forwarded_by_topic=_counted(known, fields, "forwarded_by_topic"),
            dead_by_topic=_counted(known, fields, "dead_by_topic"),
            dead_by_reason=_counted(known, fields, "dead_by_reason"),
            lateness=known.of("lateness", fields.value("lateness"), _histogram),
            commit_times=known.of("commit_times", fields.value("commit_times"), _histogram),
            unavailable_topics=fields.texts("unavailable_topics"),
            fences=tuple(Fence(str(node), int(upto)) for node, upto in fields.pairs("fences")),
            fills={parse_wheel(name): fills.integer(name, at_least=0) for name in fills.names()},
            vote_wish=None if fields.is_null("vote_wish") else VoteWish(*fields.pair("vote_wish")),
            stands=fields.boolean("stands"),
            call_since_ms=fields.optional_integer("call_since_ms"),
            unreadable=known.of("unreadable", fields.items("unreadable"), FrameSet.from_json),
            lost=known.of("lost", fields.items("lost"), FrameSet.from_json),
            ingress_slot=fields.optional_integer("ingress_slot", at_least=0),
            ingress=known.of("ingress", fields.value("ingress"), _ingress),
            reschedules=known.of("reschedules", fields.items("reschedules"), _reschedules),
            needs=fields.integer("needs", at_least=1),
        )


def _reschedules(document: Any) -> dict[MessageKey, Reschedule]:
    return {
        (bytes.fromhex(id_), int(due_ms)): Reschedule.from_json(stands)
        for id_, due_ms, stands in document
    }


def _ingress(document: Any) -> IngressStatus | None:
    return None if document is None else IngressStatus.from_json(document)


def _sight(fields: Fields, known: Unchanged) -> PeerSight:
    heartbeat = Heartbeat.from_json(fields.object("beat"), known)
    return PeerSight(heartbeat, fields.optional_integer("heard_ms"))


def _counted(known: Unchanged, fields: Fields, name: str) -> Mapping[str, int]:
    return known.of(name, fields.value(name), _counts)


def _counts(document: Any) -> dict[str, int]:
    fields = Fields(document)
    return {name: fields.integer(name, at_least=0) for name in fields.names()}


def _histogram(document: Any) -> Histogram | None:
    return None if document is None else Histogram.from_json(Fields(document))


def _wheels(document: Any) -> dict[WheelId, WheelRecord]:
    fields = Fields(document)
    return {
        parse_wheel(name): WheelRecord.from_json(fields.object(name)) for name in fields.names()
    }


def _nodes(document: Any) -> dict[str, NodeRecord]:
    fields = Fields(document)
    return {name: NodeRecord.from_json(fields.object(name)) for name in fields.names()}


def _leader(fields: Fields) -> Leader:
    return Leader(fields.text("node"), fields.integer("epoch"))
