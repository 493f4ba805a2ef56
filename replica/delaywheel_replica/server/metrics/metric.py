"""One metric: its name, kind and meaning, and how a scrape computes it.

Names begin with `delaywheel_` and end with their unit (seconds, bytes), those of counters with
`_total`. Labels have few values: nodes, roles, reasons, horizons, and topics as far as
`process/topic_counts.py` counts them separately; never wheels.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Any, Final, TypeAlias, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from delaywheel_replica.core.protocol.histogram import Histogram
from delaywheel_replica.server.metrics.scrape import Scrape

PREFIX = "delaywheel_"
_TOTAL = "_total"
_UNITS = ("seconds", "bytes")

Value: TypeAlias = float | None
"""None: unknown, or not applicable now: no sample is given."""
Values: TypeAlias = Iterable[tuple[tuple[str, ...], float]]
"""Values of labels, and the sample."""
Histograms: TypeAlias = Iterable[tuple[tuple[str, ...], Histogram]]
"""Values of labels, and what was counted."""
_Sample = TypeVar("_Sample", float, Histogram)


class MetricType(StrEnum):
    """The type of a metric, in Prometheus' terms."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


_FAMILIES: Final[Mapping[MetricType, Callable[..., Any]]] = {
    MetricType.COUNTER: CounterMetricFamily,
    MetricType.GAUGE: GaugeMetricFamily,
    MetricType.HISTOGRAM: HistogramMetricFamily,
}


@dataclass(frozen=True, slots=True)
class Spec:
    """One metric.

    Attributes:
        kind: How it behaves: a counter never falls while its process lives.
        text: What it means, for people.
        values: Its values in a scrape, by labels; none: it does not apply, and is left out.
    """

    name: str
    kind: MetricType
    text: str
    labels: tuple[str, ...]
    values: Callable[[Scrape], Values | Histograms]

    def family(self, scrape: Scrape) -> Metric | None:
        """Makes its samples for a scrape; None: it does not apply."""
        base = self.name.removesuffix(_TOTAL)
        last = base.rpartition("_")[2]
        unit = last if last in _UNITS else ""
        made = _FAMILIES[self.kind](base, self.text, labels=self.labels, unit=unit)
        for label_values, value in self.values(scrape):
            made.add_metric(label_values, **_sample(value))
        return made if made.samples else None


def gauge(name: str, text: str, value: Callable[[Scrape], Value]) -> Spec:
    """One value that goes up and down."""
    return gauges(name, text, (), _single(value))


def gauges(
    name: str, text: str, labels: tuple[str, ...], values: Callable[[Scrape], Values]
) -> Spec:
    """Values that go up and down, by labels."""
    return Spec(PREFIX + name, MetricType.GAUGE, text, labels, values)


def counter(name: str, text: str, value: Callable[[Scrape], Value]) -> Spec:
    """A number that only grows. The name is given without `_total`."""
    return counters(name, text, (), _single(value))


def counters(
    name: str, text: str, labels: tuple[str, ...], values: Callable[[Scrape], Values]
) -> Spec:
    """Numbers that only grow, by labels. The name is given without `_total`."""
    return Spec(PREFIX + name + _TOTAL, MetricType.COUNTER, text, labels, values)


def histogram(name: str, text: str, value: Callable[[Scrape], Histogram | None]) -> Spec:
    """Counts in buckets; the name ends with `_seconds`."""
    return histograms(name, text, (), _single(value))


def histograms(
    name: str, text: str, labels: tuple[str, ...], values: Callable[[Scrape], Histograms]
) -> Spec:
    """Counts in buckets, by labels; the name ends with `_seconds`."""
    return Spec(PREFIX + name, MetricType.HISTOGRAM, text, labels, values)


def by_label(values: Mapping[str, float | None]) -> Values:
    """Returns the known values by one label."""
    return [((label,), value) for label, value in values.items() if value is not None]


def _single(
    value: Callable[[Scrape], _Sample | None],
) -> Callable[[Scrape], Iterable[tuple[tuple[str, ...], _Sample]]]:
    """Returns one value as values by no labels."""
    return lambda scrape: [] if (found := value(scrape)) is None else [((), found)]


def _sample(value: float | Histogram) -> dict[str, Any]:
    """Returns a value as the library's families take it."""
    if not isinstance(value, Histogram):
        return {"value": value}
    bounds = [str(bound / 1e6) for bound in value.bounds_us] + ["+Inf"]
    buckets = list(zip(bounds, accumulate(value.counts), strict=True))
    return {"buckets": buckets, "sum_value": value.sum_us / 1e6}
