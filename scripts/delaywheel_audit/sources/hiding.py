"""Removes secrets given on a command line from all output."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator

from delaywheel_replica.hiding import HIDDEN, is_secret, shown


def shown_command(arguments: Iterable[str]) -> str:
    """Returns a command line without secret settings and secrets in URIs."""
    return shlex.join(["reconcile", *_shown_arguments(arguments)])


def without_secrets(text: str, uri: str) -> str:
    """Returns a text without the secrets of a URI."""
    return text.replace(uri, shown(uri))


def _shown_arguments(arguments: Iterable[str]) -> Iterator[str]:
    pending = ""
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if pending:
            yield _HIDES[pending](argument)
            pending = ""
        elif argument in _HIDES:
            yield argument
            pending = argument
        elif option in _HIDES and equals:
            yield f"{option}={_HIDES[option](value)}"
        else:
            yield argument


def _shown_setting(text: str) -> str:
    name = text.partition("=")[0]
    return f"{name}={HIDDEN}" if is_secret(name) else text


_HIDES = {"--kafka-setting": _shown_setting, "--ledger": shown, "--output": shown}
