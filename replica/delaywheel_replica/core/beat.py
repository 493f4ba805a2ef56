"""What processes and nodes tell of themselves.

A `Beat` is what a node's server tells: its wheels and how far it holds each. The server writes
it, with its process' stamp, into the row that its cleaner reads (`ServerStatus`); between nodes
it is what goes to the peers. `CleanerStatus` is the cleaner's row for its server: what the
control topic says and how forwarding goes. Both are whole states, never changes: a reader that
missed some loses nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from delaywheel.identity import WheelId
from delaywheel_replica.core.control import Leader, WheelRecord
from delaywheel_replica.core.fields import Fields, parse_wheel
from delaywheel_replica.core.progress import Progress
from delaywheel_replica.core.seal import Seal

SERVER_FRESH_MS = 500
"""A server that has not stamped its row for so long does not count as living."""


class Role(StrEnum):
    """What a cleaner does now."""

    STANDBY = "standby"
    CANDIDATE = "candidate"
    RESTING = "resting"
    LEADING = "leading"


@dataclass(frozen=True, slots=True)
class WheelBeat:
    """How far a node holds one wheel.

    Attributes:
        applied: the greatest seq up to which the node holds it.
        high_watermark: the greatest seq that the node knows to be held by W members.
        seal_slot: with `seal_seq` the newest seal known of it; at first (first slot, 0).
        seal_seq: see `seal_slot`.
        ledger_seq: frames up to here are in the published ledger.
        top_slot: the greatest slot that one of its frames has; -1: it has none.
    """

    applied: int
    high_watermark: int
    seal_slot: int
    seal_seq: int
    ledger_seq: int
    top_slot: int

    @property
    def seal(self) -> Seal:
        """The newest seal known."""
        return Seal(self.seal_slot, self.seal_seq)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "applied": self.applied,
            "high_watermark": self.high_watermark,
            "seal_slot": self.seal_slot,
            "seal_seq": self.seal_seq,
            "ledger_seq": self.ledger_seq,
            "top_slot": self.top_slot,
        }

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Reads what `to_json` wrote.

        Raises:
            MalformedError: it is something else.
        """
        fields = document if isinstance(document, Fields) else Fields(document)
        return cls(
            applied=fields.integer("applied", at_least=0),
            high_watermark=fields.integer("high_watermark", at_least=0),
            seal_slot=fields.integer("seal_slot"),
            seal_seq=fields.integer("seal_seq", at_least=0),
            ledger_seq=fields.integer("ledger_seq", at_least=0),
            top_slot=fields.integer("top_slot", at_least=-1),
        )


