"""Transactions in Kafka: what they write, settings of producers, errors, those that stay open.

And how many replicas the topics have that we make for them. The settings are those of nodes, of
consumers, and of replays of letters.

librdkafka speaks the transaction protocol in which a copy of an EndTxn that arrives late ends a
later transaction of the same producer in the middle; the copy comes from the library's own retries.
A producer that is `repeating` has a short backoff, so whoever uses it judges by the time that an
end took whether it may have been sent twice. One that is `unrepeated` sends nothing again within a
call: that ends as a time-out, an unknown outcome.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Generic, NamedTuple, Protocol, Self, TypeVar
from zlib import crc32

from delaywheel.headers import content_bytes

_Answer = TypeVar("_Answer")

TRANSACTION_TIMEOUT_MS: Final = 10_000
"""Brokers abort what a dead producer began after so long; read_committed consumers wait for it."""

LEADER_TIMEOUT_MS: Final = 20_000
"""The same of a leader of nodes: it outlasts a broker that was killed, until Kafka misses it."""

MOST_TIMEOUT_SETTING: Final = "transaction.max.timeout.ms"
"""Brokers refuse producers whose transactions may last longer."""

MOST_TIMEOUT_ADVICE: Final = (
    f"set {MOST_TIMEOUT_SETTING} of the brokers to {LEADER_TIMEOUT_MS} or more"
)

MAX_CALL_MS: Final = 9_000
"""No call that may end a transaction waits longer: below the brokers' own abort."""

_NO_RETRY_BACKOFF_MS: Final = 30_000

ANY_PARTITION: Final = -1

MIN_INSYNC: Final = "min.insync.replicas"


def replicas_on(brokers: int) -> int:
    """Returns how many replicas a topic gets on so many brokers."""
    return max(1, min(3, brokers))


def least_in_sync(replicas: int) -> int:
    """Returns `min.insync.replicas` of a topic with so many: one broker may be away."""
    return max(1, replicas - 1)


class Outgoing(NamedTuple):
    """A record to write; `timestamp_ms` 0 means the time of writing."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    partition: int = ANY_PARTITION
    timestamp_ms: int = 0

    @property
    def length_bytes(self) -> int:
        """The length of key, value and headers."""
        return content_bytes(self.key, self.value, self.headers)

    def to_one_of(self, partitions: Sequence[int]) -> Self:
        """Returns it for one of these partitions, by its key; as it is if there are none."""
        if not partitions:
            return self
        number = crc32(self.key or self.value or b"") % len(partitions)
        return self._replace(partition=partitions[number])


class _KafkaError(Protocol):
    """An error of the client, which not all may import who use this module."""

    def name(self) -> Any:
        """Returns its name."""

    def str(self) -> Any:
        """Returns what it says."""


_MOVES: Final = frozenset(
    {
        "LEADER_NOT_AVAILABLE",
        "NOT_LEADER_FOR_PARTITION",
        "FENCED_LEADER_EPOCH",
        "UNKNOWN_LEADER_EPOCH",
        "OFFSET_NOT_AVAILABLE",
        "REPLICA_NOT_AVAILABLE",
        "NOT_COORDINATOR",
        "COORDINATOR_NOT_AVAILABLE",
        "COORDINATOR_LOAD_IN_PROGRESS",
        "_DESTROY_BROKER",
    }
)
"""What brokers answer while leaders and coordinators move to others; of the last the client says
that it has dropped the broker that it asked: Kafka no longer names it."""
_MOVED_S: Final = 0.1


def is_moving(error: _KafkaError) -> bool:
    """Whether the same call may succeed soon, though the client library calls it not retriable."""
    return error.name() in _MOVES


def ask_again_after_moves(
    ask: Callable[[], _Answer], look: Callable[[], object], timeout_s: float
) -> _Answer:
    """Repeats a question about partitions while their leaders move; raises the client's error.

    `look` has the client look where they are now: else it may ask as before for minutes.
    """
    deadline, has_moved = time.monotonic() + timeout_s, False
    while True:
        try:
            if has_moved:
                look()
            return ask()
        except Exception as error:
            is_kafkas = type(error).__name__ == "KafkaException"
            has_moved = is_kafkas and is_moving(error.args[0])
            if not has_moved or time.monotonic() > deadline:
                raise
        time.sleep(_MOVED_S)


def is_timeout_refused(error: _KafkaError) -> bool:
    """Whether brokers refuse our producers, however often they ask: see `MOST_TIMEOUT_ADVICE`."""
    return bool(error.name() == "INVALID_TRANSACTION_TIMEOUT")


def text_of(error: _KafkaError) -> str:
    """Returns what an error says; of a setting that is wrong, which one it is."""
    return MOST_TIMEOUT_ADVICE if is_timeout_refused(error) else str(error.str())


def words_of(error: _KafkaError) -> str:
    """Returns an error's name and what it says."""
    return f"{error.name()}: {text_of(error)}"


