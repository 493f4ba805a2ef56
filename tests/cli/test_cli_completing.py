"""Shell completion, which needs no node."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from delaywheel_replica.cli.completing import candidates


def completed(line: str) -> set[str]:
    *words, current = line.split(" ")
    return set(candidates(words, current))


@pytest.mark.parametrize(
    ("line", "reported"),
    [
        ("st", {"status"}),
        ("rec", {"reconcile"}),
        ("config ", {"check", "show", "--help"}),
        ("status --js", {"--json"}),
        ("status --json --js", set()),
        ("produce orders --header a=1 --hea", {"--header"}),
        ("produce orders --level 1", {"10s", "1m", "10m", "1h"}),
        ("produce orders --level=1h", {"--level=1h"}),
        ("serve --set span", {"span_seconds="}),
        ("serve --set kafka.b", {"kafka.bootstrap.servers="}),
        ("reconcile --kafka-s", {"--kafka-setting"}),
        ("reconcile --by ", {"due", "accepted"}),
        ("reconcile --from now --la", {"--late-tolerance"}),
        ("completion ", {"bash", "zsh"}),
        ("no-such-command --x", set()),
        ("config no-such --x", set()),
    ],
)
@pytest.mark.usefixtures("command")
def test_what_may_follow(line: str, reported: set[str]) -> None:
    assert completed(line) == reported


BASH = """
eval "$(delaywheel completion bash)"
compopt() { :; }
for COMP_LINE in "$@"; do
  COMP_POINT=${#COMP_LINE}
  _delaywheel
  echo "${COMPREPLY[*]}"
done
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes(tmp_path: Path) -> None:
    lines = ["delaywheel cl", "delaywheel serve --set log_le", "delaywheel produce t --level=4"]
    ended = subprocess.run(
        ["bash", "-c", BASH, "bash", *lines],
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.splitlines() == ["clock", "log_level=", "45m"]
