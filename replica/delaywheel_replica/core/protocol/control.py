"""The control topic: what the cluster has agreed on.

Every record is written in a leader's transaction, so the log's order decides and the newest record
of a key counts; docs/PROTOCOL.md has the keys in a table. `ControlState` results from applying the
records in order; it is a value, so a leader applies the records of a transaction only once that
transaction is known to be committed.

A release ignores keys that it does not know, and so would lead past a record that binds leaders. So
before what an earlier release would ignore comes ``newer-release-needed``, at which such a release
stops as at a malformed record. A node leads only after it has read the topic to its end.
"""

import re
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Final, TypeVar

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel_replica.core.protocol.codec import (
    MalformedError,
    Natural,
    Positive,
    decode,
    encode,
    parse_wheel,
)
from delaywheel_replica.core.protocol.frames import NO_FRAMES, FrameName, FrameRange, FrameSet
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.reschedules import MessageKey, Reschedule

_T = TypeVar("_T")

ControlRecord = tuple[str, bytes | None]
"""Key and value of a record to be written; no value removes the key."""

CONTROL_VERSION: Final = 3
"""The version of these records that this release knows; no release that knew less was published.

3 adds half messages, which a leader that does not know them would send each at its due, and the ids
that are left out, which it would use.
"""

NEEDS_KEY: Final = "wheel/newer-release-needed"
"""Under `wheel/`, and no wheel's: even a reader that knew no such key would stop at it."""

OPENING: Final[ControlRecord] = "transaction", b""
"""Opens a transaction that is more than an idle commit. No state depends on it.

The client adds the partitions that it finds written to a transaction in one request to the brokers.
The progress is written last, once all else has arrived: without this record before, its partition
would take a request of its own in each transaction.
"""

REMOVED = "removed"
"""Replaces the storage of a node that was removed for good: no disk has it."""

ROLLED_BACK: Final = "rolled-back"
"""Reported in place of a folder's uuid by a node whose folder is an older copy of itself
(core/node/rolled_back.py): no wheel is registered with it."""

_IDS_KEY: Final = "ids"
_LEADER_KEY = re.compile(r"leader/(0|[1-9][0-9]{0,3})")
_LOST_KEY = re.compile(r"lost/([^/]+)/([1-9][0-9]{0,18})")
_RESCHEDULES = "reschedule/"
_INGRESS_KEY = re.compile(r"ingress/([^/]+)/(0|[1-9][0-9]{0,9})")


class ControlRecordMalformedError(Exception):
    """A control record under one of our keys has content that we never write."""


@dataclass(frozen=True, slots=True)
class LeaderRecord:
    """The last candidate that committed with one transactional id.

    Attributes:
        token: Of one candidacy, the same under every transactional id.
        offset: Of this record in the control topic; the greatest of a leader's is its epoch.
    """

    node: str
    token: str
    offset: int


@dataclass(frozen=True, slots=True)
class Leader:
    """The leader according to the control topic; the epoch grows with every leader."""

    node: str
    epoch: int


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The transactional ids that are done without; core/election/id_turns.py says when.

    Attributes:
        ids: Whoever wrote this uses them no more before another record without them is committed.
        unmarked: Those of which the leader that wrote this has no mark.
    """

    ids: frozenset[Natural] = frozenset()
    unmarked: frozenset[Natural] = frozenset()


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A node id's storage, or `REMOVED`, and its last wheel number. Kept forever.

    `saves` says how often the node.json on it had been saved when that wheel was given.
    """

    storage: str
    last_number: Natural
    saves: Natural = 0

    def on(self, storage: str) -> "NodeRecord":
        """Returns the record of the same node, with another storage: its numbers continue."""
        return NodeRecord(storage, self.last_number)

    def is_ahead_of(self, storage: str, saves: int) -> bool:
        """Whether this storage was seen in a later state than the one with so many saves."""
        return self.storage == storage and self.saves > saves


def required_answers(members: int, min_insync: int) -> int:
    """Returns R: any R members include a holder of every frame that W = ``min_insync`` hold."""
    if not 1 <= min_insync <= members:
        raise ValueError(f"min_insync {min_insync} of {members} members")
    return members - min_insync + 1


