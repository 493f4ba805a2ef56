"""A transactional Kafka in memory: the part of the brokers that exactly-once depends on.

It speaks the transaction protocol without KIP-890, as librdkafka does. Per transactional id:

| state | InitProducerId | new partition | EndTxn, the same way | EndTxn, the other way |
|---|---|---|---|---|
| EMPTY | next epoch | ONGOING | INVALID_TXN_STATE | INVALID_TXN_STATE |
| ONGOING | next epoch, abort; CONCURRENT | added | PREPARE_* | PREPARE_* |
| PREPARE_* | CONCURRENT | CONCURRENT | CONCURRENT | INVALID_TXN_STATE |
| COMPLETE_* | next epoch, EMPTY | ONGOING | OK, nothing happens | INVALID_TXN_STATE |

* CONCURRENT_TRANSACTIONS: the client retries. A request of an older epoch changes nothing of
  all this. So a late copy of an EndTxn, in the same epoch, ends whatever transaction is ongoing.
* PREPARE_* becomes COMPLETE_* when the marker has reached every partition of the transaction.
* A partition takes records of a transaction that is open in it, until its marker is there; for
  any other that its client takes for added, the coordinator is asked and refuses
  (`transaction.partition.verification.enable`).
* A partition's last stable offset is the first offset of the oldest transaction open in it. What
  is below it and committed is *visible*.
* An ongoing transaction that takes too long is aborted under a new epoch.

A state that no client may cause raises `SimKafkaError`: see `SimKafka.check`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from delaywheel.transactional import LEADER_TIMEOUT_MS
from delaywheel_replica.cleaner.outside.ports import Record
from sim.kafka.faults import KafkaFaults, draw_us
from sim.kafka.log import Entry, Partition, Transaction
from sim.kafka.topic_troubles import TopicTroubles
from sim.machine.clocks import SimClock
from sim.machine.scheduler import US_PER_MS, US_PER_S, Scheduler

DOWN_RETRY_US = 100 * US_PER_MS
QUOTA_WINDOW_S = 10


class Code(StrEnum):
    """The brokers' answers, with librdkafka's names."""

    OK = "NO_ERROR"
    TIMED_OUT = "_TIMED_OUT"
    """No answer came in time; the client's own error."""
    NOT_READY = "_STATE"
    """There is no producer epoch; the client's own error."""
    CONCURRENT = "CONCURRENT_TRANSACTIONS"
    FENCED = "INVALID_PRODUCER_EPOCH"
    NOT_LEADER = "NOT_LEADER_OR_FOLLOWER"
    NOT_COORDINATOR = "NOT_COORDINATOR"
    INVALID_STATE = "INVALID_TXN_STATE"
    UNKNOWN_TOPIC = "UNKNOWN_TOPIC_OR_PART"
    REFUSED = "INVALID_RECORD"
    DENIED = "TOPIC_AUTHORIZATION_FAILED"
    NO_ANSWER = "no answer"
    """The client's time-out was raised for another request."""


class State(StrEnum):
    """The state of a transactional id."""

    EMPTY = "empty"
    ONGOING = "ongoing"
    PREPARE_COMMIT = "prepare commit"
    PREPARE_ABORT = "prepare abort"
    COMPLETE_COMMIT = "complete commit"
    COMPLETE_ABORT = "complete abort"


_PREPARING = (State.PREPARE_COMMIT, State.PREPARE_ABORT)


class _Coordinated:
    """What the coordinator knows of one transactional id."""

    __slots__ = ("epoch", "name", "state", "transaction")

    def __init__(self, name: str) -> None:
        self.name = name
        self.epoch = -1
        self.state = State.EMPTY
        self.transaction: Transaction | None = None


OnVisible = Callable[[list[Entry]], None]
OnDecided = Callable[[Transaction], None]


