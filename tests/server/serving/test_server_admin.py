"""A server process whose data folder is gone, until the operator says that the new one counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.link import NodeStorage
from support.server.server_process import ServerProcess
from support.services.waiting import wait_until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path / "n1")
    server.start()
    server.wait_accepting()
    yield server
    server.kill()


def test_an_emptied_node_accepts_again_once_it_is_replaced(server: ServerProcess) -> None:
    assert server.produce(pb.DelayedMessage(topic="orders", delay_ms=60_000))[0].handle
    server.wait_spare()  # both wheels are at risk
    before = server.cleaner.state.nodes["n1"].storage
    server.kill()
    server.data.rename(server.data.with_name("lost"))
    server.start()
    refused = wait_until("it is reported", lambda: _replaced(server)).refusing
    assert refused.reason == "NO_WHEEL"
    assert f"STORAGE_REPLACED: node n1 runs on storage {_storage(server)}" in refused.message
    assert {row.state for row in server.describe().wheels} == {pb.WHEEL_STATE_FENCED}

    request = pb.ReplaceNodeRequest(node="n1", dry_run=True)
    reported = server.admin.ReplaceNode(request, timeout=20).change
    assert (reported.storage_before, reported.storage) == (before, _storage(server))
    assert [row.wheel for row in reported.wheels] == ["n1.1", "n1.2"]
    assert _replaced(server), "a dry run changes nothing"
    request = pb.ReplaceNodeRequest(node="n1", storage=reported.storage)
    assert server.admin.ReplaceNode(request, timeout=20).change.storage == reported.storage
    assert set(server.cleaner.received) >= {NodeStorage("n1", reported.storage)}
    server.wait_accepting()
    after = server.describe()
    assert not after.HasField("refusing")
    assert not after.members[0].storage_replaced


def _replaced(server: ServerProcess) -> pb.DescribeClusterResponse | None:
    answer = server.describe()
    return answer if answer.members[0].storage_replaced else None


def _storage(server: ServerProcess) -> str:
    return wait_until("it reports itself", server.cleaner.heartbeat).storage
