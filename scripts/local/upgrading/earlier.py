"""An earlier revision's own code, in an environment of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

from local.loopback.cluster import ROOT, ClusterError
from local.loopback.kafka_jars import cache_folder

UPGRADE_FROM = ROOT / "packaging" / "upgrade-from"
"""The revision that nodes are upgraded from, if no other is named: the last release."""
_INSTALL = "needs=server; source scripts/_bootstrap.sh"


def installed(revision: str) -> str:
    """Returns the Python that runs a revision's nodes; it is installed once, with its own pins.

    Raises:
        ClusterError: There is no such revision, or it cannot be installed.
    """
    commit = _run("git", "rev-parse", "--verify", f"{revision}^{{commit}}", cwd=ROOT).strip()
    folder = cache_folder() / "revisions" / commit
    if not (folder / ".git").exists():
        _run("git", "clone", "--quiet", "--no-checkout", str(ROOT), str(folder), cwd=ROOT)
    _run("git", "checkout", "--quiet", commit, cwd=folder)
    _run("bash", "-c", _INSTALL, cwd=folder)
    return str(folder / ".venv" / "bin" / "python")


def _run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout
