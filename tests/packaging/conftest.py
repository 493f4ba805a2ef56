"""A release of this tree as it is, signed with a key that nobody keeps."""

from __future__ import annotations

import dataclasses
import subprocess

import pytest

from local.release import sums
from local.release.building import build
from local.release.checks import Release
from local.release.run import ROOT
from local.release.source import source_of

VERSION = "9.8.7"


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    folder = tmp_path_factory.mktemp("release")
    source = dataclasses.replace(source_of(ROOT, is_dev=True), version=VERSION)
    dist = build(source, folder / "first")
    sums.write_sums(dist)
    key = folder / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    sums.sign(dist, key)
    return Release(source, dist, key, folder)
