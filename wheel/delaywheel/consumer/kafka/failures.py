"""What errors of Kafka mean for a consumer.

| Kafka says | then |
|---|---|
| a topic, the group or the transactional id is not permitted | the consumer stops, |
|   | NOT_AUTHORIZED; or waits, with `wait_for_rights` |
| a topic does not take a record as it is | that record alone gets another outcome |
| another member has the same `group.instance.id` | the consumer stops, INSTANCE_TAKEN, |
|   | if that is so (fencing.py) |
| a client does not know a setting, or not its value | the consumer stops, SETTING_INVALID |
| our transactions may not last so long | the consumer stops, TRANSACTION_TIMEOUT_REFUSED |
| anything else | asked again, later each time |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from confluent_kafka import KafkaError, KafkaException

from delaywheel.consumer.message import ConsumerError, ConsumerReason
from delaywheel.consumer.port import KafkaUnavailable, TransactionFailure
from delaywheel.transactional import is_timeout_refused, words_of

REFUSALS = frozenset(
    {
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)
"""These credentials may not do this."""

FENCED = frozenset({KafkaError.FENCED_INSTANCE_ID, KafkaError.UNRELEASED_INSTANCE_ID})
"""Another member of the group has the same `group.instance.id`, or Kafka takes us for another."""

_OF_RECORDS = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.POLICY_VIOLATION,
        KafkaError._INVALID_ARG,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
    }
)


def _translated(exception: KafkaException) -> Exception:
    error = exception.args[0]
    if error.code() in REFUSALS:
        return ConsumerError(ConsumerReason.NOT_AUTHORIZED, error.str())
    if error.code() == KafkaError._INVALID_ARG:
        return ConsumerError(ConsumerReason.SETTING_INVALID, f"kafka: {error.str()}")
    if is_timeout_refused(error):
        return ConsumerError(ConsumerReason.TRANSACTION_TIMEOUT_REFUSED, error.str())
    return KafkaUnavailable(words_of(error))


_LATE = frozenset({"_TIMED_OUT", "_MSG_TIMED_OUT", "REQUEST_TIMED_OUT"})


class NoAnswerInTime(KafkaUnavailable):
    """Records of a transaction were not answered; fewer may be."""


@contextmanager
def translated_errors() -> Iterator[None]:
    """Raises what Kafka's errors mean, outside of a transaction."""
    try:
        yield
    except KafkaException as exception:
        raise _translated(exception) from exception


def failure_of(
    raised: Exception, refused: Iterable[tuple[str, KafkaError]], *, is_before_end: bool
) -> TransactionFailure:
    """Returns why a transaction failed: by the call's error, and those of undelivered records.

    `is_before_end`: its end was not requested yet.
    """
    causes = [(f"{topic}: {error.str()}", error) for topic, error in refused]
    if isinstance(raised, KafkaException) and isinstance(raised.args[0], KafkaError):
        causes.append((raised.args[0].str(), raised.args[0]))
    for text, error in causes:
        if error.code() in REFUSALS:
            return TransactionFailure(text, is_forbidden=True, has_begun_to_end=not is_before_end)
    for text, error in causes:
        if error.code() in FENCED:
            return TransactionFailure(text, is_fenced=True)
    for text, error in causes:
        if is_before_end and error.code() in _OF_RECORDS:
            return TransactionFailure(text, is_refusal=True)
    is_late = isinstance(raised, NoAnswerInTime) or any(e.name() in _LATE for _, e in causes)
    return TransactionFailure(causes[0][0] if causes else str(raised), is_late=is_late)
