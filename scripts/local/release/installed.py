"""A release, installed in an environment that is made from dist/ alone.

None of its programs has this checkout on any path.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

from packaging.utils import canonicalize_name

from local.loopback.kafka_jars import cache_folder
from local.release.bill import OURS
from local.release.source import NotReleasableError, NotRunError

PATIENCE_S = 600.0
"""For all that one command does: to install Spark takes minutes on a busy machine."""


class Environment:
    """A virtual environment in a folder of its own, made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        """Makes an empty one, unless it is there."""
        self.folder = folder
        self.programs = folder / "bin"
        self.python = str(self.programs / "python")
        self._pip = (sys.executable, "-m", "pip", "--python", self.python)
        if not folder.exists():
            venv.create(folder, with_pip=False, symlinks=True)

    @property
    def variables(self) -> dict[str, str]:
        """What its programs find in their environment."""
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        path = f"{self.programs}:/usr/local/bin:/usr/bin:/bin"
        return kept | {"PATH": path, "HOME": str(self.folder)}

    def install(self, wheel: Path, extra: str, pins: Path) -> None:
        """Installs a wheel and all that it requires, from what is cached, else from an index."""
        wanted = ("--constraint", str(pins), f"{wheel}[{extra}]" if extra else str(wheel))
        cached = ("--no-index", "--find-links", str(cache_folder() / "wheels"))
        for source in (cached, ()):
            done = self.run(*self._pip, "install", "--quiet", *source, *wanted)
            if done.returncode == 0:
                return
        raise NotRunError(f"pip does not install [{extra}]: {done.stderr.splitlines()[-1:]}")

    def versions(self) -> dict[str, str]:
        """Returns what is installed, ours left out."""
        listed = json.loads(self.told(*self._pip, "list", "--format", "json"))
        found = {canonicalize_name(one["name"]): one["version"] for one in listed}
        return {name: version for name, version in found.items() if name != OURS}

    def told(self, *command: str, **variables: str) -> str:
        """Returns what a command prints, with these variables as well; it must not fail."""
        done = self.run(*command, **variables)
        if done.returncode:
            shown = " ".join(command)
            raise NotReleasableError(f"{shown} failed:\n{done.stdout}{done.stderr}".rstrip())
        return done.stdout

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end, whatever that is."""
        return subprocess.run(
            command,
            env=self.variables | variables,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
