"""scripts/release: what it takes for a version, what it checks, and what it says."""

from __future__ import annotations

import base64
import dataclasses
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from local.release import bill, first_minutes, run, source, sums
from local.release.checks import CHECKS, Release, has_same_bytes
from local.release.run import ROOT
from local.release.source import NO_VERSION, NotReleasableError, NotRunError, source_of
from support.process.night import NIGHT

pytestmark = pytest.mark.kafka  # beside test_packages, which needs the same build

OF_FILES = (
    "metadata and contents",
    "licences",
    "signature",
    # A second build, which `scripts/release --check` makes before each release.
    *(("the same bytes once more",) if NIGHT else ()),
)
NOBODYS = b"\0\0\0\x0bssh-ed25519\0\0\0\x20" + bytes(32)
NOBODYS_KEY = f"ssh-ed25519 {base64.b64encode(NOBODYS).decode()}"


class Clone:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.git("init", "-q")
        shutil.copy(ROOT / "pyproject.toml", root)
        (root / ".gitignore").write_text("dist/\n")
        self.commit()

    def git(self, *arguments: str) -> None:
        who = ("-c", "user.name=n", "-c", "user.email=n@example.com")
        subprocess.run(["git", "-C", self.root, *who, *arguments], check=True)

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "-q", "--allow-empty", "-m", "one")


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_each_extra_has_first_minutes() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = bill.of_users(declared["optional-dependencies"])
    assert {*extras} == {*first_minutes.OWN} | {"cli", "server"}, "those are README's"


def test_the_version_is_the_tags_or_counts_from_it(clone: Clone) -> None:
    clone.git("tag", "0.2.0")
    assert source_of(clone.root, is_dev=False).version == "0.2.0"
    for _ in range(7):
        clone.commit()
    clone.git("tag", "drill-4")
    assert source_of(clone.root, is_dev=False).version == "0.2.1.dev7"


def test_a_clone_without_tags_or_with_changes_is_no_release(
    clone: Clone, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main([], root=clone.root) == 1
    assert "error: this clone has no tag of a release" in capsys.readouterr().err
    clone.git("tag", "0.2.0")
    (clone.root / "new.py").touch()
    assert run.main([], root=clone.root) == 1
    assert "error: there are changes that are not committed (new.py)" in capsys.readouterr().err
    assert source_of(clone.root, is_dev=True).version == NO_VERSION
    assert not (clone.root / "dist").exists()


@pytest.mark.parametrize("what", OF_FILES)
def test_a_release_of_this_tree_is_right(what: str, release: Release) -> None:
    assert CHECKS[what](release)


def test_what_is_built_has_the_version_of_its_tag(release: Release) -> None:
    assert release.described.version == release.source.version != NO_VERSION
    assert {release.wheel, release.sdist} <= {*release.dist.iterdir()}


def test_the_sdist_has_what_is_packaged_for_others(release: Release) -> None:
    names = subprocess.check_output(["tar", "-tzf", release.sdist], text=True)
    assert "/packaging/systemd/delaywheel.service\n" in names


def test_another_key_and_other_bytes_are_noticed(release: Release, tmp_path: Path) -> None:
    with pytest.raises(NotReleasableError, match="Could not verify signature"):
        sums.check_signature(release.dist, NOBODYS_KEY, tmp_path)
    later = dataclasses.replace(release.source, epoch_s=release.source.epoch_s + 86_400)
    other = dataclasses.replace(release, source=later, scratch=tmp_path)
    with pytest.raises(NotReleasableError, match="a second build differs"):
        has_same_bytes(other)


def test_a_command_that_takes_too_long_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "PATIENCE_S", 0.01)
    with pytest.raises(NotReleasableError, match=r"^sleep 9 took more than 0\.01 s"):
        source.run("sleep", "9")


def test_the_readme_has_the_line_that_verifies() -> None:
    assert f"\n{sums.VERIFY}\n" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_sbom_says_which_extras_install_what(release: Release) -> None:
    (pyarrow,) = (part for part in release.components if part["name"] == "pyarrow")
    assert pyarrow["scope"] == "optional"
    assert "server" in pyarrow["properties"][0]["value"].split()


def test_what_was_not_run_is_in_the_table_and_in_the_exit_code(
    clone: Clone,
    release: Release,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def missing(_: Release) -> str:
        raise NotRunError("no Java found")

    def built(_: object, folder: Path) -> Path:
        folder.mkdir()
        shutil.copyfile(release.wheel, folder / release.wheel.name)
        return folder

    monkeypatch.delenv(run.KEY_VARIABLE, raising=False)
    monkeypatch.setattr(run, "build", built)
    monkeypatch.setattr(run, "CHECKS", {"first minutes": missing, "licences": lambda _: "fine"})
    monkeypatch.setattr("local.release.image.shutil.which", lambda _: None)
    asked = ["--dev", "--check", "--image"]
    assert run.main(asked, root=clone.root) == 2
    assert run.main([*asked, "--allow-missing"], root=clone.root) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["checked", "licences", "fine"] in rows
    assert ["not", "run", "here", "first", "minutes", "no", "Java", "found"] in rows
    assert ["not", "run", "here", "image", "buildah", "is", "not", "installed"] in rows
    assert ["not", "run", "here", "SHA256SUMS.sig", run.KEY_VARIABLE, "names", "no", "key"] in rows
    assert sorted(file.name for file in (clone.root / "dist").iterdir()) == [
        "SHA256SUMS",
        release.wheel.name,
    ]
