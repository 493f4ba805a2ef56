"""Prints the result for people: figures, findings, and their meanings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from delaywheel_audit.matching.findings import KINDS, is_error
from delaywheel_audit.matching.summary import FATES, Summary
from delaywheel_audit.sources.ledger_files import moment

if TYPE_CHECKING:
    from delaywheel_audit.output import Output

_SHOWN = 5


def print_summary(summary: Summary, output: Output, page: str | None, *, as_json: bool) -> None:
    """Prints a summary to the terminal, or as JSON for programs."""
    if as_json:
        print(summary.to_json())
        return
    console = Console(markup=False, highlight=False)
    console.print(_title(summary), style="bold")
    console.print(_figures(summary))
    for kind, count in summary.findings.items():
        _print_kind(console, output, kind, count)
    for note in summary.notes:
        console.print(f"note: {note}")
    console.print(f"tables and summary in {output.place}" + (f", page {page}" if page else ""))
    console.print(verdict(summary), style="bold")


def verdict(summary: Summary) -> str:
    """Returns the answer in one line."""
    accepted = f"{summary.counts['accepted']:,} acceptances"
    if summary.balanced and not summary.final:
        return f"not final: balanced so far, {accepted}; ask again when the range is past"
    if summary.balanced:
        return f"balanced: {accepted}, each with its one fate"
    if summary.is_unproven:
        some = f"{summary.counts['not_verifiable']:,} of {accepted}"
        return f"not verifiable: {some}; Kafka has deleted records of that time"
    fields = summary.findings
    wrong = {kind: count for kind, count in fields.items() if is_error(kind)} or fields
    return f"not balanced: {', '.join(f'{count:,} {kind}' for kind, count in wrong.items())}"


def _title(summary: Summary) -> str:
    first = "the first" if summary.from_ms is None else moment(summary.from_ms)
    last = "the last" if summary.to_ms is None else moment(summary.to_ms)
    return f"cluster {summary.cluster}, {summary.by} from {first} to {last}"


def _figures(summary: Summary) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    counts = summary.counts
    table.add_row("accepted", f"{counts['accepted']:,}", style="bold")
    for name in FATES:
        table.add_row(f"  {name.replace('_', ' ')}", f"{counts[name]:,}")
    table.add_row("acknowledged (different messages)", f"{counts['acknowledged']:,}")
    for name in ("duplicated", "unexpected", "early", "late", "unpublished", "unbooked"):
        table.add_row(name, f"{counts[name]:,}")
    for name, value in summary.lateness.items():
        table.add_row(f"lateness {name}", "-" if value is None else f"{value:,} ms")
    for name, value in (summary.ends or {}).items():
        table.add_row(f"both ends: {name.replace('_', ' ')}", f"{value:,}")
    return table


def _print_kind(console: Console, output: Output, kind: str, count: int) -> None:
    known = KINDS[kind]
    console.print(f"{count:,} {kind}", style="bold")
    console.print(f"  {known.means} {known.then}".replace("`", ""))
    for row in output.some_findings({kind: count}, _SHOWN):
        fields = {name: value for name, value in row.items() if value not in (None, "", kind)}
        if "due_ms" in fields:
            fields["due"] = moment(fields["due_ms"])
        console.print("  " + "  ".join(f"{name}={value}" for name, value in fields.items()))
    if count > _SHOWN:
        console.print(f"  … and {count - _SHOWN:,} more in {output.place}/findings")
