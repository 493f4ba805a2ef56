"""A failure that no restart fixes ends the server with 78, after one line that says why."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from delaywheel.storage.files.wheel_folder import list_wheels
from delaywheel.storage.folder.disk import PosixDisk
from support.server.server_process import ServerProcess


def test_an_address_that_another_has(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = ServerProcess(tmp_path / "d", listen=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(AssertionError, match="ended: 78"):
            server.start()
        server.kill()


def test_a_wheel_that_does_not_say_who_it_is(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "d")
    with server:
        server.wait_accepting()
    (wheel,) = list_wheels(PosixDisk(), server.data)
    (server.data / "wheels" / str(wheel) / "meta.json").write_text("{}")
    with pytest.raises(AssertionError, match="ended: 78"):
        server.start()
    server.kill()
