"""axe-core, which looks for what keeps people from using a page: npm's package of one version.

It is fetched into the cache folder, once: 0.6 MB.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from local.loopback.kafka_jars import cache_folder

_FETCH = """
npm pack --silent axe-core@4.14.1
echo "e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745  axe-core-4.14.1.tgz" |
  sha256sum --check --status
tar -xf axe-core-4.14.1.tgz package/axe.min.js
"""


def find_axe() -> Path:
    """Returns the script; skips a test where it cannot be fetched."""
    kept = cache_folder() / "axe-4.14.1.js"
    if kept.exists():
        return kept
    if shutil.which("npm") is None:
        pytest.skip("there is no axe-core, and no npm to fetch it")
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent, prefix="axe-") as folder:
        command = ["bash", "-euo", "pipefail", "-c", _FETCH]
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=200
        )
        if done.returncode != 0:
            pytest.skip(f"there is no axe-core, it cannot be fetched: {done.stderr[-300:]}")
        (Path(folder) / "package/axe.min.js").replace(kept)
    return kept
