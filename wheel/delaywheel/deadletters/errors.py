"""Errors of reading and settling dead letters, by name."""

from __future__ import annotations

from enum import StrEnum

from delaywheel.errors import RefusedError


class DeadLettersReason(StrEnum):
    """Stable names of errors."""

    TOPIC_MISSING = "TOPIC_MISSING"
    """There is no such dead-letter topic: it never had a letter, or has another name."""
    TOPIC_RESERVED = "TOPIC_RESERVED"
    """The service keeps its own records in the topic that the letters were to be sent to."""
    MARKS_NOT_COMPACTED = "MARKS_NOT_COMPACTED"
    """The topic of the marks would forget them: set its `cleanup.policy` to `compact`."""
    LETTER_MISSING = "LETTER_MISSING"
    """There is no letter at that place, or no longer."""
    OVERTAKEN = "OVERTAKEN"
    """Another process has taken over the letters of this topic; what this one did stays done."""
    KAFKA_UNREACHABLE = "KAFKA_UNREACHABLE"
    """Kafka did not answer in time: retrying helps."""
    KAFKA_REFUSED = "KAFKA_REFUSED"
    """Kafka refused; the text says why."""
    OUTCOME_UNKNOWN = "OUTCOME_UNKNOWN"
    """Kafka did not say whether the last letters were dealt with: retrying finds out."""


class DeadLettersError(RefusedError):
    """Reading or settling failed; `outcome_known` concerns the last few letters."""

    @property
    def retry_helps(self) -> bool:
        """Whether the same call may succeed later."""
        return self.reason in {
            DeadLettersReason.KAFKA_UNREACHABLE,
            DeadLettersReason.OUTCOME_UNKNOWN,
        }
