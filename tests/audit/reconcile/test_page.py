"""The reconciliation's page, read as a browser would: no Spark, no browser; about a second."""

from __future__ import annotations

import io
import platform
import re
from html.parser import HTMLParser
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel_audit import terminal
from delaywheel_audit.matching.findings import KINDS
from delaywheel_audit.matching.summary import Summary
from delaywheel_audit.page import write_page
from delaywheel_audit.page.bins import GREATEST, SUMS, merge
from delaywheel_audit.page.markup import el, to_html, visible
from delaywheel_audit.page.over_time import MOST_COLUMNS
from delaywheel_audit.page.plots import counts_plot, spans_plot
from delaywheel_audit.page.scales import HEIGHT, Linear, Spans, count_ticks, time_step, time_ticks
from delaywheel_audit.page.verdict import difference, equation, verdict
from delaywheel_audit.page.words import PARTS, clock, moment, short_moment, span

NOON = 1_795_262_400_000  # 2026-11-21 12:00 UTC
MINUTE = 60_000
VOID = {"meta", "br", "link", "img", "input"}
ERRORS = [kind for kind, known in KINDS.items() if known.is_error]
HOSTILE = "<script>alert(1)</script>\"'&amp;<img src=x onerror=alert(1)>\x00\u202egpj"


class Page(HTMLParser):
    """The text of a page, and whether each element is closed where it must be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self) -> str:
        return "\n".join(
            text for tag, texts in self.texts.items() if tag != "style" for text in texts
        )


def bucket(at: int, topic: str = "orders", **values: int) -> dict[str, Any]:
    """One of 100 forwarded, with other figures; the sums agree."""
    row: dict[str, Any] = dict.fromkeys(SUMS, 0) | {"topic": topic, "bucket_ms": at}
    row |= dict(zip(GREATEST, (12, 40, 90, 60_010, 60_500, 61_000), strict=True))
    row |= {"forwarded": 100} | values
    row["accepted"] = sum(row[part] for part in PARTS)
    row["acknowledged"] = row["accepted"] - row["duplicates_dropped"]
    return row


def finding(kind: str, number: int = 0, **values: Any) -> dict[str, Any]:
    row = {
        "kind": kind,
        "topic": "orders",
        "id": f"{number:032x}",
        "due_ms": NOON + number,
        "accepted_at_ms": NOON - MINUTE,
        "wheel": "node-1.3",
        "seq": 17 + number,
        "partition": None,
        "offset": None,
        "forwarded_at_ms": None,
        "lateness_ms": None,
        "detail": "neither forwarded nor reported",
    }
    return row | values


def summary_of(buckets: list[dict[str, Any]], rows: list[dict[str, Any]], **values: Any) -> Summary:
    """The job's summary of these buckets."""
    kinds = [row["kind"] for row in rows]
    facts: dict[str, Any] = {
        "cluster": "eu",
        "from_ms": NOON,
        "to_ms": NOON + 60 * MINUTE,
        "by": "due",
        "interval_ms": MINUTE,
        "late_tolerance_ms": 1000,
        "topics": sorted({row["topic"] for row in buckets}),
        "made_at_ms": NOON + 90 * MINUTE,
        "kafka_ends": {"orders": {0: 1234, 1: 5678}},
        "progress_ms": NOON + 89 * MINUTE,
        "counts": {name: sum(row[name] for row in buckets) for name in SUMS},
        "lateness": {"p50": 12, "p99": 40, "max": 2090},
        "findings": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        "ledger_gaps": [],
        "balanced": not any(kind in ERRORS for kind in kinds),
        "seconds": 41.5,
        "command": "delaywheel reconcile --from 2026-11-21T12:00Z",
    }
    return Summary(**(facts | values))


def page_of(
    buckets: list[dict[str, Any]], rows: list[dict[str, Any]], **values: Any
) -> tuple[str, Page]:
    stream = io.StringIO()
    write_page(stream, summary_of(buckets, rows, **values), buckets, rows, output="out")
    return stream.getvalue(), Page(stream.getvalue())


