"""Formats dead letters: JSON for programs, cells and lines for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from delaywheel.deadletters import Letter, LetterCounts, LetterState, Mark, Settled
from delaywheel_replica.cli.printing.tables import print_table
from delaywheel_replica.cli.printing.text import base64_of, bytes_text, one_line
from delaywheel_replica.quantities import iso

COLUMNS = ("place", "since", "reason", "topic", "bytes")
COLUMNS_WITH_STATE = (*COLUMNS, "state")
_EXAMPLES = 5


def shape(letter: Letter, state: LetterState, *, with_content: bool) -> dict[str, Any]:
    """Returns one letter as JSON: bytes in base64, unknown values as null."""
    document: dict[str, Any] = {
        "place": str(letter.place),
        "partition": letter.place.partition,
        "offset": letter.place.offset,
        "timestamp_ms": letter.timestamp_ms,
        "state": state.value,
        "reason": letter.reason or None,
        "detail": letter.detail or None,
        "topic": letter.destination or None,
        "id": letter.id or None,
        "due_ms": letter.due_ms,
        "length_bytes": letter.length_bytes,
    }
    if with_content:
        document["key"] = base64_of(letter.key)
        document["value"] = base64_of(letter.value)
        document["headers"] = [
            {"name": name, "value": base64_of(value)} for name, value in letter.headers
        ]
    return document


def mark_shape(mark: Mark | None) -> dict[str, Any] | None:
    """Returns how a letter was settled, as JSON."""
    return None if mark is None else {"at_ms": mark.at_ms, "to": mark.to}


def counts_shape(counts: LetterCounts) -> list[dict[str, Any]]:
    """Returns counts as JSON."""
    return [row._asdict() for row in counts.rows()]


def settled_shape(settled: Settled) -> dict[str, Any]:
    """Returns the settled letters, as JSON."""
    return {
        "done": settled.done,
        "refused": dict(settled.refused),
        "refused_letters": [{"place": str(place), "why": why} for place, why in settled.examples],
    }


def cells(letter: Letter, state: LetterState, *, with_state: bool) -> list[object]:
    """Returns one letter's row."""
    row: list[object] = [
        *(str(letter.place), iso(letter.timestamp_ms), letter.reason or None),
        *(letter.destination or None, letter.length_bytes),
    ]
    return [*row, state.value] if with_state else row


def facts(letter: Letter, mark: Mark | None) -> Iterable[tuple[str, object]]:
    """Returns one letter's lines."""
    state = LetterState.WAITING if mark is None else mark.state
    yield "place", str(letter.place)
    yield "state", state.value if mark is None else f"{state.value} at {iso(mark.at_ms)}"
    if mark is not None and mark.to is not None:
        yield "sent to", mark.to
    yield "since", iso(letter.timestamp_ms)
    yield "reason", letter.reason or None
    yield "detail", letter.detail or None
    yield "topic", letter.destination or None
    if letter.destination != letter.topic:
        yield "asked again by", f"replay, which sends the letter to {letter.topic}"
    yield "id", letter.id or None
    yield "due", None if letter.due_ms is None else iso(letter.due_ms)
    yield "key", bytes_text(letter.key)
    for name, value in letter.headers:
        yield f"header {one_line(name)}", bytes_text(value)
    yield "value", bytes_text(letter.value)


def print_counts(counts: LetterCounts) -> None:
    """Prints the counts."""
    rows = [(row.topic or None, row.reason or None, *row[2:]) for row in counts.rows()]
    print_table(["topic", "reason", "waiting", "replayed", "dropped"], rows)


def refusals(settled: Settled) -> Iterable[str]:
    """Returns lines about letters that could not be sent."""
    for reason, number in settled.refused.most_common():
        yield f"not sent, they wait on: {number:,} {reason}"
    for place, why in settled.examples[:_EXAMPLES]:
        yield f"  {place}  {why}"
