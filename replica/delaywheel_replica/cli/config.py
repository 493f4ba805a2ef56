"""`delaywheel config check` and `config show`: what `serve` would run with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from delaywheel_replica.cleaner.client_check import refused_by_client
from delaywheel_replica.cli.failures import Failure
from delaywheel_replica.cli.options import AsJson
from delaywheel_replica.cli.output import print_json, print_table
from delaywheel_replica.config import Config
from delaywheel_replica.config_sources import ConfigError, load_config

ConfigFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--config", envvar="DELAYWHEEL_CONFIG", metavar="FILE", help="Settings as TOML."),
]
Settings: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="A setting that wins over environment (DELAYWHEEL_NAME) and file, e.g. "
        "--set node_id=n1 --set kafka.bootstrap.servers=127.0.0.1:9092. `config show` lists all.",
    ),
]

app = typer.Typer(
    name="config",
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Check or show the settings that serve would use.",
)


def load(file: Path | None, settings: Sequence[str] | None) -> Config:
    """Reads the settings: flags win over the environment, the environment over the file."""
    flags = {}
    for assignment in settings or ():
        name, equals, value = assignment.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"--set {assignment}: write NAME=VALUE")
        flags[name] = value
    try:
        config = load_config(file=file, flags=flags)
    except ConfigError as error:
        raise Failure("CONFIG_INVALID", str(error)) from error
    if why := refused_by_client(config.kafka_settings):
        raise Failure("CONFIG_INVALID", f"kafka: {why}")
    return config


@app.command()
def check(file: ConfigFile = None, settings: Settings = None) -> None:
    """Say whether the settings are in order; exit code 1 and every fault by name if not."""
    config = load(file, settings)
    print(f"in order: node {config.node_id} of cluster {config.cluster_id}")


@app.command()
def show(file: ConfigFile = None, settings: Settings = None, as_json: AsJson = False) -> None:
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