def test_a_balanced_page_says_so_with_the_equation() -> None:
    buckets = [bucket(NOON + n * MINUTE, cancelled=n) for n in range(60)]
    _, page = page_of(buckets, [])
    headline = "Balanced: 7,770 accepted = 6,000 forwarded + 1,770 cancelled"
    assert headline in page.text
    assert {"class": "good"} in page.of("header")
    assert "Nothing. Looked for: missing" in page.text
    for reported in (
        "7,770",
        "6,000",
        "1,770",
        "2026-11-21 12:00",
        "eu",
        "41.5 s",
        "2.09 s",
        "5,678",
    ):
        assert reported in page.text
    assert "delaywheel reconcile --from 2026-11-21T12:00Z" in page.texts["code"]


def test_an_unbalanced_page_names_what_is_wrong_and_each_message() -> None:
    findings = [finding("missing", n) for n in range(3)]
    findings.append(
        finding("duplicated", 9, partition=5, offset=4711, lateness_ms=12, detail="twice")
    )
    buckets = [bucket(NOON, missing=3, duplicated=1), bucket(NOON + MINUTE)]
    _, page = page_of(buckets, findings)
    assert "Not balanced: 3 missing and 1 duplicated" in page.text
    assert "203 accepted = 200 forwarded + 3 missing." in page.text
    assert {"class": "bad"} in page.of("header")
    for row in findings:
        assert row["id"] in page.text
    for reported in (
        "2026-11-21 12:00:00.001",
        str(NOON + 1),
        "node-1.3 / 18",
        "5 / 4711",
        "twice",
        "Looked for and not found",
    ):
        assert reported in page.text
    # What it means and what to do stands beside it; backticks are code.
    plain = re.sub(r"\s+", "", page.text)
    for part in f"{KINDS['missing'].then}`{KINDS['duplicated'].means}".split("`"):
        assert re.sub(r"\s+", "", part) in plain
    assert "`" not in page.text


def test_findings_stand_before_the_plots_and_who_made_it_at_the_foot() -> None:
    buckets = [bucket(NOON, missing=1)]
    text, page = page_of(buckets, [finding("missing")])
    order = [text.index(f">{part}</h2>") for part in ("Findings", "By topic", "Over time")]
    assert order == sorted(order)
    foot = text[text.index("<footer") :]
    for reported in (
        f"delaywheel {version('delaywheel')}",
        platform.node(),
        "--from 2026-11-21T12",
    ):
        assert reported in foot
    assert text.count("delaywheel reconcile --from") == 1
    assert "Records of the ledger by when they were due" in page.text


def test_what_there_is_none_of_takes_no_column() -> None:
    table = page_of([bucket(NOON, missing=1)], [])[0].partition("Records by topic")[2]
    heads = re.findall(r">([a-z0-9 ]+)</th>", table.partition("</thead>")[0])
    assert heads[:4] == ["topic", "accepted", "forwarded", "missing"]
    assert not {"lost", "pending", "early", "acknowledged"} & set(heads)


def test_a_colour_has_one_meaning() -> None:
    text, _ = page_of([], [])
    dark = text.index("prefers-color-scheme: dark")
    for theme in (text[:dark], text[dark:]):
        found = re.findall(r"--([a-z_0-9]+): (#[0-9a-f]{3,6});", theme)
        colours = {name: colour for name, colour in found if name in {*PARTS, "good", "bad"}}
        assert len(set(colours.values())) == len(PARTS) + 2, colours
        inks = {colour for name, colour in found if name in {"p50", "p99", "max"}}
        assert len(inks) == 3
        assert not inks & set(colours.values())


def test_numbers_of_the_page_are_the_summarys() -> None:
    buckets = [bucket(NOON, "a", dead=7, lost=2), bucket(NOON, "b", pending=11)]
    findings = [finding("lost", n) for n in range(2)]
    _, page = page_of(buckets, findings)
    tiles = page.texts["b"]
    summary = summary_of(buckets, findings)
    for part in ("accepted", *PARTS):
        assert f"{summary.counts[part]:,}" in tiles
    # The line of all topics is the summary's, and each topic's the sum of its buckets.
    cells = page.texts["td"]
    assert {"220", "109", "111", "200", "7", "2", "11"} <= set(cells)
    assert "11 still pending when it was examined." in page.text


def test_lost_messages_are_an_error_although_the_numbers_balance() -> None:
    buckets, findings = [bucket(NOON, lost=1)], [finding("lost")]
    said = verdict(summary_of(buckets, findings))
    assert said.look == "bad"
    assert said.headline == "Not balanced: 1 lost"
    assert said.remarks == ["101 accepted = 100 forwarded + 1 lost."]
    # Findings count, whatever else is shown.
    assert verdict(summary_of(buckets, findings, balanced=True)) == said


