"""A consumer's metrics for Prometheus. It needs prometheus-client, which the SDK does not."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from delaywheel.consumer.sync import BaseConsumer
from delaywheel.consumer.watching.figures import HANDLER_BOUNDS_S
from delaywheel.consumer.watching.health import ConsumerTrouble

_OUTCOMES = ("done", "retried", "skipped", "expired", "parked", "forwarded")
_PREFIX = "delaywheel_consumer"


class ConsumerMetrics(Collector):
    """Collects one consumer; docs/CONSUMER_REFERENCE.md lists the metrics."""

    def __init__(self, consumer: BaseConsumer) -> None:
        """Takes the consumer; register the result with a registry."""
        self._consumer = consumer

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics, of one moment."""
        now, group = self._consumer.figures, [self._consumer.group]
        outcomes = CounterMetricFamily(
            f"{_PREFIX}_records", "Records by outcome.", labels=["group", "outcome", "reason"]
        )
        for name in _OUTCOMES:
            outcomes.add_metric([*group, name, ""], getattr(now.counts, name))
        for reason, count in now.dead_reasons.items():
            outcomes.add_metric([*group, "dead", reason], count)
        yield outcomes
        for name, text, count in (
            ("produced", "Records that handlers have written.", now.counts.produced),
            ("commits", "Transactions that were committed.", now.counts.commits),
            ("failed_commits", "Transactions that failed, or may have.", now.counts.failed_commits),
            ("forgotten", "Records held here that are delivered again.", now.counts.forgotten),
            ("restarts", "Partitions read from their beginning again.", now.counts.restarts),
        ):
            counter = CounterMetricFamily(f"{_PREFIX}_{name}", text, labels=["group"])
            counter.add_metric(group, count)
            yield counter
        for name, text, value in (
            ("held_records", "Records that are held, in hand or not.", now.held),
            ("held_bytes", "Their keys, values and headers.", now.held_bytes),
            ("in_hand_records", "Records that handlers have.", now.in_hand),
            (
                "oldest_in_hand_seconds",
                "The longest that a record is in hand, of those that hold up their partition.",
                now.oldest_in_hand_s,
            ),
            (
                "suspect_partitions",
                "Partitions handled record by record: whoever had them before died.",
                now.suspects,
            ),
            (
                "counts_forbidden",
                "1 while it may not write to the topic of the trace's counts.",
                now.are_counts_forbidden,
            ),
        ):
            gauge = GaugeMetricFamily(f"{_PREFIX}_{name}", text, labels=["group"])
            gauge.add_metric(group, value)
            yield gauge
        lag = GaugeMetricFamily(
            f"{_PREFIX}_lag_offsets",
            "Offsets of a partition that are unread, or whose records are held.",
            labels=["group", "topic", "partition"],
        )
        for at, count in now.lags.items():
            lag.add_metric([*group, at.topic, str(at.number)], count)
        yield lag
        troubles = GaugeMetricFamily(
            f"{_PREFIX}_trouble", "1 while it is so.", labels=["group", "trouble"]
        )
        for trouble in ConsumerTrouble:
            troubles.add_metric([*group, trouble], trouble in self._consumer.health.troubles)
        yield troubles
        handled = HistogramMetricFamily(
            f"{_PREFIX}_handler_seconds",
            "How long records were in hand until they were settled.",
            labels=["group"],
        )
        bounds = [*map(str, HANDLER_BOUNDS_S), "+Inf"]
        buckets = list(zip(bounds, accumulate(now.handled), strict=True))
        handled.add_metric(group, buckets, now.handled_s)
        yield handled
