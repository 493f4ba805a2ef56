"""What the cleaner needs of Kafka, as ports; real clients or a simulation implement them.

A *number* is one of the leader's transactional ids, 0 to `IDS` - 1. All calls are bounded by the
time they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from delaywheel_replica.core.ingress.reading import CommittedRecord
from delaywheel_replica.core.ingress.term import Handed
from delaywheel_replica.core.ingress.underway import RecordAnswer
from delaywheel_replica.core.protocol.control import IngressPartition
from delaywheel_replica.core.protocol.transaction_outcomes import TransactionState
from delaywheel_replica.kafka_settings import BATCH_HEADER_BYTES

IDS = 3
"""How many transactional ids take turns. Never changes on a cluster: a leader inits all of them.

Two have to be left where one is kept by a broker that is away: each is inited again now and then,
and another has to vouch for it.
"""

ANSWER_MS = 1_000
"""A transaction whose records are being answered is waited for until none was for so long."""

UNTAKEN = "UNTAKEN"
"""What the cause of a transaction begins with that went to a partition which takes nothing."""

ANY_PARTITION = -1
NOW = -1


class Record(NamedTuple):
    """A whole record to be produced."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    partition: int = ANY_PARTITION
    timestamp_ms: int = NOW

    @property
    def batch_bytes(self) -> int:
        """How large Kafka counts an uncompressed batch with only this record."""
        body = 1 + 1 + 1 + _sized(self.key) + _sized(self.value) + _varint(len(self.headers))
        for name, value in self.headers:
            body += _sized(name.encode()) + _sized(value)
        return BATCH_HEADER_BYTES + _varint(body) + body


class RefusedRecord(NamedTuple):
    """A record that the client refused, without harm to the transaction."""

    number: int
    """Which of the records written by that call, from 0."""
    reason: str


class StoredRecord(NamedTuple):
    """One committed record of the control topic; a value of None is a tombstone."""

    key: bytes
    value: bytes | None
    offset: int
    appended_ms: int = -1
    """The broker's wall clock when it took the record; -1: the topic does not keep that."""


@dataclass(frozen=True, slots=True)
class KafkaCallEnd:
    """How a call or a transaction ended and, if it failed, why in Kafka's words."""

    verdict: TransactionState
    cause: str | None = None


class ProducersPort(Protocol):
    """The transactional producers of one candidacy, and of its term.

    Attributes:
        is_untaken: Says whether the running transaction has messages for a partition that takes
            nothing; asked while Kafka does not answer it. Such a one is given up: UNTAKEN.
        alone: The id beside which no other can be used, as far as is known: once inited, it sends
            requests again later, so that its ends are not in doubt.
    """

    is_untaken: Callable[[], bool]
    alone: int | None

    @property
    def answered_ms(self) -> int | None:
        """When Kafka last answered a running transaction, by the monotonic clock.

        For any thread, while another one waits in `flush` or `commit`. While it answers nothing
        that was written, because partitions move, an answer to a question counts.
        """

    @property
    def throttled_until_ms(self) -> int | None:
        """Until when Kafka has said that it throttles one of them, by the monotonic clock."""

    def init(self, number: int, timeout_ms: int) -> KafkaCallEnd:
        """Makes a new producer of this id, which fences the older ones.

        CONTINUE when it is ready. Calls for different numbers may run at the same time, on
        different threads, also while another number has a transaction.
        """

    def begin(self, number: int) -> None:
        """Opens a transaction; `commit` reports a failure."""

    def write(self, number: int, records: Iterable[Record]) -> list[RefusedRecord]:
        """Hands records over in order; stops silently once the transaction is lost."""

    def write_own(self, number: int, records: Iterable[Record]) -> None:
        """Hands over records of ours; a transaction of which one is refused is aborted."""

    def flush(self, number: int, timeout_ms: int) -> bool:
        """Waits until the brokers have every record, and take more; False: `commit` says why not.

        A transaction that is to be throttled for longer than it may last is aborted, THROTTLED.
        """

    def commit(self, number: int, last: Record, timeout_ms: int) -> KafkaCallEnd:
        """Flushes, writes the record that must come last, and commits; aborts if it cannot.

        COMMITTED, COMMITTED_LOOSE, ABORTED, ABANDONED, UNKNOWN or FENCED.
        """

    def warm(self, topics: Iterable[str], timeout_ms: int) -> bool:
        """Has the clients look up topics, to replace outdated information."""

    def destroy(self) -> None:
        """Closes all producers; open transactions stay open until the next init."""


class ControlPort(Protocol):
    """The control topic as a reader that begins at its start."""

    @property
    def position(self) -> int:
        """The offset of the next record to read."""

    def poll(self) -> list[StoredRecord]:
        """Returns the records that arrived since the last call, without waiting."""

    def read_to_end(self, timeout_s: float) -> list[StoredRecord]:
        """Returns all records not returned yet, up to the current last stable offset."""

    def close(self) -> None:
        """Closes the reader."""


class TopicPartitions(NamedTuple):
    """A topic as it is now."""

    topic_id: str
    """Kafka's id: a recreated topic has another."""
    partitions: int


class IngressFound(NamedTuple):
    """The ingress topics that Kafka has."""

    topics: Mapping[str, TopicPartitions]
    """Those that records can be taken from."""
    faults: Mapping[str, str] = MappingProxyType({})
    """For each other topic, what is wrong and what to do, as text."""


