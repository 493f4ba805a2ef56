"""Metrics of a consumer of letters for Prometheus. It needs prometheus-client."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from delaywheel.deadletters.handling.aio import AsyncDeadLetterConsumer
from delaywheel.deadletters.handling.consumer import DeadLetterConsumer

_PREFIX = "delaywheel_letter_consumer"


class DeadLetterMetrics(Collector):
    """Collects one consumer of letters; docs/CONSUMER_REFERENCE.md lists the metrics."""

    def __init__(self, letters: DeadLetterConsumer | AsyncDeadLetterConsumer) -> None:
        """Takes the consumer; register the result with a registry."""
        self._letters = letters

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics, of one moment."""
        now, topic = self._letters.figures, [self._letters.topic]
        decided = CounterMetricFamily(
            f"{_PREFIX}_letters",
            "Letters by reason, and by what became of them.",
            labels=["topic", "reason", "became"],
        )
        for (reason, became), count in now.decided.items():
            decided.add_metric([*topic, reason, became], count)
        yield decided
        failures = CounterMetricFamily(
            f"{_PREFIX}_handler_failures", "How often handlers raised.", labels=["topic"]
        )
        failures.add_metric(topic, now.handler_failures)
        yield failures
        for name, text, value in (
            ("waiting_offsets", "Offsets that no handler has passed.", now.waiting_offsets),
            ("at_work", "1 while this process has claimed the letters.", now.is_at_work),
            ("trouble", "1 while something keeps it from its work.", now.trouble is not None),
        ):
            gauge = GaugeMetricFamily(f"{_PREFIX}_{name}", text, labels=["topic"])
            gauge.add_metric(topic, value)
            yield gauge