def test_notes_and_an_open_range_are_shown() -> None:
    notes = ["3 were forwarded whose acceptance is not published yet."]
    _, page = page_of([bucket(NOON)], [], from_ms=None, to_ms=None, topics=[], notes=notes)
    assert notes[0] in page.text
    assert "All messages by due" in page.text
    assert "all (1): orders" in page.text


def test_late_messages_are_shown_and_no_error() -> None:
    said = verdict(summary_of([bucket(NOON, late=2)], [finding("late", n) for n in range(2)]))
    assert said.look == "good"
    assert said.remarks == ["Found too, and no error: 2 late."]


def test_a_sum_that_does_not_agree_is_reported_first() -> None:
    counts = dict.fromkeys(SUMS, 0) | {"accepted": 101, "forwarded": 100}
    summary = summary_of([bucket(NOON)], [], counts=counts)
    assert difference(counts) == -1
    said = verdict(summary)
    assert said.look == "bad"
    assert said.headline == "The numbers do not add up: 101 accepted = 100 forwarded"


def test_books_that_may_still_change_have_a_verdict_of_their_own() -> None:
    summary = summary_of([bucket(NOON)], [], final=False)
    said = verdict(summary)
    assert (said.look, said.headline.partition(":")[0]) == ("open", "Not final, balanced so far")
    assert terminal.verdict(summary).startswith("not final: balanced so far, 100 acceptances")
    _, page = page_of([bucket(NOON)], [], final=False)
    assert "\u2713" not in page.text
    wrong = summary_of([bucket(NOON)], [finding("missing")], final=False)
    assert verdict(wrong).look == "bad"
    assert terminal.verdict(wrong).startswith("not balanced")


def test_books_that_nobody_can_prove_have_a_verdict_of_their_own() -> None:
    buckets = [bucket(NOON, not_verifiable=3, dead=1)]
    rows = [*(finding("not_verifiable", n) for n in range(3)), finding("dead_letter")]
    _, page = page_of(buckets, rows)
    counted = "104 accepted = 100 forwarded + 1 dead-lettered + 3 not verifiable"
    assert f"Not verifiable: {counted}" in page.text
    assert "Found too, and no error: 1 dead letter." in page.text
    assert "Balanced" not in page.text
    summary = summary_of(buckets, rows)
    assert verdict(summary).look == "open"
    assert terminal.verdict(summary).startswith("not verifiable: 3 of 104 acceptances")
    wrong = summary_of(buckets, [*rows, finding("missing")])
    assert verdict(wrong).headline == "Not balanced: 1 missing and 3 not verifiable"
    assert terminal.verdict(wrong) == "not balanced: 3 not_verifiable, 1 missing"


def test_an_unbalanced_summary_is_never_shown_as_good() -> None:
    assert verdict(summary_of([bucket(NOON)], [], balanced=False)).look == "bad"
    assert verdict(summary_of([], [], balanced=False)).look == "bad"
    assert verdict(summary_of([bucket(NOON)], [finding("of_a_later_release")])).look == "bad"


def test_no_rows_at_all() -> None:
    text, page = page_of([], [], lateness={"p50": None, "p99": None, "max": None}, topics=[])
    assert "Nothing was accepted in this range" in page.text
    assert "There is nothing to show: no message in this range." in page.text
    assert not page.of("svg")
    assert "None" not in text


def test_nothing_forwarded_has_no_plots_of_spans() -> None:
    row = bucket(NOON, pending=5) | dict.fromkeys(GREATEST) | {"forwarded": 0, "accepted": 5}
    text, page = page_of([row], [])
    assert len(page.of("svg")) == 1
    assert "Balanced: 5 accepted = 5 pending" in page.text
    assert "None" not in text


