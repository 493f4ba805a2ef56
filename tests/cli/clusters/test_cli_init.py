"""`delaywheel init`: what it writes is in order, and what is wrong leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from delaywheel_replica.server.access.grants import Grants
from support.clients.command import Command

ROOT = Path(__file__).parents[3]
AWAY = ("--kafka", "127.0.0.1:1", "--cluster", "shop")
THREE = ("--nodes", "delay-1,delay-2=10.0.0.2,delay-3")


def test_each_nodes_settings_are_in_order(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "new" / "shop"
    ended = command("init", *AWAY, *THREE, "--systemd", "--out", str(out))
    assert ended.code == 0
    assert "warning: kafka: 127.0.0.1:1: " in ended.err
    written = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert written == {
        "kafka.sh",
        *(
            f"delay-{number}/{name}"
            for number in (1, 2, 3)
            for name in ("node.toml", "grants.toml", "delaywheel.service", "delaywheel.sysusers")
        ),
    }
    assert {str(out / name) for name in written} <= {*ended.out.splitlines()}
    for node in ("delay-1", "delay-2", "delay-3"):
        file = out / node / "node.toml"
        checked = command("config", "check", "--config", str(file), "--set", f"data_dir={tmp_path}")
        assert checked.out == f"settings in order: node {node} of cluster shop\n"
    settings = tomllib.loads((out / "delay-2" / "node.toml").read_text())
    assert settings["advertised"] == "10.0.0.2:7420"
    assert settings["members"] == {
        "delay-1": "delay-1:7421",
        "delay-2": "10.0.0.2:7421",
        "delay-3": "delay-3:7421",
    }
    Grants.parse((out / "delay-1" / "grants.toml").read_bytes())
    unit = "delaywheel.service"
    shipped = (ROOT / "packaging" / "systemd" / unit).read_bytes()
    assert (out / "delay-3" / unit).read_bytes() == shipped


def test_nodes_of_one_machine_share_no_port_and_no_folder(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "shop"
    hosts = {f"n{number}": f"127.0.0.{number}" for number in (1, 2, 3)}
    nodes = ",".join(f"{node}={host}" for node, host in hosts.items())
    ended = command("init", *AWAY, "--nodes", nodes, "--systemd", "--out", str(out))
    assert ended.code == 0
    for node, host in hosts.items():
        settings = tomllib.loads((out / node / "node.toml").read_text())
        assert (settings["listen"], settings["metrics_listen"]) == (f"{host}:7420", f"{host}:7422")
        # Into which the unit lets it write.
        unit = (out / node / "delaywheel@.service").read_text()
        assert settings["data_dir"] == f"/var/lib/delaywheel/{node}"
        assert "StateDirectory=delaywheel/%i\n" in unit


def test_a_node_alone_has_no_members(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "shop"
    assert command("init", *AWAY, "--nodes", "n1", "--out", str(out)).code == 0
    assert "members" not in tomllib.loads((out / "n1" / "node.toml").read_text())
    assert not (out / "n1" / "delaywheel.service").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"--nodes": "n1,n2"}, "--nodes n1,n2: a cluster has 1, 3 or 5"),
        ({"--nodes": "n1,N2,n3"}, "node 'N2': 1 to 31 of a-z"),
        ({"--nodes": "n1,../n2,n3"}, "node '../n2': 1 to 31 of a-z"),
        ({"--nodes": "n1,n1,n3"}, "a name and a host of its own"),
        ({"--nodes": "n1=h,n2=h,n3"}, "a name and a host of its own"),
        ({"--nodes": "n1=0.0.0.0,n2,n3"}, "members.n1 0.0.0.0:7421: leads nowhere"),
        ({"--nodes": "n1=a b,n2,n3"}, "'a b' is no name or address of a host"),
        ({"--nodes": "n1=$(id),n2,n3"}, "'$(id)' is no name or address of a host"),
        ({"--nodes": "n1=10.0.0.300,n2,n3"}, "'10.0.0.300' is no name or address of a host"),
        ({"--nodes": "n1=-a.b,n2,n3"}, "'-a.b' is no name or address of a host"),
        ({"--nodes": "n1=::1,n2,n3"}, "'::1' is no name or address of a host (of IPv6: in br"),
        ({"--nodes": "n1=[10.0.0.3],n2,n3"}, "'[10.0.0.3]' is no name or address of a host"),
        ({"--cluster": "My Shop"}, "cluster 'My Shop': 1 to 31 of a-z"),
        ({"--kafka": ""}, "kafka: bootstrap.servers is missing"),
    ],
)
def test_what_is_no_cluster_is_refused(
    given: dict[str, str], said: str, command: Command, tmp_path: Path
) -> None:
    asked = {"--kafka": "k:1", "--cluster": "shop", "--nodes": "n1", **given}
    words = [word for pair in asked.items() for word in pair]
    ended = command("init", *words, "--out", str(tmp_path / "out" / "shop"))
    assert ended.code in {1, 2}
    assert said in ended.err
    assert f"{tmp_path}/." not in ended.err  # what it was tried in is gone
    assert not (tmp_path / "out").exists()
    assert not [*tmp_path.glob(".*")]


def test_nothing_is_overwritten(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    for out in (tmp_path, tmp_path / "mine", tmp_path / "mine" / "below"):
        ended = command("init", *AWAY, *THREE, "--out", str(out))
        assert ended.code == 1
        assert ended.err.startswith(("error: FILES_EXIST: ", "error: NOT_WRITTEN: "))
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["mine"]
    assert (tmp_path / "mine").read_text() == "mine"


def test_the_current_folder_is_not_replaced(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose shell is in it would be nowhere."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for out in (".", str(tmp_path / "here")):
        ended = command("init", *AWAY, *THREE, "--out", out)
        assert ended.code == 1
        assert "is in use, and is not replaced: name a new folder, such as " in ended.err
    assert not [*Path().iterdir()]
    assert command("init", *AWAY, *THREE, "--out", "shop").code == 0


def test_sigterm_leaves_nothing_behind(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def ended(*_: object) -> None:
        assert [*tmp_path.glob(".*")]
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("delaywheel_replica.cli.doing.init.command.load", ended)
    assert command("init", *AWAY, *THREE, "--out", str(tmp_path / "shop")).code == 143
    assert not [*tmp_path.glob(".*"), *tmp_path.glob("shop")]
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_rights_in_kafka_are_those_in_the_docs(command: Command, tmp_path: Path) -> None:
    """The tests of brokers that deny all else read them there."""
    out = tmp_path / "shop"
    assert command("init", *AWAY, "--nodes", "n1", "--out", str(out)).code == 0
    script = (out / "kafka.sh").read_text().replace("\\\n", "")
    wanted = {}
    for line in (ROOT / "docs" / "KAFKA.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:3]]
        if len(cells) == 2 and re.match(r"(cluster|topics|transactional ids|group) ?`?", cells[0]):
            wanted[cells[0].replace("<cluster>", "shop")] = {*cells[1].split(", ")}
    granted = {}
    for line in script.splitlines():
        if line.startswith("acl --"):
            words = line.split()
            kind = next(
                word[2:]
                for word in words
                if word in {"--cluster", "--topic", "--group", "--transactional-id"}
            )
            name = "" if kind == "cluster" else f" `{words[words.index(f'--{kind}') + 1]}`"
            kind = {"topic": "topics", "transactional-id": "transactional ids"}.get(kind, kind)
            prefixed = ", prefixed" if "prefixed" in words else ""
            operations = {after for word, after in pairwise(words) if word == "--operation"}
            granted[f"{kind}{name}{prefixed}"] = operations
    assert granted.items() <= wanted.items()
    assert len(granted) == 5
