"""Runs the command line tool in this process, as its user sees it."""

from __future__ import annotations

import io
import json
from typing import Any, NamedTuple

import pytest

from delaywheel_replica.cli.app import main


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
