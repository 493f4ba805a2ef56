"""Reads a node's settings, for `serve` and for those who ask what it would read.

Each node begins with it: what takes long to import and is needed for less stays out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from delaywheel_replica.cli.failures import CommandFailure
from delaywheel_replica.config import Config
from delaywheel_replica.config_faults import Fault
from delaywheel_replica.config_sources import ConfigError
from delaywheel_replica.node_config import load_node_config


def load(
    file: Path | None,
    settings: Sequence[tuple[str, str]],
    *checks: Callable[[Config], Iterable[Fault]],
) -> Config:
    """Reads the settings: flags win over the environment, the environment over the file."""
    try:
        return load_node_config(file, dict(settings), *checks)
    except ConfigError as error:
        lines = str(error).splitlines()
        text = lines[0] if len(lines) == 1 else "".join(f"\n  {line}" for line in lines)
        raise CommandFailure("CONFIG_INVALID", text) from error
