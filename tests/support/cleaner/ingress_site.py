"""A leader that reads ingress topics, beside a fake Kafka and a fake server.

Ingress, forwarder, reader and wheels are the real ones. The pretended server writes what it is
handed into a wheel of the leader's node, when a test lets it, and answers; the pretended Kafka
keeps what is sent to its ingress topics, and commits or not, as a test says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from delaywheel import ingress as headers_of_ingress
from delaywheel.headers import decode_headers
from delaywheel.identity import WheelId
from delaywheel_replica.cleaner.delivery.dead_letters import DeadLetters
from delaywheel_replica.cleaner.delivery.forward import Forwarder, Planned, Transacted
from delaywheel_replica.cleaner.due.reader import DueReader
from delaywheel_replica.cleaner.ingress.term import Ingress, IngressSettings
from delaywheel_replica.cleaner.outside.ports import (
    NO_ENDS,
    NO_IDS,
    Fetched,
    IngressFound,
    KafkaAway,
    KafkaCallEnd,
    ReadsRefused,
    Record,
    TopicPartitions,
)
from delaywheel_replica.core.ingress.place import IngressPlace
from delaywheel_replica.core.ingress.reading import CommittedRecord, Delayed, IngressRules
from delaywheel_replica.core.ingress.term import Handed
from delaywheel_replica.core.ingress.underway import RecordAnswer
from delaywheel_replica.core.leader.duties import Cluster, Situation
from delaywheel_replica.core.leader.pacing import CapLimits
from delaywheel_replica.core.protocol.control import (
    CONTROL_VERSION,
    ControlState,
    IngressPartition,
    IngressRecord,
    NodeRecord,
    node_record,
    wheel_record,
)
from delaywheel_replica.core.protocol.heartbeat import Heartbeat
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.transaction_outcomes import TransactionState
from delaywheel_replica.kafka_settings import KafkaNames
from support.cleaner.committing import AllGoes, AtOnce, CommittingProducers
from support.core.values import heartbeat, wheel_heartbeat, wheel_record_of
from support.due.wheels import Sent, Wheels

NAMES = KafkaNames("c")
TOPIC = NAMES.ingress
NOW_MS = 1_900_000_000_000
LATE_WINDOW_S = 60
LETTER_BYTES = 4_000
AT = (TOPIC, 0)


class ManualClock:
    """A clock that moves when the test says so."""

    def __init__(self) -> None:
        self.now_ms = NOW_MS

    def wall_ms(self) -> int:
        return self.now_ms

    def monotonic_ms(self) -> int:
        return self.now_ms

    def monotonic(self) -> float:
        return self.now_ms / 1000


@dataclass
class PretendedTopics:
    """The ingress topics.

    Attributes:
        partitions: topic -> what each partition has.
        ids: topic -> Kafka's id of it.
        first_kept: of partitions of which something was deleted.
        faults: what Kafka has against topics, by name: they are not found.
        refuses: why Kafka refuses to be read.
        is_away: Kafka finds no topics.
        group_offsets: the offsets last committed for the group.
        group_unread: which partitions it was told are not read.
        readers: how many were made.
    """

    partitions: dict[str, list[list[CommittedRecord]]] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)
    first_kept: dict[IngressPartition, int] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    refuses: str | Mapping[str, str] | None = None
    is_away: bool = False
    group_offsets: Mapping[IngressPartition, int] = field(default_factory=dict)
    group_unread: AbstractSet[IngressPartition] = frozenset()
    readers: int = 0
    asked_for: list[AbstractSet[str]] = field(default_factory=list)

    def make(self, topic: str = TOPIC, partitions: int = 2, id_: str = "id") -> None:
        """Creates a topic, or recreates it."""
        self.partitions[topic] = [[] for _ in range(partitions)]
        self.ids[topic] = id_

    def send(
        self,
        *headers: tuple[str, bytes | None],
        at: IngressPartition = AT,
        timestamp_ms: int = NOW_MS,
        value: bytes | None = b"v",
        key: bytes | None = None,
    ) -> IngressPlace:
        """Adds a record with these headers."""
        records = self.partitions[at[0]][at[1]]
        place = IngressPlace(*at, len(records))
        records.append(CommittedRecord(place, timestamp_ms, key, value, list(headers)))
        return place

    def find_ingress(self, also: AbstractSet[str] = frozenset()) -> IngressFound:
        self.asked_for.append(also)
        if self.is_away:
            raise KafkaAway("no answer")
        found = {
            name: TopicPartitions(self.ids[name], len(partitions))
            for name, partitions in self.partitions.items()
            if name not in self.faults
        }
        return IngressFound(found, self.faults)

    def ingress(self, on_news: Callable[[], None]) -> PretendedReader:
        del on_news
        self.readers += 1
        return PretendedReader(self)


class PretendedReader:
    """Reads the fake topics: `IngressPort`."""

    def __init__(self, topics: PretendedTopics) -> None:
        self._topics = topics
        self._positions: dict[IngressPartition, int] = {}
        self._paused: AbstractSet[IngressPartition] = frozenset()
        self.cut_off: dict[IngressPartition, int] = {}
        self.open_transactions: set[IngressPartition] = set()
        self._topic_ids: dict[str, str] = {}

    @property
    def recreated(self) -> frozenset[str]:
        ids = self._topics.ids
        return frozenset(name for name, id_ in self._topic_ids.items() if ids[name] != id_)

    def assign(
        self,
        positions: Mapping[IngressPartition, int],
        least_ends: Mapping[IngressPartition, int] = NO_ENDS,
        topic_ids: Mapping[str, str] = NO_IDS,
    ) -> None:
        self._topic_ids |= topic_ids
        self.cut_off |= {
            at: len(self._topics.partitions[at[0]][at[1]])
            for at in positions
            if len(self._topics.partitions[at[0]][at[1]]) < least_ends.get(at, 0)
        }
        self._positions = {**positions, **self._positions}

    def pause_only(self, partitions: AbstractSet[IngressPartition]) -> None:
        self._paused = partitions

    def poll(self) -> list[Fetched]:
        if isinstance(self._topics.refuses, str):
            raise KafkaAway(self._topics.refuses)
        if self._topics.refuses is not None:
            raise ReadsRefused(self._topics.refuses)
        fetched = []
        for at, position in list(self._positions.items()):
            if at in self._paused or at[0] in self.recreated:
                continue
            kept = self._topics.first_kept.get(at, 0)
            records = self._topics.partitions[at[0]][at[1]][max(position, kept) :]
            if records or kept > position:
                end = max(position, kept) + len(records)
                first_kept = kept if kept > position else None
                fetched.append(Fetched(at, tuple(records), end, first_kept))
                self._positions[at] = end
        return fetched

    def lags(self) -> dict[IngressPartition, int]:
        return {
            at: len(self._topics.partitions[at[0]][at[1]]) - position
            for at, position in self._positions.items()
        }

    def report_to_group(
        self, offsets: Mapping[IngressPartition, int], unread: AbstractSet[IngressPartition]
    ) -> None:
        self._topics.group_offsets, self._topics.group_unread = dict(offsets), set(unread)

    def close(self) -> None:
        """Nothing is open."""


class PretendedServer:
    """A node's server, as the hand-over of a term sees it: `HandoverPort`."""

    def __init__(self, wheels: Wheels, wheel: WheelId, clock: ManualClock) -> None:
        self._wheels = wheels
        self._wheel = wheel
        self._clock = clock
        self.waiting: list[Handed] = []
        self._answers: list[tuple[Handed, RecordAnswer]] = []
        self.room_bytes = 4 << 20
        self.is_broken = False
        self.closed = False

    def hand(self, records: Sequence[Handed]) -> None:
        self.waiting += records

    def answers(self) -> list[tuple[Handed, RecordAnswer]]:
        answers, self._answers = self._answers, []
        return answers

    def answer(self, answer: RecordAnswer, count: int = 99, *, writes: bool | None = None) -> int:
        """Answers a number of records; writes them if the answer says so, or a test does."""
        served, self.waiting = self.waiting[:count], self.waiting[count:]
        for handed in served:
            if answer is RecordAnswer.HELD if writes is None else writes:
                self._write(handed)
            self._answers.append((handed, answer))
        return len(served)

    def fileno(self) -> int:
        return 99

    def close(self) -> None:
        self.closed = True

    def _write(self, handed: Handed) -> None:
        request = handed.taken.request
        if isinstance(request, Delayed):
            row = Sent(
                request.due_ms,
                request.id,
                request.topic,
                request.key,
                request.value,
                tuple(decode_headers(request.headers)),
                request.partition,
                request.timestamp_ms,
            )
            self._wheels.write(self._wheel, [row], now_ms=self._clock.now_ms)
        else:
            assert handed.taken.slot is not None
            row = Sent(request.due_ms, request.id)  # type: ignore[union-attr]
            self._wheels.cancel(self._wheel, [row], now_ms=self._clock.now_ms)