def test_where_findings_have_no_columns_each_cell_is_named() -> None:
    rows = [finding("dead_letter", detail="TOPIC_UNAVAILABLE"), finding("dead_letter", 1)]
    text, page = page_of([bucket(NOON, dead=2)], rows)
    (frame,) = (each for each in page.of("div") if each.get("class") == "frame findings")
    heads = re.findall(r'--head-(\d): "([^"]+)"', frame["style"] or "")
    assert [name for _, name in heads] == [
        "topic", "id", "due (UTC, ms)", "accepted (UTC)", "wheel / seq", "detail",
    ]  # fmt: skip
    for number, _ in heads:
        assert f".findings td:nth-child({number})::before" in text
    assert "TOPIC_UNAVAILABLE" in page.texts["td"]
    assert "2 dead letters" in page.text


@pytest.mark.parametrize("place", ["topic", "id", "detail", "wheel"])
def test_nothing_that_is_shown_becomes_markup(place: str) -> None:
    rows = [finding("unexpected") | {place: HOSTILE}]
    buckets = [bucket(NOON, HOSTILE), bucket(NOON, "orders")]
    text, page = page_of(buckets, rows, cluster=HOSTILE, command=HOSTILE, topics=[HOSTILE])
    assert not page.of("script")
    assert not page.of("img")
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert "<script>alert(1)</script>\"'&amp;<img src=x onerror=alert(1)>\\x00\\u202e" in page.text
    assert "\x00" not in text
    assert "\u202e" not in text


def test_titles_and_attributes_are_escaped() -> None:
    element = el("p", HOSTILE, el("b", "<"), HOSTILE, aria_label=HOSTILE, class_=None)
    page = Page(to_html(element))
    shown = visible(HOSTILE)
    assert page.tags == [("p", {"aria-label": shown}), ("b", {})]
    assert "".join(page.texts["p"]) == shown * 2


def test_a_forged_due_is_no_defect_of_the_page() -> None:
    _, page = page_of([bucket(NOON)], [finding("unexpected", due_ms=2**62, lateness_ms=-(2**62))])
    assert f"{2**62:,} ms" in page.text


def test_the_page_needs_nothing_beside_it() -> None:
    text, page = page_of([bucket(NOON)], [finding("missing")])
    names = {name for _, attributes in page.tags for name in attributes}
    assert not names & {"src", "href", "xlink:href"}
    assert "url(" not in text
    assert "@import" not in text


def test_plots_describe_to_screen_readers_what_they_show() -> None:
    buckets = [bucket(NOON + n * MINUTE, missing=n == 3) for n in range(10)]
    text, page = page_of(buckets, [finding("missing")])
    plots = page.of("svg")
    assert len(plots) == 4
    assert all(plot["role"] == "img" and plot["aria-label"] for plot in plots)
    assert "Messages per column: 1,001 accepted, at most 101 in one column." in str(plots[0])
    assert "1 missing" in str(plots[1])
    # And the same as a table.
    assert "The figures of the plots" in page.texts["caption"]
    assert page.texts["td"].count("2026-11-21 12:03") == 1
    assert "2026-11-21 12:03: accepted 101 = forwarded 100 + missing 1" in text


def test_a_thousand_findings_and_500_buckets_can_be_mailed(tmp_path: Path) -> None:
    kinds = ("missing", "duplicated", "late", "lost", "changed")
    findings = [
        finding(kinds[n % 5], n, partition=7, offset=10**7 + n, forwarded_at_ms=NOON)
        for n in range(1000)
    ]
    topics = ("orders", "payments", "x" * 249)
    buckets = [
        bucket(NOON + n * MINUTE, topic, cancelled=n % 7, dead=n % 3, missing=n % 2, late=n % 4)
        for n in range(500)
        for topic in topics
    ]
    target = tmp_path / "page.html"
    write_page(target, summary_of(buckets, findings), buckets, findings)
    assert target.stat().st_size < 500_000
    page = Page(target.read_text("utf-8"))
    assert "5 min a column: 5 buckets of 1 min" in page.text
    assert "Of several buckets or topics the greatest" in page.text
    assert {row["id"] for row in findings} <= set(page.texts["code"])


def test_more_findings_than_rows_are_said_to_be_elsewhere() -> None:
    findings = [finding("missing", n) for n in range(60)]
    _, page = page_of([bucket(NOON, missing=1234)], findings, findings={"missing": 1234})
    assert "1,234 rows, the first 60 shown; all are in out/findings" in page.text
    assert "Not balanced: 1,234 missing" in page.text
    _, page = page_of([bucket(NOON)], [], findings={"missing": 2}, balanced=False)
    assert "The rows are in the table out/findings." in page.text


