"""packaging/systemd/delaywheel.service: a node runs with what the unit leaves it.

No systemd runs here: bubblewrap has the unit's mounts, users and capabilities, and prctl denies
memory that is written and executed. SystemCallFilter= and RestrictAddressFamilies= are not tried.
The node has no Kafka: it starts, takes calls, reloads, and ends.
"""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from local.loopback.kafka import free_ports
from support.process.night import at_night

pytestmark = at_night

ROOT = Path(__file__).parents[2]
UNIT = dict(
    re.findall(
        r"^(\w+)=(.*)$",
        (ROOT / "packaging" / "systemd" / "delaywheel.service").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
)
PR_SET_MDWE = 65
DENYING = f"""
import ctypes, os, sys
if ctypes.CDLL(None).prctl({PR_SET_MDWE}, 1, 0, 0, 0):
    sys.exit("this kernel knows no PR_SET_MDWE")
os.execv(sys.argv[1], sys.argv[1:])
"""
MOUNTS = {
    ("ProtectSystem", "strict"): ("--ro-bind", "/", "/"),
    ("ProtectHome", "yes"): ("--tmpfs", "/home", "--tmpfs", "/root"),
    ("PrivateTmp", "yes"): ("--tmpfs", "/tmp", "--tmpfs", "/var/tmp"),
    ("PrivateDevices", "yes"): ("--dev", "/dev"),
    ("PrivateUsers", "yes"): ("--unshare-user", "--uid", "10001", "--gid", "10001"),
    ("PrivateIPC", "yes"): ("--unshare-ipc",),
    ("ProtectHostname", "yes"): ("--unshare-uts",),
    ("CapabilityBoundingSet", ""): ("--cap-drop", "ALL"),
}
"""What bubblewrap is told for a line of the unit, in this order."""


def confined(folder: Path) -> list[str]:
    """The unit's command, in what the unit leaves of the machine."""
    program = shutil.which("bwrap")
    if program is None:
        pytest.skip("bwrap is not installed (Debian, Ubuntu: bubblewrap)")
    command = [program, "--die-with-parent"]
    for (name, value), options in MOUNTS.items():
        assert UNIT[name] == value
        command += options
    # What is installed may lie in a home, and the test's folder does in /tmp.
    for readable in (sys.prefix, sys.base_prefix, str(ROOT), str(folder)):
        command += ["--ro-bind", readable, readable]
    command += ["--bind", str(folder / "data"), str(folder / "data")]
    assert UNIT["MemoryDenyWriteExecute"] == "yes"
    started = UNIT["ExecStart"].split()
    started[0] = str(Path(sys.executable).with_name("delaywheel"))
    started[-1] = str(folder / "node.toml")
    return [*command, sys.executable, "-c", DENYING, sys.executable, *started]


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """What systemd would hear."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(120)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield manager


def test_a_node_runs_with_what_the_unit_leaves_it(manager: socket.socket, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(0o750)
    (port,) = free_ports(1)
    (tmp_path / "node.toml").write_text(
        f'cluster_id = "c"\nnode_id = "n1"\ndata_dir = "{tmp_path / "data"}"\n'
        f'listen = "127.0.0.1:{port}"\n[kafka]\n"bootstrap.servers" = "127.0.0.1:1"\n'
    )
    log = tmp_path / "log"

    def heard(text: str) -> None:
        while text not in manager.recv(4096).decode():
            pass

    with log.open("wb") as output, subprocess.Popen(confined(tmp_path), stderr=output) as outer:
        try:
            heard("READY=1")
            (pid,) = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
            status = Path(f"/proc/{pid}/status").read_text()
            assert re.search(r"^CapEff:\s0+$", status, re.MULTILINE)
            subprocess.run(["kill", "-HUP", pid], check=True)
            heard("RELOADING=1")
            heard("READY=1")
            subprocess.run(["kill", "-TERM", pid], check=True)
            heard("STOPPING=1")
            assert outer.wait(60) == 0, log.read_text()
        finally:
            outer.send_signal(signal.SIGKILL)
