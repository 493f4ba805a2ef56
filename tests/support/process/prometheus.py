"""Prometheus and its tool for rules: any on this machine, or those of Debian's package.

The package is fetched and unpacked, not installed, into the cache folder, once.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from local.loopback.kafka_jars import cache_folder

_FETCH = """
get() { apt-get -qq -o Acquire::http::Timeout=30 -o APT::Sandbox::User=root "$@"; }
get download prometheus || { get update && get download prometheus; }
dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x "./usr/bin/$1"
"""


def find_program(name: str) -> str:
    """Returns `prometheus` or `promtool`; skips a test where it is neither found nor fetched."""
    kept = cache_folder() / name
    if not kept.exists():
        if found := shutil.which(name):
            return found
        _fetch(name, kept)
    return str(kept)


def _fetch(name: str, kept: Path) -> None:
    if shutil.which("apt-get") is None:
        pytest.skip(f"there is no {name}, and no apt-get to fetch it (Debian, Ubuntu: prometheus)")
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent, prefix=f"{name}-") as folder:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", _FETCH, "fetch", name],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
        if done.returncode != 0:
            pytest.skip(f"there is no {name}, and it cannot be fetched: {done.stderr[-300:]}")
        (Path(folder) / "usr/bin" / name).replace(kept)
