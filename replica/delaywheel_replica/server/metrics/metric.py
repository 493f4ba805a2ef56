"""One metric: its name, kind and meaning, and how a scrape computes it.

Names begin with `delaywheel_` and end with their unit (seconds, bytes), those of counters with
`_total`. Labels have few values: nodes, roles, reasons, horizons, and topics as far as
`process/topic_counts.py` counts them separately; never wheels.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import TypeAlias

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from delaywheel_replica.core.protocol.histogram import Histogram
from delaywheel_replica.server.metrics.scrape import Scrape

PREFIX = "delaywheel_"
_UNITS = ("seconds", "bytes")

Value: TypeAlias = float | None
"""None: unknown, or not applicable now: no sample is given."""
Values: TypeAlias = Iterable[tuple[tuple[str, ...], float]]
"""Values of labels, and the sample."""
Histograms: TypeAlias = Iterable[tuple[tuple[str, ...], Histogram]]
"""Values of labels, and what was counted."""


class MetricType(StrEnum):
    """The type of a metric, in Prometheus' terms."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Spec:
    """One metric.

    Attributes:
        name: The full name, as it is scraped.
        kind: How it behaves: a counter never falls while its process lives.
        text: What it means, for people.
        labels: The names of its labels.
        family: Makes its samples for a scrape; None: it does not apply, and is left out.
    """

    name: str
    kind: MetricType
    text: str
    labels: tuple[str, ...]
    family: Callable[[Scrape], Metric | None]


def gauge(name: str, text: str, value: Callable[[Scrape], Value]) -> Spec:
    """One value that goes up and down."""
    return gauges(name, text, (), lambda scrape: _single(value(scrape)))


def gauges(
    name: str, text: str, labels: tuple[str, ...], values: Callable[[Scrape], Values]
) -> Spec:
    """Values that go up and down, by labels."""
    full = PREFIX + name

    def family(scrape: Scrape) -> Metric | None:
        made = GaugeMetricFamily(full, text, labels=labels, unit=_unit(full))
        for label_values, value in values(scrape):
            made.add_metric(label_values, value)
        return made if made.samples else None

    return Spec(full, MetricType.GAUGE, text, labels, family)


def counter(name: str, text: str, value: Callable[[Scrape], Value]) -> Spec:
    """A number that only grows. The name is given without `_total`."""
    return counters(name, text, (), lambda scrape: _single(value(scrape)))


def counters(
    name: str, text: str, labels: tuple[str, ...], values: Callable[[Scrape], Values]
) -> Spec:
    """Numbers that only grow, by labels. The name is given without `_total`."""
    base = PREFIX + name

    def family(scrape: Scrape) -> Metric | None:
        made = CounterMetricFamily(base, text, labels=labels, unit=_unit(base))
        for label_values, value in values(scrape):
            made.add_metric(label_values, value)
        return made if made.samples else None

    return Spec(f"{base}_total", MetricType.COUNTER, text, labels, family)


def histogram(name: str, text: str, value: Callable[[Scrape], Histogram | None]) -> Spec:
    """Counts in buckets; the name ends with `_seconds`."""

    def values(scrape: Scrape) -> Histograms:
        found = value(scrape)
        return [] if found is None else [((), found)]

    return histograms(name, text, (), values)


def histograms(
    name: str, text: str, labels: tuple[str, ...], values: Callable[[Scrape], Histograms]
) -> Spec:
    """Counts in buckets, by labels; the name ends with `_seconds`."""
    full = PREFIX + name

    def family(scrape: Scrape) -> Metric | None:
        made = HistogramMetricFamily(full, text, labels=labels, unit=_unit(full))
        for label_values, found in values(scrape):
            bounds = [str(bound / 1e6) for bound in found.bounds_us] + ["+Inf"]
            buckets = list(zip(bounds, accumulate(found.counts), strict=True))
            made.add_metric(label_values, buckets=buckets, sum_value=found.sum_us / 1e6)
        return made if made.samples else None

    return Spec(full, MetricType.HISTOGRAM, text, labels, family)


def one_of(values: Iterable[str], present: str | None) -> Values:
    """Returns 1 for the present value and 0 for all others."""
    return [((value,), float(value == present)) for value in values]


def by_label(values: Mapping[str, float | None]) -> Values:
    """Returns the known values by one label."""
    return [((label,), value) for label, value in values.items() if value is not None]


def _single(value: Value) -> Values:
    return [] if value is None else [((), value)]


def _unit(name: str) -> str:
    last = name.rpartition("_")[2]
    return last if last in _UNITS else ""
