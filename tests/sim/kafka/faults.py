"""Faults between a client and the simulated Kafka, as switches and probabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

from delaywheel_replica.cleaner.outside.ports import Record

RangeUs = tuple[int, int]
"""The least and the greatest delay, in microseconds; drawn uniformly."""


def draw_us(random: Random, span_us: RangeUs) -> int:
    """Draws a time from a range."""
    least, most = span_us
    return least + int(random.random() * (most - least))


@dataclass(slots=True)
class KafkaFaults:
    """How Kafka answers. By default it is healthy: a commit then takes 3 to 8 ms.

    `SimKafka` itself decides which nodes reach Kafka at all (`stop`, `cut`).
    """

    way_us: RangeUs = (500, 1_300)
    """How long a request takes to the brokers, and its answer back."""
    slow_us: Mapping[str, RangeUs] = field(default_factory=dict)
    """The same for single nodes."""
    commit_us: RangeUs = (0, 0)
    """How long the coordinator takes for an EndTxn before it counts."""
    marker_us: RangeUs = (300, 3_000)
    """How long until a marker is in its log: until then nothing behind it is visible."""
    check_us: int = 0
    """How long the first request of a candidacy takes: it may have to create topics."""
    init_us: RangeUs = (50_000, 75_000)
    """How long an InitProducerId takes before it counts."""

    bytes_per_s: int = 0
    """The quota of all producers together; 0: none. What goes beyond it within `QUOTA_WINDOW_S` is
    taken, and its connection is muted for as long as makes up for it."""

    lost_request: float = 0.0
    lost_reply: float = 0.0
    lost_init_reply: float = 0.0
    """As `lost_reply`, for InitProducerId only: it timed out, though older epochs are fenced."""
    lost_end_reply: float = 0.0
    """As `lost_reply`, for EndTxn only: it timed out, though the transaction has ended."""

    late_end: float = 0.0
    """How likely an EndTxn is under way for `late_us`."""
    retried_end: float = 0.0
    """How likely that happens while the library sends a second copy at once, which is in time."""
    late_us: RangeUs = (100_000, 5_000_000)

    refused_batch: float = 0.0
    """How likely the brokers refuse a flush: the transaction can then only be aborted."""
    refuse: Callable[[Record], str | None] | None = None
    """Why the client refuses a record at once, if it does."""
