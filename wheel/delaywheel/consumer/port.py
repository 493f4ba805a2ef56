"""The consumer's requirements on Kafka, as a port. Tests have one that fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple, Protocol, TypeVar

from delaywheel.consumer.message import ConsumerError, ConsumerReason
from delaywheel.consumer.order import Away
from delaywheel.consumer.records import FetchedRecords, Partition, Passed
from delaywheel.consumer.rules.subscription import TopicNames
from delaywheel.ingress import IngressLimits
from delaywheel.transactional import Outgoing

FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 5.0

_T = TypeVar("_T")

OnPartitions = Callable[[list[Partition]], None]


class KafkaUnavailable(Exception):
    """Kafka does not answer; retrying may help."""


class IngressToCome(KafkaUnavailable):
    """There is no ingress topic yet: a node makes it when it is started."""


class RightMissing(KafkaUnavailable):
    """These credentials may not do that now; retrying may help, as the right is waited for."""


def insist(
    ask: Callable[[], _T],
    note: Callable[[KafkaUnavailable | None], None],
    gives_up: Callable[[], bool],
) -> _T | None:
    """Asks until Kafka answers, at growing intervals; None if the caller gave up meanwhile."""
    backoff_s = FIRST_BACKOFF_S
    while True:
        try:
            answer = ask()
        except KafkaUnavailable as away:
            note(away)
        else:
            note(None)
            return answer
        deadline = time.monotonic() + backoff_s
        while time.monotonic() < deadline:
            if gives_up():
                return None
            time.sleep(FIRST_BACKOFF_S)
        backoff_s = min(backoff_s * 2, LONGEST_BACKOFF_S)


class TopicTooSmall(ConsumerError):
    """A topic takes less than the one whose records go there."""

    def __init__(self, topic: str, text: str) -> None:
        super().__init__(ConsumerReason.TOPIC_TOO_SMALL, text)
        self.topic = topic


class Start(NamedTuple):
    """What a consumer learns from Kafka at its start.

    Attributes:
        most_bytes: The largest batch that the ingress topic, those of retries and those of dead
            letters accept, by topic. Where nobody says it, what is worth a try: of a topic of
            retries, to which others write, Kafka's default.
    """

    ingress_topic: str
    most_bytes: Mapping[str, int]


FORWARD_ROOM_BYTES = 500
"""How much larger a record may come back than it was sent: delaywheel adds headers."""


class ConsumedTopic(NamedTuple):
    """A topic as it is now; its id is empty if Kafka does not say it.

    `leaderless` are the partitions that nobody leads now: no question about them is answered.
    """

    id: str
    partitions: int
    leaderless: AbstractSet[int] = frozenset()


class Unread(NamedTuple):
    """How many offsets of a partition are left, and the first; ends of transactions are passed."""

    offset: int
    offsets: int


class TransactionFailure(NamedTuple):
    """Why a transaction is not committed, or perhaps not: call `renew_producer` then.

    Attributes:
        is_refusal: It is certainly not committed, since a topic does not take one of its records.
        is_forbidden: These credentials lack a right that it needs.
        has_begun_to_end: Its end was requested, so it may be committed.
        unanswered: The topics that have not taken what is written to them, and not refused it.
        unable: Those of them of which Kafka says why: `Broker.unable`.
        is_fenced: Another consumer of the group has this one's `instance`.
        is_late: Kafka did not answer in time: less may be answered.
    """

    text: str
    is_refusal: bool = False
    is_forbidden: bool = False
    has_begun_to_end: bool = True
    unanswered: frozenset[str] = frozenset()
    unable: frozenset[str] = frozenset()
    is_fenced: bool = False
    is_late: bool = False


class MissingRight(NamedTuple):
    """What these credentials may not do and the consumer does, in Kafka's words.

    Without Describe a topic is not seen at all.
    """

    topic: str
    operation: str


class Broker(Protocol):
    """One member of the group, with one transactional producer.

    What asks Kafka raises KafkaUnavailable where another try may help, and ConsumerError where none
    does.
    """

    @property
    def is_incremental(self) -> bool:
        """Whether callbacks name only the partitions that come or go; otherwise, all of ours."""

    def start(self) -> Start:
        """Checks the topics, and creates ours that are missing; without ingress: IngressToCome."""

    def all_topics(self) -> AbstractSet[str]:
        """Returns the names of all topics that these credentials may see."""

    def prepare(self, topics: Sequence[TopicNames]) -> Mapping[str, int]:
        """Checks these topics as `start` does, and creates the group's ones that are missing.

        Returns their largest batches, as in `Start.most_bytes`. ConsumerError: it is impossible for
        one of them.
        """

    def sizes(self, topics: Sequence[TopicNames]) -> Mapping[str, int]:
        """Returns the largest batches of these topics as they are now, as in `Start.most_bytes`.

        Raises TopicTooSmall if one takes less than the topic whose records go there.
        """

    def subscribe(
        self,
        topics: Sequence[str],
        *,
        on_assign: OnPartitions,
        on_revoke: OnPartitions,
        on_lost: OnPartitions,
    ) -> None:
        """Joins the group, if there are topics; `fetch` alone calls the callbacks."""

    def resubscribe(self, topics: Sequence[str]) -> None:
        """Reads these topics instead, once the group has assigned their partitions."""

    def fetch(self, most: int, timeout_s: float) -> Sequence[FetchedRecords]:
        """Returns committed records; waits this long for so many."""

    def ends_met(self) -> Mapping[Partition, int]:
        """Returns where `fetch` met the ends of partitions since this was asked last.

        All records before that have come from `fetch`; ends of transactions lie before it, too.
        """

    def refusal(self) -> str | None:
        """Returns what `fetch` was refused for want of a right since this was asked last."""

    def missing_rights(self) -> list[MissingRight]:
        """Returns what these credentials may not do with topics, as far as Kafka says so.

        Nobody is asked about the group: an admin client that asks its coordinator may end the
        process (librdkafka's issues 4605 and 5397).
        """

    def may_write(self, topic: str) -> bool | None:
        """Whether these credentials may write to a topic; None: it is not there."""

    def limits(self) -> IngressLimits | None:
        """Returns what ingress takes; None: nobody says it, or not to us."""

    def topics(self, names: Collection[str]) -> dict[str, ConsumedTopic]:
        """Returns these topics as they are now, as far as they exist."""

    def unable(self, topics: Collection[str]) -> AbstractSet[str]:
        """Returns those of these topics with a partition that cannot be written to now.

        It has no leader that takes connections, or fewer replicas in sync than it needs.
        """

    def committed(self, partitions: Sequence[Partition]) -> dict[Partition, Passed | None]:
        """Returns the group's offsets, once no open transaction may still change them."""

    def ends(self, partitions: Sequence[Partition]) -> dict[Partition, int]:
        """Returns the offsets after the last records."""

    def first_since(self, at: Partition, since_ms: int) -> int:
        """Returns the offset of the first record of this time or later; else that of the end."""

    def unread(self, positions: Mapping[Partition, int | None]) -> dict[Partition, Unread]:
        """Returns what these partitions have behind what was read, as far as the client knows.

        A position is the next offset to read; None: the first existing one.
        """

    def held_up(self, places: Mapping[Partition, int]) -> AbstractSet[Partition]:
        """Returns those of these partitions that stand still behind an open transaction.

        `places` has the next offset of those that have more, and are not paused.
        """

    def away(
        self, lanes: Sequence[Partition], tell: Callable[[int], None]
    ) -> dict[Partition, list[Away]]:
        """Returns what the order topics say now about these partitions of source topics.

        `tell` is called every few seconds with how many records are unread.
        """

    def assign(self, positions: Mapping[Partition, int | None]) -> None:
        """Reads these partitions from these offsets on; None: from the beginning.

        If the broker is incremental, the others go on as they are.
        """

    def seek(self, positions: Mapping[Partition, int | None]) -> None:
        """Reads assigned partitions from other offsets on; only if the broker is incremental."""

    def membership(self) -> bytes | None:
        """Returns the proof of membership for transactions; None while not in the group."""

    def pause(self, partitions: Sequence[Partition]) -> None:
        """Stops fetching these partitions."""

    def resume(self, partitions: Sequence[Partition]) -> None:
        """Resumes fetching these partitions."""

    def commit(
        self,
        records: Sequence[Outgoing],
        offsets: Mapping[Partition, Passed],
        membership: bytes,
        *,
        one_by_one: bool = False,
    ) -> TransactionFailure | None:
        """Writes records and offsets in one transaction; None: it is committed.

        With `one_by_one` each record is in a batch of its own: a topic may take all, and not
        together. Raises ConsumerError if another consumer of the group has this one's `instance`: a
        new producer would end that one's work.

        Args:
            offsets: The next ones to read.
            membership: As of the assignment of these partitions.
        """

    def renew_producer(self, unseen: AbstractSet[str]) -> None:
        """Makes a new producer, which ends the old one's work.

        If Kafka cannot write the end of that now, the next call makes one that leaves it alone.
        Topics that are `unseen`, which these credentials may not describe now, are not looked for.
        Raises ConsumerError if a topic that outcomes go to is gone: no transaction with one would
        ever commit.
        """

    def close(self) -> None:
        """Leaves the group."""