@dataclass(frozen=True, slots=True)
class WheelRecord:
    """A registered wheel.

    Attributes:
        members: Node -> storage uuid; with another storage it is not a member of this wheel.
        min_insync: W.
        seal_slot: The floor at registration, and the wheel's first seal: no frame is for one below.
        closed_at: T: no frame beyond it counts. None: not closed.
        limit: No end is found below it; members that have fenced the wheel may accept up to here.
    """

    members: Mapping[str, str]
    min_insync: Positive
    seal_slot: int
    closed_at: Natural | None = None
    limit: Natural = 0

    def __post_init__(self) -> None:
        if self.min_insync > len(self.members):
            raise ValueError(f"min_insync {self.min_insync} of {len(self.members)}")

    @property
    def required_answers(self) -> int:
        """R: how many members must answer a fence."""
        return required_answers(len(self.members), self.min_insync)


@dataclass(frozen=True, slots=True)
class _Mark:
    """A candidate's record about itself; the record's offset is its epoch."""

    node: str
    token: str


@dataclass(frozen=True, slots=True)
class _Lost:
    last_seq: Positive


@dataclass(frozen=True, slots=True)
class _Needs:
    version: Positive


IngressPartition = tuple[str, int]
"""An ingress topic and one of its partitions."""


@dataclass(frozen=True, slots=True)
class IngressRecord:
    """How far an ingress partition has been read; docs/PROTOCOL.md has its fields in a table."""

    topic_id: str
    next_offset: Natural
    announced: SeqSet = NO_SEQS
    levels_ms: Mapping[str, Natural] = field(default_factory=dict)
    cut_off: Natural | None = None


@dataclass(frozen=True, slots=True)
class ControlState:
    """The state that results from the records so far.

    Attributes:
        progress: None before the first leader.
        leaders: Transactional id -> the last candidate that committed with it.
        nodes: Every node that was ever given a wheel, or removed.
        lost: Frames that no member can read.
        lost_records: First frame of each record of lost ones -> last seq: these are removed with
            the wheel. Ranges of several records may touch, and overlap.
        reschedules: Messages that have another due by now, while frames do not express it yet.
        needs: The version of these records that a leader must know.
    """

    progress: Progress | None = None
    leaders: Mapping[int, LeaderRecord] = field(default_factory=dict)
    left_out: LeftOut = field(default_factory=LeftOut)
    nodes: Mapping[str, NodeRecord] = field(default_factory=dict)
    wheels: Mapping[WheelId, WheelRecord] = field(default_factory=dict)
    lost: FrameSet = NO_FRAMES
    lost_records: Mapping[FrameName, int] = field(default_factory=dict)
    ingress: Mapping[IngressPartition, IngressRecord] = field(default_factory=dict)
    reschedules: Mapping[MessageKey, Reschedule] = field(default_factory=dict)
    needs: int = 1

    def apply(self, key: bytes | str | None, value: bytes | None, offset: int) -> "ControlState":
        """Returns the state after one more record; the value None removes its key.

        Unknown keys are ignored, so that an older node can follow a newer one's topic.

        Raises:
            ControlRecordMalformedError: A known key with a value that we never write, or records
                that only later releases know.
        """
        if key is None:
            return self
        text = key if isinstance(key, str) else key.decode(errors="replace")
        try:
            return _apply(self, text, value, offset)
        except MalformedError as error:
            raise ControlRecordMalformedError(
                f"control record {text!r} at offset {offset}: {error}"
            ) from error

    def apply_all(self, records: "list[ControlRecord]") -> "ControlState":
        """Returns the state after these records, for use where offsets do not matter."""
        state = self
        for of_messages, some in groupby(records, _is_of_message):
            if of_messages:  # there may be hundreds
                state = _apply_reschedules(state, some)
                continue
            for key, value in some:
                state = state.apply(key, value, -1)
        return state

    def remaining(self, record: WheelRecord) -> dict[str, str]:
        """Returns a wheel's members with their storages, except replaced and removed ones.

        A leader with outdated settings may still name a removed node for new wheels.
        """
        return {
            node: storage
            for node, storage in record.members.items()
            if storage != REMOVED
            and (node not in self.nodes or self.nodes[node].storage == storage)
        }

    def holders(self, record: WheelRecord) -> dict[str, str]:
        """Returns the nodes that hold a wheel, or are to fetch it, with their storages.

        Who was replaced never counts for an open wheel: it may have acknowledged more before,
        whatever it has fetched since. For a closed one it does, as nothing depends on who
        acknowledged what.
        """
        if record.closed_at is None:
            return self.remaining(record)
        known = {
            node: self.nodes[node].storage if node in self.nodes else storage
            for node, storage in record.members.items()
        }
        return {node: storage for node, storage in known.items() if storage != REMOVED}

    def marked(self, token: str) -> frozenset[int]:
        """Returns the transactional ids under which a candidacy's mark is the newest."""
        return frozenset(index for index, mark in self.leaders.items() if mark.token == token)

    def leader(self, ids: int, *, without: AbstractSet[int] | None = None) -> Leader | None:
        """Returns the one candidate whose token is the newest with every id.

        Ids in `without` do not count; None: those of which the leader has no mark.
        """
        without = self.left_out.unmarked if without is None else without
        records = [self.leaders.get(index) for index in range(ids) if index not in without]
        marks = [record for record in records if record is not None]
        if len(marks) < len(records) or len({mark.token for mark in marks}) != 1:
            return None
        return Leader(marks[0].node, max(mark.offset for mark in marks))


