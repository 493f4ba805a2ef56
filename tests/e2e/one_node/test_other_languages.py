"""The clients of docs/CLIENTS.md are built and run as they stand there, against a real node.

What they are built with comes from the toolchains' own registries, in the versions that the
document names, once: it is kept in the cache folder. Only the address of the node is another.

A build takes 15 to 40 CPU s, so a program whose commands and protocol are those that have passed
on this machine before is left to the night. What a node answers, the other clients show each time.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from local.loopback.kafka_jars import cache_folder
from support.process.passed import skip_what_has_passed
from support.services.service import Service
from support.services.waiting import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
HERE = "127.0.0.1:7420"
PASSING = re.compile("unavailable|deadline.?exceeded", re.IGNORECASE)
"""What gRPC calls what may be called again; the examples call once."""


def commands_under(heading: str) -> str:
    """All commands under this heading."""
    text = (ROOT / "docs" / "CLIENTS.md").read_text(encoding="utf-8")
    _, found, part = text.partition(f"\n## {heading}\n")
    assert found, heading
    part, _, _ = part.partition("\n## ")
    return "".join(re.findall(r"^```sh\n(.*?)^```$", part, re.MULTILINE | re.DOTALL))


def kept_by_go(cache: Path) -> dict[str, str]:
    return {"GOPATH": str(cache / "go"), "GOCACHE": str(cache / "go-build"), "GOTOOLCHAIN": "local"}


def kept_by_maven(cache: Path) -> dict[str, str]:
    return {"MAVEN_OPTS": f"-Dmaven.repo.local={cache / 'maven'}"}


def what_it_is_built_of(heading: str) -> list[str]:
    protocol = sorted((ROOT / "proto").rglob("*.proto"))
    return [commands_under(heading), *(path.read_text(encoding="utf-8") for path in protocol)]


@pytest.mark.parametrize(
    ("heading", "needed", "kept"),
    [("Go", "go", kept_by_go), ("Java", "mvn", kept_by_maven)],
    ids=["go", "java"],
)
def test_a_client_in_another_language(
    heading: str,
    needed: str,
    kept: Callable[[Path], dict[str, str]],
    service: Service,
    tmp_path: Path,
) -> None:
    if shutil.which(needed) is None:
        pytest.skip(f"{needed} is not installed: the {heading} client cannot be built")
    passed = skip_what_has_passed(f"client-{needed}", *what_it_is_built_of(heading))
    environment = {**os.environ, **kept(cache_folder()), "DELAYWHEEL": str(ROOT)}

    def run() -> subprocess.CompletedProcess[str] | None:
        """Runs the commands in an empty folder; None where a client should call again."""
        done = subprocess.run(
            ["bash", "-eu", "-c", commands_under(heading).replace(HERE, service.address)],
            env=environment,
            cwd=tempfile.mkdtemp(dir=tmp_path),
            capture_output=True,
            text=True,
            check=False,
            timeout=450,
        )
        return None if done.returncode and PASSING.search(done.stdout + done.stderr) else done

    done = wait_until("it is answered", run, timeout_s=200)
    assert done.returncode == 0, f"{done.stdout[-4_000:]}\n{done.stderr[-4_000:]}"
    lines = done.stdout.split("\n")[:-1]
    if heading == "Go":
        assert lines.pop() == "COMMIT_OUTCOME_COMMITTED"
    *_, accepted, outcome = lines
    assert re.fullmatch(r"accepted \S+\.\d+:\d+:[0-9a-f]{32}:\S+", accepted)
    assert outcome == "CANCEL_OUTCOME_CANCELLED"
    passed.touch()
