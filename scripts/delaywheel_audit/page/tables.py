"""The page's tables: by topic, by column of the plots, and of findings."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from delaywheel_audit.matching.findings import KINDS
from delaywheel_audit.matching.summary import Summary
from delaywheel_audit.page.bins import GREATEST, SUMS, Bin, Bins, Row, total
from delaywheel_audit.page.markup import Child, Element, add, el, prose, table
from delaywheel_audit.page.verdict import found
from delaywheel_audit.page.words import (
    PARTS,
    count,
    kind_name,
    listed,
    moment,
    short_moment,
    span,
)

# Above zero these are shown as what they are: errors.
WRONG = ("missing", "lost", "duplicated", "unexpected", "early")
_ALWAYS = ("accepted", "forwarded")
MOST_TOPICS = 50
MOST_FINDINGS = 1000
_OPEN = 50
# No percentile: of many buckets it is not known, and the greatest of them would mislead.
_SHOWN_SPANS = ("lateness_max_ms", "delay_max_ms")


def topics_table(summary: Summary, rows: Sequence[Row]) -> Element:
    """Returns a row for each topic, those with errors first, and a total."""
    of_topics: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        of_topics[row["topic"]].append(row)
    totals = {topic: total(of_topic) for topic, of_topic in of_topics.items()}
    for topic in summary.topics:
        totals.setdefault(topic, Bin(0))
    order = sorted(totals, key=lambda topic: (*_importance(totals[topic]), topic))
    # What there is none of takes no column: all of them are wider than most screens.
    names = [
        name
        for name in SUMS
        if name in _ALWAYS
        or (name != "acknowledged" and any(one.sums[name] for one in totals.values()))
    ]
    lines = [_line(topic, totals[topic], names) for topic in order[:MOST_TOPICS]]
    if rest := order[MOST_TOPICS:]:
        others = total({**totals[topic].sums, **totals[topic].greatest} for topic in rest)
        lines.append(_line(f"{len(rest)} more topics", others, names))
    if len(order) > 1:
        lines.append(_line("all", _whole(summary, totals.values()), names))
    heads = ["topic", *(_sum_name(name) for name in names), *map(_span_name, _SHOWN_SPANS)]
    ordered = "those with errors first" if any(_importance(t)[0] for t in totals.values()) else ""
    caption = "Records by topic" + (f", {ordered}" if ordered else "")
    return table(heads, lines, class_="topics" + (" summed" * (len(order) > 1)), caption=caption)


def columns_table(bins: Bins) -> Element:
    """Returns the plots' data as numbers; columns of zeros are omitted."""
    names = [name for name in SUMS if any(one.sums[name] for one in bins.columns)]
    spans = [name for name in GREATEST if bins.known(name)]
    shown = [one for one in bins.columns if one.buckets]
    lines = [
        [
            short_moment(one.from_ms),
            *(count(one.sums[name]) for name in names),
            *(span(one.greatest[name]) for name in spans),
        ]
        for one in shown
    ]
    heads = ["from (UTC)", *map(_sum_name, names), *map(_span_name, spans)]
    return table(heads, lines, class_="figures", caption="The figures of the plots")


