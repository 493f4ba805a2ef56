"""Prometheus' tool for rules: any on this machine, or the one of Debian's package.

The package is fetched and unpacked, not installed, into the cache folder, once: 19 MB.
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
dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x ./usr/bin/promtool
"""


def find_promtool() -> str:
    """Returns the program; skips the test that asks where it can neither be found nor fetched."""
    kept = cache_folder() / "promtool"
    if not kept.exists():
        if found := shutil.which("promtool"):
            return found
        _fetch(kept)
    return str(kept)


def _fetch(kept: Path) -> None:
    if shutil.which("apt-get") is None:
        pytest.skip("there is no promtool, and no apt-get to fetch it (Debian, Ubuntu: prometheus)")
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent, prefix="promtool-") as folder:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", _FETCH],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
        if done.returncode != 0:
            pytest.skip(f"there is no promtool, and it cannot be fetched: {done.stderr[-300:]}")
        (Path(folder) / "usr/bin/promtool").replace(kept)
