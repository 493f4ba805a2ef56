"""What scripts/upgrade-check starts from; the run itself takes minutes, and is its own test."""

from __future__ import annotations

import subprocess

import pytest

from local.loopback.cluster import ROOT, ClusterError
from local.upgrading.earlier import UPGRADE_FROM, installed


def test_it_starts_from_a_revision_that_lies_behind_this_one() -> None:
    revision = UPGRADE_FROM.read_text().strip()
    command = ["git", "-C", str(ROOT), "merge-base", "--is-ancestor", revision, "HEAD"]
    subprocess.run(command, check=True)


def test_a_revision_that_git_does_not_know_is_named() -> None:
    with pytest.raises(ClusterError, match=r"no-such-release\^\{commit\} failed"):
        installed("no-such-release")