def _apply(state: ControlState, key: str, value: bytes | None, offset: int) -> ControlState:
    kind, _, rest = key.partition("/")
    if key == "progress":
        return replace(state, progress=_read(Progress, value))
    if key == NEEDS_KEY:
        return replace(state, needs=_needs(_read(_Needs, value).version))
    if match := _LEADER_KEY.fullmatch(key):
        mark = _read(_Mark, value)
        leader = LeaderRecord(mark.node, mark.token, offset)
        return replace(state, leaders={**state.leaders, int(match[1]): leader})
    if kind == "node" and rest:
        return replace(state, nodes={**state.nodes, rest: _read(NodeRecord, value)})
    if kind == "wheel" and rest:
        return _apply_wheel(state, parse_wheel(rest), value)
    return _apply_other(state, kind, key, value)


def _apply_other(state: ControlState, kind: str, key: str, value: bytes | None) -> ControlState:
    if match := _LOST_KEY.fullmatch(key):
        return _apply_lost(state, (parse_wheel(match[1]), int(match[2])), value)
    if key == _IDS_KEY:
        return replace(state, left_out=_read(LeftOut, value))
    if kind == "reschedule":
        return _apply_reschedules(state, [(key, value)])
    return _apply_ingress(state, key, value) if kind == "ingress" else state


def _is_of_message(record: ControlRecord) -> bool:
    return record[0].startswith(_RESCHEDULES)


def _apply_reschedules(state: ControlState, records: Iterable[ControlRecord]) -> ControlState:
    """Applies records of messages, with one copy of all that stand."""
    reschedules = dict(state.reschedules)
    for key, value in records:
        message = MessageKey.parse(key.removeprefix(_RESCHEDULES))
        reschedules.pop(message, None)
        if value is not None:
            reschedules[message] = _read(Reschedule, value)
    return replace(state, reschedules=reschedules)


def _apply_ingress(state: ControlState, key: str, value: bytes | None) -> ControlState:
    match = _INGRESS_KEY.fullmatch(key)
    if match is None:
        return state
    taken = _read(IngressRecord, value)
    return replace(state, ingress={**state.ingress, (match[1], int(match[2])): taken})


def _apply_wheel(state: ControlState, wheel: WheelId, value: bytes | None) -> ControlState:
    """Applies a wheel record; a closed wheel never reopens, nor ends elsewhere."""
    before = state.wheels.get(wheel)
    if value is None:
        wheels = {known: record for known, record in state.wheels.items() if known != wheel}
        return replace(state, wheels=wheels)
    record = _read(WheelRecord, value)
    if before is not None and before.closed_at is not None:
        record = replace(record, closed_at=before.closed_at)
    return replace(state, wheels={**state.wheels, wheel: record})


