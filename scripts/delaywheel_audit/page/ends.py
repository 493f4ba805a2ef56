"""The page's part about both ends: each topic, and the groups that read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from delaywheel_audit.matching.findings import KINDS
from delaywheel_audit.page.bins import Row
from delaywheel_audit.page.markup import Child, Element, el, table
from delaywheel_audit.page.words import count, kind_name

_COUNTS: Final = ("said_sent", "unknown", "accepted", "forwarded", "consumed")
_MOST_ROWS: Final = 200


def ends_part(rows: Sequence[Row]) -> list[Element]:
    """Returns a row for each topic, and behind it one for each of its groups."""
    if not rows:
        return [el("p", "No program has counted anything of this range.", class_="soft")]
    sums: dict[tuple[str, str], Counter[str]] = {}
    states: dict[tuple[str, str], Counter[str]] = {}
    for row in rows:
        at = row["topic"], row["group"] or ""
        own = sums.setdefault(at, Counter())
        own.update({name: row[name] for name in _COUNTS if row[name] is not None})
        states.setdefault(at, Counter())[row["state"]] += row["minutes"]
    lines = [_line(at, sums[at], states[at]) for at in sorted(sums)[:_MOST_ROWS]]
    if len(sums) > _MOST_ROWS:
        lines.append([f"{count(len(sums) - _MOST_ROWS)} more", *[None] * (len(_COUNTS) + 1)])
    heads = ["topic \u2192 group", *map(kind_name, _COUNTS), "minutes"]
    caption = "What programs counted, beside the books"
    text = "By the minute of the due; of a group that counts what it reads the copies that it had."
    return [el("p", text, class_="soft"), table(heads, lines, class_="topics", caption=caption)]


def _line(at: tuple[str, str], sums: Counter[str], states: Counter[str]) -> list[Child]:
    topic, group = at
    name = f"\u2192 {group}" if group else topic
    line: list[Child] = [el("th", el("span", name, class_="name", title=name), scope="row")]
    line += [count(sums[name]) if name in sums else None for name in _COUNTS]
    is_wrong = any(KINDS[state].is_error for state in states if state in KINDS)
    text = ", ".join(f"{count(number)} {kind_name(state)}" for state, number in states.items())
    line.append(el("td", text, class_="wrong" if is_wrong else None))
    return line
