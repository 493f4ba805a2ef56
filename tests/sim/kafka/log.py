"""The logs of the simulated Kafka: partitions, records, markers, and which of them are visible."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable

from delaywheel_replica.cleaner.outside.ports import Record, StoredRecord
from sim.machine.scheduler import US_PER_S

COMPACT_EVERY = 512
"""A compacted topic forgets replaced records after this many records."""

TOMBSTONE_US = 30 * US_PER_S
"""The time after which it forgets removed keys."""


class SimKafkaError(Exception):
    """The simulated Kafka broke a rule of its own."""


class Entry:
    """One record in a log, or a marker.

    Attributes:
        marker: None for a record; otherwise whether it says "committed".
        visible_us: When a read_committed reader could see it first; -1: not yet, or never.
    """

    __slots__ = (
        "headers",
        "key",
        "marker",
        "offset",
        "partition",
        "timestamp_ms",
        "topic",
        "transaction",
        "value",
        "visible_us",
    )

    def __init__(
        self,
        partition: Partition,
        transaction: Transaction,
        record: Record | None,
        *,
        marker: bool | None = None,
    ) -> None:
        self.topic = partition.topic
        self.partition = partition.number
        self.offset = len(partition.log)
        self.transaction = transaction
        self.marker = marker
        self.visible_us = -1
        self.key: bytes | None = None
        self.value: bytes | None = None
        self.headers: list[tuple[str, bytes | None]] = []
        self.timestamp_ms = -1
        if record is not None:
            _, self.key, self.value, self.headers, _, self.timestamp_ms = record


class Transaction:
    """One transaction of one producer epoch.

    Attributes:
        node: Whose client began it.
        entries: Its records, in order of arrival.
        open_in: The partitions without its marker yet, and its first offset in each.
        committed: None while it is ongoing.
        decided_us: When that was decided, which is before it is visible.
        began_ms: When it began, by the clock of the brokers.
        is_plain: It stands for one record of a producer without transactions.
    """

    __slots__ = (
        "began_ms",
        "committed",
        "decided_us",
        "entries",
        "epoch",
        "is_plain",
        "node",
        "open_in",
        "transactional_id",
    )

    def __init__(self, transactional_id: str, epoch: int, node: str, began_ms: int) -> None:
        self.transactional_id = transactional_id
        self.epoch = epoch
        self.node = node
        self.entries: list[Entry] = []
        self.open_in: dict[Partition, int] = {}
        self.committed: bool | None = None
        self.began_ms = began_ms
        self.decided_us = -1
        self.is_plain = False

    @classmethod
    def plain(cls, node: str, now_us: int, now_ms: int) -> Transaction:
        """Stands for the transaction of a record without one: committed when it is taken."""
        made = cls("", -1, node, now_ms)
        made.committed, made.decided_us, made.is_plain = True, now_us, True
        return made

    def takes(self, epoch: int, partition: Partition) -> bool:
        """Whether a record of that epoch belongs to it there.

        One that is ending, perhaps under a newer epoch, is open until its marker is there.
        """
        return epoch == self.epoch and partition in self.open_in


class Partition:
    """One log.

    Attributes:
        log: Every record and marker; the offset is the place.
        first: The first offset that is kept; earlier records have been deleted.
        open: The transactions open here and their first offsets, oldest first.
        visible_to: Up to where everything committed has become visible.
        compacted: None, or what a reader of this compacted log still finds.
        latest: For a compacted log: the latest visible record of each key, without keys that were
            removed long ago.
        elections: how often a broker with another log became its leader.
    """

    __slots__ = (
        "_changed_us",
        "_stable",
        "_tombstones",
        "compacted",
        "elections",
        "first",
        "latest",
        "log",
        "number",
        "open",
        "topic",
        "visible_to",
    )

    def __init__(self, topic: str, number: int, *, compacted: bool) -> None:
        self.topic = topic
        self.number = number
        self.log: list[Entry] = []
        self.first = 0
        self.open: dict[Transaction, int] = {}
        self.visible_to = 0
        self.compacted: list[StoredRecord] | None = [] if compacted else None
        self.latest: dict[bytes, StoredRecord] = {}
        self.elections = 0
        self._changed_us = [0]
        self._stable = [0]
        # When each expires, in order.
        self._tombstones: deque[tuple[int, StoredRecord]] = deque()

    @property
    def last_stable_offset(self) -> int:
        """The offset below which every transaction has ended."""
        return next(iter(self.open.values()), len(self.log))

    def stable_at(self, at_us: int) -> int:
        """Returns the last stable offset of that time."""
        return self._stable[max(0, bisect_right(self._changed_us, at_us) - 1)]

    def append(self, transaction: Transaction, record: Record) -> None:
        """Adds a record of a transaction that is open, or begins to be open here."""
        entry = Entry(self, transaction, record)
        if self not in transaction.open_in:
            transaction.open_in[self] = self.open[transaction] = entry.offset
        transaction.entries.append(entry)
        self.log.append(entry)

    def append_plain(self, record: Record, transaction: Transaction) -> list[Entry]:
        """Adds a record without a transaction; returns what becomes visible by it."""
        entry = Entry(self, transaction, record)
        transaction.entries.append(entry)
        self.log.append(entry)
        return self._advance(transaction.decided_us)

    def mark(self, transaction: Transaction, now_us: int) -> list[Entry]:
        """Adds a transaction's marker; returns what becomes visible by it."""
        if transaction.committed is None or transaction not in self.open:
            raise SimKafkaError(f"{self.topic}: a marker of a transaction that is not ending here")
        self.log.append(Entry(self, transaction, None, marker=transaction.committed))
        del self.open[transaction], transaction.open_in[self]
        return self._advance(now_us)

    def delete_before(self, offset: int) -> None:
        """Lets retention delete records below an offset, as far as no transaction is open there."""
        self.first = max(self.first, min(offset, self.last_stable_offset))

    def cut_off(self, end: int) -> list[Entry]:
        """Makes a broker without the records from this offset on the leader; returns the lost ones.

        It keeps no half of a transaction: what began before is lost as well where it ended behind.
        """
        if self.open:
            raise SimKafkaError(f"{self.topic}: what is open here would never end")
        end = max(end, self.first)
        while any(entry.transaction in _begun(self.log[:end]) for entry in self.log[end:]):
            end -= 1
        lost, self.log = self.log[end:], self.log[:end]
        self.elections += 1
        self.visible_to = end
        self._changed_us.append(self._changed_us[-1])
        self._stable.append(end)
        return lost

    def lose_end(self, since_us: int) -> list[Entry]:
        """Makes a broker without the latest records the leader; returns the former log.

        No transaction is open, so the broker has no half of one, and coordinators need not know.
        """
        if self.open or self.compacted is None:
            raise SimKafkaError(f"{self.topic}: what is open here would never end")
        before, kept, ongoing = self.log, 0, set[Transaction]()
        for entry in before[: self.stable_at(since_us)]:
            if entry.marker is None:
                ongoing.add(entry.transaction)
            else:
                ongoing.discard(entry.transaction)
            if not ongoing:
                kept = entry.offset + 1
        self._lead_with(before[:kept])
        return before

    def lead_again(self, log: list[Entry]) -> None:
        """Brings back the broker with the lost records; records appended meanwhile are gone."""
        if self.open:
            raise SimKafkaError(f"{self.topic}: what is open here would never end")
        self._lead_with(log)

    def _lead_with(self, log: list[Entry]) -> None:
        self.log = log
        self.elections += 1
        self.visible_to = len(log)
        self.latest = {}
        self._tombstones.clear()
        self._changed_us.append(self._changed_us[-1])
        self._stable.append(len(log))
        assert self.compacted is not None
        self.compacted.clear()
        for entry in log:
            if entry.visible_us >= 0:
                self._keep(self.compacted, [entry], entry.visible_us)

    def check(self) -> None:
        """Checks the log for contradictions.

        Raises:
            SimKafkaError: It is.
        """
        ended: dict[Transaction, bool] = {}
        begun: set[Transaction] = set()
        for offset, entry in enumerate(self.log):
            transaction = entry.transaction
            if entry.offset != offset:
                raise SimKafkaError(f"{self.topic}: offset {entry.offset} at place {offset}")
            if transaction in ended:
                raise SimKafkaError(f"{self.topic}: offset {offset} is behind its marker")
            if transaction.is_plain:
                ended[transaction] = True
            elif entry.marker is None:
                begun.add(transaction)
            elif entry.marker is not transaction.committed or transaction not in begun:
                raise SimKafkaError(f"{self.topic}: the marker at {offset} fits nothing")
            else:
                ended[transaction] = entry.marker
        if begun - ended.keys() != self.open.keys():
            raise SimKafkaError(f"{self.topic}: what is open is not what has no marker")
        for entry in self.log[: self.last_stable_offset]:
            if (entry.visible_us >= 0) != (entry.marker is None and ended[entry.transaction]):
                raise SimKafkaError(f"{self.topic}: offset {entry.offset} is wrongly visible")

    def _advance(self, now_us: int) -> list[Entry]:
        stable = self.last_stable_offset
        seen = []
        for entry in self.log[self.visible_to : stable]:
            if entry.transaction.committed is None:
                raise SimKafkaError(f"{self.topic}: ongoing below the last stable offset {stable}")
            if entry.marker is None and entry.transaction.committed:
                entry.visible_us = now_us
                seen.append(entry)
        self.visible_to = stable
        self._changed_us.append(now_us)
        self._stable.append(stable)
        if self.compacted is not None:
            self._keep(self.compacted, seen, now_us)
        return seen

    def _keep(self, compacted: list[StoredRecord], seen: Iterable[Entry], now_us: int) -> None:
        latest = self.latest
        for entry in seen:
            if entry.key is not None:
                stored = latest[entry.key] = _stored(entry.key, entry)
                compacted.append(stored)
                if stored.value is None:
                    self._tombstones.append((now_us + TOMBSTONE_US, stored))
        expired = False
        while self._tombstones and self._tombstones[0][0] <= now_us:
            _, tombstone = self._tombstones.popleft()
            if latest[tombstone.key] is tombstone:
                del latest[tombstone.key]
                expired = True
        if expired or len(compacted) > len(latest) + COMPACT_EVERY:
            compacted[:] = [stored for stored in compacted if latest.get(stored.key) is stored]


def _begun(entries: Iterable[Entry]) -> set[Transaction]:
    """Returns the transactions of these records whose markers are not among them."""
    found: set[Transaction] = set()
    for entry in entries:
        if entry.marker is None and not entry.transaction.is_plain:
            found.add(entry.transaction)
        else:
            found.discard(entry.transaction)
    return found


def _stored(key: bytes, entry: Entry) -> StoredRecord:
    """Pairs a record with the time at which the brokers took its transaction's first record."""
    return StoredRecord(key, entry.value, entry.offset, entry.transaction.began_ms)