class Fetched(NamedTuple):
    """Records read from one ingress partition."""

    at: IngressPartition
    records: tuple[CommittedRecord, ...]
    position: int
    """The offset after them, and after transaction markers and gaps."""
    first_kept: int | None = None
    """Kafka has deleted everything before it; None: nothing unread was deleted."""


NO_ENDS: Final[Mapping[IngressPartition, int]] = MappingProxyType({})
NO_IDS: Final[Mapping[str, str]] = MappingProxyType({})


class IngressPort(Protocol):
    """Reads committed records of explicitly assigned ingress partitions."""

    @property
    def cut_off(self) -> Mapping[IngressPartition, int]:
        """Returns the partitions that end before what was read or announced of them, and where."""

    def assign(
        self,
        positions: Mapping[IngressPartition, int],
        least_ends: Mapping[IngressPartition, int] = NO_ENDS,
        topic_ids: Mapping[str, str] = NO_IDS,
    ) -> None:
        """Reads more partitions from their positions on; those already being read continue.

        A partition that ends before its least end is cut off. A topic of the same name and another
        id is not read.
        """

    @property
    def recreated(self) -> AbstractSet[str]:
        """Returns the topics whose id has changed; they are no longer read."""

    def pause_only(self, partitions: AbstractSet[IngressPartition]) -> None:
        """Pauses these partitions and resumes all others."""

    def poll(self) -> list[Fetched]:
        """Returns some records of each partition; KafkaAway: Kafka refuses reads."""

    def lags(self) -> dict[IngressPartition, int]:
        """Returns the number of unread offsets of each partition, as last reported by Kafka."""

    @property
    def open_transactions(self) -> AbstractSet[IngressPartition]:
        """Returns the partitions that are held up by a transaction that stays open."""

    def report_to_group(
        self, offsets: Mapping[IngressPartition, int], unread: AbstractSet[IngressPartition]
    ) -> None:
        """Shows progress in the consumer group's offsets, and which partitions are not read."""

    def close(self) -> None:
        """Closes the reader."""


class IngressKafkaPort(Protocol):
    """The ingress topics of a Kafka cluster."""

    def find_ingress(self, also: AbstractSet[str]) -> IngressFound:
        """Finds the ingress topics, and creates missing ones of the settings; KafkaAway: no answer.

        It may take some seconds. Topics in `also` are no longer in the settings, but still have
        announced records.
        """

    def ingress(self, on_news: Callable[[], None]) -> IngressPort:
        """Makes a new reader; `on_news` is called on any thread when `poll` has something."""


class HandoverPort(Protocol):
    """Hands announced ingress records to this node's server, during one term."""

    @property
    def room_bytes(self) -> int:
        """How much may be handed over now: unanswered records are bounded. 0 once it is broken."""

    @property
    def is_broken(self) -> bool:
        """Whether it no longer takes records: once all are answered, another is made."""

    def hand(self, records: Sequence[Handed]) -> None:
        """Sends records without blocking; each gets one answer.

        A `Delayed` request becomes a message, a `Withdrawn` one a cancel.
        """

    def answers(self) -> list[tuple[Handed, RecordAnswer]]:
        """Returns the answers since the last call.

        What is unanswered when the server is gone, or the connection broken, is answered UNKNOWN.
        """

    def fileno(self) -> int:
        """Returns the descriptor that the cleaner's main thread polls for answers."""

    def close(self) -> None:
        """Closes the connection, even with records unanswered."""


MakeHandover = Callable[[], HandoverPort | None]
"""Makes the hand-over of a term; None: there is no server to hand over to now."""


class Checked(NamedTuple):
    """What does not keep a node from leading on a Kafka.

    Attributes:
        warnings: Risks to our topics.
        halves_objection: Why no group can be asked about half messages, and what to do; None: it
            can.
        are_halves_wanted: Whether any are begun here; otherwise there may be some of another time.
        are_all_checked: Each broker has answered.
    """

    warnings: tuple[str, ...] = ()
    halves_objection: str | None = None
    are_halves_wanted: bool = True
    are_all_checked: bool = True


class KafkaPort(Protocol):
    """Makes producers and readers."""

    def check(self, *, has_wheels: bool, on_answer: Callable[[], None] = lambda: None) -> Checked:
        """Checks that Kafka answers and can keep our promises; creates our topics.

        Calls `on_answer` as Kafka has answered the first of several questions.

        Raises:
            KafkaAway: Kafka does not answer.
            LeadingRefused: Kafka answers, but leading on it would break a promise.
        """

    def producers(self) -> ProducersPort:
        """Makes the producers of a new candidacy."""

    def control(self) -> ControlPort:
        """Makes a new reader of the control topic."""


class KafkaAway(Exception):
    """Kafka did not answer; the text names the question."""


class ReadsRefused(KafkaAway):
    """Kafka refuses to let topics be read, and why, by topic; of no topic: of all."""

    def __init__(self, refusals: Mapping[str, str]) -> None:
        super().__init__("; ".join(refusals.values()))
        self.refusals = refusals


class LeadingRefused(Exception):
    """Leading would break a promise; the text has the reason and the remedy."""


class ControlUnreadable(Exception):
    """Kafka did not answer in time, or no longer has the records after those that were read."""


class ControlNotReadInTime(ControlUnreadable):
    """There was no answer, or more than could be read, in time; reading continues as it stopped."""


def _sized(value: bytes | None) -> int:
    return _varint(-1) if value is None else _varint(len(value)) + len(value)


def _varint(number: int) -> int:
    """Returns the length of a zigzag varint in bytes."""
    zigzag = number * 2 if number >= 0 else -number * 2 - 1
    return max(1, (zigzag.bit_length() + 6) // 7)
