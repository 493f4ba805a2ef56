"""Plots as inline SVG of any width; texts are HTML beside it, so they are not stretched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from delaywheel_audit.page.bins import Bin, Bins
from delaywheel_audit.page.markup import Child, Element, el
from delaywheel_audit.page.scales import HEIGHT, Linear, Spans, count_ticks, time_ticks
from delaywheel_audit.page.words import PARTS, clock, count, short_moment, span

# With few columns a space between them, with many none: it would be less than a pixel.
_SPACED = 80
_LANE = 10


def counts_plot(bins: Bins, parts: Sequence[str], *, tooltips: bool = True) -> Element:
    """Plots the fates of accepted messages, stacked below the line of acceptances."""
    stacks = [_stack(one, parts) for one in bins.columns]
    accepted = [one.sums["accepted"] for one in bins.columns]
    most = max(*accepted, *(stack[-1] for stack in stacks), 1)
    scale = Linear(count_ticks(most))
    # The highest first: each layer covers the foot of the one behind it, so no seams show.
    layers = [
        el("path", class_=f"part {part}", d=_steps([scale.y(s[number]) for s in stacks]))
        for number, part in reversed(list(enumerate(parts)))
    ]
    outline = el("path", class_="outline", d=_outline([scale.y(value) for value in accepted]))
    label = (
        f"Messages per column: {count(sum(accepted))} accepted, at most {count(max(accepted))} "
        f"in one column. {_extent(bins)}"
    )
    titles = (_counts_title(one, parts) for one in bins.columns) if tooltips else ()
    drawn = [*layers, outline]
    return _chart(bins, label, [(scale.y(t), count(t)) for t in scale.ticks], drawn, titles)


def spans_plot(
    bins: Bins, name: str, tolerance_ms: int | None = None, *, tooltips: bool = True
) -> Element | None:
    """Plots p50, p99 and max of lateness or delay; None if there is nothing to show."""
    values = [value for of in ("p50", "p99", "max") for value in bins.known(f"{name}_{of}_ms")]
    if not values:
        return None
    scale = Spans.around([*values, *([tolerance_ms] if tolerance_ms else [])])
    drawn = []
    if tolerance_ms:
        line = f"M0 {scale.y(tolerance_ms)}H{len(bins.columns)}"
        drawn.append(el("path", class_="tolerance", d=line))
    for of, draw in (("max", _dots), ("p99", _line), ("p50", _line)):
        heights = [
            None if value is None else scale.y(value)
            for value in (one.greatest[f"{name}_{of}_ms"] for one in bins.columns)
        ]
        drawn.append(el("path", class_=of, d=draw(heights)))
    label = (
        f"{name.capitalize()} over time on a logarithmic axis: the greatest p50 of a column is "
        f"{span(max(bins.known(f'{name}_p50_ms'), default=None))}, the greatest p99 "
        f"{span(max(bins.known(f'{name}_p99_ms'), default=None))}, the maximum "
        f"{span(max(bins.known(f'{name}_max_ms'), default=None))}. {_extent(bins)}"
    )
    titles = (_spans_title(one, name) for one in bins.columns) if tooltips else ()
    return _chart(bins, label, [(scale.y(t), span(t)) for t in scale.ticks], drawn, titles)


def lanes_plot(bins: Bins, lanes: dict[str, list[int]]) -> Element:
    """Plots one lane for each kind of finding."""
    height = _LANE * len(lanes)
    marks: list[Element] = []
    places: list[tuple[int, str]] = []
    for number, (name, counts) in enumerate(lanes.items()):
        top = number * _LANE
        places.append((round(HEIGHT * (top + _LANE / 2) / height), name))
        for column, found in enumerate(counts):
            if found:
                title = el("title", f"{_from(bins.columns[column], bins)}: {count(found)} {name}")
                shape = f"M{column} {top + 1}h1v{_LANE - 2}h-1z"
                marks.append(el("path", title, class_="mark", d=shape))
    texts = ", ".join(f"{count(sum(counts))} {name}" for name, counts in lanes.items())
    label = f"Where findings are in time: {texts}. {_extent(bins)}"
    return _chart(bins, label, places, marks, (), lanes=len(lanes))


def legend(entries: Iterable[tuple[str, Child]]) -> Element:
    """Returns a legend of style classes and texts."""
    return el(
        "ul",
        *(el("li", el("i", class_=f"key {look}"), text) for look, text in entries),
        class_="legend",
    )


def _chart(
    bins: Bins,
    label: str,
    ticks: Sequence[tuple[int, str]],
    drawn: Iterable[Element],
    titles: Iterable[str],
    *,
    lanes: int = 0,
) -> Element:
    """Returns axes around a drawing; columns with titles show them on hover."""
    width = len(bins.columns)
    height = _LANE * lanes if lanes else HEIGHT
    times, step = time_ticks(bins.from_ms, bins.to_ms)
    at = [(time - bins.from_ms) / bins.width_ms for time in times]
    grid = "".join(f"M{_number(x)} 0V{height}" for x in at)
    if not lanes:
        grid += "".join(f"M0 {y}H{width}" for y, _ in ticks)
    svg = el(
        "svg",
        el("path", class_="grid", d=grid),
        *drawn,
        *(
            el("rect", el("title", title), class_="hit", x=x, width=1, height=height)
            for x, title in enumerate(titles)
        ),
        role="img",
        aria_label=label,
        viewBox=f"0 0 {width} {height}",
        preserveAspectRatio="none",
    )
    beside = (el("span", text, style=f"top:{_number(100 * y / HEIGHT)}%") for y, text in ticks)
    below = (
        el(
            "span",
            clock(time, step),
            class_="odd" if number % 2 else None,
            style=f"left:{_number(100 * x / width)}%",
        )
        for number, (time, x) in enumerate(zip(times, at, strict=True))
    )
    return el(
        "div",
        el("div", *beside, class_="y", aria_hidden="true"),
        svg,
        el("div", *below, class_="x", aria_hidden="true"),
        class_="chart lanes" if lanes else "chart",
        style=f"--lanes:{lanes}" if lanes else None,
    )


def _stack(one: Bin, parts: Sequence[str]) -> list[int]:
    """Returns how high each layer reaches."""
    heights, height = [], 0
    for part in parts:
        height += one.sums[part]
        heights.append(height)
    return heights or [0]


def _steps(heights: Sequence[int]) -> str:
    """Returns an area with a step for each column, down to the base."""
    if len(heights) <= _SPACED:
        return "".join(
            f"M{number}.08 {HEIGHT}V{y}h.84V{HEIGHT}z"
            for number, y in enumerate(heights)
            if y < HEIGHT
        )
    return f"M0 {HEIGHT}{_over(heights)}V{HEIGHT}z"


def _outline(heights: Sequence[int]) -> str:
    return f"M0 {heights[0]}{_over(heights)}"


def _over(heights: Sequence[int]) -> str:
    """Returns a path along the heights of columns, joining equal neighbours."""
    parts, before = [], None
    for number, y in enumerate(heights):
        if y != before:
            parts.append(f"V{y}")
        parts.append(f"H{number + 1}")
        before = y
    return "".join(parts)


def _line(heights: Sequence[int | None]) -> str:
    """Returns a line through the columns' middles, broken at gaps, with dots for single points."""
    parts, joined = [], False
    for number, y in enumerate(heights):
        if y is not None:
            parts.append(f"{'L' if joined else 'M'}{number}.5 {y}" + ("" if joined else "h0"))
        joined = y is not None
    return "".join(parts)


def _dots(heights: Sequence[int | None]) -> str:
    return "".join(f"M{number}.5 {y}h0" for number, y in enumerate(heights) if y is not None)


def _from(one: Bin, bins: Bins) -> str:
    return clock(one.from_ms, bins.width_ms)


def _extent(bins: Bins) -> str:
    return f"{short_moment(bins.from_ms)} to {short_moment(bins.to_ms)} UTC."


def _counts_title(one: Bin, parts: Sequence[str]) -> str:
    texts = [f"{PARTS[part]} {count(one.sums[part])}" for part in parts if one.sums[part]]
    equal = f" = {' + '.join(texts)}" if texts else ""
    return f"{short_moment(one.from_ms)}: accepted {count(one.sums['accepted'])}{equal}"


def _spans_title(one: Bin, name: str) -> str:
    values = (f"{of} {span(one.greatest[f'{name}_{of}_ms'])}" for of in ("p50", "p99", "max"))
    return f"{short_moment(one.from_ms)}: {', '.join(values)}"


def _number(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")
