"""What commands print: JSON for programs, tables for people.

Nothing is folded: what is printed can be cut out and given to another command. Off a terminal
each row is one line. On a terminal that is too narrow for a table, the first cell of each row
stands on a line of its own, with the others below it.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

from delaywheel_replica.cli.printing.text import printable, say

_NUMBER = re.compile(r"[0-9][0-9,.]*|-")
_GAP = "  "


def print_json(document: Any) -> None:
    """Prints an indented JSON document, since people read it too."""
    say(json.dumps(document, indent=2, ensure_ascii=False))


def print_ndjson(documents: Iterable[Any]) -> None:
    """Prints JSON documents, one a line, each as soon as it is available."""
    for document in documents:
        text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
        say(text)


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, none: str = "none"
) -> None:
    """Prints rows below their column names; numbers are right-aligned. Says `none` without rows."""
    cells = [[_cell(value) for value in row] for row in rows]
    if not cells:
        print_prose(none)
        return
    lines = _lines(columns, cells)
    width = terminal_columns()
    if width is None or all(_width(line) <= width for line in lines):
        print("\n".join(lines))
        return
    heads = [columns[0], *(row[0] for row in cells)]
    below = _lines(columns[1:], [row[1:] for row in cells])
    for head, line in zip(heads, below, strict=True):
        print(f"{head}\n{_GAP}{line}")


def print_facts(facts: Iterable[tuple[str, object]]) -> None:
    """Prints names with their values, one a line."""
    known = [(_cell(name), _cell(value)) for name, value in facts]
    indent = max(map(_width, (name for name, _ in known)), default=0) + len(_GAP)
    for name, value in known:
        print(_wrapped(f"{_padded(name, indent)}{value}", indent))


def print_prose(text: str) -> None:
    """Prints sentences, wrapped at the terminal's width."""
    print(_wrapped(printable(text), len(_GAP)))


def terminal_columns() -> int | None:
    """Returns the terminal's width; None for a file or another program."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _lines(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    whole = [columns, *rows]
    widths = [max(_width(row[place]) for row in whole) for place in range(len(columns))]
    rights = [
        bool(rows) and all(_NUMBER.fullmatch(row[place]) for row in rows)
        for place in range(len(columns))
    ]
    return [
        _GAP.join(
            _padded(cell, width, right=right)
            for cell, width, right in zip(row, widths, rights, strict=True)
        ).rstrip()
        for row in whole
    ]


def _wrapped(text: str, indent: int) -> str:
    """Wraps only between words: ids, times, addresses and names stay whole."""
    width = terminal_columns()
    if width is None or _width(text) <= width:
        return text
    return textwrap.fill(
        text,
        max(width, indent + 1),
        subsequent_indent=" " * indent,
        replace_whitespace=False,
        drop_whitespace=True,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _padded(text: str, width: int, *, right: bool = False) -> str:
    space = " " * (width - _width(text))
    return f"{space}{text}" if right else f"{text}{space}"


def _width(text: str) -> int:
    """Returns how many terminal columns a text needs."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(mark) else 2 if unicodedata.east_asian_width(mark) in "WF" else 1
        for mark in text
    )


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else printable(str(value)).replace("\n", r"\n")
