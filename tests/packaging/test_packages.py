"""The wheel, installed with only its requirements: each extra works."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest

from local.release.bill import closure
from local.release.checks import Release
from local.release.installed import Environment

pytestmark = pytest.mark.kafka

GOLDEN = Path(__file__).parents[1] / "golden" / "node-3"
CONFIG = ("--set", "cluster_id=c", "--set", "node_id=n1", "--set", "kafka.bootstrap.servers=k:1")


class Linked(Environment):
    """Has the wheel alone, and links to what an extra requires: pip takes a minute with Spark."""

    def __init__(self, folder: Path, release: Release) -> None:
        super().__init__(folder)
        self.pip("install", "--no-deps", "--no-compile", str(release.wheel))
        self._requirements = release.described.requires or []
        self._site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))

    @contextlib.contextmanager
    def having(self, extra: str) -> Iterator[None]:
        """Has links to exactly the requirements of an extra meanwhile."""
        names = closure(self._requirements, extra).keys() - {"delaywheel"}
        links = {
            self._site / top: made.locate_file(top)
            for made in map(distribution, names)
            for top in {path.parts[0] for path in made.files or [] if path.parts[0] != ".."}
        }
        new = [link for link in links if not link.exists()]
        for link in new:
            link.symlink_to(str(links[link]))
        try:
            yield
        finally:
            for link in new:
                link.unlink()

    def delaywheel(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self._run(str(self.programs / "delaywheel"), *arguments)

    def imports(self, code: str) -> subprocess.CompletedProcess[str]:
        return self._run(self.python, "-c", code)

    def _run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=self.variables,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture(scope="module")
def alone(release: Release, tmp_path_factory: pytest.TempPathFactory) -> Linked:
    return Linked(tmp_path_factory.mktemp("linked") / "one", release)


@pytest.fixture
def installed(alone: Linked, request: pytest.FixtureRequest) -> Iterator[Linked]:
    """The same environment with the extra that a test names."""
    with alone.having(request.param):
        yield alone


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


def with_extra(extra: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("installed", [extra], indirect=True)


def test_a_checkout_is_installed_as_a_release_is(release: Release, tmp_path: Path) -> None:
    """A release's wheel is made from its sdist, which has no link to the units of systemd."""
    command = (sys.executable, "-m", "hatchling", "build", "--target", "wheel", "-d", str(tmp_path))
    environment = os.environ | {"SETUPTOOLS_SCM_PRETEND_VERSION": release.source.version}
    subprocess.run(command, cwd=release.dist.parent / "tree", env=environment, check=True)
    (built,) = tmp_path.glob("*.whl")
    assert names_in(built) == names_in(release.wheel)


@with_extra("")
def test_the_client_alone_has_no_broken_command(installed: Linked) -> None:
    code = "import delaywheel; delaywheel.Client, delaywheel.AsyncClient, delaywheel.Message"
    assert installed.imports(code).returncode == 0
    assert "produce" in installed.delaywheel("--help").stdout
    asked = ("status", "--server", "127.0.0.1:1", "--timeout", "1s")
    assert installed.delaywheel(*asked).returncode == 3
    for needing in (("config", "check"), ("verify", str(GOLDEN))):
        reported = installed.delaywheel(*needing)
        assert (reported.returncode, reported.stdout) == (1, "")
        assert reported.stderr.startswith("error: NOT_INSTALLED: this needs ")
        assert "install delaywheel[cli]" in reported.stderr


@with_extra("")
def test_consumers_need_their_extra(installed: Linked) -> None:
    reported = installed.imports("import delaywheel.consumer")
    assert "install delaywheel[consumer]" in reported.stderr


@with_extra("cli")
def test_the_command_does_all_but_serve(installed: Linked, tmp_path: Path) -> None:
    cluster = ("--kafka", "127.0.0.1:1", "--cluster", "c", "--nodes", "n1", "--systemd")
    assert installed.delaywheel("init", *cluster, "--out", str(tmp_path / "c")).returncode == 0
    assert (tmp_path / "c" / "n1" / "delaywheel.service").stat().st_size
    here = ("--set", f"data_dir={tmp_path / 'n1'}")
    assert installed.delaywheel("config", "check", *CONFIG, *here).returncode == 0
    assert installed.delaywheel("slots", "--data", str(GOLDEN)).stdout
    assert installed.delaywheel("verify", str(GOLDEN)).returncode == 0
    reported = installed.delaywheel("serve", *CONFIG, *here)
    assert reported.returncode == 1
    assert reported.stderr.startswith("error: NOT_INSTALLED: a node needs ")
    assert "install delaywheel[server]" in reported.stderr
    reported = installed.delaywheel("reconcile")
    assert reported.returncode == 2
    assert "install delaywheel[audit]" in reported.stderr


@with_extra("server")
def test_what_a_node_needs_can_serve(installed: Linked, tmp_path: Path) -> None:
    data = tmp_path / "n1"
    settings = (*CONFIG, "--set", f"data_dir={data}", "--set", "listen=127.0.0.1:0")
    command = str(installed.programs / "delaywheel")
    log = tmp_path / "log"
    with log.open("wb") as output:
        node = subprocess.Popen(
            (command, "serve", *settings, "--set", "metrics_listen=127.0.0.1:0"),
            env=installed.variables,
            cwd=tmp_path,
            stderr=output,
        )
    try:
        deadline = time.monotonic() + 60
        while '"address": "127' not in _text(data / "node.run"):
            assert node.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        node.send_signal(signal.SIGTERM)
        assert node.wait(60) == 0, log.read_text()
    finally:
        node.kill()
        node.wait()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
