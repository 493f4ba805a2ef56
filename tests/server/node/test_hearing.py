"""The server watches its cleaner: its status, and the end of its process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from delaywheel.storage.folder.status_file import RowWriter
from delaywheel_replica.core.protocol.codec import to_json
from delaywheel_replica.core.protocol.status_files import CleanerStatus, Role
from delaywheel_replica.link import Link, Topics
from delaywheel_replica.server.node.cleaner_watch import CleanerWatch
from delaywheel_replica.server.node.node_view import CleanerRow, CleanerView, monotonic_ms
from support.server.well import cleaner_status


@dataclass
class Ears:
    """A server's end of the status, and the writer of its cleaner's."""

    pen: RowWriter
    cleaner: CleanerView = field(default_factory=CleanerView)
    reported: list[CleanerStatus | None] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    written: int = 0

    def take(self, status: CleanerStatus | None) -> None:
        self.reported.append(status)
        self.news.set()

    def write(self, pid: int) -> CleanerStatus:
        self.written += 1  # two within a millisecond differ: the same one is reported once
        stamp_ms = monotonic_ms() + 60_000 + self.written
        status = cleaner_status(pid=pid, monotonic_ms=stamp_ms, role=Role.LEADING)
        self.pen.write(to_json(status))
        return status

    async def heard(self) -> CleanerStatus | None:
        """The next report."""
        async with asyncio.timeout(20):
            while not self.reported:
                self.news.clear()
                await self.news.wait()
        return self.reported.pop(0)


@pytest.fixture
async def ears(tmp_path: Path) -> AsyncIterator[Ears]:
    path = tmp_path / "cleaner.row"
    found = Ears(RowWriter(path))
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = Link(one.detach())
    hearing = CleanerWatch(
        link,
        CleanerRow(path, cleaner_status().boot),
        found.cleaner,
        on_topics=lambda _: None,
        on_dead=lambda _: None,
        on_place=lambda _: None,
        on_handover=lambda _: None,
        on_status=found.take,
    )
    task = asyncio.create_task(hearing.run())
    yield found
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    link.close()
    other.close()


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as started:
        yield started
        started.kill()


async def test_a_row_counts_until_its_process_ends(
    ears: Ears, process: subprocess.Popen[bytes]
) -> None:
    status = ears.write(process.pid)
    assert await ears.heard() == status
    assert ears.cleaner.leading() == status
    process.send_signal(signal.SIGKILL)
    assert await ears.heard() is None, "long before the row is old"
    assert ears.cleaner.leading() is None
    assert ears.cleaner.status == status, "what it committed stays true"


async def test_its_last_word_is_heard(ears: Ears, process: subprocess.Popen[bytes]) -> None:
    ears.write(process.pid)
    await ears.heard()
    last = ears.write(process.pid)
    process.send_signal(signal.SIGKILL)
    assert await ears.heard() == last
    assert await ears.heard() is None


async def test_the_next_cleaner_is_another_process(
    ears: Ears, process: subprocess.Popen[bytes]
) -> None:
    ears.write(process.pid)
    await ears.heard()
    process.send_signal(signal.SIGKILL)
    assert await ears.heard() is None
    status = ears.write(os.getpid())
    assert await ears.heard() == status
    assert ears.cleaner.leading() == status


async def test_a_row_of_a_process_that_is_gone_already(
    ears: Ears, process: subprocess.Popen[bytes]
) -> None:
    process.kill()
    process.wait()
    status = ears.write(process.pid)
    assert await ears.heard() == status
    assert await ears.heard() is None
    assert ears.cleaner.fresh() is None


async def test_what_the_loop_calls_ends_the_process_when_it_fails(
    tmp_path: Path, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio would log it, and the server would receive nothing more."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    path = tmp_path / "cleaner.row"
    found = Ears(RowWriter(path))

    def fail_when_it_died(status: CleanerStatus | None) -> None:
        found.take(status)
        if status is None:
            raise ValueError("a defect")

    def fail(_: Topics) -> None:
        found.take(None)
        raise ValueError("a defect")

    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link, cleaners = Link(one.detach()), Link(other.detach())
    row = CleanerRow(path, cleaner_status().boot)
    hearing = CleanerWatch(
        link,
        row,
        found.cleaner,
        on_topics=fail,
        on_dead=lambda _: None,
        on_place=lambda _: None,
        on_handover=lambda _: None,
        on_status=fail_when_it_died,
    )
    found.write(process.pid)
    task = asyncio.create_task(hearing.run())
    await found.heard()
    cleaners.send(Topics({}, checked_at_ms=17))
    assert (await found.heard(), codes) == (None, [1])
    process.send_signal(signal.SIGKILL)
    assert (await found.heard(), codes) == (None, [1, 1])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    link.close()
    cleaners.close()
