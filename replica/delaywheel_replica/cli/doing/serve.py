"""`delaywheel serve`: turns the process into the supervisor of one node."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from delaywheel_replica.cli.doing.loading import load
from delaywheel_replica.cli.failures import CommandFailure, ExitCode
from delaywheel_replica.node import exec_node


def serve(file: Path | None, settings: Sequence[tuple[str, str]]) -> None:
    """Run one node in the foreground until SIGTERM or Ctrl-C, which stop it cleanly."""
    try:
        config = load(file, settings)
    except CommandFailure as failure:
        # What starts nodes tells by the code that starting this one again is of no use.
        failure.exit_code = ExitCode.WRONG_SETTINGS
        raise
    sys.stdout.flush()
    # By exec: the supervisor lives as long as the node, and needs none of the modules that reading
    # the settings has imported.
    exec_node(config.resolved(), file, settings)
