"""Keeps the order of each key's records over retries: decides which one comes next.

A lane is a partition of the source topic together with the same partition of the retry topic; one
consumer has both. For each lane it is known which records are *away*: sent to come back, and not
yet ended. A record is identified by its offset in the source topic, which also gives the order of
its key's records.

| a record of a key that | is |
|---|---|
| has one in hand | after that one: examined again once it is settled |
| has an earlier one away | parked: sent to come back after it, its attempt not counted; if that |
|   | one is overdue, after half as long again as it has been overdue, 10 min at most |
| has an earlier one away that is overdue by `lost_after` | handed out: that one is lost, and no |
|   | longer waited for |
| has neither | handed out |

| a record is | then it is |
|---|---|
| retried, parked | away, until it is due at least |
| done, dead, skipped, expired | no longer away |

Records that are away are listed in a compacted topic, `<topic>-order-<group>`, written in the
transaction that settles the record: the key is the offset, the value the due and the record's key,
or null once it is no longer away. A consumer that is assigned a lane reads the list from there,
after it has read the committed offsets: by then no transaction of an earlier owner is open.

No I/O, no clock, no lock.
"""

from __future__ import annotations

import logging
import struct
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from delaywheel.consumer.message import (
    ConsumerError,
    ConsumerReason,
    Outcome,
    ReceivedMessage,
    Settlement,
)
from delaywheel.consumer.records import Partition
from delaywheel.consumer.rules.subscription import TopicNames
from delaywheel.consumer.settings import ConsumerSettings
from delaywheel.transactional import Outgoing

_LOG = logging.getLogger("delaywheel.consumer")

AGAIN_MS = 200
"""A record that came back before the one it waits for comes again after at least this long."""

LONGEST_AGAIN_MS = 600_000
"""And after at most this long."""

ENTRY_BYTES = 200
"""What one record that is away takes in memory, besides its key."""

_OFFSET = struct.Struct(">q")
_DUE = struct.Struct(">q")


class Away(NamedTuple):
    """A record that was sent to return later."""

    offset: int
    due_ms: int
    key: bytes


class Behind(NamedTuple):
    """A record comes after an earlier one of its key.

    Attributes:
        until_ms: Park it until then; None: the earlier one is in hand here, and `settled` names
            this one when it is to be examined again.
    """

    until_ms: int | None


@dataclass(slots=True)
class _KeyLane:
    order_topic: str
    away: dict[bytes, dict[int, int]] = field(default_factory=dict)
    # For each key the record in hand or to be examined next, and the waiting ones.
    here: dict[bytes, deque[ReceivedMessage]] = field(default_factory=dict)
    # For each key what was lost: the next record of the key writes it.
    lost: dict[bytes, list[int]] = field(default_factory=dict)


