"""`delaywheel config check` and `config show`: what `serve` would run with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from stat import S_ISDIR

from delaywheel_replica.cleaner.kafka.client_check import client_faults
from delaywheel_replica.cli.failures import Failure
from delaywheel_replica.cli.printing.tables import print_json, print_table
from delaywheel_replica.cli.printing.text import say
from delaywheel_replica.config import Config
from delaywheel_replica.config_faults import Fault
from delaywheel_replica.config_sources import ConfigError, load_config


def load(
    file: Path | None,
    settings: Sequence[tuple[str, str]],
    *checks: Callable[[Config], Iterable[Fault]],
) -> Config:
    """Reads the settings: flags win over the environment, the environment over the file."""
    try:
        return load_config(file=file, flags=dict(settings), checks=[client_faults, *checks])
    except ConfigError as error:
        lines = str(error).splitlines()
        text = lines[0] if len(lines) == 1 else "".join(f"\n  {line}" for line in lines)
        raise Failure("CONFIG_INVALID", text) from error


def check(file: Path | None, settings: Sequence[tuple[str, str]]) -> None:
    """Say whether the settings are in order; exit code 1 and every fault by name if not."""
    config = load(file, settings, _data_folder)
    say(f"in order: node {config.node_id} of cluster {config.cluster_id}")


def _data_folder(config: Config) -> Iterator[Fault]:
    """Checks whether a node could write its data folder here; it need not exist yet."""
    folder = config.data_dir
    try:
        while True:
            try:
                mode = folder.stat().st_mode
                break
            except FileNotFoundError:
                folder = folder.parent
        if not S_ISDIR(mode):
            fault = f"{folder} is not a folder"
        elif not os.access(folder, os.W_OK | os.X_OK):
            fault = f"{folder} cannot be written by this user"
        else:
            return
    except OSError as error:
        fault = (error.strerror or str(error)).lower()
    yield Fault(f"data_dir {config.data_dir}: {fault}", ("data_dir",))


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
