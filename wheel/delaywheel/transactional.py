"""Settings of transactional producers: of nodes, of consumers, and of replays of letters.

librdkafka speaks the transaction protocol in which a copy of an EndTxn that arrives late ends a
later transaction of the same producer in the middle; the copy comes from the library's own retries.
A producer that is `unrepeated` has none within a call: what would have been retried ends as a
time-out, an unknown outcome.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

TRANSACTION_TIMEOUT_MS: Final = 10_000
"""Brokers abort what a dead producer began after so long; read_committed consumers wait for it."""

MAX_CALL_MS: Final = 9_000
"""No call that may end a transaction waits longer: below the brokers' own abort."""

_NO_RETRY_BACKOFF_MS: Final = 30_000


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


def transactional(transactional_id: str) -> dict[str, Any]:
    """Returns the settings of every transactional producer.

    Example:
        >>> transactional("a")["transactional.id"]
        'a'
    """
    return {
        "transactional.id": transactional_id,
        "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS,
        "message.timeout.ms": TRANSACTION_TIMEOUT_MS,
        "partitioner": "murmur2_random",  # as Java's
    }


def unrepeated(transactional_id: str) -> dict[str, Any]:
    """Returns the settings of a producer that repeats no request within a call.

    Example:
        >>> unrepeated("a")["retry.backoff.ms"] > MAX_CALL_MS
        True
    """
    return {
        **transactional(transactional_id),
        "socket.timeout.ms": TRANSACTION_TIMEOUT_MS,
        "retry.backoff.ms": _NO_RETRY_BACKOFF_MS,
        "retry.backoff.max.ms": _NO_RETRY_BACKOFF_MS,
        # Not the default 30 s: a missing topic would hold up its transaction for so long.
        "topic.metadata.propagation.max.ms": 1_000,
    }
