"""Reads a running node's settings again: ``python -m delaywheel_replica.reread``.

The supervisor starts this process, since it has no library to read settings with. It prints what it
read (``Config.resolved``) and exits with 0; or the faults, one a line, and exits with 1.
"""

import json
import os
import sys
from pathlib import Path

from delaywheel_replica.cleaner.kafka.client_check import client_faults
from delaywheel_replica.config_sources import ConfigError, load_config
from delaywheel_replica.process.inheritance import RESOLVED_VARIABLE, SOURCES_VARIABLE
from delaywheel_replica.server.access.faults import access_faults, certificate_faults


def main() -> int:
    """Reads the sources that the environment names."""
    sources = json.loads(os.environ.pop(SOURCES_VARIABLE))
    os.environ.pop(RESOLVED_VARIABLE, None)  # otherwise it would be read as a setting
    file = None if sources["file"] is None else Path(sources["file"])
    try:
        config = load_config(
            file=file,
            flags=dict(sources["flags"]),
            checks=[client_faults, certificate_faults, access_faults],
        )
    except ConfigError as error:
        print(error)  # noqa: T201 - the supervisor reads it
        return 1
    print(config.resolved())  # noqa: T201 - as above
    return 0


if __name__ == "__main__":
    sys.exit(main())