@dataclass(frozen=True, slots=True)
class Beat:
    """What a node tells of itself.

    Attributes:
        node: who.
        storage: uuid of its data folder.
        boot: the machine's boot id.
        wall_ms: its wall clock when this was told.
        open: the wheel that it accepts into.
        spare: the wheel that it opens next.
        last_number: the greatest number of its own wheels that it knows of.
        draining: it takes no more messages and wants no wheel.
        complete: it holds all that it ever acknowledged.
        wheels: every wheel of which it has files, its own and others', and its spare.
    """

    node: str
    storage: str
    boot: str
    wall_ms: int
    open: WheelId | None
    spare: WheelId | None
    last_number: int
    draining: bool
    complete: bool
    wheels: Mapping[WheelId, WheelBeat] = field(default_factory=dict)

    @property
    def named(self) -> tuple[WheelId, ...]:
        """The own wheels that are in use: neither may be closed."""
        return tuple(wheel for wheel in (self.open, self.spare) if wheel is not None)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "node": self.node,
            "storage": self.storage,
            "boot": self.boot,
            "wall_ms": self.wall_ms,
            "open": _text(self.open),
            "spare": _text(self.spare),
            "last_number": self.last_number,
            "draining": self.draining,
            "complete": self.complete,
            "wheels": {str(wheel): beat.to_json() for wheel, beat in self.wheels.items()},
        }

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Reads what `to_json` wrote.

        Raises:
            MalformedError: it is something else.
        """
        fields = document if isinstance(document, Fields) else Fields(document)
        wheels = fields.object("wheels")
        return cls(
            node=fields.text("node"),
            storage=fields.text("storage"),
            boot=fields.text("boot"),
            wall_ms=fields.integer("wall_ms"),
            open=fields.optional_wheel("open"),
            spare=fields.optional_wheel("spare"),
            last_number=fields.integer("last_number", at_least=0),
            draining=fields.boolean("draining"),
            complete=fields.boolean("complete"),
            wheels={
                parse_wheel(name): WheelBeat.from_json(wheels.object(name))
                for name in wheels.names()
            },
        )


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """The server's row: its node's beat, stamped by this process.

    Attributes:
        beat: what it tells.
        pid: the server process.
        monotonic_ms: CLOCK_MONOTONIC when it was written; the same clock in all processes of
            one machine.
    """

    beat: Beat
    pid: int
    monotonic_ms: int

    def is_fresh(self, now_monotonic_ms: int) -> bool:
        """Whether the server lives, as far as its row tells."""
        return now_monotonic_ms - self.monotonic_ms < SERVER_FRESH_MS

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return self.beat.to_json() | {"pid": self.pid, "monotonic_ms": self.monotonic_ms}

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Reads what `to_json` wrote.

        Raises:
            MalformedError: it is something else.
        """
        fields = Fields(document)
        return cls(
            beat=Beat.from_json(fields),
            pid=fields.integer("pid"),
            monotonic_ms=fields.integer("monotonic_ms"),
        )


@dataclass(frozen=True, slots=True)
class CleanerStatus:
    """The cleaner's row.

    Attributes:
        node: who.
        boot: the machine's boot id.
        pid: the cleaner process.
        monotonic_ms: CLOCK_MONOTONIC when it was written.
        wall_ms: its wall clock then.
        role: what it does.
        epoch: of its own leadership, while it rests or leads.
        leader: who leads, as far as it read the control topic.
        progress: the committed one, None before the first leader.
        control_offset: how far it has read the control topic; -1: never.
        wheels: the registered wheels.
        lateness_ms: wall clock minus the oldest due not done yet; 0: nothing is overdue.
        kafka_error: why it does not lead or forward, for people.
        counters: since the process started.
        unavailable_topics: topics that are dead-lettered until they answer again.
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
    lateness_ms: int = 0
    kafka_error: str | None = None
    counters: Mapping[str, int] = field(default_factory=dict)
    unavailable_topics: tuple[str, ...] = ()

    @property
    def floor(self) -> int | None:
        """The committed floor, None before the first leader."""
        return None if self.progress is None else self.progress.floor

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
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
            "lateness_ms": self.lateness_ms,
            "kafka_error": self.kafka_error,
            "counters": dict(self.counters),
            "unavailable_topics": list(self.unavailable_topics),
        }

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Reads what `to_json` wrote.

        Raises:
            MalformedError: it is something else.
        """
        fields = Fields(document)
        leader = fields.optional_object("leader")
        progress = fields.optional_object("progress")
        wheels = fields.object("wheels")
        counters = fields.object("counters")
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
            wheels={
                parse_wheel(name): WheelRecord.from_json(wheels.object(name))
                for name in wheels.names()
            },
            lateness_ms=fields.integer("lateness_ms"),
            kafka_error=fields.optional_text("kafka_error"),
            counters={name: counters.integer(name) for name in counters.names()},
            unavailable_topics=fields.texts("unavailable_topics"),
        )


def _leader(fields: Fields) -> Leader:
    return Leader(fields.text("node"), fields.integer("epoch"))


def _text(wheel: WheelId | None) -> str | None:
    return None if wheel is None else str(wheel)
