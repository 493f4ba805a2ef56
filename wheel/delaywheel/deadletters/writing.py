"""Transactions that settle letters, on confluent-kafka.

begin -> records -> flush -> marks -> flush -> commit

This client does not report deliveries within transactions by callback, so a failure shows at the
next call:

| what failed | where it shows | then |
|---|---|---|
| the client refuses a record | `produce` raises | aborted; that record is refused |
| a broker refuses a batch | `produce` of the marks raises `_STATE` | aborted; one of the records is the cause |
| the same partition again, after a refused batch | the same | aborted, which heals it: retried |
| no answer, before the commit | `flush` leaves some behind | aborted, known |
| the commit, before its EndTxn | `_INCONSISTENT`, `_STATE` | aborted; as a refused batch |
| the commit, later | any other error | not known: nothing more is sent |
| another claim | any call: fenced | nothing more is sent |

The client retries nothing within a call (`delaywheel.transactional` says why).
"""  # noqa: E501 - rows of a table

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from delaywheel.deadletters.errors import DeadLettersError, DeadLettersReason
from delaywheel.deadletters.marks import CLAIM_KEY
from delaywheel.deadletters.reading import refused
from delaywheel.transactional import MAX_CALL_MS, Outgoing, unrepeated, words_of

CALL_S = MAX_CALL_MS / 1000
INIT_S = 30.0
LARGEST_REQUEST_BYTES = 90_000_000
"""The client's own limit of sizes, set high: topics and brokers decide."""

_BEFORE_END = frozenset({KafkaError._STATE, KafkaError._INCONSISTENT})
_BY_CLIENT = frozenset(
    {KafkaError._UNKNOWN_PARTITION, KafkaError._INVALID_ARG, KafkaError.MSG_SIZE_TOO_LARGE}
)
_FENCED = frozenset(
    {KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH}
)


@dataclass(frozen=True, slots=True)
class RefusedTransaction:
    """Nothing of a transaction was committed, because one of its records was refused.

    It has this number, unless that is not known; `why` is in Kafka's words, beginning with its name
    of the error.
    """

    why: str
    number: int | None


class LetterWriter:
    """The producer of one claim. After any error that it raises it is unusable."""

    def __init__(self, client: Mapping[str, Any], topic: str, marks_topic: str) -> None:
        """Prepares; the claim connects."""
        self._marks_topic = marks_topic
        self._producer = Producer(
            {
                "client.id": f"delaywheel-letters-{topic}",
                "log_level": 0,
                "linger.ms": 5,
                **client,
                **unrepeated(f"{topic}-replay"),
                "message.max.bytes": LARGEST_REQUEST_BYTES,
            }
        )

    def claim(self) -> bytes:
        """Fences earlier writers and commits a claim; returns the claim."""
        try:
            self._producer.init_transactions(INIT_S)
        except KafkaException as exception:
            raise _failure(exception) from exception
        token = {"token": secrets.token_hex(16), "at_ms": time.time_ns() // 1_000_000}
        value = json.dumps(token, separators=(",", ":")).encode()
        self.forget([(CLAIM_KEY, value)])
        return value

    def forget(self, records: Sequence[tuple[bytes, bytes | None]]) -> None:
        """Commits records of the topic of marks alone."""
        ended = self.transact([], records)
        if ended is not None:
            raise DeadLettersError(
                DeadLettersReason.KAFKA_REFUSED, f"{self._marks_topic}: {ended.why}"
            )

    def transact(
        self, records: Sequence[Outgoing], marks: Iterable[tuple[bytes, bytes | None]]
    ) -> RefusedTransaction | None:
        """Commits records together with the marks of their letters; None means committed.

        Of a DeadLettersError `outcome_known` says whether it is certain that it is not.
        """
        try:
            self._producer.begin_transaction()
            for number, record in enumerate(records):
                error = self._produce(record)
                if error is not None:
                    if error.code() == KafkaError._STATE:
                        return self._refused_batch()
                    self._abort()
                    return RefusedTransaction(words_of(error), number)
            self._flush()
            for key, value in marks:
                if self._produce(Outgoing(self._marks_topic, key, value, [], 0)) is not None:
                    return self._refused_batch()
            self._flush()
        except KafkaException as exception:
            raise _failure(exception) from exception
        return self._commit()

    def _produce(self, record: Outgoing) -> KafkaError | None:
        """Hands a record over; returns the client's error if it does not accept it."""
        while True:
            try:
                self._producer.produce(
                    record.topic,
                    value=record.value,
                    key=record.key,
                    headers=list(record.headers),
                    partition=record.partition,
                    timestamp=record.timestamp_ms,
                )
            except BufferError:
                self._flush()  # an empty queue accepts any record
            except KafkaException as exception:
                error: KafkaError = exception.args[0]
                if error.code() in _BY_CLIENT or error.code() == KafkaError._STATE:
                    return error
                raise
            else:
                return None

    def _flush(self) -> None:
        unanswered = self._producer.flush(CALL_S)
        if unanswered:
            raise DeadLettersError(
                DeadLettersReason.KAFKA_UNREACHABLE, f"no answer to {unanswered} records"
            )

    def _refused_batch(self) -> RefusedTransaction:
        """Asks for the cause, and aborts: the client refuses to commit such a transaction."""
        why = "unknown"
        try:
            self._producer.commit_transaction(CALL_S)
        except KafkaException as exception:
            why = words_of(exception.args[0])
        self._abort()
        return RefusedTransaction(why, None)

    def _commit(self) -> RefusedTransaction | None:
        try:
            self._producer.commit_transaction(CALL_S)
        except KafkaException as exception:
            error = exception.args[0]
            if error.code() in _BEFORE_END:
                self._abort()
                return RefusedTransaction(words_of(error), None)
            raise _failure(exception, outcome_known=False) from exception
        return None

    def _abort(self) -> None:
        try:
            self._producer.abort_transaction(CALL_S)
        except KafkaException as exception:
            raise _failure(exception) from exception


def _failure(exception: KafkaException, *, outcome_known: bool = True) -> DeadLettersError:
    error = exception.args[0]
    if error.code() in _FENCED:
        reason, text = DeadLettersReason.OVERTAKEN, "another process deals with its letters now"
    elif outcome_known:
        return refused(error)
    else:
        reason, text = DeadLettersReason.OUTCOME_UNKNOWN, f"of the last letters: {error.str()}"
    return DeadLettersError(reason, text, outcome_known=outcome_known)
