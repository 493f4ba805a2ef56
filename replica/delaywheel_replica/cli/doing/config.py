"""`delaywheel config check` and `config show`: what `serve` would run with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from delaywheel_replica.cleaner.kafka.client_check import client_faults
from delaywheel_replica.cli.failures import Failure
from delaywheel_replica.cli.printing.tables import print_json, print_table
from delaywheel_replica.config import Config
from delaywheel_replica.config_sources import ConfigError, load_config


def load(file: Path | None, settings: Sequence[tuple[str, str]]) -> Config:
    """Reads the settings: flags win over the environment, the environment over the file."""
    try:
        return load_config(file=file, flags=dict(settings), checks=[client_faults])
    except ConfigError as error:
        lines = str(error).splitlines()
        text = lines[0] if len(lines) == 1 else "".join(f"\n  {line}" for line in lines)
        raise Failure("CONFIG_INVALID", text) from error


def check(file: Path | None, settings: Sequence[tuple[str, str]]) -> None:
    """Say whether the settings are in order; exit code 1 and every fault by name if not."""
    config = load(file, settings)
    print(f"in order: node {config.node_id} of cluster {config.cluster_id}")


def show(file: Path | None, settings: Sequence[tuple[str, str]], *, as_json: bool) -> None:
    """Show every setting, defaults included; secrets are masked."""
    shown = load(file, settings).shown()
    if as_json:
        print_json(shown)
        return
    rows: list[tuple[str, object]] = []
    for name, value in shown.items():
        if isinstance(value, dict):
            rows += [(f"{name}.{key}", str(part)) for key, part in value.items()]
        else:
            rows.append((name, None if value is None else str(value)))
    print_table(["setting", "value"], rows)
