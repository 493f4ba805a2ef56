"""Shell completion, which needs no node."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.cli import seen_names
from delaywheel_replica.cli.completing import candidates
from support.clients.command import Command
from support.clients.fake_service import answer
from support.clients.scripted_node import ScriptedNode


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


@pytest.mark.usefixtures("command")
def test_names_that_commands_have_seen(command: Command, node: ScriptedNode) -> None:
    assert completed("produce ") == set()
    command("produce", "orders", "v", "--level", "5s")
    command("produce", "invoices", "v", "--level", "5s")
    node.describe = answer(
        pb.DescribeClusterResponse(
            node="n1",
            members=[pb.Member(node="n1"), pb.Member(node="n2")],
            levels=[pb.Level(name="soon"), pb.Level(name="5s")],
        )
    )
    command("status")
    assert completed("produce ") == {"orders", "invoices"}
    assert completed("reconcile --topic o") == {"orders"}
    assert completed("produce orders --level ") == {"soon", "5s"}
    assert completed("node replace ") == {"n1", "n2"}


@pytest.mark.usefixtures("command")
def test_names_of_another_cluster_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    seen_names.note("there:7420", topics=["theirs"])
    assert completed("produce ") == set()
    monkeypatch.setenv("DELAYWHEEL_SERVER", "there:7420")
    assert completed("produce ") == {"theirs"}


@pytest.mark.usefixtures("command")
def test_what_is_known_is_bounded() -> None:
    for number in range(2_000):
        seen_names.note("a:1", topics=[f"topic-{number}", "x" * 1_000])
    assert len(seen_names.names("a:1", "topics")) == 500
    assert seen_names.names("a:1", "topics")[0] == "topic-1999"
    for number in range(20):
        seen_names.note(f"b{number}:1", nodes=["n"])
    assert seen_names.names("a:1", "topics") == []
    assert seen_names.names("b19:1", "nodes") == ["n"]


@pytest.mark.usefixtures("command")
@pytest.mark.parametrize("text", ["", "{", "[1]", '{"127.0.0.1:7420": {"topics": 5}}', "\xff"])
def test_a_file_that_cannot_be_read_is_as_none(text: str, tmp_path: Path) -> None:
    path = tmp_path / "cache" / "delaywheel" / "known.json"
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="latin-1")
    assert completed("produce ") == set()
    seen_names.note("127.0.0.1:7420", topics=["orders"])
    assert completed("produce ") == {"orders"}


def test_nobody_needs_a_place_to_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    seen_names.note("a:1", topics=["orders"])
    assert seen_names.names("a:1", "topics") == []


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
