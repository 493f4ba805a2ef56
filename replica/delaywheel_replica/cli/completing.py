"""Shell completion: commands, options, and known values.

The shell asks at each key, so nothing here imports what commands need to do their work.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable, Sequence
from typing import Final

from delaywheel_replica.cli.commands import COMMANDS, all_commands, find
from delaywheel_replica.cli.parsing import Command, CommandGroup, Parser

ASK: Final = "complete"
"""The word by which the shell's function asks; not a command for people."""

_BASH = """\
_delaywheel() {
  local IFS=$'\\n'
  COMPREPLY=($(delaywheel complete "${COMP_LINE:0:COMP_POINT}" "$COMP_WORDBREAKS" 2>/dev/null))
  if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=.] ]]; then compopt -o nospace; fi
}
complete -o default -F _delaywheel delaywheel
"""
_SCRIPTS: Final = {"bash": _BASH, "zsh": f"autoload -U +X bashcompinit && bashcompinit\n{_BASH}"}


def script(shell: str) -> None:
    """Prints the script for the shell to source."""
    print(_SCRIPTS[shell], end="")


def answer(line: str, breaks: str) -> None:
    """Prints completions of an unfinished command line (up to the cursor, with the program's name).

    They replace what follows the last of the characters at which the shell breaks words.
    """
    words = _words(line)[1:]
    current = words.pop() if words and not line[-1:].isspace() else ""
    kept = max((current.rfind(mark) for mark in breaks if mark in "=:"), default=-1) + 1
    for candidate in sorted(set(candidates(words, current))):
        sys.stdout.write(f"{candidate[kept:]}\n")


def candidates(words: Sequence[str], current: str) -> Iterable[str]:
    """Returns completions of the word being typed.

    `words` are those before it, without the program's name.
    """
    return [candidate for candidate in _candidates(words, current) if candidate.startswith(current)]


def _candidates(words: Sequence[str], current: str) -> Iterable[str]:
    if not words:
        if any(name.startswith(current) for name in COMMANDS if current):
            return COMMANDS
        return [*all_commands(), "--help", "--version"]
    found = find(words[0])
    if isinstance(found, CommandGroup):
        if len(words) == 1:
            return [*found.commands, "--help"]
        found, words = found.commands.get(words[1]), words[1:]
    return [] if found is None else _of_command(found, words[1:], current)


def _of_command(command: Command, words: Sequence[str], current: str) -> Iterable[str]:
    parser = Parser("delaywheel", command)
    flags = {flag: action for action in parser.declared for flag in action.option_strings}
    flag, equals, _ = current.partition("=")
    if equals and flag in flags:
        return [f"{flag}={value}" for value in parser.values_of(flags[flag])]
    places = [action for action in parser.declared if not action.option_strings]
    used: set[str] = set()
    waiting: argparse.Action | None = None
    for word in words:
        name = word.partition("=")[0]
        if waiting is not None:
            waiting = None
        elif name in flags:
            used.add(flags[name].dest)
            waiting = flags[name] if flags[name].nargs != 0 and name == word else None
        elif places:
            places.pop(0)
    if waiting is not None:
        return parser.values_of(waiting)
    if current.startswith("-"):
        return [
            flag
            for flag, action in flags.items()
            # A list is what a repeatable flag fills.
            if flag.startswith("--")
            and (action.dest not in used or isinstance(action.default, list))
        ]
    return parser.values_of(places[0]) if places else []


def _words(line: str) -> list[str]:
    """Splits a line as a shell does; a quote may still be open."""
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()
