"""The command `delaywheel`: dispatches to commands, and turns every failure into a name."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from delaywheel_replica.cli.failures import CommandFailure, ExitCode, discard_output
from delaywheel_replica.cli.printing.text import note

_WHAT = "Delay messages for Apache Kafka: accepted now, visible in their topic at their due."
_HELP = ("-h", "--help")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits with its code."""
    _escape_what_cannot_be_encoded()
    # gRPC would log each failed handshake, beside the one line that says what is wrong.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        code = run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
        sys.exit(code)
    except CommandFailure as failure:
        _end(str(failure), failure.exit_code)
    except KeyboardInterrupt:
        _end("INTERRUPTED", 130)
    except BrokenPipeError:
        discard_output()
        sys.exit(ExitCode.DONE)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("delaywheel"):
            raise
        extra = "web" if error.name == "aiohttp" else "cli"
        _end(
            f"NOT_INSTALLED: this needs {error.name}: install delaywheel[{extra}]",
            ExitCode.REFUSED,
        )
    except Exception as error:
        # Only here: it knows the SDK's errors, and with them gRPC.
        from delaywheel_replica.cli.asking.sdk_failures import failure_of  # noqa: PLC0415

        named = failure_of(error)
        if named is not None:
            _end(str(named), named.exit_code)
        if os.environ.get("DELAYWHEEL_TRACEBACK"):
            raise
        _end(f"DEFECT: {type(error).__name__}: {error}", ExitCode.DEFECT)


def run(arguments: Sequence[str]) -> int:
    """Runs one command; returns its exit code, or raises the named CommandFailure."""
    if arguments and arguments[0] == "--version":
        # Only here: it reads the metadata of installed packages.
        from importlib.metadata import version  # noqa: PLC0415

        print(f"delaywheel {version('delaywheel')}")
        return ExitCode.DONE
    # Only here: as above.
    from delaywheel_replica.cli import completing, running  # noqa: PLC0415

    if arguments and arguments[0] == "help":
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in _HELP:
        running.print_help(_WHAT)
        return ExitCode.DONE if arguments else ExitCode.USAGE
    if arguments[0] == completing.ASK and len(arguments) == 3:
        completing.answer(*arguments[1:])
        return ExitCode.DONE
    return running.run(arguments)


def _escape_what_cannot_be_encoded() -> None:
    """Lets a terminal without letters for a text show their numbers."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _end(text: str, exit_code: int) -> NoReturn:
    note(f"error: {text}")
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
