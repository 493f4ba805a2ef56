"""Keeps the order of each key's records over retries: decides whose turn it is.

A lane is a partition of the source topic together with the same partition of the retry topic; one
consumer has both. For each lane it is known which records are *away*: sent to come back, and not
yet ended. A record is identified by its offset in the source topic, which also gives the order of
its key's records.

| a record of a key that | is |
|---|---|
| has one in hand | after that one: examined again once it is settled |
| has an earlier one away | parked: sent to come back after it, its attempt not counted |
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
from delaywheel.consumer.records import Outgoing, Partition
from delaywheel.consumer.settings import Settings, TopicNames

_LOG = logging.getLogger("delaywheel.consumer")

AGAIN_MS = 200
"""A record that came back before the one it waits for comes again after at least this long."""

ENTRY_BYTES = 200
"""What one record that is away takes in memory, besides its key."""

_OFFSET = struct.Struct(">q")
_DUE = struct.Struct(">q")


class Away(NamedTuple):
    """A record that was sent to return later."""

    offset: int
    due_ms: int
    key: bytes


@dataclass(slots=True)
class _Lane:
    order_topic: str
    away: dict[bytes, dict[int, int]] = field(default_factory=dict)
    # For each key the record in hand, and the waiting ones.
    here: dict[bytes, deque[ReceivedMessage]] = field(default_factory=dict)


class KeyOrder:
    """All lanes of one consumer."""

    def __init__(self) -> None:
        self._lanes: dict[Partition, _Lane] = {}
        self._away_bytes = 0

    @property
    def away_bytes(self) -> int:
        """The memory of records that are away (sent to return later), in bytes."""
        return self._away_bytes

    def assign(self, lane: Partition, order_topic: str, away: Iterable[Away]) -> None:
        """Adds a lane, with its records that are away."""
        self.forget([lane])
        known = self._lanes[lane] = _Lane(order_topic)
        for one in away:
            self._add(known, one)

    def forget(self, lanes: Iterable[Partition]) -> None:
        """Drops lanes that are no longer assigned."""
        for lane in lanes:
            known = self._lanes.pop(lane, None)
            if known is not None:
                self._away_bytes -= sum(
                    len(offsets) * (ENTRY_BYTES + len(key)) for key, offsets in known.away.items()
                )

    def admit(self, message: ReceivedMessage, now_ms: int) -> int | bool:
        """Decides whether it is this record's turn.

        Returns:
            True: Yes; it is in hand now. False: It is behind another one; `settled` names it when
            it is to be examined again. A number: Park it until then.
        """
        lane, key = self._lane(message), message.key
        if lane is None or key is None:
            return True
        queue = lane.here.get(key)
        if queue is not None:
            queue.append(message)
            return False
        earlier = [
            due_ms
            for offset, due_ms in lane.away.get(key, {}).items()
            if offset < message.origin.offset
        ]
        if earlier:
            return max(max(earlier) + 1, now_ms + AGAIN_MS)
        lane.here[key] = deque((message,))
        return True

    def settled(
        self, message: ReceivedMessage, settlement: Settlement
    ) -> tuple[Outgoing | None, list[ReceivedMessage]]:
        """Notes that a record has its outcome.

        Returns:
            What its transaction writes to the order topic, and which records to examine again.
        """
        lane, key = self._lane(message), message.key
        if lane is None or key is None:
            return None, []
        offset = message.origin.offset
        freed: list[ReceivedMessage] = []
        queue = lane.here.get(key)
        if queue is not None and queue[0] is message:
            del lane.here[key]
            queue.popleft()
            freed = list(queue)
        if settlement.outcome in (Outcome.RETRIED, Outcome.PARKED):
            self._add(lane, Away(offset, settlement.due_ms, key))
            value = _DUE.pack(settlement.due_ms) + key
            return self._record(lane, message, value), freed
        offsets = lane.away.get(key, {})
        if offset not in offsets:
            return None, freed
        del offsets[offset]
        if not offsets:
            del lane.away[key]
        self._away_bytes -= ENTRY_BYTES + len(key)
        return self._record(lane, message, None), freed

    def _add(self, lane: _Lane, one: Away) -> None:
        offsets = lane.away.setdefault(one.key, {})
        if one.offset not in offsets:
            self._away_bytes += ENTRY_BYTES + len(one.key)
        offsets[one.offset] = one.due_ms

    def _lane(self, message: ReceivedMessage) -> _Lane | None:
        """Returns a record's lane; None if its order is unknown, as for another program's retry."""
        origin = message.origin
        if origin.partition != message.place.partition:
            return None
        return self._lanes.get(Partition(origin.topic, origin.partition))

    @staticmethod
    def _record(lane: _Lane, message: ReceivedMessage, value: bytes | None) -> Outgoing:
        key = _OFFSET.pack(message.origin.offset)
        return Outgoing(lane.order_topic, key, value, [], message.origin.partition)


def read_away(records: Iterable[tuple[bytes | None, bytes | None]]) -> list[Away]:
    """Returns the records sent to return later, from all keys and values of an order partition."""
    away: dict[int, Away] = {}
    for key, value in records:
        if key is None or len(key) != _OFFSET.size:
            continue
        (offset,) = _OFFSET.unpack(key)
        if value is None or len(value) < _DUE.size:
            away.pop(offset, None)
        else:
            (due_ms,) = _DUE.unpack_from(value)
            away[offset] = Away(offset, due_ms, value[_DUE.size :])
    return list(away.values())


def check_partitions(topics: Sequence[TopicNames], known: Mapping[str, int]) -> None:
    """Checks that lanes have both halves: a group's topics need equal numbers of partitions.

    Raises:
        ConsumerError: The numbers differ.
    """
    for names in topics:
        for name in (names.retry, names.order):
            if known[name] != known[names.source]:
                raise ConsumerError(
                    ConsumerReason.ORDER_IMPOSSIBLE,
                    f"{name} has {known[name]} partitions, {names.source} {known[names.source]}",
                )


def whole_lanes(settings: Settings, partitions: Sequence[Partition]) -> list[Partition]:
    """Returns those of these partitions whose counterparts in their lanes were assigned too.

    The halves come apart for a moment while some member does not yet know of a new topic or
    partition, and for longer if the topics have different numbers of partitions.
    """
    whole = []
    for partition in partitions:
        names = settings.names_of(partition.topic)
        other = names.retry if partition.topic == names.source else names.source
        if Partition(other, partition.number) in partitions:
            whole.append(partition)
        else:
            _LOG.warning("ORDER_IMPOSSIBLE: %s is not read without %s's", partition, other)
    return whole
