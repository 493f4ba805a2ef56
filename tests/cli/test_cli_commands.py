"""Every command is documented; commands of other packages join; failures have names."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest
import typer

from delaywheel_replica.cli import app as app_module
from delaywheel_replica.cli.commands import COMMANDS as OURS
from delaywheel_replica.cli.commands import PLUGIN_GROUP, loaded
from support.command import Command

COMMANDS = {
    "serve",
    "produce",
    "slots",
    "slot",
    "get",
    "cancel",
    "status",
    "verify",
    "config check",
    "config show",
    "clock set-back",
    "node replace",
    "node remove",
}


def all_commands() -> Iterator[str]:
    for name in OURS:
        command = loaded(name)
        inside = getattr(command, "commands", None)
        yield from [name] if inside is None else [f"{name} {inner}" for inner in inside]


def test_these_are_the_commands() -> None:
    assert set(all_commands()) == COMMANDS


@pytest.mark.parametrize("name", sorted(OURS))
def test_the_list_of_all_commands_tells_what_their_own_help_begins_with(name: str) -> None:
    assert OURS[name].text == loaded(name).help.partition("\n\n")[0].replace("\n", " ")


def test_help_and_version_need_nothing_of_what_commands_need() -> None:
    """A shell's completion asks at each key."""
    heavy = {"grpc", "numpy", "pydantic", "confluent_kafka", "pyarrow", "structlog", "asyncio"}
    told = "import sys; from delaywheel_replica.cli.app import main\n"
    told += "try: main(sys.argv[1:])\nexcept SystemExit: print('have', *sys.modules)\n"
    for asked in ("--version", "--help"):
        ended = subprocess.run(
            [sys.executable, "-c", told, asked], capture_output=True, text=True, check=True
        )
        *shown, have = ended.stdout.splitlines()
        assert shown
        assert not heavy & set(have.split())


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_command_is_documented(name: str, command: Command) -> None:
    ended = command(*name.split(), "--help")
    assert ended.code == 0
    assert f"Usage: delaywheel {name}" in ended.out


READING = sorted(COMMANDS - {"serve", "config check"})


@pytest.mark.parametrize("name", READING)
def test_command_that_reads_prints_json_too(name: str, command: Command) -> None:
    assert "--json" in command(*name.split(), "--help").out


ASKING = {"produce", "slots", "slot", "get", "cancel", "status", "node replace", "node remove"}


@pytest.mark.parametrize("name", sorted(ASKING))
def test_command_that_asks_a_node_takes_its_address(name: str, command: Command) -> None:
    told = command(*name.split(), "--help").out
    assert "--server" in told
    assert "DELAYWHEEL_SERVER" in told


def test_version(command: Command) -> None:
    ended = command("--version")
    assert ended.code == 0
    assert ended.out.startswith("delaywheel 0.")


def test_without_a_command_help_is_shown(command: Command) -> None:
    ended = command()
    assert "Usage: delaywheel" in ended.out + ended.err


def test_commands_of_other_packages_join(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = typer.Typer(help="Keeps the books.")

    @plugin.command()
    def audit() -> None:
        """Audits."""
        print("audited")  # noqa: T201 - what a command does

    @plugin.callback()
    def books() -> None:
        """Keeps the books."""

    class Entry:
        name = "books"

        def load(self) -> typer.Typer:
            return plugin

    def entry_points(*, group: str) -> list[Entry]:
        return [Entry()] if group == "delaywheel.commands" else []

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    assert command("books", "audit").out == "audited\n"
    assert "books" in command("--help").out


def test_entry_point_group_is_what_packages_name() -> None:
    assert EntryPoint("books", "x:app", PLUGIN_GROUP).group == "delaywheel.commands"


def test_wrong_usage_is_exit_code_2(command: Command) -> None:
    ended = command("slot")
    assert ended.code == 2
    assert "SECOND" in ended.err


def test_nobody_there_is_unavailable_by_name(command: Command) -> None:
    ended = command("status", "--server", "127.0.0.1:1", "--timeout", "60")
    assert ended.code == 3
    assert ended.err.startswith("error: UNAVAILABLE: ")
    assert "127.0.0.1:1" in ended.err
    assert "Traceback" not in ended.err


def test_address_must_be_one(command: Command) -> None:
    ended = command("status", "--server", "nonsense")
    assert ended.code == 2
    assert ended.err.startswith("error: ADDRESS_INVALID: ")


def test_defect_is_named_without_a_traceback(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> typer.Typer:
        raise ZeroDivisionError("so wrong")

    monkeypatch.setattr(app_module, "build_app", broken)
    ended = command("status")
    assert ended.code == 70
    assert ended.err == "error: DEFECT: ZeroDivisionError: so wrong\n"
