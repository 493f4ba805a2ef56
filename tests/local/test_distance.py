"""What processes send to each other takes the time that was asked for, both ways."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ONE_WAY_MS = 20
PROGRAM = """
import socket, threading, time

at = socket.create_server(("127.0.0.1", 0))
def answer():
    connection, _ = at.accept()
    while asked := connection.recv(1 << 16):
        connection.sendall(asked)
threading.Thread(target=answer, daemon=True).start()
began = time.monotonic()
connection = socket.create_connection(at.getsockname())
print(time.monotonic() - began)
for number in range(3):
    began = time.monotonic()
    connection.sendall(b"%d" % number)
    assert connection.recv(10) == b"%d" % number
    print(time.monotonic() - began)
connection.sendall(bytes(1 << 20))
left = 1 << 20
while left:
    left -= len(connection.recv(left))
"""


@pytest.mark.parametrize("jitter_ms", [0, 30])
def test_a_round_trip_is_twice_the_way(jitter_ms: int) -> None:
    if os.geteuid() or not Path("/dev/net/tun").exists() or not shutil.which("ip"):
        pytest.skip("it takes root, TUN devices and `ip`")
    far = [sys.executable, "-m", "local.stage.distance"]
    far += [f"--ms={ONE_WAY_MS}", f"--jitter-ms={jitter_ms}", sys.executable, "-c", PROGRAM]
    done = subprocess.run(far, capture_output=True, text=True, check=True, timeout=60)
    trips_s = [float(line) for line in done.stdout.split()]
    assert len(trips_s) == 4
    assert min(trips_s) >= 2 * ONE_WAY_MS / 1000
