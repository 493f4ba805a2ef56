"""The sections of docs/RUNBOOK.md to which a cause leads; a test holds the two together."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Section(StrEnum):
    """A section, by its heading."""

    KAFKA_AWAY = "Kafka is away"
    NO_LEADER = "No leader is elected"
    CONTROL_TOPIC = "The control topic is missing"
    THROTTLED = "Kafka throttles"
    NOTHING_FORWARDED = "Nothing is forwarded"
    CLOCK_AHEAD = "A clock was ahead"
    NO_MESSAGES_TAKEN = "A node takes no messages"
    NODE_REPLACED = "Replacing a node"
    OLDER_COPY = "An older copy of a folder"
    NODE_SILENT = "No node answers Prometheus"
    LATE = "Lateness grows"
    SLOW_CANCELS = "Cancels are slow"
    DEAD_LETTERS = "Dead letters grow"
    INGRESS = "Ingress topics are not taken"
    COPIES_MISSING = "Copies are missing"
    NOTHING_DELETED = "Nothing is deleted"
    DISK_FULL = "The disk is full"
    DISK_HANGS = "The disk hangs"
    OUT_OF_MEMORY = "A node is out of memory"
    LEDGER = "The ledger is not published"
    NODES_DIFFER = "Nodes refuse each other"
    FILES_REFUSED = "A certificate or a file of rights is refused"


_OF_KAFKA: Final = (
    ("it throttles", Section.THROTTLED),
    ("the control topic", Section.CONTROL_TOPIC),
    *((words, Section.KAFKA_AWAY) for words in ("imed out", "ransport", "Failed while waiting")),
    *((words, Section.KAFKA_AWAY) for words in ("brokers are down", "onnect", "esolve")),
)
_OF_REFUSALS: Final = (
    ("STORAGE_ROLLED_BACK", Section.OLDER_COPY),
    ("STORAGE_REPLACED", Section.NODE_REPLACED),
    ("DISK_FULL", Section.DISK_FULL),
    ("DISK_STALLED", Section.DISK_HANGS),
)


def of_kafka(error: str) -> Section:
    """Returns where to look for what nodes have against Kafka; most keeps them from leading."""
    found = (section for words, section in _OF_KAFKA if words in error)
    return next(found, Section.NO_LEADER)


def of_refusal(reason: str, message: str) -> Section:
    """Returns where to look for why a node takes no messages."""
    found = (section for words, section in _OF_REFUSALS if words in f"{reason} {message}")
    return next(found, Section.NO_MESSAGES_TAKEN)
