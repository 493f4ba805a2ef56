"""A failure that no restart fixes ends the server with 78, after one line that says why."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from delaywheel.storage.files.wheel_folder import list_wheels
from delaywheel.storage.folder.disk import PosixDisk
from support.server.server_process import ServerProcess


def test_an_address_that_another_has(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        server = ServerProcess(tmp_path / "d", listen=address)
        with pytest.raises(AssertionError, match="ended: 78"):
            server.start()
        server.kill()
    assert f"listen {address}: Address already in use" in capfd.readouterr().err


def test_a_wheel_of_a_newer_release(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "d")
    with server:
        server.wait_accepting()
    (wheel,) = list_wheels(PosixDisk(), server.data)
    path = server.data / "wheels" / str(wheel) / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 99}))
    with pytest.raises(AssertionError, match="ended: 78"):
        server.start()
    server.kill()
