"""Errors of reading Kafka, by name.

A text is `REASON: what happened and what to do`.
"""

from __future__ import annotations

import re
from enum import StrEnum

from confluent_kafka import KafkaError


class Reason(StrEnum):
    """Why nothing, or not everything, was read."""

    ACCESS_DENIED = "ACCESS_DENIED"
    AUTHENTICATION_FAILED = "AUTHENTICATION_FAILED"
    """Kafka refuses the credentials, or TLS fails: a retry does not help."""
    BROKER_AWAY = "BROKER_AWAY"
    CLIENT_REFUSED = "CLIENT_REFUSED"
    """The Kafka client does not take the `kafka.` settings."""
    KAFKA_FAILED = "KAFKA_FAILED"
    """Any other error of Kafka or its client that does not pass on its own."""
    OFFSETS_GONE = "OFFSETS_GONE"
    """Records of the range were deleted, by retention or otherwise, before they were read."""
    OFFSETS_NOT_THERE = "OFFSETS_NOT_THERE"
    """The partition ends before the range does."""
    OPTION_INVALID = "OPTION_INVALID"
    RECORD_UNREADABLE = "RECORD_UNREADABLE"
    """A record batch is damaged, or compressed in a way that the client does not know."""
    TOPIC_GONE = "TOPIC_GONE"
    """The topic, or one of its partitions, was deleted since planning."""
    TOPIC_RECREATED = "TOPIC_RECREATED"
    """The topic of this name is not the one that was planned."""


class KafkaSourceError(Exception):
    """Kafka could not be read as requested.

    Attributes:
        reason: Stable; see `Reason`.
        message: What happened, and what to do.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(reason, message)
        self.reason = reason
        self.message = message

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


_IN_JAVA = {
    r"(Topic|Cluster)AuthorizationException": Reason.ACCESS_DENIED,
    r"(SaslAuthentication|SslAuthentication|SSLHandshake)Exception": Reason.AUTHENTICATION_FAILED,
    r"CorruptRecordException|InvalidRecordException|past the record": Reason.RECORD_UNREADABLE,
    r"TimeoutException": Reason.BROKER_AWAY,
}
"""What Kafka's client in Java says, somewhere in what Spark makes of it."""


def reason_in_java(text: str) -> Reason | None:
    """Returns the reason in what Spark says of a failed read; None: none of Kafka's."""
    return next((reason for name, reason in _IN_JAVA.items() if re.search(name, text)), None)


TOPIC_CODES = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.UNKNOWN_TOPIC_ID,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
    }
)
"""Kafka does not know the topic or partition, at this moment."""

REFUSALS = {
    KafkaError._AUTHENTICATION: Reason.AUTHENTICATION_FAILED,
    KafkaError.SASL_AUTHENTICATION_FAILED: Reason.AUTHENTICATION_FAILED,
    KafkaError.UNSUPPORTED_SASL_MECHANISM: Reason.AUTHENTICATION_FAILED,
    KafkaError._SSL: Reason.AUTHENTICATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED: Reason.ACCESS_DENIED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: Reason.ACCESS_DENIED,
    KafkaError.INVALID_MSG: Reason.RECORD_UNREADABLE,
    KafkaError.UNSUPPORTED_COMPRESSION_TYPE: Reason.RECORD_UNREADABLE,
    KafkaError._BAD_MSG: Reason.RECORD_UNREADABLE,
    KafkaError._BAD_COMPRESSION: Reason.RECORD_UNREADABLE,
}
"""Errors that waiting does not fix."""

_PASSING = frozenset(
    {
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._RESOLVE,
        KafkaError._TIMED_OUT,
        KafkaError._TIMED_OUT_QUEUE,
        KafkaError._TRANSPORT,
        KafkaError._DESTROY_BROKER,
        KafkaError._WAIT_COORD,
        KafkaError.BROKER_NOT_AVAILABLE,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.KAFKA_STORAGE_ERROR,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NETWORK_EXCEPTION,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError.REPLICA_NOT_AVAILABLE,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.THROTTLING_QUOTA_EXCEEDED,
        KafkaError.UNKNOWN,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        # No group is used, but a client with a group id still asks for its coordinator.
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.NOT_COORDINATOR,
    }
)


def final_reason(error: KafkaError) -> Reason | None:
    """Returns the reason if waiting does not help; None if the error may pass."""
    code = error.code()
    if code in REFUSALS:
        return REFUSALS[code]
    if code in _PASSING or code in TOPIC_CODES:
        return None
    return None if error.retriable() else Reason.KAFKA_FAILED
