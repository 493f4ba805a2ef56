"""The group that is asked about halves: one consumer of letters, with a database.

What a letter says, and what follows from a check, is decided by the SDK's own code: `HalfChecker`
settles the letter, and the consumer's `Policy` makes the record. Reading, the transaction with the
letter's offset, and the process itself are simulated: it may die between any two of its requests,
and begins again with the offsets that are committed.

The database answers from a half's `unknowns`-th attempt on. Its barrier rolls back a local
transaction that has not ended by then.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from delaywheel.consumer.checking.checker import HalfChecker
from delaywheel.consumer.checking.letters import AskedHalf, half_of
from delaywheel.consumer.checking.settings import checker_settings
from delaywheel.consumer.message import Outcome, ReceivedMessage, Settlement
from delaywheel.consumer.port import Start
from delaywheel.consumer.records import Incoming, Place, RecordHeaders, unpack_retry
from delaywheel.consumer.rules.policy import Policy
from delaywheel.ingress import IngressLimits
from delaywheel.transactions import HalfVerdict
from delaywheel_replica.cleaner.outside.ports import Record
from delaywheel_replica.core.ingress.place import IngressPlace
from delaywheel_replica.core.protocol.reschedules import MessageKey
from sim.checking.book import GROUP, Entry
from sim.checking.ingress_book import Sent
from sim.halves.checks import LEVELS_MS
from sim.kafka.brokers import Code
from sim.kafka.log import Entry as LogEntry
from sim.kafka.log import Partition, Transaction
from sim.machine.clocks import EPOCH_MS
from sim.machine.scheduler import US_PER_MS
from sim.nodes.senders import AGAIN_US, SENDER, Waits

if TYPE_CHECKING:
    from sim.nodes.world import World

OFFSETS: Final = "__consumer_offsets"
NAME: Final = "checker"
"""Of its transactions."""

MARKERS_US: Final = 5 * US_PER_MS
POLL_US: Final = 100 * US_PER_MS
LARGEST_BYTES: Final = 1 << 20


class Answer(NamedTuple):
    """What a transaction says about a half, and the record for the ingress topic that it has."""

    entry: Entry
    settlement: Settlement
    sent: Sent | None


class Checker:
    """The one checker of a run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._kafka = world.kafka
        self._random = world.scheduler.stream("checker")
        options: Any = {"retry": [f"{ms}ms" for ms in LEVELS_MS], "jitter": 0.0}
        settings = checker_settings(GROUP.decode(), "kafka:9092", world.names.cluster_id, options)
        self._topics = settings.topics.names_of(world.names.halves)
        takes = (world.names.ingress, self._topics.retry, self._topics.dead)
        most_bytes = dict.fromkeys(takes, LARGEST_BYTES)
        self._policy = Policy(settings, Start(world.names.ingress, most_bytes))
        self._policy.learn_limits(IngressLimits(1 << 62, 1 << 62, takes_answers=True))
        for topic in (self._topics.retry, self._topics.dead, OFFSETS):
            world.kafka.create(topic)
        self._life = 0
        self._open: Answer | None = None
        world.kafka.on_decided(self._decided)
        if world.settings.halves:
            self.begin()

    def begin(self) -> None:
        """Starts the process."""
        self._life += 1
        self._go_on(self._run(), self._life)

    def die(self) -> None:
        """Kills the process; what it has sent to Kafka arrives."""
        self._life += 1
        self._world.trace.add("checker", "dies")

    def left(self) -> Iterator[str]:
        """Yields what has still to be done."""
        if self._world.settings.halves:
            passed = self._passed()
            for partition in self._partitions():
                at = partition.topic, partition.number
                if any(_visible(partition, passed.get(at, 0))):
                    yield f"letters at {at} have no answer"

    def check(self, half: AskedHalf) -> HalfVerdict:
        """Asks the database; called by `HalfChecker`."""
        entry = self._entry(MessageKey(half.id, half.due_ms, half.topic))
        if half.attempt <= entry.unknowns:
            return HalfVerdict.UNKNOWN
        if entry.committed is None:
            entry.committed = False
        return HalfVerdict.COMMIT if entry.committed else HalfVerdict.ROLLBACK

    # --- what its letters settle with

    def forward(self, letter: ReceivedMessage, headers: RecordHeaders) -> Settlement:
        """Sends its message."""
        return self._settle(self._policy.forward(letter, headers))

    def roll_back(self, letter: ReceivedMessage) -> Settlement:
        """Has the message dropped."""
        return self._settle(self._policy.rolled_back(letter))

    def retry(self, letter: ReceivedMessage, after: None, error: str) -> Settlement:
        """Lets the letter come back, or makes it a dead letter."""
        return self._settle(self._policy.retry(letter, after, error, self._now_ms()))

    def _settle(self, settlement: Settlement) -> Settlement:
        self._settled = settlement
        return settlement

    # --- the process

    def _go_on(self, waits: Waits, life: int) -> None:
        if life != self._life:
            return
        wait_us = next(waits) + self._random.randrange(200, 2_000)
        self._world.scheduler.call_later(wait_us, self._go_on, waits, life)

    def _run(self) -> Waits:
        while True:
            yield from self._until_up()
            code, epoch = self._kafka.init_producer(NAME)
            if code is Code.OK:
                yield from self._answer_all(epoch)
            yield AGAIN_US

    def _answer_all(self, epoch: int) -> Waits:
        """Answers one letter after another until a transaction fails."""
        passed = self._passed()
        while True:
            yield from self._until_up()
            found = next(self._unread(passed), None)
            if found is None:
                yield POLL_US
                continue
            at, letter = found
            settlement = self._settlement(letter)
            yield self._random.choice((0, 0, 0, 0, 0, 0, 5_000, 400_000))
            if not (yield from self._transaction(epoch, letter, settlement)):
                return
            passed[at] = letter.offset + 1

    def _settlement(self, entry: LogEntry) -> Settlement:
        """Has a letter checked."""
        place = Place(entry.topic, entry.partition, entry.offset, entry.timestamp_ms)
        block: Any = SimpleNamespace(desk=self)
        letter = ReceivedMessage(block, 0, place, entry.key, entry.value, entry.headers)
        if entry.topic == self._topics.retry:
            incoming = Incoming(place, entry.key, entry.value, entry.headers)
            letter.take_trip(*unpack_retry(incoming))
        skipped = self._policy.at_hand_out(letter, self._now_ms())
        if skipped is not None:
            self._world.violation(f"the letter at {place} is for no group: {entry.headers}")
            return skipped
        HalfChecker._answer(cast("HalfChecker", self), letter)
        settlement, half = self._settled, half_of(letter)
        self._asked = self._entry(MessageKey(half.id, half.due_ms, half.topic))
        self._world.halves.checked(self._asked, letter.attempt, settlement)
        return settlement

    def _transaction(self, epoch: int, letter: LogEntry, settlement: Settlement) -> Any:
        """Writes an answer and the letter's offset; returns whether that is committed."""
        kafka, added = self._kafka, set[Partition]()
        entry, sent = self._asked, None
        self._open = Answer(entry, settlement, None)
        record = settlement.record
        if record is not None:
            while (partition := self._partition(record.topic)) is None:
                yield AGAIN_US
            offset = len(partition.log)
            written = Record(*record[:4], timestamp_ms=self._now_ms())
            code, _ = kafka.produce(NAME, epoch, SENDER, [(partition, written)], added)
            if code is not Code.OK:
                return False
            if partition.topic == self._world.names.ingress:
                own = entry.headers if settlement.outcome is Outcome.FORWARDED else None
                place = IngressPlace(partition.topic, partition.number, offset)
                sent = self._world.halves.sends(written, place, own)
                self._open = self._open._replace(sent=sent)
            yield self._random.choice((0, 0, 0, 0, 0, 0, 0, 300_000))
        if not (yield from self._tell(epoch, settlement, added)):
            return False
        if not (yield from self._pass(epoch, letter, added)):
            return False
        yield from self._until_up()
        if kafka.end_transaction(NAME, epoch, commit=True) is not Code.OK:
            return False
        while any(transaction.transactional_id == NAME for transaction in kafka.ongoing()):
            yield MARKERS_US
        return True

    def _pass(self, epoch: int, letter: LogEntry, added: set[Partition]) -> Any:
        """Writes the letter's offset; returns whether the brokers took it."""
        yield from ()
        (offsets,) = self._kafka.partitions(OFFSETS)
        key = f"{letter.topic}/{letter.partition}".encode()
        passes = Record(OFFSETS, key, b"%d" % (letter.offset + 1), [], timestamp_ms=self._now_ms())
        code, _ = self._kafka.produce(NAME, epoch, SENDER, [(offsets, passes)], added)
        return code is Code.OK

    def _tell(self, epoch: int, settlement: Settlement, added: set[Partition]) -> Any:
        """Writes what the service is told; returns whether the brokers took it."""
        for record in settlement.answers:
            while (partition := self._partition(record.topic)) is None:
                yield AGAIN_US
            written = Record(*record[:4], timestamp_ms=self._now_ms())
            code, _ = self._kafka.produce(NAME, epoch, SENDER, [(partition, written)], added)
            if code is not Code.OK:
                return False
        return True

    def _decided(self, transaction: Transaction) -> None:
        if transaction.transactional_id == NAME and self._open is not None:
            answer, self._open = self._open, None
            self._world.halves.answered(*answer, is_committed=bool(transaction.committed))

    # --- what Kafka has

    def _partitions(self) -> list[Partition]:
        topics = self._world.names.halves, self._topics.retry
        return [each for topic in topics for each in self._kafka.partitions(topic)]

    def _passed(self) -> dict[tuple[str, int], int]:
        """Returns the offsets that are committed."""
        found = {}
        for entry in self._kafka.visible(OFFSETS):
            topic, _, number = (entry.key or b"").decode().rpartition("/")
            found[topic, int(number)] = int(entry.value or b"")
        return found

    def _unread(
        self, passed: dict[tuple[str, int], int]
    ) -> Iterator[tuple[tuple[str, int], LogEntry]]:
        for partition in self._partitions():
            at = partition.topic, partition.number
            for entry in _visible(partition, passed.get(at, 0)):
                yield at, entry

    def _partition(self, topic: str) -> Partition | None:
        """A partition for a record now; None: no broker takes it."""
        if not self._kafka.is_up or self._kafka.troubles.of(topic) is not None:
            return None
        partitions = self._kafka.partitions(topic)
        return self._random.choice(partitions) if partitions else None

    def _until_up(self) -> Waits:
        while not self._kafka.is_up:
            yield AGAIN_US

    def _entry(self, key: MessageKey) -> Entry:
        return self._world.book.by_key[key]

    def _now_ms(self) -> int:
        return EPOCH_MS + self._world.scheduler.now_us // US_PER_MS


def _visible(partition: Partition, first: int) -> Iterator[LogEntry]:
    return (
        entry
        for entry in partition.log[first : partition.last_stable_offset]
        if entry.visible_us >= 0
    )
