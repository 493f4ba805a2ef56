"""What nodes report about themselves to one another.

A `Heartbeat` is what a node's server reports: its wheels, and how far it holds each. It goes to
every peer and, with its process's stamp, into the status file that its cleaner reads
(status_files.py). It is a whole state, never a change: a reader that missed some loses nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Annotated, Any, Final, NamedTuple

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel_replica.core.protocol.codec import (
    MOST,
    MalformedError,
    Natural,
    NodeId,
    ShortText,
    at_most,
    between,
)
from delaywheel_replica.core.protocol.progress import Reached
from delaywheel_replica.core.protocol.seal import Seal

_NUMBERS_OF_A_WHEEL = 6  # the spans of missing frames follow

_MOST_SLOT: Final = (1 << 32) - 1
"""Slots are 32 bits wide in frames and index rows."""

WheelNumber = Annotated[int, between(1, 10**18 - 1)]
"""A wheel's name has at most 18 digits for it."""

MOST_WHEELS: Final = 1 << 16
"""The most entries in one heartbeat or promise."""
MOST_MEMBERS: Final = 1_000

MAX_MISSING = 50
"""Missing frames of one wheel are reported in this many spans: the sizes of reports are bounded."""

LONGEST_OBJECTION = 250
"""How many characters of an objection are reported."""

MAX_SOUGHT = 512
"""How many spans of frames are searched for at once, per wheel."""


@dataclass(frozen=True, slots=True)
class WheelHeartbeat:
    """What one node reports of one wheel.

    Attributes:
        applied: The greatest seq of which the node has a row; for an origin's own open wheel, the
            last seq written.
        high_watermark: The greatest seq that the node knows to be held by W members.
        seal_slot: With `seal_seq` the newest known seal; at first (first slot, 0).
        ledger_seq: Frames up to here are in the published ledger.
        top_slot: The greatest slot of any of its frames; -1: it has none.
        missing: Seqs up to `applied` that cannot be read here and are not known to be lost or
            finished. Beyond `MAX_MISSING` spans the last one covers all behind it.
    """

    applied: int
    high_watermark: int
    seal_slot: int
    seal_seq: int
    ledger_seq: int
    top_slot: int
    missing: SeqSet = NO_SEQS

    @classmethod
    def empty(cls, seal_slot: int = 0) -> "WheelHeartbeat":
        """Returns the report of a wheel without frames."""
        return cls(0, 0, seal_slot, 0, 0, -1)

    @property
    def prefix(self) -> int:
        """The seq up to which every frame is held: what counts for "W members hold it"."""
        return self.missing.first - 1 if self.missing else self.applied

    @property
    def shown(self) -> SeqSet:
        """The frames that the node reports holding."""
        return NO_SEQS.with_span(1, self.applied) - self.missing

    def shows(self, seq: int) -> bool:
        """Whether the node reports holding a frame."""
        return seq <= self.applied and seq not in self.missing

    @property
    def seal(self) -> Seal:
        """The newest known seal."""
        return Seal(self.seal_slot, self.seal_seq)

    def to_json(self) -> list[int]:
        """Returns a compact JSON list, since a status names every wheel several times."""
        return [
            self.applied,
            self.high_watermark,
            self.seal_slot,
            self.seal_seq,
            self.ledger_seq,
            self.top_slot,
            *chain.from_iterable(self.missing.spans),
        ]

    @classmethod
    def from_json(cls, document: Any) -> "WheelHeartbeat":
        """Reads what `to_json` wrote, or raises MalformedError."""
        if not isinstance(document, list) or len(document) < _NUMBERS_OF_A_WHEEL:
            raise MalformedError(f"a list of numbers was expected, not {document!r}")
        if set(map(type, document)) != {int}:
            raise MalformedError(f"{document!r} is no list of integers")
        return wheel_heartbeat(tuple(document))


class Fence(NamedTuple):
    """A request to every member: promise to refuse this node's wheels up to `upto`."""

    origin: NodeId
    upto: WheelNumber


Seqs = Annotated[Mapping[WheelId, Natural], at_most(MOST_WHEELS)]


@dataclass(frozen=True, slots=True)
class LeaderTerm:
    """What a leader reports while it leads; repeated in full with every heartbeat.

    Attributes:
        fences: Promises that it wants of every member.
        limits: Wheel -> the seq up to which members that have fenced it may still fetch it, from
            any node, so that it can be closed there.
        halves_objection: Why no group can be asked about half messages, or none is heard, so that
            no node accepts any; at most `LONGEST_OBJECTION` characters. None: it can.
    """

    epoch: Natural
    fences: Annotated[tuple[Fence, ...], at_most(MOST_WHEELS)] = ()
    limits: Seqs = field(default_factory=dict)
    halves_objection: ShortText | None = None