@contextmanager
def fatal_errors_as_they_are() -> Iterator[None]:
    """Raises a client's fatal error (another producer has fenced this one) as a `KafkaException`.

    For calls that wait while the client's callbacks run: confluent-kafka raises the error amid
    those, and if a line for the log comes next, Python makes a SystemError of it.
    """
    try:
        yield
    except SystemError as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from None


def transactional(
    transactional_id: str, timeout_ms: int = TRANSACTION_TIMEOUT_MS
) -> dict[str, Any]:
    """Returns the settings of every transactional producer."""
    return {
        "transactional.id": transactional_id,
        "transaction.timeout.ms": timeout_ms,
        "message.timeout.ms": timeout_ms,
        "partitioner": "murmur2_random",  # as Java's
    }


def repeating(
    transactional_id: str, backoff_ms: int, timeout_ms: int = TRANSACTION_TIMEOUT_MS
) -> dict[str, Any]:
    """Returns the settings of a producer that sends requests again, after this backoff."""
    return {
        **transactional(transactional_id, timeout_ms),
        "socket.timeout.ms": TRANSACTION_TIMEOUT_MS,
        "retry.backoff.ms": backoff_ms,
        "retry.backoff.max.ms": backoff_ms,
        # Not the default 30 s: a missing topic would hold up its transaction for so long.
        "topic.metadata.propagation.max.ms": 1_000,
    }


def unrepeated(transactional_id: str) -> dict[str, Any]:
    """Returns the settings of a producer that repeats no request within a call."""
    return repeating(transactional_id, _NO_RETRY_BACKOFF_MS)


# librdkafka does not reuse the numbers of a refused batch, and notices the gap at the next batch
# for that partition. The abort that follows begins a new producer epoch.
_AFTERMATH: Final = "OUT_OF_ORDER_SEQUENCE_NUMBER"


def is_aftermath(cause: str | None) -> bool:
    """Whether a transaction failed only because of an earlier one, and will not fail again.

    The cause is in Kafka's words, beginning with its name of the error.
    """
    return cause is not None and cause.startswith(_AFTERMATH)


_At = TypeVar("_At")

OPEN_S: Final = 10.0
"""A partition that stands still for so long although it has more is looked at, and again later."""


class OpenTransactionWatch(Generic[_At]):
    """Finds partitions that a producer's open transaction holds up.

    Nobody who reads committed records reads past one, and Kafka aborts it only after its producer's
    `transaction.timeout.ms`, 15 minutes at most.
    """

    def __init__(self, end_of: Callable[[_At], int | None]) -> None:
        """Begins without partitions; `end_of` asks, as a reader of committed records, for an end.

        That is where the first open transaction began. None: no answer.
        """
        self._end_of = end_of
        self._standing: dict[_At, tuple[int, float]] = {}
        self._found: frozenset[_At] = frozenset()

    def look(self, unread: Mapping[_At, int]) -> frozenset[_At]:
        """Returns the partitions that are held up; at most one is asked about in each call.

        `unread` has the next offset of those that have more than was read, and are not paused.
        """
        now_s = time.monotonic()
        self._found &= unread.keys()
        self._standing = {at: one for at, one in self._standing.items() if at in unread}
        for at, position in unread.items():
            stood_at, look_s = self._standing.get(at, (-1, 0.0))
            if stood_at != position:
                self._standing[at] = position, now_s + OPEN_S
                self._found -= {at}
            elif now_s >= look_s:
                self._standing[at] = position, now_s + OPEN_S
                end = self._end_of(at)
                if end is not None:
                    is_open = end <= position
                    self._found = self._found | {at} if is_open else self._found - {at}
                break
        return self._found
