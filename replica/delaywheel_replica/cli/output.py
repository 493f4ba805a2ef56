"""What commands print: JSON for programs, tables for people."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

_NUMBER = re.compile(r"[0-9][0-9,.]*|-")


def print_json(document: Any) -> None:
    """Prints a JSON document, indented: it is read by people too."""
    print(json.dumps(document, indent=2, ensure_ascii=False))


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None
) -> None:
    """Prints rows below their column names; numbers are set to the right."""
    console = Console(markup=False, highlight=False)
    if title is not None:
        console.print(title, style="bold")
    table = Table(box=None, pad_edge=False)
    cells = [[_cell(value) for value in row] for row in rows]
    for number, name in enumerate(columns):
        is_numeric = bool(cells) and all(_NUMBER.fullmatch(row[number]) for row in cells)
        table.add_column(name, justify="right" if is_numeric else "left", overflow="fold")
    for row in cells:
        table.add_row(*row)
    console.print(table)


def print_facts(facts: Iterable[tuple[str, object]]) -> None:
    """Prints names with their values, one a line."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, _cell(value))
    Console(markup=False, highlight=False).print(table)


def bytes_text(content: bytes | None) -> str:
    """Bytes for people: as text if they are text."""
    if content is None:
        return "null"
    try:
        return json.dumps(content.decode(), ensure_ascii=False)
    except UnicodeDecodeError:
        return f"0x{content.hex()}"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
