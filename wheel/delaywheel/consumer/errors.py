"""What stops a consumer, by name."""

from __future__ import annotations

from enum import StrEnum

from delaywheel.errors import DelaywheelError


class ConsumerReason(StrEnum):
    """Why a consumer cannot go on; each name is stable."""

    TOPIC_MISSING = "TOPIC_MISSING"
    """A topic that it is to read is not there: create it, or correct its name."""
    INGRESS_MISSING = "INGRESS_MISSING"
    """Kafka has no ingress topic: start a delaywheel node on it, or correct `cluster`."""
    CLUSTER_AMBIGUOUS = "CLUSTER_AMBIGUOUS"
    """Several delaywheel clusters use this Kafka: say which one with `cluster`."""
    TOPICS_NOT_MADE = "TOPICS_NOT_MADE"
    """Kafka refused to make the retry or dead-letter topic: make them, or allow it."""
    NOT_AUTHORIZED = "NOT_AUTHORIZED"
    """Kafka refuses a topic, the group or the transactional id to these credentials."""
    KAFKA_FATAL = "KAFKA_FATAL"
    """The Kafka client can do nothing any more; a new consumer may."""


class ConsumerError(DelaywheelError):
    """The consumer has stopped; what it had not committed is delivered again.

    Attributes:
        reason: Why.
    """

    def __init__(self, reason: ConsumerReason, text: str) -> None:
        super().__init__(f"{reason}: {text}", outcome_known=True)
        self.reason = reason


class SettledError(RuntimeError):
    """`done`, `retry` or `dead` was called for a message that had been settled before."""