class KeyOrder:
    """All lanes of one consumer."""

    def __init__(self, *, lost_after_ms: int) -> None:
        """Begins without lanes; a record that is away is waited for so long after its due."""
        self._lost_after_ms = lost_after_ms
        self._lanes: dict[Partition, _KeyLane] = {}
        self.away_bytes = 0
        """The memory of records that are away (sent to return later), in bytes."""
        self.lost = 0
        """How many records are lost: nobody knows what became of them."""

    def assign(self, lane: Partition, order_topic: str, away: Iterable[Away]) -> None:
        """Adds a lane, with its records that are away."""
        self.forget([lane])
        known = self._lanes[lane] = _KeyLane(order_topic)
        for one in away:
            self._add(known, one)

    def forget(self, lanes: Iterable[Partition]) -> None:
        """Drops lanes that are no longer assigned."""
        for lane in lanes:
            known = self._lanes.pop(lane, None)
            if known is not None:
                self.away_bytes -= sum(
                    len(offsets) * (ENTRY_BYTES + len(key)) for key, offsets in known.away.items()
                )

    def admit(self, message: ReceivedMessage, now_ms: int) -> Behind | None:
        """Takes this record in hand, and returns None; or returns what it is behind."""
        lane, key = self._lane(message), message.key
        if lane is None or key is None:
            return None
        queue = lane.here.get(key)
        if queue is not None and queue[0] is not message:
            queue.append(message)
            return Behind(None)
        self._give_up(lane, message, key, now_ms)
        earlier = [
            due_ms
            for offset, due_ms in lane.away.get(key, {}).items()
            if offset < message.origin.offset
        ]
        if earlier:
            last_ms = max(earlier)
            again_ms = min(max(AGAIN_MS, (now_ms - last_ms) // 2), LONGEST_AGAIN_MS)
            return Behind(max(last_ms + 1, now_ms + again_ms))
        if queue is None:
            lane.here[key] = deque((message,))
        return None

    def _give_up(self, lane: _KeyLane, message: ReceivedMessage, key: bytes, now_ms: int) -> None:
        """Waits no longer for earlier records of the key that will not come any more."""
        gone = [
            offset
            for offset, due_ms in lane.away.get(key, {}).items()
            if offset < message.origin.offset and now_ms - due_ms > self._lost_after_ms
        ]
        for offset in gone:
            topic, partition = message.origin.topic, message.origin.partition
            _LOG.error(
                "%s/%d/%d was retried and never came back: the next record of its key, %r, goes on",
                *(topic, partition, offset, message),
            )
            self._remove(lane, key, offset)
            lane.lost.setdefault(key, []).append(offset)
        self.lost += len(gone)

    def replaced(self, message: ReceivedMessage, again: ReceivedMessage) -> None:
        """Notes that a record in hand is handed out again, as another object."""
        lane, key = self._lane(message), message.key
        queue = None if lane is None or key is None else lane.here.get(key)
        if queue is not None and queue[0] is message:
            queue[0] = again

    def settled(
        self, message: ReceivedMessage, settlement: Settlement
    ) -> tuple[tuple[Outgoing, ...], list[ReceivedMessage]]:
        """Notes that a record has its outcome.

        Returns what its transaction writes to the order topic, and which records to examine again.
        """
        lane, key = self._lane(message), message.key
        if lane is None or key is None:
            return (), []
        offset, number = message.origin.offset, message.origin.partition
        freed: list[ReceivedMessage] = []
        queue = lane.here.get(key)
        if queue is not None and queue[0] is message:
            queue.popleft()
            if queue:
                freed.append(queue[0])
            else:
                del lane.here[key]
        lost = lane.lost.pop(key, ())
        written = [self._record(lane, number, gone, None) for gone in lost]
        if settlement.outcome in (Outcome.RETRIED, Outcome.PARKED):
            self._add(lane, Away(offset, settlement.due_ms, key))
            value = _DUE.pack(settlement.due_ms) + key
            written.append(self._record(lane, number, offset, value))
        elif self._remove(lane, key, offset):
            written.append(self._record(lane, number, offset, None))
        return tuple(written), freed

    def _remove(self, lane: _KeyLane, key: bytes, offset: int) -> bool:
        """Notes that a record is no longer away; returns whether it was."""
        offsets = lane.away.get(key, {})
        if offset not in offsets:
            return False
        del offsets[offset]
        if not offsets:
            del lane.away[key]
        self.away_bytes -= ENTRY_BYTES + len(key)
        return True

    def _add(self, lane: _KeyLane, one: Away) -> None:
        offsets = lane.away.setdefault(one.key, {})
        if one.offset not in offsets:
            self.away_bytes += ENTRY_BYTES + len(one.key)
        offsets[one.offset] = one.due_ms

    def _lane(self, message: ReceivedMessage) -> _KeyLane | None:
        """Returns a record's lane; None if its order is unknown, as for another program's retry."""
        origin = message.origin
        if origin.partition != message.place.partition:
            return None
        return self._lanes.get(Partition(origin.topic, origin.partition))

    @staticmethod
    def _record(lane: _KeyLane, partition: int, offset: int, value: bytes | None) -> Outgoing:
        return Outgoing(lane.order_topic, _OFFSET.pack(offset), value, [], partition)


def fold(away: dict[int, Away], key: bytes | None, value: bytes | None) -> None:
    """Takes in one record of an order partition, by offset: what is away after it."""
    if key is None or len(key) != _OFFSET.size:
        return
    (offset,) = _OFFSET.unpack(key)
    if value is None or len(value) < _DUE.size:
        away.pop(offset, None)
    else:
        (due_ms,) = _DUE.unpack_from(value)
        away[offset] = Away(offset, due_ms, value[_DUE.size :])


def check_partitions(topics: Iterable[TopicNames], known: Mapping[str, int]) -> None:
    """Raises ConsumerError unless a group's topics have equal numbers of partitions, for lanes."""
    for names in topics:
        for name in (names.retry, names.order):
            if known[name] != known[names.source]:
                raise ConsumerError(
                    ConsumerReason.ORDER_IMPOSSIBLE,
                    f"{name} has {known[name]} partitions, {names.source} {known[names.source]}",
                )


def whole_lanes(settings: ConsumerSettings, partitions: Sequence[Partition]) -> list[Partition]:
    """Returns those of these partitions whose counterparts in their lanes were assigned too.

    The halves come apart for a moment while some member does not yet know of a new topic or
    partition, and for longer if the topics have different numbers of partitions.
    """
    whole = []
    for partition in partitions:
        names = settings.topics.names_of(partition.topic)
        other = names.retry if partition.topic == names.source else names.source
        if Partition(other, partition.number) in partitions:
            whole.append(partition)
    return whole
