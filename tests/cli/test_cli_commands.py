"""Every command is documented; commands of other packages join; failures have names."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from inspect import signature
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest

from delaywheel_replica.cli import app as app_module
from delaywheel_replica.cli import parsing as cli
from delaywheel_replica.cli.commands import COMMANDS as OURS
from support.clients.command import Command

ROOT = Path(__file__).parents[2]


def commands() -> Iterator[tuple[str, cli.Command]]:
    for name, command in OURS.items():
        if isinstance(command, cli.CommandGroup):
            yield from ((f"{name} {inner}", one) for inner, one in command.commands.items())
        else:
            yield name, command


EACH = [pytest.param(name, command, id=name) for name, command in commands()]


def names_taken(function: Callable[..., object]) -> set[str]:
    """The parameters of a function, including those of a typed dictionary."""
    names: set[str] = set()
    for parameter in signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            (reported,) = get_args(get_type_hints(function)[parameter.name])
            names |= reported.__annotations__.keys()
        else:
            names.add(parameter.name)
    return names


@pytest.mark.parametrize(("name", "asked"), EACH)
def test_the_arguments_of_a_command_are_those_of_its_function(
    name: str, asked: cli.Command
) -> None:
    module, _, function = asked.run.partition(":")
    takes = names_taken(getattr(import_module(module), function))
    assert cli.Parser(name, asked).names == takes


HEAVY = {
    *("grpc", "numpy", "pydantic", "confluent_kafka", "pyarrow", "pyspark", "structlog", "rich"),
    *("asyncio", "google.protobuf", "unittest", "delaywheel_proto"),
}
LIGHT = [
    ("--version",),
    ("--help",),
    *((*name.split(), "--help") for name in ("status", "slots", "produce", "config show")),
    ("reconcile", "--help"),
    ("complete", "delaywheel st", ":="),
    ("complete", "delaywheel serve --set sp", ":="),
    ("complete", "delaywheel produce orders --level 1", ":="),
    ("complete", "delaywheel reconcile --kafka-", ":="),
]


def test_help_version_and_completion_need_nothing_of_what_commands_need() -> None:
    """A shell's completion asks at each key."""
    reported = "import sys; from delaywheel_replica.cli.app import main\n"
    reported += f"for asked in {LIGHT!r}:\n"
    reported += "    try: main(asked)\n    except SystemExit: print('have', *sys.modules)\n"
    ended = subprocess.run(
        [sys.executable, "-c", reported],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = ended.stdout.splitlines()
    have = [number for number, line in enumerate(lines) if line.startswith("have ")]
    assert len(have) == len(LIGHT)
    assert not any(after == before + 1 for before, after in pairwise([-1, *have])), "all are shown"
    for asked, number in zip(LIGHT, have, strict=True):
        assert not HEAVY & set(lines[number].split()), asked


def test_a_node_begins_without_what_its_processes_load(tmp_path: Path) -> None:
    """Reading the settings takes half of the CPU so: each start of a node waits for it."""
    reported = "import os, sys; from delaywheel_replica.cli.app import main\n"
    reported += "os.execve = lambda *_: sys.exit(' '.join(sys.modules))\nmain(sys.argv[1:])"
    settings = {
        "cluster_id": "c",
        "node_id": "n1",
        "data_dir": tmp_path,
        "kafka.bootstrap.servers": "k:1",
    }
    asked = [f"--set={name}={value}" for name, value in settings.items()]
    ended = subprocess.run(
        [sys.executable, "-c", reported, "serve", *asked],
        capture_output=True,
        text=True,
        check=False,
    )
    have = set(ended.stderr.split())
    assert "delaywheel_replica.node" in have, ended.stderr
    assert not have & {"grpc", "numpy", "structlog", "google.protobuf", "delaywheel_proto"}


@pytest.mark.parametrize(("name", "asked"), EACH)
def test_examples_are_command_lines_that_can_be_read(name: str, asked: cli.Command) -> None:
    joined = asked.examples.replace("\\\n", " ")
    lines = [line.strip() for line in joined.splitlines() if f"delaywheel {name}" in line]
    assert lines
    for line in lines:
        said = line.partition(f"delaywheel {name}")[2]
        words = shlex.split(re.split(r"\)$|[|<>]", said)[0].replace('"$handle"', "h"))
        files = ("orders.txt", "pending.jsonl", "moved.jsonl", "node.log", "page.pem", "page.key")
        there = {"/var/lib/delaywheel": str(ROOT), **dict.fromkeys(files, str(ROOT / "LICENSE"))}
        words = [there.get(word, word) for word in words]
        cli.Parser(name, asked).read(words)


WITHOUT_JSON = {"init", "serve", "web", "config check", "completion", "topic create"}
ASKING = {
    *("tail", "topic create", "dead list", "dead show", "dead replay", "dead drop"),
    *("produce", "slots", "slot", "search", "get", "cancel", "reschedule", "status"),
    *("node replace", "node remove"),
}


@pytest.mark.parametrize(("name", "asked"), EACH)
def test_help_says_how_a_command_is_called_in_whole_paragraphs(
    name: str, asked: cli.Command, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ended = command(*name.split(), "--help")
    assert ended.code == 0
    assert f"Usage: delaywheel {name}" in ended.out
    assert "--json" in ended.out or name in WITHOUT_JSON
    assert ("--server" in ended.out and "DELAYWHEEL_SERVER" in ended.out) or name not in ASKING
    assert all(len(line) <= 80 for line in ended.out.partition("Examples:")[0].splitlines())
    for paragraph in (asked.text, asked.more):
        assert " ".join(paragraph.split()) in " ".join(ended.out.split())
    assert "Examples:\n  " in ended.out
    assert ", ..." not in ended.out, "it says all that may be written"


GROUPS = [name for name, found in OURS.items() if isinstance(found, cli.CommandGroup)]


@pytest.mark.parametrize("asked", [(), *((name,) for name in GROUPS)], ids=" ".join)
def test_help_of_several_commands_has_examples_of_them(
    asked: tuple[str, ...], command: Command
) -> None:
    listed, _, examples = command(*asked, "--help").out.partition("\n\nExamples:\n")
    named = re.findall(rf"delaywheel {' '.join(asked)} ?([a-z-]+)", examples)
    assert named
    assert all(f"\n  {name}" in listed for name in named)
    if asked:
        group = OURS[asked[0]]
        assert isinstance(group, cli.CommandGroup)
        assert set(named) == set(group.commands)


def test_version(command: Command) -> None:
    ended = command("--version")
    assert ended.code == 0
    assert ended.out.startswith("delaywheel 0.")


def test_without_a_command_help_is_shown(command: Command) -> None:
    ended = command()
    assert "Usage: delaywheel" in ended.out + ended.err


def test_commands_of_other_packages_join(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        name = "books"

        def load(self) -> cli.Command:
            return cli.Command("Keeps the books.", f"{__name__}:books", lambda _: None)

    def entry_points(*, group: str) -> list[Entry]:
        return [Entry()] if group == "delaywheel.commands" else []

    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(books=lambda: 7))
    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    assert command("books").code == 7
    assert "Keeps the books." in command("--help").out


def test_wrong_usage_is_exit_code_2(command: Command) -> None:
    ended = command("slot")
    assert ended.code == 2
    assert "SECOND" in ended.err


@pytest.mark.parametrize(
    "asked",
    [
        ("status",),
        ("get", "n1.7:1900000000:0190163d8694739b8d3f8a4d6a1f5d10:orders"),
        ("cancel", "n1.7:1900000000:0190163d8694739b8d3f8a4d6a1f5d10:orders"),
        ("produce", "orders", "v", "--delay", "1m"),
    ],
    ids=lambda asked: asked[0],
)
def test_where_nobody_is_each_command_says_so_alike(
    command: Command, asked: tuple[str, ...]
) -> None:
    ended = command(*asked, "--server", "127.0.0.1:1", "--timeout", "60")
    assert ended.code == 3
    assert ended.out == "DOWN: no node that was asked answers\n" * (asked == ("status",))
    assert ended.err.startswith("error: UNAVAILABLE: ")
    assert "cannot connect: Connection refused" in ended.err
    assert "127.0.0.1:1" in ended.err
    assert "last error" not in ended.err, "gRPC's own words"


def test_a_command_mistyped_is_guessed(command: Command) -> None:
    assert command("stauts").err == (
        "error: USAGE: no command 'stauts': did you mean status? (delaywheel --help)\n"
    )
    assert "did you mean set-back?" in command("clock", "setback").err
    assert command("topic", "show").err == (
        "error: USAGE: no command delaywheel topic 'show': there is create\n"
    )


def test_an_option_before_its_command_is_refused_with_its_place(command: Command) -> None:
    ended = command("--server", "a:1", "status")
    assert (ended.code, ended.err) == (
        2,
        "error: USAGE: --server comes after a command: delaywheel COMMAND --server …\n",
    )


def test_help_is_a_command_too(command: Command) -> None:
    assert command("help") == command("--help")
    assert command("help", "dead", "list") == command("dead", "list", "--help")


def test_options_stand_anywhere(command: Command) -> None:
    ended = command("get", "--server", "127.0.0.1:1", "n1.1:5:00", "--timeout", "1s", "x")
    assert ended.err.startswith("error: USAGE: unrecognized arguments: x")


def test_a_mistyped_option_is_told_what_was_meant(command: Command) -> None:
    for option in (("--dealy", "5s"), ("--dealy=5s",)):
        ended = command("produce", "orders", "v", *option)
        assert f"{' '.join(option)}: did you mean --delay? (delaywheel produce" in ended.err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (("dead", "list", "shop-dead-g"), "--dead-topic shop-dead-g"),
        (("search", "orders"), "--topic orders"),
        (("export", "orders"), "--topic orders"),
        (("config", "check", "node.toml"), "--config node.toml"),
        (("config", "show", "node.toml"), "--config node.toml"),
        (("doctor", "node.toml"), "--config node.toml"),
        (("status", "n1:4440"), "--server n1:4440"),
    ],
    ids=lambda words: " ".join(words[:-1]) if isinstance(words, tuple) else "",
)
def test_a_word_without_its_option_is_told_which_one(
    command: Command, typed: tuple[str, ...], meant: str
) -> None:
    assert command(*typed).err == (
        f"error: USAGE: unrecognized arguments: {typed[-1]}: did you mean {meant}?"
        f" (delaywheel {' '.join(typed[:-1])} --help)\n"
    )


def test_address_must_be_one(command: Command) -> None:
    ended = command("status", "--server", "nonsense")
    assert ended.code == 2
    assert ended.err.startswith("error: ADDRESS_INVALID: ")


def test_defect_is_named_without_a_traceback(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(arguments: object) -> int:
        raise ZeroDivisionError(f"so wrong: {arguments}")

    monkeypatch.setattr(app_module, "run", broken)
    ended = command("status")
    assert ended.code == 70
    assert ended.err == "error: DEFECT: ZeroDivisionError: so wrong: ('status',)\n"


def test_behind_two_dashes_there_are_no_options(command: Command) -> None:
    """Python 3.11 takes them for options again: it parses twice, the second time without `--`."""
    ended = command("dead", "drop", "--kafka", "127.0.0.1:1", "--cluster", "c", "--", "--execute")
    assert ended.code == 2
    assert "argument PLACE: " in ended.err
    assert "--execute" in ended.err
