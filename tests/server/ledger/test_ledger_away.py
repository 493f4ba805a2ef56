"""The ledger's place is away, then the disk full: a real server, from refusal to the gap.

Costs some 25 s, of which the books are patient for 10; and as much again for a place that hangs.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from delaywheel.identity import WheelId
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from support.server.server_process import ServerProcess, config_for
from support.services.waiting import wait_until

pytestmark = pytest.mark.slow

ONE = WheelId("n1", 1)
MESSAGES = 5


def test_an_audit_never_stops_the_business(tmp_path: Path) -> None:
    obstacle = tmp_path / "mount"
    obstacle.touch()  # where a folder should be: nothing can be read or written below
    books = obstacle / "books"
    server = ServerProcess(tmp_path / "n1", ledger_uri=str(books))
    server.start()
    try:
        server.wait_accepting()
        due_ms = time.time_ns() // 1_000_000 + 60_000
        rows = [
            pb.DelayedMessage(topic="orders", value=b"v", id=bytes([n] * 16), deliver_at_ms=due_ms)
            for n in range(MESSAGES)
        ]
        assert all(result.handle for result in server.produce(*rows))
        wait_until("status says so", lambda: "mount" in report(server).failure)
        assert report(server).failing_since_ms
        assert ledger_seq(server) == 0
        # The disk reaches its reserve: nothing is accepted, but the floor must advance.
        server.kill()
        server.config = config_for(
            server.data, ledger_uri=str(books), disk_reserve_bytes=str(1 << 60)
        )
        server.start()
        wait_until("given up", lambda: ledger_seq(server) == 1, timeout_s=120)
        wait_until("it is reported", lambda: report(server).gap_messages == MESSAGES)
        assert report(server).gaps == 1
        assert not list(obstacle.parent.rglob("*.parquet"))
        obstacle.unlink()
        name = f"n1.1-{1:019}-{1:019}.json"
        gap = wait_until("the gap is in place", lambda: read(books / "gaps" / name))
    finally:
        server.kill()
    assert (gap["messages"], gap["reason"], gap["node"]) == (MESSAGES, "DISK_RESERVE", "n1")
    assert gap["accepted_from_ms"] == gap["accepted_to_ms"]
    assert not list(books.rglob("*.parquet"))


def test_a_place_that_hangs_is_reported_and_keeps_no_node_from_ending(tmp_path: Path) -> None:
    books = tmp_path / "books"
    books.mkdir()
    os.mkfifo(books / ".n1.tmp")  # opened to be written, it waits for a reader
    server = ServerProcess(tmp_path / "n1", ledger_uri=str(books))
    server.start()
    try:
        server.wait_accepting()
        due_ms = time.time_ns() // 1_000_000 + 60_000
        row = pb.DelayedMessage(topic="orders", value=b"v", id=bytes(16), deliver_at_ms=due_ms)
        assert all(result.handle for result in server.produce(row))
        wait_until("status says so", lambda: report(server).failure, timeout_s=120)
        assert report(server).failure == "does not answer"
        assert report(server).failing_since_ms
        assert ledger_seq(server) == 0
        assert server.terminate() == 0
    finally:
        server.kill()


def report(server: ServerProcess) -> pb.LedgerReport:
    """The node's report about its ledger."""
    request = pb.DescribeClusterRequest(all_members=True)
    (member,) = server.stub.DescribeCluster(request, timeout=30).members
    return member.report.ledger


def ledger_seq(server: ServerProcess) -> int:
    """Up to where the ledger of the first wheel counts as published."""
    heartbeat = server.cleaner.heartbeat()
    reported = None if heartbeat is None else heartbeat.wheels.get(ONE)
    return 0 if reported is None else reported.ledger_seq


def read(path: Path) -> dict[str, object] | None:
    """Returns a gap, once it is there."""
    try:
        found: dict[str, object] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return found
