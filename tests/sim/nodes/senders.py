"""Producers of other programs, which send records to the ingress topic.

They retry until the brokers have taken a record, and until its transaction has ended; or they die
before that, and the brokers abort it when it has been open for long.

A half message, and what its sender says of it, are records alone. The message book knows the half
as one that a node may have accepted: it is the same message as any half from then on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from delaywheel import ingress
from delaywheel_replica.cleaner.outside.ports import Record
from delaywheel_replica.core.ingress.place import IngressPlace
from sim.checking.book import Entry, Fate, half_headers
from sim.checking.ingress_book import FIRST_ROLLBACK, Headers, Sent
from sim.kafka.brokers import Code
from sim.kafka.log import Partition, Transaction
from sim.machine.clocks import EPOCH_MS
from sim.machine.scheduler import US_PER_MS
from sim.plans.plan import HalfOrder, IngressDraft, IngressOrder

if TYPE_CHECKING:
    from sim.nodes.world import World

SENDER = "sender"
"""The name that stands for a node in their transactions."""

AGAIN_US = 100 * US_PER_MS

Waits = Iterator[int]
"""How long to wait before each next request, in microseconds."""


class Senders:
    """All senders of a run.

    Attributes:
        busy: how many are not done.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._kafka = world.kafka
        self._book = world.ingress.book
        self._random = world.scheduler.stream("senders")
        self._transactions = 0
        self._open: dict[str, list[Sent]] = {}
        self.busy = 0
        world.kafka.on_decided(self._decided)

    def send(self, order: IngressOrder) -> None:
        """Starts a sender."""
        now_ms = EPOCH_MS + self._world.scheduler.now_us // US_PER_MS + order.clock_ms
        entered = [self._book.enter(draft, now_ms, self._world.book) for draft in order.drafts]
        sents = [sent for sent in entered if sent is not None]
        if not sents:
            return
        self._world.trace.add("sender", "sends", *(f"i{sent.number}" for sent in sents))
        self.busy += 1
        self._go_on(self._each(sents) if order.ends is None else self._together(sents, order))

    def half(self, order: HalfOrder) -> None:
        """Starts a sender of a half message, with a local transaction."""
        (draft,) = order.begin.drafts
        entry = self._world.book.enter(draft, self._world.scheduler.now_us // US_PER_MS)
        entry.unknowns, entry.fate = order.unknowns, Fate.UNKNOWN
        entry.sent_us = self._world.scheduler.now_us
        self.busy += 1
        self._go_on(self._half(order, entry))

    def _half(self, order: HalfOrder, entry: Entry) -> Waits:
        """Begins it, ends its transaction, says so; the check may have come first."""
        id_, due = (ingress.ID, entry.key.id), (ingress.DELIVER_AT, b"%d" % entry.due_ms)
        topic = ingress.TOPIC, entry.topic.encode()
        begin = [topic, id_, due, *entry.headers, *half_headers(entry)]
        yield from self._lands(entry, Record(self._ingress, entry.record_key, entry.value, begin))
        yield order.after_ms * US_PER_MS
        if entry.committed is None:
            entry.committed = order.ends == "commit"
        self._world.trace.add("sender", f"m{entry.number}", f"committed={entry.committed}")
        if not order.says:
            return
        if entry.committed:
            commit: Headers = [(ingress.COMMIT, entry.key.id.hex().encode()), due, topic]
            yield from self._lands(entry, Record(self._ingress, None, None, commit))
        else:
            number = FIRST_ROLLBACK + entry.number
            cancel = IngressDraft(number, "cancel_message", of=entry.number)
            now_ms = EPOCH_MS + self._world.scheduler.now_us // US_PER_MS
            sent = self._book.enter(cancel, now_ms, self._world.book)
            assert sent is not None
            yield from self._each([sent])

    def _lands(self, entry: Entry, record: Record) -> Waits:
        """Sends a record of a half to any partition."""
        yield 0
        while (found := self._open_partitions()) is None:
            yield AGAIN_US
        partition = self._random.choice(found)
        place = f"{partition.topic}/{partition.number}/{len(partition.log)}"
        entry.recorded_at.append((partition, len(partition.log)))
        written = record._replace(timestamp_ms=EPOCH_MS + self._world.scheduler.now_us // US_PER_MS)
        self._kafka.produce_plain(partition, written, SENDER)
        self._world.trace.add("sender", f"m{entry.number}:", record.headers[0][0], place)

    def _go_on(self, waits: Waits) -> None:
        wait_us = next(waits, None)
        if wait_us is None:
            self.busy -= 1
            return
        wait_us += self._random.randrange(200, 2_000)
        self._world.scheduler.call_later(wait_us, self._go_on, waits)

    def _each(self, sents: list[Sent]) -> Waits:
        """Sends each record alone."""
        for sent in sents:
            yield 0
            while (partition := self._partition(sent)) is None:
                yield AGAIN_US
            sent.is_committed = True
            self._taken(sent, partition, len(partition.log))
            self._kafka.produce_plain(partition, self._record(sent), SENDER)

    def _together(self, sents: list[Sent], order: IngressOrder) -> Waits:
        """Sends all records in one transaction, with a new id each time."""
        self._transactions += 1
        name = f"{SENDER}-{self._transactions}"
        yield 0
        yield from self._until_up()
        _, epoch = self._kafka.init_producer(name)
        added: set[Partition] = set()
        mine = self._open[name] = []
        for sent in sents:
            yield order.open_ms * US_PER_MS // len(sents)
            while (partition := self._partition(sent)) is None:
                yield AGAIN_US
            at = len(partition.log)
            records = [(partition, self._record(sent))]
            code, _ = self._kafka.produce(name, epoch, SENDER, records, added)
            if code is not Code.OK:
                return  # it has been open for too long: the brokers have aborted it
            self._taken(sent, partition, at)
            mine.append(sent)
        if order.ends == "left":
            return
        yield 0
        yield from self._until_up()
        self._kafka.end_transaction(name, epoch, commit=order.ends == "commit")

    def _until_up(self) -> Waits:
        while not self._kafka.is_up:
            yield AGAIN_US

    def _partition(self, sent: Sent) -> Partition | None:
        """The partition for a record now; None: no broker takes it."""
        partitions = self._open_partitions()
        return None if partitions is None else partitions[sent.draft.partition % len(partitions)]

    @property
    def _ingress(self) -> str:
        return self._world.names.ingress

    def _open_partitions(self) -> Sequence[Partition] | None:
        kafka = self._kafka
        if not kafka.is_up or kafka.troubles.of(self._ingress) is not None:
            return None
        return kafka.partitions(self._ingress) or None

    def _record(self, sent: Sent) -> Record:
        return Record(
            self._ingress,
            sent.key,
            sent.value,
            sent.headers,
            timestamp_ms=sent.timestamp_ms,
        )

    def _taken(self, sent: Sent, partition: Partition, offset: int) -> None:
        place = IngressPlace(partition.topic, partition.number, offset)
        topic_id = self._kafka.topic_id(partition.topic)
        self._book.taken(sent, topic_id, place, self._world.scheduler.now_us)
        self._world.trace.add("sender", f"has i{sent.number}", sent.draft.asks, str(place))

    def _decided(self, transaction: Transaction) -> None:
        for sent in self._open.pop(transaction.transactional_id, ()):
            sent.is_committed = bool(transaction.committed)
            words = "committed" if transaction.committed else "aborted"
            self._world.trace.add("kafka", f"i{sent.number} is", words)
