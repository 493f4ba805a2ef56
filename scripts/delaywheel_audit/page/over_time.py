"""What happened over time: the plots, and their figures as a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from delaywheel_audit.matching.summary import Summary
from delaywheel_audit.page.bins import Bins, Row, merge
from delaywheel_audit.page.markup import Child, Element, add, details, el
from delaywheel_audit.page.plots import counts_plot, lanes_plot, legend, spans_plot
from delaywheel_audit.page.tables import columns_table
from delaywheel_audit.page.words import PARTS, kind_name, short_moment, span

MOST_COLUMNS = 200
_TOPIC_COLUMNS = 100
_TOPICS_DRAWN = 8
_TITLES = {
    "lateness": "Lateness: how long after its due a record was forwarded",
    "delay": "End-to-end delay: from acceptance to forwarding",
}


def over_time(
    summary: Summary,
    buckets: Sequence[Row],
    findings: Sequence[Mapping[str, Any]],
    interval_ms: int,
) -> list[Element]:
    """Returns the plots; none without buckets."""
    bins = merge(buckets, interval_ms, MOST_COLUMNS)
    if bins is None:
        return []
    parts = _parts(bins)
    figures = [
        _figure(
            f"Records of the ledger by when they were {summary.by}",
            _column_note(bins, are_spans=False),
            legend([*((f"part {part}", PARTS[part]) for part in parts), ("outline", "accepted")]),
            counts_plot(bins, parts),
        )
    ]
    if lanes := _lanes(summary, bins, findings):
        figures.append(
            _figure(
                "Findings over time, in records",
                "A mark is a column with findings.",
                lanes_plot(bins, lanes),
            )
        )
    for name, tolerance in (("lateness", summary.late_tolerance_ms), ("delay", None)):
        plot = spans_plot(bins, name, tolerance)
        if plot is not None:
            note = f"Logarithmic. {_column_note(bins, are_spans=True)}"
            figures.append(_figure(_TITLES[name], note, _spans_legend(tolerance), plot))
    figures.append(details("The figures of the plots as a table", columns_table(bins)))
    if by_topic := _topic_plots(summary, buckets, interval_ms):
        figures.append(details("The plots by topic", *by_topic))
    return figures


def _topic_plots(summary: Summary, buckets: Sequence[Row], interval_ms: int) -> list[Element]:
    """Returns small plots, without tooltips, of the topics with the most messages."""
    of_topics: dict[str, list[Row]] = defaultdict(list)
    for row in buckets:
        of_topics[row["topic"]].append(row)
    if len(of_topics) < 2:
        return []
    order = sorted(of_topics, key=lambda topic: -sum(row["accepted"] for row in of_topics[topic]))
    drawn: list[Element] = []
    if len(order) > _TOPICS_DRAWN:
        drawn.append(el("p", f"The {_TOPICS_DRAWN} with the most messages of {len(order)}."))
    for topic in order[:_TOPICS_DRAWN]:
        bins = merge(of_topics[topic], interval_ms, _TOPIC_COLUMNS)
        if bins is None:
            continue
        figure = el(
            "figure",
            el("figcaption", el("b", topic)),
            el("p", f"Records of the ledger. {_column_note(bins, are_spans=False)}", class_="soft"),
            counts_plot(bins, _parts(bins), tooltips=False),
        )
        lateness = spans_plot(bins, "lateness", summary.late_tolerance_ms, tooltips=False)
        if lateness is not None:
            add(figure, el("p", "Lateness: p50, p99 and max.", class_="soft"), lateness)
        drawn.append(figure)
    return drawn


def _lanes(
    summary: Summary, bins: Bins, findings: Sequence[Mapping[str, Any]]
) -> dict[str, list[int]]:
    """Returns findings by column, from the buckets or else from the rows at hand."""
    names = ("missing", "lost", "duplicated", "unexpected", "early", "late")
    lanes = {name: [one.sums[name] for one in bins.columns] for name in names}
    time = "due_ms" if summary.by == "due" else "accepted_at_ms"
    for row in findings:
        if row["kind"] not in names and row.get(time) is not None:
            column = bins.place(row[time])
            lane = lanes.setdefault(row["kind"], [0] * len(bins.columns))
            if column is not None:
                lane[column] += 1
    return {kind_name(name): counts for name, counts in lanes.items() if any(counts)}


def _parts(bins: Bins) -> list[str]:
    """Returns the parts that are not empty."""
    return [part for part in PARTS if any(one.sums[part] for one in bins.columns)]


def _figure(title: str, note: str, *parts: Child) -> Element:
    caption = el("figcaption", el("b", title), " ", el("span", note, class_="soft"))
    return el("figure", caption, *parts)


def _spans_legend(tolerance_ms: int | None) -> Element:
    entries: list[tuple[str, Child]] = [("p50", "p50"), ("p99", "p99"), ("max", "max")]
    if tolerance_ms:
        entries.append(("tolerance", f"tolerated: {span(tolerance_ms)}"))
    return legend(entries)


def _column_note(bins: Bins, *, are_spans: bool) -> str:
    extent = f"{short_moment(bins.from_ms)} to {short_moment(bins.to_ms)} UTC"
    note = f"{extent}, {span(bins.width_ms)} a column"
    merged = bins.width_ms // bins.interval_ms
    if merged > 1:
        note += f": {merged} buckets of {span(bins.interval_ms)}"
    if are_spans and bins.is_merged:
        note += ". Of several buckets or topics the greatest: the true percentile is not above it"
    return note + "."
