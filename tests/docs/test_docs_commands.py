"""Commands in the documents can be parsed by their programs."""

import re
import shlex
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from delaywheel_replica.cli.commands import COMMANDS, PLUGIN_GROUP
from delaywheel_replica.cli.parsing import Command, CommandGroup, Parser
from local import demo, sim
from local.bench import cli as bench
from local.chaos import run as chaos
from local.loopback import cluster

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

PARSERS = {
    "bench": bench.argument_parser,
    "chaos": chaos.argument_parser,
    "cluster": cluster.argument_parser,
    "demo": demo.argument_parser,
    "sim": sim.argument_parser,
}

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PLUGINS = PROJECT["entry-points"][PLUGIN_GROUP]
"""Of this tree, whatever is installed."""

FILES = {"node.toml", "pending.jsonl", "moved.jsonl"}

_COMMAND = re.compile(r"`delaywheel ([a-z][^`]*)`")
_BLOCK = re.compile(r"^```(?:sh)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINE = re.compile(
    r"^(?:[\d*]+ [\d* ]+  )?(?:handle=\$\()?delaywheel ([a-z][^|>#\n)]*)", re.MULTILINE
)
_DATE = re.compile(r"\$\(date [^()]*\)")
_SCRIPT = re.compile(r"(?:`|^)scripts/([a-z-]+)(?![a-z_/-])( [^`\n]*)?", re.MULTILINE)


def readable(words: list[str]) -> bool:
    """Whether they are all complete, and not shortened."""
    return bool(words) and not any("…" in word for word in words)


@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)
def test_commands_can_be_read(document: Path) -> None:
    content = document.read_text(encoding="utf-8")
    blocks = [_DATE.sub("2026-05-01T10:00Z", block) for block in _BLOCK.findall(content)]
    lines = [line for block in blocks for line in _LINE.findall(block)]
    for text in [*_COMMAND.findall(content), *lines]:
        name, *words = shlex.split(text)
        command = COMMANDS.get(name)
        if command is None and name in PLUGINS:
            command = EntryPoint(name, PLUGINS[name], PLUGIN_GROUP).load()
        if isinstance(command, CommandGroup):
            command = command.commands.get(words.pop(0))
        assert isinstance(command, Command), text
        if readable(words):
            there = [str(ROOT / "README.md") if word in FILES else word for word in words]
            Parser(name, command).read([str(ROOT) if word == "DIR" else word for word in there])


@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)
def test_scripts_are_there_and_take_what_is_given(document: Path) -> None:
    for name, rest in _SCRIPT.findall(document.read_text(encoding="utf-8")):
        if not (ROOT / "scripts" / name).is_dir():
            assert (ROOT / "scripts" / name).is_file(), name
            words = re.split(r" {2,}|\\", rest)[0].split()
            reads = PARSERS.get(name)
            if reads is not None and readable(words):
                reads().parse_args(words)
