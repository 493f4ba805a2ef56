"""Numbers agree with their nouns in every command and answer, and help needs no dictionary."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from delaywheel_replica.cli.commands import COMMANDS
from support.clients.command import Command

ROOT = Path(__file__).parents[2]
_ROOMS = (
    "replica/delaywheel_replica/cli",
    "replica/delaywheel_replica/server",
    "wheel/delaywheel/client",
)
FILES = [path for room in _ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
_COUNTED = re.compile(
    r"^ (messages?|frames?|nodes?|calls?|topics?|letters?|copies|copy|wheels?|seconds?)\b"
)
_SIZED = re.compile(r"^ bytes?\b")


def faults(source: str) -> Iterator[str]:
    """Yields numbers in texts whose noun may not agree with them, or that are hard to read."""
    for text in ast.walk(ast.parse(source)):
        if not isinstance(text, ast.JoinedStr):
            continue
        for part, after in zip(text.values, text.values[1:], strict=False):
            if not isinstance(part, ast.FormattedValue) or not isinstance(after, ast.Constant):
                continue
            spec = ast.unparse(part.format_spec) if part.format_spec is not None else ""
            if _COUNTED.match(str(after.value)):
                yield f"{ast.unparse(text)}: use counted"
            elif _SIZED.match(str(after.value)) and "," not in spec:
                yield f"{ast.unparse(text)}: use size, or counted"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_numbers_agree_with_their_nouns(path: Path) -> None:
    assert list(faults(path.read_text(encoding="utf-8"))) == []


_UNKNOWN = re.compile(
    r"\b(watermarks?|epochs?|cleaners?|dial|seals?|sealed|fenced|seqs?|quorum|mirrors?|heartbeats?|"
    r"candidac(y|ies)|V|W|w)\b"
)


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_uses_no_word_of_ours_that_is_not_explained(name: str, command: Command) -> None:
    """docs/CLI.md explains ten words where people meet them first."""
    assert _UNKNOWN.findall(command(*name.split(), "--help").out) == []


def test_it_would_be_noticed() -> None:
    assert len(list(faults('f"{n} frames"; f"{n:,} messages"; f"{n} bytes"; f"{n:,} bytes"'))) == 3