def test_findings_that_no_bucket_counts_are_placed_by_their_time() -> None:
    rows = [finding("changed", accepted_at_ms=NOON + 2 * MINUTE), finding("changed", due_ms=0)]
    buckets = [bucket(NOON + n * MINUTE) for n in range(5)]
    text, _ = page_of(buckets, rows)
    assert "12:00: 1 changed" in text
    text, _ = page_of(buckets, rows, by="accepted")
    assert "12:02: 1 changed" in text


def test_many_topics_are_summed_and_those_with_errors_come_first() -> None:
    buckets = [bucket(NOON, f"topic-{n:03d}", missing=int(n == 77)) for n in range(80)]
    _, page = page_of(buckets, [finding("missing")])
    heads = page.texts["span"]
    assert heads.index("topic-077") < heads.index("topic-000")
    assert "30 more topics" in heads
    assert "3,000" in page.texts["td"]
    assert "The 8 with the most messages of 80." in page.text


def test_equation_leaves_out_what_there_is_none_of() -> None:
    counts = {"accepted": 3, "forwarded": 1, "duplicates_dropped": 2, "missing": 0}
    assert equation(counts) == "3 accepted = 1 forwarded + 2 duplicates dropped"
    assert equation({}) == "0 accepted = 0"


def test_merged_columns_keep_every_message_and_the_greatest_percentile() -> None:
    buckets = [bucket(NOON + n * MINUTE, cancelled=n) for n in range(500) if n % 10]
    buckets[33]["lateness_p99_ms"] = 7777
    bins = merge(buckets, MINUTE, MOST_COLUMNS)
    assert bins is not None
    assert len(bins.columns) <= MOST_COLUMNS
    assert sum(one.sums["accepted"] for one in bins.columns) == sum(b["accepted"] for b in buckets)
    column = bins.place(buckets[33]["bucket_ms"])
    assert column is not None
    assert bins.columns[column].greatest["lateness_p99_ms"] == 7777


