"""The order of a key's records, kept over retries: whose turn it is.

A lane is a partition of the source topic with the partition of the same number of the retry topic;
one consumer has both. Of a lane it is known which records are *away*: sent to come back, and not
ended. A record is told by its offset in the source, which gives the order of its key's records.

| a record of a key that | is |
|---|---|
| has one in hand | behind it: looked at again once that one is settled |
| has an earlier one away | parked: sent to come back after it, its attempt not counted |
| has neither | handed out |

| a record is | then it is |
|---|---|
| retried, parked | away, until it is due at least |
| done, dead, skipped, expired | not away any more |

What is away stands in a compacted topic, `<topic>-order-<group>`, written in the transaction that
settles the record: its key is the offset, its value the due and the record's key, or null once it
is not away. Whoever is assigned a lane reads it from there, after the committed offsets are told:
by then no transaction of an earlier owner is open.

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
"""A record that came back before the one it waits for comes again after so long, at least."""

ENTRY_BYTES = 200
"""What one record that is away takes in memory, beside its key."""

_OFFSET = struct.Struct(">q")
_DUE = struct.Struct(">q")


class Away(NamedTuple):
    """A record that was sent to come back."""

    offset: int
    due_ms: int
    key: bytes


@dataclass(slots=True)
class _Lane:
    order_topic: str
    away: dict[bytes, dict[int, int]] = field(default_factory=dict)
    # Of each key the one that is in hand, and those behind it.
    here: dict[bytes, deque[ReceivedMessage]] = field(default_factory=dict)


class KeyOrder:
    """All lanes of one consumer."""

    def __init__(self) -> None:
        self._lanes: dict[Partition, _Lane] = {}
        self._away_bytes = 0

    @property
    def away_bytes(self) -> int:
        """What is known of records that are away takes so much."""
        return self._away_bytes

    def assign(self, lane: Partition, order_topic: str, away: Iterable[Away]) -> None:
        """A lane is ours now, with what is away of it."""
        self.forget([lane])
        known = self._lanes[lane] = _Lane(order_topic)
        for one in away:
            self._add(known, one)

    def forget(self, lanes: Iterable[Partition]) -> None:
        """Lanes are not ours any more."""
        for lane in lanes:
            known = self._lanes.pop(lane, None)
            if known is not None:
                self._away_bytes -= sum(
                    len(offsets) * (ENTRY_BYTES + len(key)) for key, offsets in known.away.items()
                )

    def admit(self, message: ReceivedMessage, now_ms: int) -> int | bool:
        """Whose turn it is.

        Returns:
            True: this record's, it is in hand now. False: it is behind another one, and is told by
            `settled` when it is to be looked at again. A number: it is to be parked until then.
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
        """A record has its outcome.

        Returns:
            What its transaction is to write into the order topic, and whom to look at again.
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
        """None: no order is known of it, as of what somebody else put into the retry topic."""
        origin = message.origin
        if origin.partition != message.place.partition:
            return None
        return self._lanes.get(Partition(origin.topic, origin.partition))

    @staticmethod
    def _record(lane: _Lane, message: ReceivedMessage, value: bytes | None) -> Outgoing:
        key = _OFFSET.pack(message.origin.offset)
        return Outgoing(lane.order_topic, key, value, [], message.origin.partition)


def read_away(records: Iterable[tuple[bytes | None, bytes | None]]) -> list[Away]:
    """What is away, from all records of a partition of an order topic in order: key and value."""
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
    """Checks that a lane has all its halves: topics of a group have as many partitions.

    Raises:
        ConsumerError: they have not.
    """
    for names in topics:
        for name in (names.retry, names.order):
            if known[name] != known[names.source]:
                raise ConsumerError(
                    ConsumerReason.ORDER_IMPOSSIBLE,
                    f"{name} has {known[name]} partitions, {names.source} {known[names.source]}",
                )


def whole_lanes(settings: Settings, partitions: Sequence[Partition]) -> list[Partition]:
    """Those of these partitions that have come with their other half: a lane needs both.

    They come apart for a moment while some member does not know of a new topic or partition yet;
    for longer if the topics have different numbers of partitions.
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
