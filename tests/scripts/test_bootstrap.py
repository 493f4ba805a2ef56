"""scripts/_bootstrap.sh in a separate folder, with a Python that only records its arguments."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PYTHON = """#!/usr/bin/env bash
echo "$*" >>"$CALLS"
case "$*" in
  *"-m venv"*)
    folder=${!#}
    mkdir -p "$folder/bin" && rm -f "$folder/delaywheel-stamp" && cp "$0" "$folder/bin/python" ;;
  *"pip wheel"*)
    echo "Downloading a-1-py3-none-any.whl"
    touch "$DELAYWHEEL_CACHE/wheels/a-1-py3-none-any.whl" ;;
  *"pip install"*)
    [[ -e $DELAYWHEEL_CACHE/wheels/a-1-py3-none-any.whl ]] || exit 1
    exit "${PIP_EXIT:-0}" ;;
esac
"""


class Tree:
    """A copy of the files that the bootstrap needs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls_path = folder / "calls"
        (folder / "scripts").mkdir(parents=True)
        for name in ("pyproject.toml", "constraints.txt", "scripts/_bootstrap.sh"):
            shutil.copy(ROOT / name, folder / name)
        self.python = folder / "a-python"
        self.python.write_text(PYTHON)
        self.python.chmod(0o755)

    def source(self, then: str = "true", **environment: str) -> subprocess.CompletedProcess[str]:
        self.calls_path.write_text("")
        return subprocess.run(
            ["bash", "-c", f'source "{self.folder}/scripts/_bootstrap.sh"; {then}'],
            env={
                **os.environ,
                "CALLS": str(self.calls_path),
                "DELAYWHEEL_PYTHON": str(self.python),
                "DELAYWHEEL_CACHE": str(self.folder / "cache"),
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )

    @property
    def installs(self) -> int:
        return self.calls_path.read_text().count("pip install")

    @property
    def environments_made(self) -> int:
        return self.calls_path.read_text().count("-m venv")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "tree")


def test_makes_the_environment_once(tree: Tree) -> None:
    assert tree.source().returncode == 0
    assert (tree.environments_made, tree.installs) == (1, 1)
    again = tree.source()
    assert again.returncode == 0
    assert tree.calls_path.read_text() == ""
    assert again.stderr == ""


def test_installs_with_the_pins(tree: Tree) -> None:
    tree.source()
    asked = tree.calls_path.read_text()
    assert f"--constraint {tree.folder}/constraints.txt" in asked
    assert f"--editable {tree.folder}[dev]" in asked


def test_a_script_that_needs_a_node_only_gets_no_more(tree: Tree) -> None:
    """What is there already serves it; what is more comes when a script needs it, and stays."""
    assert tree.source(needs="server").returncode == 0
    assert f"--editable {tree.folder}[server]" in tree.calls_path.read_text()
    assert "[dev]" not in tree.calls_path.read_text()
    assert tree.source(needs="server").stderr == ""
    assert tree.source().returncode == 0
    assert (tree.environments_made, tree.installs) == (0, 1)
    for needs in ("server", "dev"):
        assert tree.source(needs=needs).stderr == ""
    another = Tree(tree.folder.parent / "another")
    another.source()
    assert another.source(needs="server").stderr == ""


def test_what_takes_long_says_so(tree: Tree) -> None:
    """Nobody watches a silent terminal for minutes."""
    sleep, sleeps, real = tree.folder / "bin/sleep", tree.folder / "sleeps", shutil.which("sleep")
    sleep.parent.mkdir()
    sleep.write_text(f'#!/bin/sh\necho "$*" >>{sleeps}\nexec {real} 0.02\n')
    sleep.chmod(0o755)
    sleeps.touch()
    # Of two pauses that begin from now on, the second begins once the first was reported.
    count = f"$(wc -l <{sleeps})"
    until_reported = f"n={count}; until (({count} > n + 1)); do {real} 0.02; done; exit 0"
    slow = tree.python.read_text().replace('exit "${PIP_EXIT:-0}"', until_reported)
    tree.python.write_text(slow)
    path = f"{sleep.parent}:{os.environ['PATH']}"
    assert re.search(r"installing: \d+ s", tree.source(PATH=path).stderr)
    assert {*sleeps.read_text().split()} == {"5"}