def findings_part(
    summary: Summary, findings: Sequence[Mapping[str, Any]], output: str
) -> list[Element]:
    """Returns each kind of finding with its meaning, remedy and rows."""
    of_kinds: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in findings:
        of_kinds[row["kind"]].append(row)
    counts = found(summary)
    for kind, rows in of_kinds.items():
        counts[kind] = max(counts.get(kind, 0), len(rows))
    present = {kind: number for kind, number in counts.items() if number}
    most = max(MOST_FINDINGS // max(len(present), 1), 1)
    parts = [
        _kind_part(kind, number, of_kinds[kind][:most], output) for kind, number in present.items()
    ]
    absent = [kind_name(kind) for kind, number in counts.items() if not number]
    if not present:
        parts.append(el("p", f"Nothing. Looked for: {listed(absent)}."))
    elif absent:
        parts.append(el("p", f"Looked for and not found: {listed(absent)}.", class_="soft"))
    return parts


def _kind_part(kind: str, number: int, rows: Sequence[Mapping[str, Any]], output: str) -> Element:
    known = KINDS.get(kind)
    look = "wrong" if known is None or known.is_error else "note"
    part = el(
        "section",
        el("h3", kind_name(kind).capitalize(), " ", el("b", count(number), class_=look)),
        class_="kind",
        id=f"kind-{kind}",
    )
    if known is not None:
        add(part, el("p", *prose(known.means)))
        add(part, el("p", el("b", "What to do: "), *prose(known.then)))
    if not rows:
        add(part, el("p", f"The rows are in the table {_place(output)}.", class_="soft"))
        return part
    text = _rows(number)
    if len(rows) < number:
        text += f", the first {count(len(rows))} shown; all are in {_place(output)}"
    body = _findings_table(rows, f"Findings: {kind_name(kind)}")
    add(part, el("details", el("summary", text), body, open=len(rows) <= _OPEN))
    return part


def _findings_table(rows: Sequence[Mapping[str, Any]], caption: str) -> Element:
    """Returns a table of findings without columns that are empty in all rows."""
    cells: dict[str, list[Child]] = {
        "topic": [row.get("topic") and el("span", row["topic"], class_="name") for row in rows],
        "id": [row.get("id") and el("code", row["id"]) for row in rows],
        "due (UTC, ms)": [_due(row) for row in rows],
        "accepted (UTC)": [_moment(row, "accepted_at_ms") for row in rows],
        "wheel / seq": [_pair(row, "wheel", "seq") for row in rows],
        "partition / offset": [_pair(row, "partition", "offset") for row in rows],
        "forwarded (UTC)": [_moment(row, "forwarded_at_ms") for row in rows],
        "lateness": [_span(row, "lateness_ms") for row in rows],
        "detail": [row.get("detail") for row in rows],
    }
    kept = {
        name: column
        for name, column in cells.items()
        if any(value not in (None, "") for value in column)
    }
    lines = zip(*kept.values(), strict=True)
    made = table(kept, lines, class_="findings", caption=caption)
    # For where there is no room for columns; given once, since there may be a thousand rows.
    heads = (f"--head-{n}: {json.dumps(name)}" for n, name in enumerate(kept, 1))
    made.set("style", "; ".join(heads))
    return made


def _line(name: str, whole: Bin, names: Sequence[str]) -> list[Child]:
    line: list[Child] = [el("th", el("span", name, class_="name", title=name), scope="row")]
    for key in names:
        number = whole.sums[key]
        look = "wrong" if number and key in WRONG else None if number else "zero"
        line.append(el("td", count(number), class_=look))
    line.extend(span(whole.greatest[key]) for key in _SHOWN_SPANS)
    return line


def _whole(summary: Summary, totals: Any) -> Bin:
    """Returns the summary's totals, which include percentiles over all values."""
    whole = total({**one.sums, **one.greatest} for one in totals)
    whole.sums.update({name: summary.counts.get(name, whole.sums[name]) for name in SUMS})
    for of in ("p50", "p99", "max"):
        whole.greatest[f"lateness_{of}_ms"] = summary.lateness.get(of)
    return whole


def _importance(whole: Bin) -> tuple[int, int]:
    return (-sum(whole.sums[name] for name in WRONG), -whole.sums["accepted"])


def _sum_name(name: str) -> str:
    return PARTS.get(name) or kind_name(name)


def _span_name(name: str) -> str:
    return kind_name(name.removesuffix("_ms"))


def _rows(number: int) -> str:
    return "1 row" if number == 1 else f"{count(number)} rows"


def _place(output: str) -> str:
    return f"{output.rstrip('/')}/findings" if output else "findings"


def _due(row: Mapping[str, Any]) -> Child:
    due = row.get("due_ms")
    return None if due is None else el("td", moment(due), " ", el("small", due))


def _moment(row: Mapping[str, Any], key: str) -> Child:
    return None if row.get(key) is None else moment(row[key])


def _span(row: Mapping[str, Any], key: str) -> Child:
    return None if row.get(key) is None else span(row[key])


def _pair(row: Mapping[str, Any], one: str, other: str) -> Child:
    values = [str(row[key]) for key in (one, other) if row.get(key) is not None]
    return " / ".join(values) or None
