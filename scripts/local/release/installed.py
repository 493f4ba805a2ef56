"""A release, installed in an environment that is made from dist/ alone.

None of its programs has this checkout on any path.
"""

from __future__ import annotations

import json
import os
import sys
import venv
from pathlib import Path

from packaging.utils import canonicalize_name

from local.loopback.kafka_jars import cache_folder
from local.release.bill import OURS
from local.release.source import run


class Environment:
    """A virtual environment in a folder of its own, made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        """Makes an empty one, unless it is there."""
        self.folder = folder
        self.programs = folder / "bin"
        self.python = str(self.programs / "python")
        path = f"{self.programs}:/usr/local/bin:/usr/bin:/bin"
        self.variables = {**os.environ, "PATH": path, "HOME": str(folder), "PYTHONPATH": ""}
        if not folder.exists():
            venv.create(folder, with_pip=False, symlinks=True)

    def pip(self, *arguments: str) -> str:
        """Runs pip on it; what it installs was fetched when .venv was made."""
        found = ("--no-index", "--find-links", str(cache_folder() / "wheels"))
        source = found if arguments[0] == "install" else ()
        return self.told(sys.executable, "-m", "pip", "--python", self.python, *arguments, *source)

    def versions(self) -> dict[str, str]:
        """Returns what is installed, ours left out."""
        listed = json.loads(self.pip("list", "--format", "json"))
        found = {canonicalize_name(one["name"]): one["version"] for one in listed}
        return {name: version for name, version in found.items() if name != OURS}

    def told(self, *command: str, **variables: str) -> str:
        """Returns what a command prints, with these variables as well; it must not fail."""
        return run(*command, cwd=self.folder, env=self.variables | variables)
