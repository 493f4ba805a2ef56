"""Maps the SDK's errors to ends of commands."""

from __future__ import annotations

from delaywheel.errors import (
    CallFailedError,
    DelaywheelError,
    MessageInvalidError,
    RefusedError,
    TimedOutError,
)
from delaywheel_replica.cli.failures import CommandFailure, ExitCode


def failure_of(error: Exception) -> CommandFailure | None:
    """Returns how a command ends that raised this; None if it is no error of the SDK."""
    if not isinstance(error, DelaywheelError):
        return None
    if not error.outcome_known:
        text = str(error).removeprefix("OUTCOME_UNKNOWN: ")
        return CommandFailure("OUTCOME_UNKNOWN", text, ExitCode.UNKNOWN_OUTCOME)
    match error:
        case TimedOutError():
            return CommandFailure("UNAVAILABLE", str(error), ExitCode.UNAVAILABLE)
        case RefusedError():
            text = str(error).removeprefix(f"{error.reason}: ")
            return CommandFailure(str(error.reason), text, _exit_code_of(error))
        case CallFailedError():
            return CommandFailure(error.code.name, str(error).removeprefix(f"{error.code.name}: "))
        case _:
            return CommandFailure("FAILED", str(error))


def _exit_code_of(error: RefusedError) -> ExitCode:
    if isinstance(error, MessageInvalidError):
        return ExitCode.USAGE
    return ExitCode.UNAVAILABLE if error.retry_helps else ExitCode.REFUSED
