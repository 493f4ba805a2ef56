"""Finds the command that a command line names, and runs it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from delaywheel_replica.cli.commands import all_commands, find
from delaywheel_replica.cli.failures import ExitCode
from delaywheel_replica.cli.parsing import Command, CommandGroup, Parser, print_list, usage
from delaywheel_replica.patterns import did_you_mean

_HELP = ("-h", "--help")
_FIRST = """
    # A message in half an hour, to the node at 127.0.0.1:7420
    handle=$(delaywheel produce orders 'still there?' --delay 30m)
    delaywheel get "$handle"
    delaywheel cancel "$handle"

    # How the cluster stands
    delaywheel status
"""


def print_help(what: str) -> None:
    """Lists all commands."""
    print_list(
        f"Usage: delaywheel COMMAND ...\n\n{what}\n\nCommands (delaywheel COMMAND --help):",
        [
            *((name, command.text) for name, command in all_commands().items()),
            ("--version", "Print the version."),
        ],
        _FIRST,
    )


def run(arguments: Sequence[str]) -> int:
    """Runs a command; returns its exit code."""
    name, rest = arguments[0], list(arguments[1:])
    found = find(name)
    prog = f"delaywheel {name}"
    if isinstance(found, CommandGroup):
        if not rest or rest[0] in _HELP:
            title = f"Usage: {prog} COMMAND ...\n\n{found.text}\n\nCommands:"
            commands = found.commands
            print_list(title, [(inner, c.text) for inner, c in commands.items()], found.examples)
            return ExitCode.DONE if rest else ExitCode.USAGE
        group, name = found, rest.pop(0)
        found = group.commands.get(name)
        if found is None:
            there = did_you_mean(name, group.commands) or f": there is {', '.join(group.commands)}"
            raise usage(f"no command {prog} {name!r}{there}")
        prog = f"{prog} {name}"
    if found is None:
        if name.startswith("-"):
            raise usage(f"{name} comes after a command: delaywheel COMMAND {name} …")
        raise usage(f"no command {name!r}{did_you_mean(name, all_commands())} (delaywheel --help)")
    return _do(prog, found, rest)


def _do(prog: str, command: Command, arguments: list[str]) -> int:
    parser = Parser(prog, command)
    named = parser.completed(parser.read(arguments))
    module, _, function = command.run.partition(":")
    do = getattr(import_module(module), function)
    code = do(arguments) if command.reads_itself else do(**named)
    return ExitCode.DONE if code is None else code