class Heard(NamedTuple):
    """States that a node heard another one directly, and when.

    Attributes:
        boot: The newest heard: answers of an older boot no longer count with who reports this.
        ago_ms: How long ago, at the time of the report.
        storage: The last one heard, but for `ROLLED_BACK`.
        saves: The most saves that were heard of that storage.
    """

    boot: ShortText
    ago_ms: Natural
    storage: ShortText = ""
    saves: Natural = 0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A node's report about itself.

    Of two heartbeats of one storage the one with the greater (start, count) is newer; see `order`.

    Attributes:
        storage: The uuid of its data folder.
        boot: The machine's boot id.
        open: The wheel that it accepts messages into.
        spare: The wheel that it opens next.
        last_number: The greatest number of its own wheels that it knows of.
        draining: It accepts nothing more and wants no wheel.
        complete: It holds all that it ever acknowledged, and reports all that it holds.
        wheels: Every wheel of which it has files, its own and others', and its spare.
        start: How often the node has started on this storage.
        count: The number of heartbeats since that start.
        saves: How often its node.json was saved.
        floor: The greatest committed floor it knows of; None before the first.
        reached: The latest committed progress it knows of; None before the first.
        stands: Its cleaner is a candidate that waits for Kafka, which has answered it; reported,
            like `term`, only while both of its processes live.
        heard: Every other node that it ever heard directly since its start.
        disk_out: Its disk accepts no frames now: it has no room, or hangs.
        verifying: Wheels of which it has files without knowing yet what they hold.
        control_version: The version of control records that its release knows.
    """

    node: NodeId
    storage: ShortText
    boot: ShortText
    wall_ms: Natural
    open: WheelId | None
    spare: WheelId | None
    last_number: Annotated[int, between(0, 10**18 - 1)]
    draining: bool
    complete: bool
    wheels: Annotated[Mapping[WheelId, WheelHeartbeat], at_most(MOST_WHEELS)] = field(
        default_factory=dict
    )
    start: Annotated[int, between(0, 10**9)] = 0  # one a second for thirty years
    count: Annotated[int, between(0, 10**13)] = 0  # ten a millisecond for thirty years
    saves: Natural = 0
    floor: Annotated[int, between(-MOST)] | None = None
    reached: Reached | None = None
    stands: bool = False
    term: LeaderTerm | None = None
    heard: Annotated[Mapping[NodeId, Heard], at_most(MOST_MEMBERS)] = field(default_factory=dict)
    disk_out: bool = False
    verifying: Annotated[frozenset[WheelId], at_most(MOST_WHEELS)] = frozenset()
    control_version: Annotated[int, between(1, 10**6)] = 1

    @property
    def order(self) -> tuple[int, int]:
        """Grows with every heartbeat of one storage."""
        return self.start, self.count

    @property
    def named(self) -> tuple[WheelId, ...]:
        """The own wheels in use, which may not be closed."""
        return tuple(wheel for wheel in (self.open, self.spare) if wheel is not None)


@dataclass(frozen=True, slots=True)
class Promise:
    """A member's answer to a fence, durable before it is sent, and what the member holds.

    Attributes:
        storage: The uuid of its data folder.
        applied: Wheel -> the greatest seq of it that the member has; a wheel not named: nothing.
        incomplete: Those of these wheels, or wheels it does not hold, of which the member may have
            lost acknowledged frames.
        all_incomplete: That applies to every wheel.
    """

    node: NodeId
    storage: ShortText
    fence: Fence
    applied: Seqs = field(default_factory=dict)
    incomplete: Annotated[frozenset[WheelId], at_most(MOST_WHEELS)] = frozenset()
    all_incomplete: bool = False

    def covers(self, wheel: WheelId) -> bool:
        """Whether the promise covers this wheel."""
        return wheel.node == self.fence.origin and wheel.number <= self.fence.upto

    def is_complete(self, wheel: WheelId) -> bool:
        """Whether the member holds all that it ever acknowledged of this wheel."""
        return not self.all_incomplete and wheel not in self.incomplete


# What is reported of an open wheel changes with each heartbeat: so the cache is always full, and an
# entry takes half a KiB.
@lru_cache(maxsize=1_024)
def wheel_heartbeat(numbers: tuple[int, ...]) -> WheelHeartbeat:
    """Reads the numbers of `WheelHeartbeat.to_json`, or raises MalformedError.

    Cached, since those of most wheels do not change.
    """
    applied, high_watermark, seal_slot, seal_seq, ledger_seq, top_slot, *spans = numbers
    # In one expression: a node reports each of its wheels ten times a second.
    if not (
        0 <= applied <= MOST
        and 0 <= high_watermark <= MOST
        and 0 <= seal_seq <= MOST
        and 0 <= ledger_seq <= MOST
        and -MOST <= seal_slot <= MOST
        and -1 <= top_slot <= _MOST_SLOT
    ):
        raise MalformedError(f"{list(numbers)} are numbers that no wheel has")
    if len(spans) % 2:
        raise MalformedError(f"{list(numbers)} have half a span")
    missing = SeqSet(zip(spans[::2], spans[1::2], strict=True)) if spans else NO_SEQS
    is_within = not missing or 1 <= missing.first <= missing.last <= applied
    if not is_within or len(missing.spans) > MAX_MISSING:
        raise MalformedError(f"{list(numbers)} have missing frames that cannot be")
    return WheelHeartbeat(
        applied, high_watermark, seal_slot, seal_seq, ledger_seq, top_slot, missing
    )
