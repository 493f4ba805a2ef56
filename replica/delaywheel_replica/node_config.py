"""Reads a node's settings, with every check: for `serve`, and again for a node that runs.

The supervisor has no library to read settings with: it runs this module, which prints how they
differ from those that it has, and exits with 0; or prints the faults, one a line, and exits with 1.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from delaywheel_replica.cleaner.kafka.client_check import client_faults
from delaywheel_replica.config import RELOADABLE, Config
from delaywheel_replica.config_faults import Fault
from delaywheel_replica.config_sources import ConfigError, load_config
from delaywheel_replica.process.inheritance import RESOLVED_VARIABLE, SOURCES_VARIABLE
from delaywheel_replica.server.access.faults import access_faults, certificate_faults


def load_node_config(
    file: Path | None, flags: Mapping[str, Any], *checks: Callable[[Config], Iterable[Fault]]
) -> Config:
    """Reads the settings; see `load_config`."""
    own = (client_faults, certificate_faults, access_faults)
    return load_config(file=file, flags=flags, checks=[*own, *checks])


def main() -> int:
    """Reads the sources that the environment names."""
    sources = json.loads(os.environ.pop(SOURCES_VARIABLE))
    known = json.loads(os.environ.pop(RESOLVED_VARIABLE))
    file = None if sources["file"] is None else Path(sources["file"])
    try:
        read = json.loads(load_node_config(file, dict(sources["flags"])).resolved())
    except ConfigError as error:
        print(error)  # noqa: T201 - the supervisor reads it
        return 1
    changed = sorted(name for name in read if read[name] != known[name])
    difference = {
        "taken": [name for name in changed if name in RELOADABLE],
        "kept": [name for name in changed if name not in RELOADABLE],
        "settings": {name: read[name] for name in RELOADABLE},
    }
    print(json.dumps(difference))  # noqa: T201 - as above
    return 0


if __name__ == "__main__":
    sys.exit(main())
