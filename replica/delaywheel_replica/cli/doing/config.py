"""`delaywheel config check` and `config show`: what `serve` would run with."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from stat import S_ISDIR
from typing import Any

from delaywheel_replica.cli.doing.checking.items import print_items
from delaywheel_replica.cli.doing.checking.kafka import kafka_items
from delaywheel_replica.cli.doing.checking.machine import existing_folder, machine_items
from delaywheel_replica.cli.doing.checking.peers import peer_items
from delaywheel_replica.cli.doing.loading import load
from delaywheel_replica.cli.failures import ExitCode
from delaywheel_replica.cli.parsing import usage
from delaywheel_replica.cli.printing.tables import print_json
from delaywheel_replica.cli.printing.text import say
from delaywheel_replica.config import Config
from delaywheel_replica.config_faults import Fault
from delaywheel_replica.hiding import HIDDEN
from delaywheel_replica.process.open_files import is_open, open_to_all


def check(
    file: Path | None,
    settings: Sequence[tuple[str, str]],
    *,
    connect: bool,
    topics: Sequence[str],
    as_json: bool,
) -> ExitCode:
    """Says whether the settings are in order, and whether what they name is."""
    if (topics or as_json) and not connect:
        raise usage("--topic and --json are for --connect")
    config = load(file, settings, _data_folder)
    if not as_json:
        say(f"settings in order: node {config.node_id} of cluster {config.cluster_id}")
    if not connect:
        return ExitCode.DONE
    items = chain(machine_items(config), peer_items(config), kafka_items(config, topics))
    return print_items(items, as_json=as_json)


def _data_folder(config: Config) -> Iterator[Fault]:
    """Checks whether a node could write its data folder here; it need not exist yet."""
    try:
        folder = existing_folder(config.data_dir)
        mode = folder.stat().st_mode
        if not S_ISDIR(mode):
            fault = f"{folder} is not a folder"
        elif not os.access(folder, os.W_OK | os.X_OK):
            fault = f"{folder} cannot be written by this user"
        elif folder == config.data_dir and is_open(folder):
            fault = open_to_all(folder)
        else:
            return
    except OSError as error:
        fault = (error.strerror or str(error)).lower()
    yield Fault(f"data_dir {config.data_dir}: {fault}", ("data_dir",))


def show(file: Path | None, settings: Sequence[tuple[str, str]], *, as_json: bool) -> None:
    """Show every setting, defaults included, as `serve` reads them; secrets are masked."""
    config = load(file, settings)
    shown = config.shown()
    if as_json:
        print_json(shown)
        return
    tables = {name: value for name, value in shown.items() if isinstance(value, dict)}
    for name, value in shown.items():
        if name not in tables:
            is_hidden = name == "ledger_uri" and value != config.ledger_uri
            say(_assignment(name, value, is_hidden=is_hidden))
    for table, entries in tables.items():
        say(f"\n[{table}]")
        for name, value in entries.items():
            say(_assignment(toml(name), value, is_hidden=value == HIDDEN, table=table))


def _assignment(name: str, value: Any, *, is_hidden: bool, table: str = "") -> str:
    """Returns a line of TOML; a comment for what it cannot have, or must not."""
    if value is None:
        return f"# {name}: none"
    if is_hidden:
        parts = [part for part in (table, name.strip('"').replace(".", "_")) if part]
        variable = f"DELAYWHEEL_{'__'.join(parts).upper()}"
        return f"# {name} = {toml(value)} is not shown: give it as {variable}"
    return f"{name} = {toml(value)}"


def toml(value: Any) -> str:
    """Returns a value in TOML, whose texts, numbers and lists of them are written as JSON's."""
    return json.dumps(value, ensure_ascii=False)