@given(
    first=st.integers(0, 2**42),
    interval=st.sampled_from([1, 7, 100, 1000, 7000, 60_000, 3_600_000]),
    places=st.sets(st.integers(0, 5000), min_size=1, max_size=20),
    most=st.integers(2, 300),
)
def test_columns_cover_all_buckets_and_are_never_too_many(
    first: int, interval: int, places: set[int], most: int
) -> None:
    rows = [bucket(first // interval * interval + place * interval) for place in places]
    bins = merge(rows, interval, most)
    assert bins is not None
    assert len(bins.columns) <= most
    assert bins.width_ms % interval == 0
    assert sum(one.buckets for one in bins.columns) == len(rows)
    # Not coarser than need be: less than eight times.
    assert bins.width_ms == interval or len(bins.columns) * 8 >= min(most, bins.columns[-1].buckets)
    for one in bins.columns:
        assert one.from_ms % bins.width_ms == 0


@given(top=st.integers(0, 10**15))
def test_count_ticks_begin_at_nought_and_reach_the_top(top: int) -> None:
    ticks = count_ticks(top)
    assert ticks[0] == 0
    assert ticks[-1] >= top
    assert 2 <= len(ticks) <= 6
    assert len({after - before for before, after in pairwise(ticks)}) == 1
    assert str(ticks[1]).rstrip("0") in ("1", "2", "5")
    assert Linear(ticks).y(0) == HEIGHT
    assert 0 <= Linear(ticks).y(top) <= HEIGHT


@given(start=st.integers(0, 2**43), long=st.integers(1, 10**12))
def test_time_ticks_are_few_and_inside(start: int, long: int) -> None:
    ticks, step = time_ticks(start, start + long)
    assert len(ticks) <= 9
    assert all(start <= tick < start + long and tick % step == 0 for tick in ticks)


@given(values=st.lists(st.integers(-(10**6), 10**14), min_size=1, max_size=9))
def test_spans_keep_their_order_on_the_axis(values: list[int]) -> None:
    scale = Spans.around(values)
    assert len(scale.ticks) >= 2
    places = [scale.y(value) for value in sorted(values)]
    assert places == sorted(places, reverse=True)
    assert all(0 <= place <= HEIGHT for place in places)
    assert scale.y(scale.ticks[0]) == HEIGHT
    assert scale.y(scale.ticks[-1]) == 0


def test_steps_are_friendly_where_they_can_be() -> None:
    assert time_step(3_600_000, 8) == 10 * MINUTE
    assert time_step(500 * MINUTE, 200, MINUTE) == 5 * MINUTE
    assert time_step(500 * 7000, 200, 7000) == 21_000
    assert Spans.around([13, 58, 18_230]).ticks == [10, 100, 1000, 10_000, MINUTE]
    assert Spans.around([0]).ticks == [1, 10]


def test_a_layer_is_drawn_from_the_sum_of_those_below() -> None:
    bins = merge([bucket(NOON, missing=100)], MINUTE, 10)
    assert bins is not None
    paths = counts_plot(bins, ["forwarded", "missing"]).iter("path")
    drawn = {path.get("class"): path.get("d") for path in paths}
    assert drawn["part missing"] == "M0.08 1000V0h.84V1000z"
    assert drawn["part forwarded"] == "M0.08 1000V500h.84V1000z"
    assert drawn["outline"] == "M0 0V0H1"


def test_lines_break_where_nothing_was_forwarded() -> None:
    rows = [bucket(NOON + n * MINUTE) for n in range(5)]
    rows[1] |= dict.fromkeys(GREATEST)
    bins = merge(rows, MINUTE, 10)
    assert bins is not None
    plot = spans_plot(bins, "lateness", 100)
    assert plot is not None
    (line,) = [path.get("d") for path in plot.iter("path") if path.get("class") == "p99"]
    assert line is not None
    assert re.findall(r"([ML][\d.]+)", line) == ["M0.5", "M2.5", "L3.5", "L4.5"]


@pytest.mark.parametrize(
    ("ms", "shown"),
    [
        (None, "-"),
        (0, "0 ms"),
        (999, "999 ms"),
        (1000, "1 s"),
        (1234, "1.23 s"),
        (59_999, "59.99 s"),
        (-1500, "\u22121.5 s"),
        (200_000, "3 min 20 s"),
        (3_600_000, "1 h"),
        (90_000_000, "1 d 1 h"),
    ],
)
def test_spans_in_words(ms: int | None, shown: str) -> None:
    assert span(ms) == shown


def test_times_in_words() -> None:
    assert moment(NOON + 7) == "2026-11-21 12:00:00.007"
    assert short_moment(NOON) == "2026-11-21 12:00"
    assert short_moment(NOON + 1500) == "2026-11-21 12:00:01.500"
    assert moment(-1) == "1969-12-31 23:59:59.999"
    assert clock(NOON, 10 * MINUTE) == "12:00"
    assert clock(NOON + 12 * 3_600_000, 10 * MINUTE) == "Nov 22"
    assert clock(NOON + 5, 1) == "12:00:00.005"
    assert clock(2**62, 1000) == f"{2**62:,}"


def test_both_ends_show_each_topic_with_its_groups() -> None:
    nothing = dict.fromkeys(("said_sent", "unknown", "accepted", "consumed"))
    rows = [
        {**nothing, "topic": "orders", "group": "mail", "state": "whole", "forwarded": 90,
         "consumed": 90, "minutes": 9},
        {**nothing, "topic": "orders", "group": "mail", "state": "lost_after", "forwarded": 10,
         "consumed": 7, "minutes": 1},
        {**nothing, "topic": "orders", "group": None, "state": "whole", "said_sent": 101,
         "unknown": 0, "accepted": 101, "forwarded": 100, "minutes": 10},
    ]  # fmt: skip
    stream = io.StringIO()
    buckets = [bucket(NOON)]
    write_page(stream, summary_of(buckets, [], ends={"said_sent": 101}), buckets, [], ends=rows)
    text = stream.getvalue()
    part = text[text.index(">Both ends</h2>") : text.index(">Over time</h2>")]
    lines = [re.findall(r"<t[hd][^>]*>(?:<span[^>]*>)?([^<]*)", row) for row in part.split("<tr>")]
    assert lines[2] == ["orders", "101", "0", "101", "100", "", "10 whole"]
    assert lines[3] == ["\u2192 mail", "", "", "", "100", "97", "9 whole, 1 lost after"]
    assert "clock differs" in Page(text).text, "it was looked for"
    assert "clock differs" not in page_of(buckets, [])[1].text
