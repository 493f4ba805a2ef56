"""The wheel, installed with only its requirements: each extra works."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
import time
import venv
import zipfile
from collections.abc import Iterable, Iterator
from email import message_from_string
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "node-3"
CONFIG = ("--set", "cluster_id=c", "--set", "node_id=n1", "--set", "kafka.bootstrap.servers=k:1")


def wanted(requirements: Iterable[str], extras: frozenset[str]) -> set[tuple[str, str]]:
    """Distributions, with their extras, in these requirements with these extras."""
    found = set()
    for requirement in map(Requirement, requirements):
        contexts = [{"extra": extra} for extra in extras | {""}]
        if requirement.marker is None or any(map(requirement.marker.evaluate, contexts)):
            found |= {(requirement.name, extra) for extra in requirement.extras | {""}}
    return found


def closure(requirements: list[str], extra: str) -> set[str]:
    """Names of all distributions that are installed with this extra."""
    waiting = wanted(requirements, frozenset({extra}))
    seen: set[tuple[str, str]] = set()
    while waiting:
        name, its_extra = one = waiting.pop()
        seen.add(one)
        theirs = requirements if name == "delaywheel" else distribution(name).requires or []
        waiting |= wanted(theirs, frozenset({its_extra})) - seen
    return {name for name, _ in seen} - {"delaywheel"}


class Installed:
    """An environment with the wheel, and links to the requirements of an extra."""

    def __init__(self, wheel: Path, folder: Path) -> None:
        """Has the wheel alone: pip and the first start of each module cost most."""
        venv.create(folder, with_pip=False, symlinks=True)
        self.programs = folder / "bin"
        python = self.programs / "python"
        run(
            *(sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"),
            *("--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check", str(wheel)),
        )
        self._site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
        with zipfile.ZipFile(wheel) as content:
            name = next(n for n in content.namelist() if n.endswith(".dist-info/METADATA"))
            metadata = message_from_string(content.read(name).decode())
        self._requirements = metadata.get_all("Requires-Dist") or []

    @contextlib.contextmanager
    def having(self, extra: str) -> Iterator[None]:
        """Has links to exactly the requirements of an extra meanwhile."""
        links = {
            self._site / top: made.locate_file(top)
            for made in map(distribution, closure(self._requirements, extra))
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

    def command(self, *arguments: str) -> list[str]:
        return [str(self.programs / "delaywheel"), *arguments]


def run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command, env=environment, cwd="/", capture_output=True, text=True, check=check, timeout=60
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("wheel")
    run(
        *(sys.executable, "-m", "build", "--wheel", "--no-isolation"),
        *("--outdir", str(folder), str(ROOT)),
    )
    (built,) = folder.iterdir()
    return Installed(built, tmp_path_factory.mktemp("installed"))


@pytest.fixture
def installed(alone: Installed, request: pytest.FixtureRequest) -> Iterator[Installed]:
    """The same environment with the extra that a test names."""
    with alone.having(request.param):
        yield alone


def with_extra(extra: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("installed", [extra], indirect=True)


@with_extra("")
def test_the_client_alone_has_no_broken_command(installed: Installed) -> None:
    code = "import delaywheel; delaywheel.Client, delaywheel.AsyncClient, delaywheel.Message"
    run(str(installed.programs / "python"), "-c", code)
    assert "produce" in run(*installed.command("--help")).stdout
    asked = ("status", "--server", "127.0.0.1:1", "--timeout", "1s")
    assert run(*installed.command(*asked), check=False).returncode == 3
    for needing in (("config", "check"), ("verify", str(GOLDEN))):
        reported = run(*installed.command(*needing), check=False)
        assert (reported.returncode, reported.stdout) == (1, "")
        assert reported.stderr.startswith("error: NOT_INSTALLED: this needs ")
        assert "install delaywheel[cli]" in reported.stderr


CONSUMERS = "from delaywheel.consumer import RetryConsumer, AsyncRetryConsumer"


@with_extra("")
def test_consumers_need_their_extra(installed: Installed) -> None:
    reported = run(str(installed.programs / "python"), "-c", CONSUMERS, check=False)
    assert "install delaywheel[consumer]" in reported.stderr


@with_extra("consumer")
def test_consumers_need_no_other_extra(installed: Installed) -> None:
    run(str(installed.programs / "python"), "-c", CONSUMERS)


@with_extra("cli")
def test_the_command_does_all_but_serve(installed: Installed, tmp_path: Path) -> None:
    here = ("--set", f"data_dir={tmp_path / 'n1'}")
    run(*installed.command("config", "check", *CONFIG, *here))
    assert run(*installed.command("slots", "--data", str(GOLDEN))).stdout
    run(*installed.command("verify", str(GOLDEN)))
    reported = run(*installed.command("serve", *CONFIG, *here), check=False)
    assert reported.returncode == 1
    assert reported.stderr.startswith("error: NOT_INSTALLED: a node needs ")
    assert "install delaywheel[server]" in reported.stderr
    reported = run(*installed.command("reconcile"), check=False)
    assert reported.returncode == 2
    assert "install delaywheel[audit]" in reported.stderr


@with_extra("server")
def test_what_a_node_needs_can_serve(installed: Installed, tmp_path: Path) -> None:
    data = tmp_path / "n1"
    settings = (*CONFIG, "--set", f"data_dir={data}", "--set", "listen=127.0.0.1:0")
    log = tmp_path / "log"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with log.open("wb") as output:
        node = subprocess.Popen(
            installed.command("serve", *settings, "--set", "metrics_listen=127.0.0.1:0"),
            env=environment,
            cwd="/",
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