def _apply_lost(state: ControlState, first: FrameName, value: bytes | None) -> ControlState:
    wheel, seq = first
    if value is None:
        records = {known: last for known, last in state.lost_records.items() if known != first}
        left = FrameSet(FrameRange(*known, last) for known, last in records.items())
        return replace(state, lost=left, lost_records=records)
    last_seq = decode(_Lost, value).last_seq
    if last_seq < seq:
        raise MalformedError(f"last_seq: {last_seq} is less than {seq}")
    return replace(
        state,
        lost=state.lost.with_range(FrameRange(wheel, seq, last_seq)),
        lost_records={**state.lost_records, first: last_seq},
    )


def _read(kind: type[_T], value: bytes | None) -> _T:
    if value is None:
        raise MalformedError("this key is never removed")
    return decode(kind, value)


def _needs(needs: int) -> int:
    if needs > CONTROL_VERSION:
        raise MalformedError(
            f"a later release wrote records of version {needs}, and this one knows those up to"
            f" {CONTROL_VERSION}: start the later one"
        )
    return needs


def needs_record(version: int) -> ControlRecord:
    """Builds the record that keeps releases that do not know this version from leading."""
    return NEEDS_KEY, encode(_Needs(version))


def progress_record(progress: Progress) -> ControlRecord:
    """Builds the progress record, which goes last in every transaction."""
    return "progress", encode(progress)


def leader_record(index: int, node: str, token: str) -> ControlRecord:
    """Builds a candidate's mark with one transactional id."""
    return f"leader/{index}", encode(_Mark(node, token))


def left_out_record(left_out: LeftOut) -> ControlRecord:
    """Builds the record of the transactional ids that are done without."""
    return _IDS_KEY, encode(left_out)


def node_record(node: str, record: NodeRecord) -> ControlRecord:
    """Builds the record of a node's storage and last wheel number."""
    return f"node/{node}", encode(record)


def wheel_record(wheel: WheelId, record: WheelRecord) -> ControlRecord:
    """Builds the record of a registered wheel."""
    return f"wheel/{wheel}", encode(record)


def ingress_record(partition: IngressPartition, record: IngressRecord) -> ControlRecord:
    """Builds the record of how far an ingress partition has been read."""
    topic, number = partition
    return f"ingress/{topic}/{number}", encode(record)


def reschedule_record(key: MessageKey, record: Reschedule | None) -> ControlRecord:
    """Builds the record of a message's new due; None: removed, once frames express the same."""
    return f"{_RESCHEDULES}{key}", None if record is None else encode(record)


def lost_record(lost: FrameRange) -> ControlRecord:
    """Builds the record of one range of frames that no member can read."""
    return f"lost/{lost.wheel}/{lost.first_seq}", encode(_Lost(lost.last_seq))


def lost_records(state: ControlState, lost: FrameSet) -> list[ControlRecord]:
    """Builds the records of frames that no member can read, one for each range.

    A range that touches a recorded one is recorded with it: millions in a row end up as one record.
    """
    joined = state.lost | lost
    ranges = dict.fromkeys(joined.range_of(found.first) for found in lost.ranges())
    records: list[ControlRecord] = []
    for found in filter(None, ranges):
        records.append(lost_record(found))
        records += [
            (f"lost/{wheel}/{seq}", None)
            for wheel, seq in sorted(state.lost_records)
            if wheel == found.wheel and found.first_seq < seq <= found.last_seq
        ]
    return records


def unregister_records(state: ControlState, wheel: WheelId) -> list[ControlRecord]:
    """Builds the tombstones of a wheel's records."""
    gone: list[ControlRecord] = [(f"wheel/{wheel}", None)]
    gone += [(f"lost/{of}/{seq}", None) for of, seq in sorted(state.lost_records) if of == wheel]
    return gone
