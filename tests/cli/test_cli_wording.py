"""Numbers agree with their nouns in every command and answer, and help needs no dictionary."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from delaywheel_replica.cli.commands import COMMANDS, PLUGIN_GROUP
from delaywheel_replica.cli.parsing import CommandGroup
from support.clients.command import Command

ROOT = Path(__file__).parents[2]
_ROOMS = (
    "replica/delaywheel_replica/cli",
    "replica/delaywheel_replica/server",
    "wheel/delaywheel/client",
)
FILES = [path for room in _ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
_COUNTED = re.compile(
    r"^ (messages?|frames?|nodes?|calls?|topics?|letters?|copies|copy|wheels?|seconds?"
    r"|partitions?|findings?)\b"
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


_OURS = frozenset(
    [
        "due",
        "handle",
        "slot",
        "wheel",
        "frame",
        "leader",
        "floor",
        "spare",
        "ledger",
        "in sync",
        "forwarded to",
        "watermark",
        "epoch",
        "cleaner",
        "dial",
        "seal",
        "sealed",
        "fenced",
        "seq",
        "quorum",
        "mirror",
        "heartbeat",
        "beat",
        "candidacy",
        "candidacies",
        "V",
        "W",
        "w",
        "ballast",
        "boot",
        "twin",
        "origin",
        "lane",
        "tombstone",
        "gap",
        "a tail",
        "trace",
    ]
)
"""Words that have a meaning of their own here, and are not explained where they are used."""
_EXPLAINED = frozenset(
    re.findall(
        r"^- \*\*(.+?)\*\*", (ROOT / "docs/CLI.md").read_text(encoding="utf-8"), re.MULTILINE
    )
)
_UNKNOWN = re.compile(rf"\b(?:{'|'.join(sorted(_OURS - _EXPLAINED))})s?\b")


def _names() -> Iterator[str]:
    """Yields the words that lead to each help: of all commands, groups, and commands of groups."""
    yield from ("", *COMMANDS)
    for name, command in COMMANDS.items():
        if isinstance(command, CommandGroup):
            yield from (f"{name} {each}" for each in command.commands)
    yield from (each.name for each in entry_points(group=PLUGIN_GROUP))


@pytest.mark.parametrize("name", list(_names()))
def test_help_uses_no_word_of_ours_that_is_not_explained(name: str, command: Command) -> None:
    """docs/CLI.md explains some, where people meet them first."""
    assert _EXPLAINED <= _OURS
    assert _UNKNOWN.findall(command(*name.split(), "--help").out) == []


def test_it_would_be_noticed() -> None:
    assert len(list(faults('f"{n} frames"; f"{n:,} messages"; f"{n} bytes"; f"{n:,} bytes"'))) == 3
