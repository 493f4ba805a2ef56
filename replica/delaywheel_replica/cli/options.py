"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

Server: TypeAlias = Annotated[
    str,
    typer.Option(
        "--server",
        envvar="DELAYWHEEL_SERVER",
        metavar="ADDRESS",
        help="Nodes to ask, HOST:PORT with commas between; the first that answers counts.",
    ),
]
DEFAULT_SERVER = "127.0.0.1:7420"

AsJson: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print JSON, whose shape does not change.")
]

DataFolder: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="DIR",
        exists=True,
        file_okay=False,
        help="Read this data folder; its node need not run.",
    ),
]

Timeout: TypeAlias = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", min=0.1, help="How long to wait.")
]
DEFAULT_TIMEOUT_S = 10.0
