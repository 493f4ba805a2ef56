"""scripts/cluster without a broker: arguments, configuration, ready file, restarts, ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from local.loopback import cluster as cluster_module
from local.loopback.beside import PageProcess
from local.loopback.cluster import (
    LocalCluster,
    main,
    next_commands,
    parse_settings,
)
from local.loopback.node import Node, to_toml
from support.services.waiting import wait_until

ROOT = Path(__file__).parents[2]

# Stands in for `delaywheel serve`: reports its processes, as the supervisor does, and waits.
NODE = """
import json, os, pathlib, signal, sys, time, tomllib
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
config = tomllib.loads(pathlib.Path(sys.argv[1]).read_text())
run = pathlib.Path(config["data_dir"]) / "node.run"
row = {"pid": os.getpid(), "server_pid": os.getpid(), "cleaner_pid": os.getpid()}
half = run.with_suffix(".half")
half.write_text(json.dumps(row | {"address": config["listen"]}))
half.replace(run)
time.sleep(600)
"""


@pytest.fixture
def fake_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(node: Node) -> list[str]:
        return [sys.executable, "-c", NODE, str(node.config)]

    monkeypatch.setattr(Node, "command", property(command))


def test_settings_are_json_or_text() -> None:
    assert parse_settings(["span_seconds=604800", "flush=group", "create_topics=true"]) == {
        "span_seconds": 604800,
        "flush": "group",
        "create_topics": True,
    }


def test_settings_with_a_dot_belong_to_a_table() -> None:
    assert parse_settings(["kafka.linger.ms=1", "kafka.client.id=x=y", "levels.5s=5000"]) == {
        "kafka": {"linger.ms": 1, "client.id": "x=y"},
        "levels": {"5s": 5000},
    }


@pytest.mark.parametrize("text", ["", "span_seconds", "=1"])
def test_settings_need_a_name_and_a_value(text: str) -> None:
    with pytest.raises(ValueError, match="NAME=VALUE"):
        parse_settings([text])


def test_toml_is_read_back_as_it_was() -> None:
    settings = {
        "node_id": "n1",
        "span_seconds": 7200,
        "create_topics": False,
        "data_dir": 'a "quoted" \\ päth',
        "kafka": {"bootstrap.servers": "127.0.0.1:1", "linger.ms": "1"},
        "levels": {"5s": 5000},
    }
    assert tomllib.loads(to_toml(settings)) == settings


@pytest.mark.parametrize("arguments", [["--nodes", "0"], ["--config", "x"], ["--nodes", "many"]])
def test_wrong_arguments_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: scripts/cluster" in capsys.readouterr().err


def test_ports_below_the_range_of_outgoing_connections(tmp_path: Path) -> None:
    cluster = LocalCluster(nodes=3, kafka="127.0.0.1:1", folder=tmp_path)
    addresses = [
        address
        for node in cluster.nodes
        for address in (node.address, node.peer_address, node.metrics_address)
    ]
    ports = [int(address.rpartition(":")[2]) for address in addresses]
    assert len(set(ports)) == 9
    assert all(port < 32768 for port in ports)


def test_the_first_node_is_where_clients_look_if_that_is_free(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        known = other.getsockname()[1]

    def address() -> str:
        made = LocalCluster(nodes=2, kafka="127.0.0.1:1", folder=tmp_path, first_port=known)
        return made.nodes[0].address

    with socket.create_server(("127.0.0.1", known)):
        assert address() != f"127.0.0.1:{known}"
    assert address() == f"127.0.0.1:{known}"
    assert address() != f"127.0.0.1:{known}", "it is the first cluster's"


def test_a_port_that_was_asked_for_is_used_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        asked = ["--kafka", "127.0.0.1:1", "--data", str(tmp_path), "--port", str(taken)]
        assert main(asked) == 1
        assert capsys.readouterr().err == f"port {taken} is in use: give another --port\n"
    made = LocalCluster(nodes=2, kafka="127.0.0.1:1", folder=tmp_path, first_port=taken)
    assert made.nodes[0].address == f"127.0.0.1:{taken}"
    with pytest.raises(SystemExit):
        main(["--nodes", "3", "--port", "65534"])


def test_the_next_commands_are_ready_to_paste(tmp_path: Path) -> None:
    cluster = LocalCluster(kafka="127.0.0.1:1", folder=tmp_path)
    address = cluster.nodes[0].address
    reported = next_commands(cluster, ["orders", "bills"])
    commands = [line.strip() for line in reported.splitlines() if line.startswith("  ")]
    path, server = commands[:2]
    assert server == f"export DELAYWHEEL_SERVER={address}"
    found = subprocess.run(
        ["bash", "-c", f"{path}; command -v delaywheel"], capture_output=True, text=True, check=True
    )
    assert Path(found.stdout.strip()).parent == Path(sys.executable).parent
    assert any(" produce orders " in command for command in commands)
    cluster.nodes[0].address = "127.0.0.1:7420"
    reported = next_commands(cluster, [])
    assert "DELAYWHEEL_SERVER" not in reported
    assert "--topic orders" in reported
    three = LocalCluster(kafka="127.0.0.1:1", folder=tmp_path / "three", nodes=3)
    addresses = ",".join(node.address for node in three.nodes)
    assert f"export DELAYWHEEL_SERVER={addresses}\n" in next_commands(three, [])


def test_the_next_commands_search_the_index_of_the_trace(tmp_path: Path) -> None:
    cluster = LocalCluster(kafka="127.0.0.1:1", folder=tmp_path)
    reported = next_commands(cluster, ["bills"], tmp_path / "my traces")
    assert f"  export DELAYWHEEL_INDEX='{tmp_path}/my traces'\n" in reported
    assert "  delaywheel trace --topic bills\n" in reported
    assert "more than a minute after the start" in reported
    assert "trace" not in next_commands(cluster, ["bills"])


def test_the_page_beside_it_prints_a_link_and_ends(tmp_path: Path) -> None:
    with PageProcess(["127.0.0.1:1"], tmp_path) as page:
        wait_until("it has a link", lambda: page.link is not None)
        link = str(page.link)
        assert "#secret=" in link
        with urlopen(link, timeout=20) as answered:
            assert b"page.js" in answered.read()
    assert page.log.stat().st_mode & 0o077 == 0
    with pytest.raises(OSError, match="refused"):
        urlopen(link, timeout=20)


@pytest.mark.usefixtures("fake_node")
def test_configuration_joins_ours_and_the_callers(tmp_path: Path) -> None:
    settings = {"cluster_id": "c9", "kafka": {"linger.ms": 1}, "flush": "group"}
    with LocalCluster(nodes=2, kafka="127.0.0.1:1", folder=tmp_path, settings=settings) as cluster:
        config = tomllib.loads((tmp_path / "n2.toml").read_text())
    assert config == {
        "node_id": "n2",
        "listen": cluster.nodes[1].address,
        "metrics_listen": cluster.nodes[1].metrics_address,
        "data_dir": str(tmp_path / "n2"),
        "cluster_id": "c9",
        "flush": "group",
        "members": {node.id: node.peer_address for node in cluster.nodes},
        "kafka": {"bootstrap.servers": "127.0.0.1:1", "linger.ms": 1},
    }


@pytest.mark.usefixtures("fake_node")
def test_ready_file_is_kept_current_when_a_node_is_restarted(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"

    def read() -> dict[str, Any]:
        content: dict[str, Any] = json.loads(ready.read_text())
        return content

    with LocalCluster(kafka="127.0.0.1:1", folder=tmp_path, ready_file=ready) as cluster:
        node = cluster.nodes[0]
        before = read()
        assert before["kafka"] == "127.0.0.1:1"
        row = before["nodes"][0]
        assert sorted(row) == ["address", "cleaner_pid", "data", "id", "pid", "server_pid"]
        assert (row["id"], row["address"]) == ("n1", node.address)
        node.kill()

        def restarted() -> bool:
            cluster.watch()
            return read()["nodes"][0]["pid"] not in {None, row["pid"]}

        wait_until("it runs again", restarted)
        assert read()["nodes"][0]["address"] == row["address"]
    assert not node.running


@pytest.mark.usefixtures("fake_node")
def test_dead_node_stays_dead_when_asked_to(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    with LocalCluster(
        kafka="127.0.0.1:1", folder=tmp_path, ready_file=ready, restart=False
    ) as cluster:
        cluster.nodes[0].kill()
        wait_until("it has ended", lambda: not cluster.nodes[0].running)
        cluster.watch()
        assert json.loads(ready.read_text())["nodes"][0]["pid"] is None
        cluster.watch()
        assert not cluster.nodes[0].running


def test_node_that_does_not_start_is_said_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = [sys.executable, "-c", "import sys; sys.exit('no such luck')"]
    monkeypatch.setattr(Node, "command", property(lambda _: broken))
    with (
        pytest.raises(cluster_module.ClusterError, match="no such luck"),
        LocalCluster(kafka="127.0.0.1:1", folder=tmp_path),
    ):
        pass


@pytest.mark.usefixtures("fake_node")
def test_own_folder_goes_after_an_end_that_was_wanted_and_stays_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "ROOT", tmp_path)
    with LocalCluster(kafka="127.0.0.1:1") as clean:
        assert clean.folder.is_dir()
    assert not clean.folder.exists()
    with pytest.raises(KeyboardInterrupt), LocalCluster(kafka="127.0.0.1:1") as interrupted:
        raise KeyboardInterrupt
    assert not interrupted.folder.exists()
    with pytest.raises(RuntimeError), LocalCluster(kafka="127.0.0.1:1") as failed:
        raise RuntimeError
    assert failed.folder.is_dir()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nodes_end_with_the_script_however_it_ends(tmp_path: Path, how: signal.Signals) -> None:
    ready = tmp_path / "ready.json"
    script = (
        "import sys\n"
        "from local.loopback.cluster import main\n"
        "from local.loopback.node import Node\n"
        f"NODE = {NODE!r}\n"
        "Node.command = property(lambda n: [sys.executable, '-c', NODE, str(n.config)])\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    arguments = ["--kafka", "127.0.0.1:1", "--data", str(tmp_path), "--ready-file", str(ready)]
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")},
    )
    try:
        wait_until("it is ready", ready.exists)
        pid = json.loads(ready.read_text())["nodes"][0]["pid"]
        process.send_signal(how)
        assert process.wait(60) == (0 if how is not signal.SIGKILL else -signal.SIGKILL)
        wait_until("it has ended", lambda: not _lives(pid))
    finally:
        process.kill()
        process.wait()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"  # no other may reap it here
    except FileNotFoundError:
        return False
