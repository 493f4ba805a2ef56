"""The command `delaywheel`: puts the commands together and turns every failure into a name.

Commands of other packages join by the entry-point group "delaywheel.commands": each entry names
a `typer.Typer`, which becomes the group of commands of the entry's name. So imports still go one
way: this package knows none of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points, version
from typing import Annotated

import typer

from delaywheel.errors import DelaywheelError
from delaywheel_replica.cli import config, messages, nodes, produce, serve, slots, status, verify
from delaywheel_replica.cli.failures import ExitCode, Failure

PLUGIN_GROUP = "delaywheel.commands"


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"delaywheel {version('delaywheel')}")
        raise typer.Exit


def _root(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Delay messages for Apache Kafka: accepted now, visible in their topic at their due."""


def build_app() -> typer.Typer:
    """All commands, those of other packages included."""
    app = typer.Typer(
        name="delaywheel",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    commands: tuple[Callable[..., None], ...] = (
        serve.serve,
        produce.produce,
        slots.slots,
        slots.slot,
        messages.get,
        messages.cancel,
        status.status,
        verify.verify,
    )
    for command in commands:
        app.command()(command)
    app.add_typer(config.app)
    app.add_typer(nodes.app)
    for plugin in entry_points(group=PLUGIN_GROUP):
        app.add_typer(plugin.load(), name=plugin.name)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits with its code."""
    try:
        build_app()(args=arguments, prog_name="delaywheel")
    except Failure as failure:
        _end(str(failure), failure.exit_code)
    except DelaywheelError as error:
        named = Failure.of(error)
        _end(str(named), named.exit_code)
    except KeyboardInterrupt:
        _end("INTERRUPTED", 130)
    except BrokenPipeError:
        # Whoever read our output has enough of it; nothing more may be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.DONE)
    except Exception as error:
        if os.environ.get("DELAYWHEEL_TRACEBACK"):
            raise
        _end(f"DEFECT: {type(error).__name__}: {error}", ExitCode.DEFECT)


def _end(text: str, exit_code: int) -> None:
    print(f"error: {text}", file=sys.stderr)
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
