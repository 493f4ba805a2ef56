"""Assembles and writes the page."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

from delaywheel_audit.matching.summary import Summary
from delaywheel_audit.page.bins import Row
from delaywheel_audit.page.ends import ends_part
from delaywheel_audit.page.markup import Child, Element, details, el, prose, style, table, to_html
from delaywheel_audit.page.over_time import over_time
from delaywheel_audit.page.tables import (
    WRONG,
    findings_part,
    topics_table,
)
from delaywheel_audit.page.verdict import difference, verdict
from delaywheel_audit.page.words import PARTS, count, moment, short_moment, span

_TOPICS_NAMED = 12
_MOST_ENDS = 500
_WORDS = {
    "accepted": "records of the ledger, written by the node that took the message",
    "acknowledged": "different messages among them: a retry that two nodes took has two records",
    "forwarded": "found in their topic in Kafka, by id and due",
    "cancelled, duplicates dropped, dead-lettered, lost": "reported in the outcomes topic",
    "pending": "not done at the newest progress record that was read",
    "not verifiable": "none of these, and Kafka has deleted the records of that time",
    "missing": "none of these: their fate is unknown",
    "early, late": "forwarded before their due, or longer after it than tolerated",
    "unexpected": "in Kafka with our headers, but not in the ledger",
}


def write_page(
    target: Path | TextIO,
    summary: Summary,
    buckets: Sequence[Row],
    findings: Sequence[Mapping[str, Any]],
    *,
    ledger: str = "",
    output: str = "",
    interval_ms: int | None = None,
    ends: Sequence[Row] | None = None,
) -> None:
    """Writes the page to a file or a stream.

    Args:
        target: Where to.
        summary: The numbers of the whole.
        buckets: Rows of the table `buckets`, or sums of them over longer intervals.
        findings: Rows of the table `findings`, or the first of each kind: how many there are of
            each is the summary's to say.
        ledger: Where the ledger was read, for the reader.
        output: Where the tables are, for the reader.
        interval_ms: How long each of `buckets` is, if not as the summary says.
        ends: Sums of the table `ends` by topic, group and state; None: there is none.
    """
    document = to_html(_page(summary, buckets, findings, ledger, output, interval_ms, ends))
    if isinstance(target, Path):
        target.write_text(document, encoding="utf-8")
    else:
        target.write(document)


def _page(
    summary: Summary,
    buckets: Sequence[Row],
    findings: Sequence[Mapping[str, Any]],
    ledger: str,
    output: str,
    interval_ms: int | None,
    ends: Sequence[Row] | None,
) -> Element:
    said = verdict(summary)
    interval = interval_ms or summary.interval_ms
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        # Nothing on the page comes from elsewhere, and nothing on it runs.
        el(
            "meta",
            http_equiv="Content-Security-Policy",
            content="default-src 'none'; style-src 'unsafe-inline'",
        ),
        el("title", f"{said.headline} · {summary.cluster}"),
        style(resources.files("delaywheel_audit.page").joinpath("page.css").read_text("utf-8")),
    )
    main = el(
        "main",
        el("h2", "What became of it"),
        el("p", "In records of the ledger.", class_="soft"),
        _equation(summary),
        *_checks(summary),
        el("h2", "Findings"),
        *findings_part(summary, findings, output),
        el("h2", "By topic"),
        topics_table(summary, buckets) if buckets or summary.topics else _nothing(),
        *([] if ends is None else [el("h2", "Both ends"), *ends_part(ends)]),
        el("h2", "Over time"),
        *(over_time(summary, buckets, findings, interval) or [_nothing()]),
        el("h2", "What was examined"),
        *_looked_at(summary, buckets, ledger, output),
        _glossary(),
    )
    return el("html", head, el("body", _header(summary), main, _footer(summary)), lang="en")


def _header(summary: Summary) -> Element:
    said = verdict(summary)
    sign = {"good": "\u2713", "bad": "\u2717"}.get(said.look, "\u2013")
    return el(
        "header",
        el("p", "delaywheel reconciliation · cluster ", el("b", summary.cluster), class_="over"),
        el("h1", el("span", sign, class_="sign", aria_hidden="true"), el("span", said.headline)),
        *(el("p", remark) for remark in said.remarks),
        el("p", _range(summary), class_="over"),
        class_=said.look,
    )


def _footer(summary: Summary) -> Element:
    """Returns the footer: what made the page, where and how."""
    release, host = version("delaywheel"), platform.node()
    texts = [el("p", f"delaywheel {release} on {host}, {moment(summary.made_at_ms)} UTC")]
    if summary.command:
        texts.append(el("p", el("code", summary.command)))
    return el("footer", *texts)


def _equation(summary: Summary) -> Element:
    counts = summary.counts
    tiles = [_tile("accepted", counts.get("accepted", 0), "whole")]
    for key, name in PARTS.items():
        look = key + (" wrong" if key in WRONG and counts.get(key) else "")
        tiles.append(el("span", "+" if len(tiles) > 1 else "=", class_="sign"))
        tiles.append(_tile(name, counts.get(key, 0), look))
    if rest := difference(counts):
        tiles.append(el("span", "\u2260", class_="sign"))
        tiles.append(_tile("difference", rest, "wrong"))
    return el("div", *tiles, class_="equation")


def _tile(name: str, number: int, look: str) -> Element:
    zero = "" if number else " zero"
    return el("div", el("b", count(number)), el("span", name), class_=f"tile {look}{zero}")


def _checks(summary: Summary) -> list[Element]:
    """Returns the checks of forwarded messages: delivered once, and on time."""
    counts, lateness = summary.counts, summary.lateness
    texts = [
        f"{count(counts.get(key, 0))} {key}"
        for key in ("duplicated", "unexpected", "early", "late")
    ]
    spans = ", ".join(f"{of} {span(lateness.get(of))}" for of in ("p50", "p99", "max"))
    return [
        el(
            "p",
            f"Of the records that Kafka holds: {', '.join(texts)}. Lateness {spans}; late is more "
            f"than {span(summary.late_tolerance_ms)} after the due.",
        ),
        el(
            "p",
            f"{count(counts.get('accepted', 0))} records of the ledger are "
            f"{count(counts.get('acknowledged', 0))} different messages: a retry that was taken "
            "twice has two records.",
            class_="soft",
        ),
        *(el("p", *prose(note), class_="soft") for note in summary.notes),
    ]


def _looked_at(summary: Summary, buckets: Sequence[Row], ledger: str, output: str) -> list[Element]:
    facts: list[tuple[str, Child]] = [
        ("Range", _range(summary)),
        ("Buckets", span(summary.interval_ms)),
        ("Topics", _topics(summary, buckets)),
        ("Ledger", ledger or None),
        ("Done", f"all that was due before {moment(summary.progress_ms)} UTC"),
        ("Took", span(round(summary.seconds * 1000))),
        ("Tables", output or None),
    ]
    pairs = (
        el("div", el("dt", name), el("dd", value)) for name, value in facts if value is not None
    )
    looked = [el("dl", *pairs)]
    lines: list[list[Child]] = [
        [el("th", topic, scope="row"), *(count(int(part)) for part in (partition, end))]
        for topic, ends in sorted(summary.kafka_ends.items())
        for partition, end in sorted(ends.items(), key=lambda pair: int(pair[0]))
    ]
    if lines:
        if len(lines) > _MOST_ENDS:
            lines[_MOST_ENDS:] = [[el("th", "and more", scope="row"), None, None]]
        caption = "The offset at which reading ended"
        ends = table(("topic", "partition", "end"), lines, class_="ends", caption=caption)
        looked.append(details("How far Kafka was read", ends))
    return looked


def _glossary() -> Element:
    pairs = (el("div", el("dt", word), el("dd", text)) for word, text in _WORDS.items())
    return details("What the words mean", el("dl", *pairs))


def _topics(summary: Summary, buckets: Sequence[Row]) -> str:
    asked = bool(summary.topics)
    topics = sorted(summary.topics or {row["topic"] for row in buckets})
    if not topics:
        return "all; there is none"
    more = len(topics) - _TOPICS_NAMED
    named = ", ".join(topics[:_TOPICS_NAMED]) + (f" and {more} more" if more > 0 else "")
    return f"{len(topics)}: {named}" if asked else f"all ({len(topics)}): {named}"


def _range(summary: Summary) -> str:
    from_ms, to_ms = summary.from_ms, summary.to_ms
    if from_ms is None and to_ms is None:
        return f"All messages by {'due' if summary.by == 'due' else 'acceptance'}"
    parts = [f"Messages {summary.by}"]
    if from_ms is not None:
        parts.append(f"from {short_moment(from_ms)}")
    if to_ms is not None:
        parts.append(f"until {short_moment(to_ms)}")
    long = "" if from_ms is None or to_ms is None else f" ({span(to_ms - from_ms)})"
    return f"{' '.join(parts)} UTC{long}"


def _nothing() -> Element:
    return el("p", "There is nothing to show: no message in this range.", class_="soft")
