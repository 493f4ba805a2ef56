"""Scripts run as a user runs them, and the traces that they leave."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.services.waiting import wait_until

ROOT = Path(__file__).parents[3]


def start_script(name: str, *arguments: str) -> subprocess.Popen[str]:
    """Starts the Python behind `scripts/<name>`."""
    return subprocess.Popen(
        [sys.executable, "-m", f"local.{name}", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def read_until(script: subprocess.Popen[str], word: str) -> str:
    """The script's output, up to the line with this word."""
    assert script.stdout is not None
    reported = ""
    while word not in reported:
        line = script.stdout.readline()
        assert line, reported
        reported += line
    return reported


def cluster_folders() -> set[Path]:
    """The folders of clusters that run, or that were kept."""
    return set((ROOT / ".run").glob("cluster-*"))


def processes_below(folder: Path) -> list[str]:
    """Command lines of processes on a cluster's folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it ended meanwhile
        if str(folder) in line:
            found.append(line)
    return found


def assert_nothing_is_left(folder: Path) -> None:
    """Every process on the folder ends on its own, and the folder is gone."""
    wait_until("all have ended", lambda: not processes_below(folder), every_s=0.1)
    assert not folder.exists()
