"""Parses command lines: argparse with help for people, named errors, and completion.

`scripts/` parse their command lines with this library too. It takes a third of Typer's import time,
and a shell waits for it at each key that completes something.
"""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from delaywheel_replica.cli.failures import CommandFailure, ExitCode
from delaywheel_replica.patterns import did_you_mean

Completer: TypeAlias = Callable[[], Iterable[str]]
"""Takes the typed part of an argument; returns possible values."""

ArgumentGroup: TypeAlias = argparse._ArgumentGroup  # noqa: SLF001 - it has no other name
"""The type that `add_argument_group` returns."""

_WIDEST = 100


@dataclass(frozen=True, slots=True)
class Command:
    """One command.

    Attributes:
        text: What the command does, in one line.
        run: `module:function` that does it: imported when the command runs, and called with the
            arguments by name. It returns the exit code, or None for 0.
        examples: Command lines that work, each below a comment that says what it does.
        reads_itself: The function is called with the list of arguments, once they are validated.
    """

    text: str
    run: str
    declare: Callable[[Parser], None]
    more: str = ""
    examples: str = ""
    reads_itself: bool = False


@dataclass(frozen=True, slots=True)
class CommandGroup:
    """Commands that share their first word."""

    text: str
    commands: Mapping[str, Command]

    @property
    def examples(self) -> str:
        """The examples of its commands."""
        return "\n\n".join(
            textwrap.dedent(each.examples).strip() for each in self.commands.values()
        )


class _NoOption(str):
    """A word that is no option, however it begins."""

    __slots__ = ()


class Parser(argparse.ArgumentParser):
    """Parses the arguments of one command.

    Attributes:
        option_of_word: The option that a word too many probably belongs to; empty: nobody knows.
    """

    def __init__(self, prog: str, command: Command) -> None:
        super().__init__(
            prog=prog,
            description=f"{command.text}\n\n{command.more}",
            epilog=_example_block(command.examples) if command.examples else None,
            formatter_class=_Help,
            allow_abbrev=False,
            add_help=False,
        )
        # As in Python 3.14: what begins with a minus and a digit, such as -5s, is a value, and
        # what parses it says what is wrong with it.
        self._negative_number_matcher = re.compile(r"-\.?\d")
        self.declared: list[argparse.Action] = []
        self.option_of_word = ""
        self._completers: dict[str, Completer] = {}
        self._after: list[Callable[[dict[str, Any]], None]] = []
        self._used: set[str] = {"help"}
        command.declare(self)
        self.argument("-h", "--help", action="help", help="show this help")

    def argument(
        self,
        *names: str,
        complete: Completer | None = None,
        group: ArgumentGroup | None = None,
        **options: Any,
    ) -> None:
        """Adds an argument, as `add_argument` does.

        `complete` returns possible values; help shows the argument in its group.
        """
        action = (group or self).add_argument(*names, **options)
        self.declared.append(action)
        if complete is not None:
            self._completers[action.dest] = complete

    def after(self, change: Callable[[dict[str, Any]], None], *, uses: Iterable[str]) -> None:
        """Lets a function change the arguments before the command gets them; some it uses up."""
        self._after.append(change)
        self._used.update(uses)

    @property
    def names(self) -> set[str]:
        """The names of the arguments that the command gets."""
        return {action.dest for action in self.declared} - self._used

    def values_of(self, action: argparse.Action) -> Iterable[str]:
        """Returns possible values of an argument, as far as they are known."""
        if action.dest in self._completers:
            return self._completers[action.dest]()
        return [str(choice) for choice in action.choices or ()]

    def read(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Returns the arguments by name; options may stand before, between or after them.

        Behind `--` there are none. The CommandFailure USAGE says what is wrong.
        """
        own = list(arguments)
        end = own.index("--") if "--" in own else len(own)
        words = [*own[:end], *map(_NoOption, own[end + 1 :])]
        named, unknown = self.parse_known_intermixed_args(words)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._meant_by(unknown[0])}")
        return vars(named)

    def _meant_by(self, unknown: str) -> str:
        if self.option_of_word and not unknown.startswith("-"):
            return f": did you mean {self.option_of_word} {unknown}?"
        flags = [flag for action in self.declared for flag in action.option_strings]
        return did_you_mean(unknown.partition("=")[0], flags)

    def completed(self, named: dict[str, Any]) -> dict[str, Any]:
        """Returns what the command gets of the arguments read (see `after`)."""
        for change in self._after:
            change(named)
        return named

    def _parse_optional(self, arg_string: str) -> Any:
        # Python 3.11 and 3.12 parse twice, and the second time without `--`.
        is_none = isinstance(arg_string, _NoOption)
        return None if is_none else super()._parse_optional(arg_string)

    def error(self, message: str) -> NoReturn:
        """Ends with a named reason instead of a page of usage."""
        raise usage(f"{message} ({self.prog} --help)")


def usage(message: str) -> CommandFailure:
    """Returns the failure for an invalid command line."""
    return CommandFailure("USAGE", message, ExitCode.USAGE)


def print_list(title: str, commands: Iterable[tuple[str, str]], examples: str) -> None:
    """Prints help that lists commands with what they do, and examples."""
    rows = [*commands, ("-h, --help", "Show this help.")]
    width = max(len(name) for name, _ in rows)
    print(title)
    for name, text in rows:
        head = f"  {name:{width}}  "
        print(
            textwrap.fill(text, _columns(), initial_indent=head, subsequent_indent=" " * len(head))
        )
    print(f"\n{_example_block(examples)}")


class _Help(argparse.HelpFormatter):
    """Help that keeps paragraphs and examples as they are."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=_columns())

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        super().add_usage(usage, actions, groups, prefix or "Usage: ")

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip().split("\n\n")
        return "\n\n".join(
            part
            if part.startswith(("  ", "Examples:"))
            else textwrap.fill(
                " ".join(part.split()), width, initial_indent=indent, break_on_hyphens=False
            )
            for part in paragraphs
        )


def _columns() -> int:
    return min(_WIDEST, shutil.get_terminal_size().columns)


def _example_block(text: str) -> str:
    return f"Examples:\n{textwrap.indent(textwrap.dedent(text).strip(), '  ')}"