class Producers(CommittingProducers):
    """Commits everything unless configured otherwise.

    Attributes:
        verdict: how the next transactions end.
        commits: of one whose end is unknown: whether it is committed.
        flushes: how often what was written is sent before the end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.verdict = TransactionState.COMMITTED
        self.commits = True
        self.flushes = 0

    def flush(self, number: int, timeout_ms: int) -> bool:  # noqa: ARG002 - the port's
        self.flushes += 1
        return True

    def commit(self, number: int, last: Record, timeout_ms: int) -> KafkaCallEnd:
        if self.verdict is TransactionState.COMMITTED or (
            self.verdict is TransactionState.UNKNOWN and self.commits
        ):
            super().commit(number, last, timeout_ms)
        return KafkaCallEnd(
            self.verdict, None if self.verdict is TransactionState.COMMITTED else "as configured"
        )


class Site:
    """Nodes a and b, of which one leads; each has one wheel.

    Attributes:
        leads: the leader's node.
        topics: its Kafka's ingress topics.
        server: of the leader's node, once something is handed over.
        forwarder: the leader's.
    """

    def __init__(self, wheels: Wheels, *, dead_letters: DeadLetters | None = None) -> None:
        self.wheels = wheels
        self.clock = ManualClock()
        self.topics = PretendedTopics()
        self.producers = Producers()
        self.settings = IngressSettings(
            NAMES,
            topics=frozenset([TOPIC]),
            rules=IngressRules({"1m": 60_000}, 2_000, frozenset([TOPIC, NAMES.control])),
            span_ms=3_600_000,
            letter_bytes=LETTER_BYTES,
        )
        self.takes = True
        self.has_server = True
        self._dead_letters = dead_letters or AllGoes()
        progress = Progress(NOW_MS - 1_000, None, {}, NOW_MS // 1000 - LATE_WINDOW_S - 10)
        self.state = ControlState(progress=progress).apply_all(
            [
                record
                for node in "ab"
                for record in (
                    node_record(node, NodeRecord(f"disk-{node}", 1)),
                    wheel_record(WheelId(node, 1), wheel_record_of("a", "b")),
                )
            ]
        )
        self.readers: list[DueReader] = []
        self.lead("a")

    def lead(self, node: str) -> None:
        """Makes a node the leader, by what is committed."""
        self.leads = node
        self.server: PretendedServer | None = None
        for record in self.producers.committed:
            if record.topic == NAMES.control:
                self.state = self.state.apply(record.key, record.value, 0)
        self.producers.committed = [
            record for record in self.producers.committed if record.topic != NAMES.control
        ] + [r for r in self.producers.committed if r.topic == NAMES.control][-50:]
        reader = DueReader(self.wheels.disk, self.wheels.data, preload_thread=False)
        self.readers.append(reader)
        self.ingress = Ingress(
            self.topics, self._made_server, self.settings, runner=AtOnce(), clock=self.clock
        )
        self.forwarder = Forwarder(
            self.state,
            self.producers,
            reader,
            self._dead_letters,
            self.ingress,
            names=NAMES,
            cluster=Cluster(("a", "b"), 1, LATE_WINDOW_S),
            caps=CapLimits(8, 1 << 20, 64, 1 << 20, own_batch_bytes=LETTER_BYTES),
            monotonic=self.clock.monotonic,
        )
        self.forwarder.forwards = True

    def close(self) -> None:
        for reader in self.readers:
            reader.close()

    def pass_ms(self, milliseconds: int) -> None:
        """Time passes."""
        self.clock.now_ms += milliseconds

    def take_in(self) -> None:
        """What comes is taken."""
        self.forwarder.take_in(self.leads, self._heartbeats(), None)

    def plan(self) -> Planned:
        """What the next transaction would do."""
        return self.forwarder.next_step(self.clock.now_ms, self.wheels.last_seqs())

    def run_once(self) -> Transacted | None:
        """Runs an iteration as the leader does: with a transaction, if there is one to commit."""
        self.take_in()
        planned = self.plan()
        return self.transact(planned) if planned else None

    def transact(self, planned: Planned | None = None) -> Transacted:
        """Runs a transaction, with or without a reason."""
        planned = planned or self.plan()
        situation = Situation(self.clock.now_ms, self.leads, self._heartbeats())
        return self.forwarder.transact(planned, situation, 1_000)

    def run_until_idle(self, most: int = 20) -> None:
        """Runs iterations until nothing is left to do at once."""
        for _ in range(most):
            if self.run_once() is None:
                return
        raise AssertionError("it never rests")

    def slot(self) -> int | None:
        """The slot that seals of the leader's node must not pass."""
        return self.ingress.bound(self.forwarder.state)

    @property
    def handed(self) -> list[int]:
        """The offsets of records handed to the server and not answered."""
        return [] if self.server is None else [each.taken.offset for each in self.server.waiting]

    def out(self) -> Counter[str]:
        """The ids of the messages in its topics."""
        return Counter(
            dict(record.headers)["dw-id"].decode()  # type: ignore[union-attr]
            for record in self.delivered()
        )

    def delivered(self) -> list[Record]:
        own = {NAMES.control, NAMES.outcomes, NAMES.dead}
        return [record for record in self.producers.committed if record.topic not in own]

    def written_to(self, topic: str) -> list[Record]:
        return [record for record in self.producers.committed if record.topic == topic]

    @property
    def offsets(self) -> dict[IngressPartition, int]:
        """How far each partition is settled, as committed."""
        state = self.forwarder.state
        return {at: record.next_offset for at, record in state.ingress.items()}

    def state_of(self, at: IngressPartition) -> IngressRecord:
        """What is committed of a partition."""
        return self.forwarder.state.ingress[at]

    def _made_server(self) -> PretendedServer | None:
        if not self.has_server:
            return None
        self.server = PretendedServer(self.wheels, WheelId(self.leads, 1), self.clock)
        return self.server

    def _heartbeats(self) -> dict[str, Heartbeat]:
        seqs = self.wheels.last_seqs()
        seal = (self.clock.now_ms // 1000 - LATE_WINDOW_S - 5, 0)
        wheels = {
            WheelId(node, 1): wheel_heartbeat(seqs.get(WheelId(node, 1), 0), seal=seal)
            for node in "ab"
        }
        return {
            node: replace(
                heartbeat(
                    node,
                    open_=WheelId(node, 1) if self.takes else None,
                    spare=WheelId(node, 2),
                    wheels=wheels,
                    draining=not self.takes,
                ),
                control_version=CONTROL_VERSION,
            )
            for node in "ab"
        }


def asked(
    delay_ms: int = 0, topic: str = "orders", *more: tuple[str, bytes | None]
) -> list[tuple[str, bytes | None]]:
    """The headers of a record with a delay."""
    return [
        (headers_of_ingress.TOPIC, topic.encode()),
        (headers_of_ingress.DELAY_MS, b"%d" % delay_ms),
        *more,
    ]
