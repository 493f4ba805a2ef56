"""The command `delaywheel`: turns every failure of a command into a name."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from delaywheel_replica.cli.commands import Commands
from delaywheel_replica.cli.failures import ExitCode, Failure


def _print_version(wanted: bool) -> None:
    if wanted:
        # Only here: a third of what it takes to show help.
        from importlib.metadata import version  # noqa: PLC0415

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
        cls=Commands,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits with its code."""
    try:
        build_app()(args=arguments, prog_name="delaywheel")
    except Failure as failure:
        _end(str(failure), failure.exit_code)
    except KeyboardInterrupt:
        _end("INTERRUPTED", 130)
    except BrokenPipeError:
        # Whoever read our output has enough of it; nothing more may be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.DONE)
    except Exception as error:
        # Only here: it knows the SDK's errors, and with them gRPC.
        from delaywheel_replica.cli.sdk_failures import failure_of  # noqa: PLC0415

        named = failure_of(error)
        if named is not None:
            _end(str(named), named.exit_code)
        if os.environ.get("DELAYWHEEL_TRACEBACK"):
            raise
        _end(f"DEFECT: {type(error).__name__}: {error}", ExitCode.DEFECT)


def _end(text: str, exit_code: int) -> NoReturn:
    print(f"error: {text}", file=sys.stderr)
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
