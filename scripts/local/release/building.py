"""Builds wheel, sdist and chart from a copy of a tree, each time to the same bytes."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from build.util import project_wheel_metadata

from local.release import bill, chart
from local.release.source import Source, git, run

PINS = "constraints.txt"
_AS_THEY_ARE = (PINS, "packaging/compose/compose.yaml", "packaging/board.json", "docs/alerts.yaml")
_VERSION_VARIABLE = "SETUPTOOLS_SCM_PRETEND_VERSION"  # hatch-vcs does not tell it our name


def build(source: Source, folder: Path) -> Path:
    """Builds in a new folder, with the SBOM; returns the folder of all files of the release.

    Raises:
        NotReleasableError: It cannot be built.
    """
    tree, built = folder / "tree", folder / "dist"
    _copy(source.root, tree)
    said = project_wheel_metadata(tree, isolated=False)
    extras = bill.of_users(said.get_all("Provides-Extra"))
    pins = (tree / PINS).read_text()
    listed = bill.bill_of(source, said.get_all("Requires-Dist") or [], extras, pins)
    (tree / bill.FILE).write_text(listed)
    # The sdist from the copy, and the wheel from that sdist.
    command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", str(built), str(tree))
    settings = {_VERSION_VARIABLE: source.version, "SOURCE_DATE_EPOCH": str(source.epoch_s)}
    run(*command, env=os.environ | settings)
    chart.package(source, tree, built)
    for name in _AS_THEY_ARE:
        shutil.copyfile(tree / name, built / Path(name).name)
    return built


def _copy(root: Path, tree: Path) -> None:
    """Copies what Git does not ignore: what else lies about is not shipped."""
    listed = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, listed.split("\0")):
        if (root / name).exists():  # it may be deleted in the tree alone
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, tree / name, follow_symlinks=False)
