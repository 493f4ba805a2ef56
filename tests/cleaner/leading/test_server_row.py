"""Which statuses of a server its cleaner believes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from delaywheel.storage.folder.status_file import RowWriter
from delaywheel_replica.cleaner.server_row import ServerRow
from delaywheel_replica.core.protocol.codec import to_json
from delaywheel_replica.core.protocol.status_files import ServerStatus
from support.core.values import heartbeat

BOOT = "this boot"
SINCE_MS = 40_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "server.row"


def read(path: Path) -> ServerStatus | None:
    return ServerRow(path, boot=BOOT, since_ms=SINCE_MS).read()


def write(path: Path, *, boot: str, monotonic_ms: int) -> ServerStatus:
    status = ServerStatus(replace(heartbeat("a"), boot=boot), pid=1, monotonic_ms=monotonic_ms)
    RowWriter(path).write(to_json(status))
    return status


def test_a_row_that_is_not_there_says_nothing(path: Path) -> None:
    assert read(path) is None


def test_the_row_of_the_living_server_is_believed(path: Path) -> None:
    assert read(path) is None
    assert write(path, boot=BOOT, monotonic_ms=SINCE_MS) == read(path)


def test_the_row_of_an_earlier_boot_is_not(path: Path) -> None:
    """Its clock may be ahead by days: it would look fresh for as long."""
    write(path, boot="before", monotonic_ms=SINCE_MS + 86_400_000)
    assert read(path) is None


def test_the_row_of_an_earlier_server_process_is_not(path: Path) -> None:
    write(path, boot=BOOT, monotonic_ms=SINCE_MS - 1)
    assert read(path) is None


def test_a_row_that_cannot_be_understood_says_nothing(path: Path) -> None:
    RowWriter(path).write({"node": 7})
    assert read(path) is None
