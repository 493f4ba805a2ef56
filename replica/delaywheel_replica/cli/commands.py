"""Which commands there are, and where: a command's module is imported when the command is run.

To tell the version or to list the commands needs nothing of gRPC, Kafka or numpy. Help is plain
text: rich would take longer to import than all the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

PLUGIN_GROUP = "delaywheel.commands"


@dataclass(frozen=True, slots=True)
class Listed:
    """One command, or group of commands.

    Attributes:
        module: of this package; it has a function, or a `typer.Typer` if it is a group.
        name: of that function, or of the Typer.
        text: what it does, in the list of all commands: what its own help begins with.
    """

    module: str
    name: str
    text: str


COMMANDS: Final = {
    "serve": Listed(
        "serve",
        "serve",
        "Run one node in the foreground until SIGTERM or Ctrl-C, which stop it cleanly.",
    ),
    "produce": Listed(
        "produce",
        "produce",
        "Send a message that becomes visible in its topic at its due; prints its handle.",
    ),
    "slots": Listed(
        "slots",
        "slots",
        "List the seconds that hold messages, of all nodes: each message once.",
    ),
    "slot": Listed(
        "slots",
        "slot",
        "List the messages of one second, as one node sees them.",
    ),
    "get": Listed(
        "messages",
        "get",
        "Show one message with its content, until its second is deleted.",
    ),
    "cancel": Listed(
        "messages",
        "cancel",
        "Withdraw a pending message; exit code 0 only if it is never delivered.",
    ),
    "status": Listed(
        "status",
        "status",
        "Show the leader, the members, the wheels with their replicas, and how far forwarding is.",
    ),
    "verify": Listed(
        "verify",
        "verify",
        "Check every frame of a data folder; exit code 1 and every finding by place if any is bad.",
    ),
    "config": Listed(
        "config",
        "app",
        "Check or show the settings that serve would use.",
    ),
    "clock": Listed(
        "clock",
        "app",
        "Go on forwarding at the clock, after a leader's clock was ahead.",
    ),
    "node": Listed(
        "nodes",
        "app",
        "Replace a node's data folder, or take a node out.",
    ),
}


class Commands(TyperGroup):
    """Ours, and those of other packages, which join by entry points."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - Typer's signature
        """All names."""
        return [*COMMANDS, *(plugin.name for plugin in _plugins())]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002 - Typer's signature
        """What the list tells of a command; None if there is none of that name."""
        listed = COMMANDS.get(cmd_name)
        if listed is None:
            return _joined(cmd_name)
        return TyperCommand(cmd_name, help=listed.text, short_help=listed.text)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The command that is to be run."""
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and command.name in COMMANDS:
            command = loaded(command.name)
        return name, command, rest


def loaded(name: str) -> Any:
    """One of our commands with its module."""
    listed = COMMANDS[name]
    found = getattr(import_module(f"delaywheel_replica.cli.{listed.module}"), listed.name)
    if isinstance(found, typer.Typer):
        return typer.main.get_group(found)
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name)(found)
    return typer.main.get_command(single)


def _joined(name: str) -> Any:
    for plugin in _plugins():
        if plugin.name == name:
            group = typer.main.get_group(plugin.load())
            group.name = name
            group.short_help = group.help
            return group
    return None


def _plugins() -> Any:
    # Only here: it reads what is told of every package that is installed.
    from importlib.metadata import entry_points  # noqa: PLC0415

    return entry_points(group=PLUGIN_GROUP)