def test_installs_again_when_the_pins_change(tree: Tree) -> None:
    tree.source()
    with (tree.folder / "constraints.txt").open("a") as pins:
        pins.write("# changed\n")
    assert tree.source().returncode == 0
    assert (tree.environments_made, tree.installs) == (0, 1)


def test_what_was_fetched_is_not_fetched_again(tree: Tree, tmp_path: Path) -> None:
    tree.source()
    assert tree.calls_path.read_text().count("pip wheel") == 1
    another = Tree(tmp_path / "another")
    assert another.source(DELAYWHEEL_CACHE=str(tree.folder / "cache")).returncode == 0
    assert another.calls_path.read_text().count("pip wheel") == 0
    assert f"--no-index --no-compile --find-links {tree.folder}/cache/wheels" in (
        another.calls_path.read_text()
    )


def test_what_the_cache_lacks_is_fetched(tree: Tree) -> None:
    """Pins changed since: an installation without an index fails, in silence."""
    (tree.folder / "cache/wheels").mkdir(parents=True)
    (tree.folder / "cache/wheels/b-1-py3-none-any.whl").touch()
    done = tree.source()
    assert done.returncode == 0, done.stderr
    assert tree.calls_path.read_text().count("pip wheel") == 1
    assert tree.installs == 2
    assert "Downloading a-1" in done.stderr


def test_failed_installation_is_said_and_tried_again(tree: Tree) -> None:
    failed = tree.source(PIP_EXIT="1")
    assert failed.returncode != 0
    assert "installation failed" in failed.stderr
    assert tree.source().returncode == 0
    assert tree.installs == 1


def test_environment_of_another_folder_is_recreated(tree: Tree, tmp_path: Path) -> None:
    tree.source()
    shutil.copytree(tree.folder, tmp_path / "copy", symlinks=True)
    copy = Tree.__new__(Tree)
    copy.folder, copy.python = tmp_path / "copy", tree.python
    copy.calls_path = copy.folder / "calls"
    assert copy.source().returncode == 0
    assert (copy.environments_made, copy.installs) == (1, 1)


def test_two_at_once_install_once(tree: Tree) -> None:
    tree.calls_path.write_text("")
    command = ["bash", "-c", f'source "{tree.folder}/scripts/_bootstrap.sh"']
    environment = {
        **os.environ,
        "CALLS": str(tree.calls_path),
        "DELAYWHEEL_PYTHON": str(tree.python),
        "DELAYWHEEL_CACHE": str(tree.folder / "cache"),
    }
    both = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [process.wait(100) for process in both] == [0, 0]
    assert tree.installs == 1


def test_working_folder_stays_the_callers(tree: Tree) -> None:
    tree.source()
    reported = tree.source(then="pwd")
    assert reported.stdout.strip() == str(Path.cwd())


def test_python_keeps_what_it_compiled(tree: Tree) -> None:
    done = tree.source("env", PYTHONDONTWRITEBYTECODE="1")
    assert "PATH=" in done.stdout
    assert "PYTHONDONTWRITEBYTECODE" not in done.stdout


def test_without_a_python_says_what_is_missing(tree: Tree, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "cat", "cut", "dirname", "flock", "grep", "id", "mkdir", "sha256sum"):
        (tools / name).symlink_to(shutil.which(name) or "")
    failed = tree.source(DELAYWHEEL_PYTHON="", PATH=str(tools))
    assert failed.returncode != 0
    assert "Python 3.11" in failed.stderr


def test_the_systems_own_python_comes_before_a_version_managers(tree: Tree) -> None:
    tree.source()
    listed = "type() { printf '%s\\n' /home/me/.pyenv/shims/python3.11 /usr/bin/true; }"
    found = tree.source(then=f"{listed}; find_python", DELAYWHEEL_PYTHON="")
    assert found.stdout == "/usr/bin/true\n"
    named = tree.source(then=f"{listed}; find_python")
    assert named.stdout == f"{tree.python}\n"


def test_finds_a_java(tree: Tree) -> None:
    tree.source()
    reported = tree.source(then='need_java; "$JAVA_HOME/bin/java" -version')
    assert reported.returncode == 0
    assert "version" in reported.stderr