class SimKafka:
    """The brokers, and what an observer outside of the simulated world can see of them.

    Requests arrive by `init_producer`, `produce` and `end_transaction`, which take no time: the
    client adds the time of the way (ports.py).

    Attributes:
        faults: What goes wrong now; replace or change it at any time.
        troubles: Topics that take nothing.
        trace: Called with descriptions of events, if set.
        clock: The brokers' clock.
        has_wrong_clock: It was ever set.
        candidacies: How often a node has begun to init all ids of leaders.
        inited_again: How often one has inited an id again within a term.
        has_coordinator: A broker coordinates transactions; otherwise the task moves to another.
        has_lost_end: A compacted topic has ever lost its end.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        topics: Mapping[str, int],
        *,
        faults: KafkaFaults | None = None,
        transaction_timeout_ms: int = LEADER_TIMEOUT_MS,
    ) -> None:
        """Begins with empty topics.

        Args:
            scheduler: The source of true time.
            topics: Partitions by name. Own topics are created by the port's check.
            faults: None: no faults at all.
            transaction_timeout_ms: How long a transaction may be ongoing.
        """
        self.scheduler = scheduler
        self.faults = KafkaFaults() if faults is None else faults
        self.trace: Callable[[str], object] | None = None
        self.clock = SimClock(scheduler)
        self.has_wrong_clock = False
        self.has_lost_end = False
        self.candidacies = 0
        self.inited_again = 0
        self.has_coordinator = True
        self._candidacy_of: dict[tuple[str, int], int] = {}
        self._random = scheduler.stream("kafka")
        self._timeout_us = transaction_timeout_ms * US_PER_MS
        self.troubles = TopicTroubles()
        self._topics: dict[str, list[Partition]] = {}
        self._ids: dict[str, _Coordinated] = {}
        self._taken: deque[tuple[int, int]] = deque()
        self._down_since_us: int | None = None
        self._cut_since_us: dict[str, int] = {}
        self._visible: dict[str, list[Entry]] = {}
        self._made: Counter[str] = Counter()
        self._group_offsets: dict[tuple[str, str, int], int] = {}
        self._on_visible: list[OnVisible] = []
        self._on_decided: list[OnDecided] = []
        for name, partitions in topics.items():
            self.create(name, partitions)

    def create(self, topic: str, partitions: int = 1, *, compacted: bool = False) -> None:
        """Creates a topic, unless it exists."""
        if topic not in self._topics:
            self._topics[topic] = [
                Partition(topic, number, compacted=compacted) for number in range(partitions)
            ]
            self._visible.setdefault(topic, [])
            self._made[topic] += 1

    def delete(self, topic: str) -> None:
        """Deletes a topic; a topic recreated under its name is another one."""
        del self._topics[topic]

    def topic_id(self, topic: str) -> str:
        """Returns the present incarnation of the topic with this name."""
        return f"{topic}-{self._made[topic]}"

    def topics(self) -> list[str]:
        """Returns the names of all topics."""
        return [*self._topics]

    def has(self, topic: str) -> bool:
        """Whether the topic exists."""
        return topic in self._topics

    def partitions(self, topic: str) -> list[Partition]:
        """The partitions of a topic; none if it does not exist."""
        return self._topics.get(topic, [])

    def throttled_us(self, sent_bytes: int) -> int:
        """Counts what was taken from a producer; returns for how long it is throttled."""
        quota, now_us = self.faults.bytes_per_s, self.scheduler.now_us
        if not quota:
            return 0
        self._taken.append((now_us, sent_bytes))
        while self._taken[0][0] <= now_us - QUOTA_WINDOW_S * US_PER_S:
            self._taken.popleft()
        beyond = sum(each for _, each in self._taken) - quota * QUOTA_WINDOW_S
        return max(0, beyond * US_PER_S // quota)

    # Which nodes can reach it.

    def stop(self) -> None:
        """Stops all brokers; stored records stay."""
        if self._down_since_us is None:
            self._down_since_us = self.scheduler.now_us

    def start(self) -> None:
        """Starts them again."""
        self._down_since_us = None

    def cut(self, node: str) -> None:
        """Cuts one node's client off."""
        self._cut_since_us.setdefault(node, self.scheduler.now_us)

    def mend(self, node: str) -> None:
        """Reconnects the node's client."""
        self._cut_since_us.pop(node, None)

    def heal(self) -> None:
        """Reconnects every node, and ends all faults."""
        self.start()
        self.has_coordinator = True
        self._cut_since_us.clear()
        self.faults = KafkaFaults()
        self.troubles.end_all(self.scheduler.now_us)

    @property
    def is_up(self) -> bool:
        """Whether the brokers run."""
        return self._down_since_us is None

    def is_reachable(self, node: str) -> bool:
        """Whether a request of this node's client, or the answer, gets through now."""
        return self._down_since_us is None and node not in self._cut_since_us

    def contact_us(self, node: str) -> int:
        """When this node's client could last hear from it: now, if it can."""
        now_us = self.scheduler.now_us
        down_us = now_us if self._down_since_us is None else self._down_since_us
        return min(down_us, self._cut_since_us.get(node, now_us))

    # Requests of clients.

    def init_producer(self, transactional_id: str, candidacy: int = 0) -> tuple[Code, int]:
        """InitProducerId: OK with the new epoch, which fences all older ones; or CONCURRENT.

        Args:
            transactional_id: Of the producer.
            candidacy: Whose producer it is, if it is a leader's; for observers.
        """
        if not self.has_coordinator:
            return Code.NOT_COORDINATOR, -1
        known = self._ids.get(transactional_id)
        if known is None:
            known = self._ids[transactional_id] = _Coordinated(transactional_id)
        if known.state in _PREPARING:
            return Code.CONCURRENT, -1
        known.epoch += 1
        if known.state is State.ONGOING:
            self._decide(known, commit=False)
            return Code.CONCURRENT, -1
        known.state = State.EMPTY
        self._candidacy_of[transactional_id, known.epoch] = candidacy
        if self.trace is not None:
            self.trace(f"init {transactional_id} epoch {known.epoch}")
        return Code.OK, known.epoch

    def produce(
        self,
        transactional_id: str,
        epoch: int,
        node: str,
        records: Sequence[tuple[Partition, Record]],
        added: set[Partition],
    ) -> tuple[Code, int]:
        """AddPartitionsToTxn if needed, and Produce, one record after the other.

        Args:
            transactional_id: Of the producer.
            epoch: Of the producer.
            node: Where it runs.
            records: Their timestamps are set.
            added: What the client takes for partitions of its transaction; grows.

        Returns:
            OK, or why the next record was refused; and how many were taken before it.
        """
        known = self._ids[transactional_id]
        for taken, (partition, record) in enumerate(records):
            trouble = self.troubles.of(partition.topic, partition.number)
            if trouble is not None and not trouble.takes(record.key):
                code = Code.NOT_LEADER if trouble.is_repeated else Code.NO_ANSWER
                return Code(trouble.refusal or code), taken
            if partition not in added:
                code = self._add_partition(known, epoch, node)
                if code is not Code.OK:
                    return code, taken
                added.add(partition)
            elif known.transaction is None or not known.transaction.takes(epoch, partition):
                return Code.FENCED if epoch < known.epoch else Code.INVALID_STATE, taken
            assert known.transaction is not None
            partition.append(known.transaction, record)
        return Code.OK, len(records)

    def end_transaction(self, transactional_id: str, epoch: int, *, commit: bool) -> Code:
        """EndTxn: ends the ongoing transaction of this epoch."""
        if not self.has_coordinator:
            return Code.NOT_COORDINATOR
        known = self._ids[transactional_id]
        if epoch < known.epoch:
            return Code.FENCED
        if known.state is State.ONGOING:
            self._decide(known, commit=commit)
            return Code.OK
        if known.state is (State.COMPLETE_COMMIT if commit else State.COMPLETE_ABORT):
            return Code.OK
        if known.state is (State.PREPARE_COMMIT if commit else State.PREPARE_ABORT):
            return Code.CONCURRENT
        return Code.INVALID_STATE

    def produce_plain(self, partition: Partition, record: Record, node: str) -> None:
        """Produce, of a producer without transactions."""
        now_us = self.scheduler.now_us
        transaction = Transaction.plain(node, now_us, self.clock.wall_ms())
        self._show(partition, partition.append_plain(record, transaction))

    def report_to_group(self, group: str, topic: str, partition: int, offset: int) -> None:
        """OffsetCommit, of a client that is no member of the group."""
        self._group_offsets[group, topic, partition] = offset

    # Observers' views.

    def group_offset(self, group: str, topic: str, partition: int) -> int | None:
        """The offset that a group shows; None: it shows none."""
        return self._group_offsets.get((group, topic, partition))

    def candidacy_of(self, transaction: Transaction) -> int | None:
        """Returns the number of the candidacy in whose term a transaction was begun."""
        return self._candidacy_of.get((transaction.transactional_id, transaction.epoch))

    def on_visible(self, callback: OnVisible) -> None:
        """Calls back with the records that have just become visible together, in log order."""
        self._on_visible.append(callback)

    def on_decided(self, callback: OnDecided) -> None:
        """Calls back when a transaction has been decided, before any of it is visible."""
        self._on_decided.append(callback)

    def visible(self, topic: str) -> Sequence[Entry]:
        """Everything a read_committed reader could have seen of a topic, in that order."""
        return self._visible.get(topic, ())

    def records_of_key(self, topic: str, key: bytes) -> list[Entry]:
        """All visible records of one key, oldest first, including replaced ones."""
        return [entry for entry in self.visible(topic) if entry.key == key]

    def live(self, topic: str) -> dict[bytes, bytes]:
        """The content of a compacted topic: the latest visible value of each key that has one."""
        return {
            key: stored.value
            for partition in self.partitions(topic)
            for key, stored in partition.latest.items()
            if stored.value is not None
        }

    def ongoing(self) -> list[Transaction]:
        """The transactions without all their markers."""
        found = (known.transaction for _, known in sorted(self._ids.items()))
        return [transaction for transaction in found if transaction is not None]

    def check(self) -> None:
        """Checks all logs for contradictions.

        Raises:
            SimKafkaError: It is.
        """
        for name in sorted(self._topics):
            for partition in self._topics[name]:
                partition.check()

    def _add_partition(self, known: _Coordinated, epoch: int, node: str) -> Code:
        """AddPartitionsToTxn; begins a transaction when none is ongoing."""
        if not self.has_coordinator:
            return Code.NOT_COORDINATOR
        if epoch < known.epoch:
            return Code.FENCED
        if known.state in _PREPARING:
            return Code.CONCURRENT
        if known.state is not State.ONGOING:
            known.transaction = Transaction(known.name, epoch, node, self.clock.wall_ms())
            known.state = State.ONGOING
            self.scheduler.call_later(self._timeout_us, self._expire, known, known.transaction)
        return Code.OK

    def _expire(self, known: _Coordinated, transaction: Transaction) -> None:
        """Aborts a transaction that took too long, and fences its producer."""
        if known.transaction is not transaction or transaction.committed is not None:
            return
        if self._down_since_us is not None:
            self.scheduler.call_later(DOWN_RETRY_US, self._expire, known, transaction)
            return
        known.epoch += 1
        self._decide(known, commit=False)

    def _decide(self, known: _Coordinated, *, commit: bool) -> None:
        """Decides a transaction in the coordinator's log; the markers follow."""
        transaction = known.transaction
        assert transaction is not None
        now_us = self.scheduler.now_us
        transaction.committed, transaction.decided_us = commit, now_us
        known.state = State.PREPARE_COMMIT if commit else State.PREPARE_ABORT
        self.scheduler.note(len(transaction.entries))
        if self.trace is not None:
            self.trace(
                f"{known.state} {known.name} epoch {transaction.epoch} of {transaction.node},"
                f" {len(transaction.entries)} records"
            )
        for callback in self._on_decided:
            callback(transaction)
        for partition in transaction.open_in:
            delay_us = draw_us(self._random, self.faults.marker_us)
            self.scheduler.call_later(delay_us, self._mark, known, transaction, partition)

    def _mark(self, known: _Coordinated, transaction: Transaction, partition: Partition) -> None:
        if self._down_since_us is not None:
            self.scheduler.call_later(DOWN_RETRY_US, self._mark, known, transaction, partition)
            return
        seen = partition.mark(transaction, self.scheduler.now_us)
        if not transaction.open_in:
            committed = known.state is State.PREPARE_COMMIT
            known.state = State.COMPLETE_COMMIT if committed else State.COMPLETE_ABORT
            known.transaction = None
        self._show(partition, seen)

    def _show(self, partition: Partition, seen: list[Entry]) -> None:
        if seen:
            self._visible[partition.topic] += seen
            for callback in self._on_visible:
                callback(seen)
