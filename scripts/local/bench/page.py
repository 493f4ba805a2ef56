"""The figures as an HTML page: lateness over time beside CPU, and a table of ratios.

The page loads nothing from elsewhere, and has no scripts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from delaywheel_audit.page.markup import Element, el, style, table, to_html
from local.bench.report import LABELS

WIDTH, HEIGHT, LEFT = 900, 160, 60
_LINES: Final = (("max_ms", "most"), ("p99_ms", "p99"), ("p50_ms", "p50"))
_LEAST_MS, _MOST_MS = 1.0, 100_000.0
_GROUPS: Final = {
    "broker": "broker",
    "servers": "server",
    "cleaners": "cleaner",
    "SDK": "sender ours",
    "Kafka's senders": "sender",
    "consumer": "consumer",
}
_SHEET: Final = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 1rem auto; padding: 0 1rem; }
svg { width: 100%; height: auto; } text { font-size: 11px; fill: currentColor; }
.grid { stroke: #8885; fill: none; } .part { fill: #8882; }
.p50, .p99, .most { fill: none; stroke-width: 1.5; }
.p50 { stroke: #0072b2; } .p99 { stroke: #d55e00; } .most { stroke: #8889; }
.c0 { fill: #9aa3ac; } .c1 { fill: #0072b2; } .c2 { fill: #009e73; } .c3 { fill: #e69f00; }
.c4 { fill: #cc79a7; } .c5 { fill: #8fcdf2; }
table { border-collapse: collapse; } caption { display: none; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #8885; }
th:first-child, td:first-child { text-align: left; }
.key { display: inline-block; width: 1em; height: .7em; margin: 0 .3em 0 1em; }
i.p50 { background: #0072b2; } i.p99 { background: #d55e00; } i.most { background: #8889; }
i.c0 { background: #9aa3ac; } i.c1 { background: #0072b2; } i.c2 { background: #009e73; }
i.c3 { background: #e69f00; } i.c4 { background: #cc79a7; } i.c5 { background: #8fcdf2; }
"""


def write_page(path: Path, document: Mapping[str, Any]) -> None:
    """Writes the page."""
    path.write_text(to_html(page_of(document)), encoding="utf-8")


def page_of(document: Mapping[str, Any]) -> Element:
    """Returns the page."""
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el(
            "meta",
            http_equiv="Content-Security-Policy",
            content="default-src 'none'; style-src 'unsafe-inline'",
        ),
        el("title", "delaywheel beside Kafka"),
        style(_SHEET),
    )
    machine = document["machine"]
    intro = (
        f"{machine['cpus']} CPUs, {machine['platform']}; values of {document['value_bytes']} bytes"
    )
    parts = [part for one in document["workloads"] for part in _workload(one)]
    body = el("body", el("h1", "delaywheel beside Kafka"), el("p", intro), *parts)
    return el("html", head, body, lang="en")


def _workload(one: Mapping[str, Any]) -> Iterable[Element]:
    yield el("h2", f"{one['name']}: {one['description']}, {one['nodes']} node(s)")
    rounds = one.get("rounds") or []
    if rounds:
        rows = [
            (name, *(f"{extent[of]:.2f}" for of in ("least", "median", "most")))
            for name, extent in one["ratios"].items()
            if extent
        ]
        yield table(("ours", "least", "median", "most"), rows, class_="ratios", caption="Ratios")
        yield el("p", f"{len(rounds)} rounds; void: {len(one['void'])}")
        parts = [(kind, part) for each in rounds for kind, part in each.items()]
    else:
        parts = [("ours", part) for part in one.get("tried", ()) if "over_time" in part]
    if any(part["over_time"] for _, part in parts):
        yield el("h3", "Lateness, ms, by the second of the due")
        yield _legend((look, look) for _, look in _LINES)
        yield _lateness(parts)
    if any(part["cpu_over_time"] for _, part in parts):
        yield el("h3", "CPU, cores")
        yield _legend((f"c{number}", name) for number, name in enumerate(_GROUPS))
        yield _cpu(parts)


