"""The page's verdict: whether the books balance, in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from delaywheel_audit.matching.findings import KINDS, is_error
from delaywheel_audit.matching.summary import Summary
from delaywheel_audit.page.words import PARTS, count, kind_name, listed


@dataclass(frozen=True, slots=True)
class Verdict:
    """The look of the page's head, its headline, and the text below."""

    look: str  # good, bad, open: good so far, or nothing: there was nothing to look at
    headline: str
    remarks: list[str]


def found(summary: Summary) -> dict[str, int]:
    """Returns the number of findings of each kind, in order of display."""
    wanted = (kind for kind, it in KINDS.items() if summary.ends is not None or not it.is_of_ends)
    kinds = {kind: summary.findings.get(kind, 0) for kind in wanted}
    return kinds | {kind: n for kind, n in summary.findings.items() if kind not in kinds}


def equation(counts: Mapping[str, int]) -> str:
    """Returns the equation of acceptances and their outcomes."""
    parts = [f"{count(counts[key])} {name}" for key, name in PARTS.items() if counts.get(key)]
    return f"{count(counts.get('accepted', 0))} accepted = {' + '.join(parts) or '0'}"


def difference(counts: Mapping[str, int]) -> int:
    """Returns the excess of the outcomes over acceptances: 0, or the job itself is wrong."""
    return sum(counts.get(part, 0) for part in PARTS) - counts.get("accepted", 0)


def verdict(summary: Summary) -> Verdict:
    """Returns the verdict in words."""
    counts = summary.counts
    errors = _findings(summary, are_errors=True)
    remarks = _remarks(summary)
    if difference(counts):
        texts = [f"Found: {listed(errors)}."] if errors else []
        headline = f"The numbers do not add up: {equation(counts)}"
        return Verdict("bad", headline, [*texts, *remarks])
    if summary.is_unproven:
        headline = f"Not verifiable: {equation(counts)}"
        more = "Kafka has deleted records of that time, so the books can no longer be proven."
        return Verdict("open", headline, [more, *remarks])
    if errors or not summary.balanced:
        headline = f"Not balanced: {listed(errors) or equation(counts)}"
        return Verdict("bad", headline, [f"{equation(counts)}.", *remarks])
    if not counts.get("accepted"):
        return Verdict("nothing", "Nothing was accepted in this range", remarks)
    if not summary.final:
        more = "More may still be accepted or published for this range: ask again when it is past."
        return Verdict("open", f"Not final, balanced so far: {equation(counts)}", [more, *remarks])
    return Verdict("good", f"Balanced: {equation(counts)}", remarks)


def _findings(summary: Summary, *, are_errors: bool) -> list[str]:
    return [
        f"{count(number)} {_name(kind, number)}"
        for kind, number in found(summary).items()
        if number and is_error(kind) is are_errors
    ]


def _remarks(summary: Summary) -> list[str]:
    notes = _findings(summary, are_errors=False)
    texts = [f"Found too, and no error: {listed(notes)}."] if notes else []
    if pending := summary.counts.get("pending"):
        texts.append(f"{count(pending)} still pending when it was examined.")
    return texts


def _name(kind: str, number: int) -> str:
    if kind == "ledger_gap":
        return "gap in the ledger" if number == 1 else "gaps in the ledger"
    if kind == "dead_letter" and number != 1:
        return "dead letters"
    return kind_name(kind)
