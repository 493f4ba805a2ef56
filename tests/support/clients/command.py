"""Runs the command line tool in this process, as its user sees it."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from delaywheel_replica.cli.app import main

CLI_DOC = Path(__file__).parents[3] / "docs" / "CLI.md"
NARROW = Path(__file__).parent / "screens_80.md"
WIDTHS = {"80 columns": 80, "120 columns": 120, "a pipe": None}
"""Where the document's screens are seen: how many columns there are."""


def screen_in_document(line: str, width: str) -> str:
    """Returns the screen of a command in docs/CLI.md, or one beside this where a width differs."""
    reported = "\n".join(each.read_text(encoding="utf-8") for each in (CLI_DOC, NARROW))
    screen = re.compile(rf"^`{re.escape(line)}`(.*):\n\n```\n((?:.*\n)*?)```$", re.MULTILINE)
    screens: dict[str, str] = dict(screen.findall(reported))
    assert screens.keys() <= {"", *(f", {each}" for each in WIDTHS)}
    return screens[f", {width}"] if f", {width}" in screens else screens[""]


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The output, parsed as JSON."""
        return json.loads(self.out)


def say(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Types this as the user."""
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


class Command:
    """Runs `delaywheel …`."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def __call__(self, *arguments: str) -> Ended:
        self._capture.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        code = ended.value.code
        return Ended(code if isinstance(code, int) else 0, *self._capture.readouterr())