def _legend(entries: Iterable[tuple[str, str]]) -> Element:
    keys = (el("span", el("i", class_=f"key {look}"), name) for look, name in entries)
    return el("p", *keys)


def _lateness(parts: Sequence[tuple[str, Mapping[str, Any]]]) -> Element:
    def y(value_ms: float) -> float:
        share = math.log(max(value_ms, _LEAST_MS) / _LEAST_MS) / math.log(_MOST_MS / _LEAST_MS)
        return HEIGHT * (1 - min(share, 1))

    columns = [(kind, second) for kind, part in parts for second in part["over_time"]]
    ticks = [(y(10.0**power), f"{10**power:,}") for power in range(5)]
    lines = [
        el("path", class_=look, d=_path([y(second[figure]) for _, second in columns]))
        for figure, look in _LINES
    ]
    names = [(kind, len(part["over_time"])) for kind, part in parts]
    return _chart("Lateness over time", names, ticks, lines)


def _cpu(parts: Sequence[tuple[str, Mapping[str, Any]]]) -> Element:
    columns = [stack(used) for _, part in parts for _, used in part["cpu_over_time"]]
    most = max(2.0, *(sum(column) for column in columns))
    step = _x(len(columns), 1) - _x(len(columns), 0)
    drawn = []
    for number, column in enumerate(columns):
        top = float(HEIGHT)
        for look, cores in enumerate(column):
            height = HEIGHT * cores / most
            top -= height
            place = {"x": f"{_x(len(columns), number):.1f}", "y": f"{top:.1f}"}
            size = {"width": f"{step:.2f}", "height": f"{height:.1f}"}
            drawn.append(el("rect", class_=f"c{look}", **place, **size))
    ticks = [(HEIGHT * (1 - cores / most), str(cores)) for cores in range(int(most) + 1)]
    names = [(kind, len(part["cpu_over_time"])) for kind, part in parts]
    return _chart("CPU over time", names, ticks, drawn)


def stack(used: Mapping[str, float]) -> list[float]:
    """Returns a second's CPU time by kind of process, in the order of the legend."""
    left, heights = dict(used), []
    for name in _GROUPS.values():
        mine = [key for key in left if name in key and not (name == "server" and "sender" in key)]
        heights.append(sum(left.pop(key) for key in mine))
    return heights


def _chart(
    label: str,
    parts: Sequence[tuple[str, int]],
    ticks: Sequence[tuple[float, str]],
    drawn: Iterable[Element],
) -> Element:
    """Returns axes, labels of the rounds, and a drawing."""
    whole, begun, names = sum(count for _, count in parts), 0, []
    for number, (kind, count) in enumerate(parts):
        x, end = _x(whole, begun), _x(whole, begun + count)
        if number % 2:
            names.append(
                el("rect", class_="part", x=f"{x:.1f}", y=0, width=f"{end - x:.1f}", height=HEIGHT)
            )
        names.append(
            el("text", LABELS[kind].partition(",")[2] or kind, x=f"{x:.1f}", y=HEIGHT + 14)
        )
        begun += count
    grid = "".join(f"M{LEFT} {y:.1f}H{WIDTH}" for y, _ in ticks)
    numbers = [
        el("text", text, x=LEFT - 6, y=f"{y + 4:.1f}", text_anchor="end") for y, text in ticks
    ]
    return el(
        "svg",
        *names,
        el("path", class_="grid", d=grid),
        *numbers,
        *drawn,
        role="img",
        aria_label=label,
        viewBox=f"0 -8 {WIDTH} {HEIGHT + 28}",
    )


def _x(columns: int, number: float) -> float:
    return LEFT + (WIDTH - LEFT) * number / max(1, columns)


def _path(heights: Sequence[float]) -> str:
    places = (f"{_x(len(heights), n + 0.5):.1f} {y:.1f}" for n, y in enumerate(heights))
    return "M" + "L".join(places)
