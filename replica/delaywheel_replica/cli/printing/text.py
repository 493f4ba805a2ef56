"""Text of others on a terminal: nothing that a sender wrote moves the cursor or hides other text.

All that commands print passes through `printable`: control characters, the terminal's escape
sequences, marks that change the text's direction, and all else that shows nothing of itself are
escaped as JSON escapes them, so that JSON stays the same document.
"""

from __future__ import annotations

import json
import re
import sys
from base64 import b64encode
from typing import Final

_SUSPECT: Final = re.compile(r"[^ -~\n]")


def printable(text: str) -> str:
    """Returns a text in which every character shows itself; line feeds stay."""
    return _SUSPECT.sub(_shown, text)


def bytes_text(content: bytes | None) -> str:
    """Returns bytes for people: as quoted text if they are text, and otherwise as hex."""
    if content is None:
        return "null"
    try:
        return printable(json.dumps(content.decode(), ensure_ascii=False))
    except UnicodeDecodeError:
        return f"0x{content.hex()}"


def one_line(text: str) -> str:
    """Returns a text as part of a line: a line feed is escaped, as JSON escapes it."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def say(text: str) -> None:
    """Prints a line of the answer, at once: a pipe's reader follows `tail` and the page's link."""
    print(printable(text), flush=True)


def note(text: str) -> None:
    """Prints a line beside the answer, on standard error."""
    print(printable(text), file=sys.stderr)


def clear_screen() -> None:
    """Clears the terminal, if standard output is one."""
    if sys.stdout.isatty():
        print("\x1b[H\x1b[2J", end="")


def _shown(match: re.Match[str]) -> str:
    mark = match[0]
    return mark if mark.isprintable() else json.dumps(mark)[1:-1]


def base64_of(content: bytes | None) -> str | None:
    """Returns bytes as JSON has them."""
    return None if content is None else b64encode(content).decode()
