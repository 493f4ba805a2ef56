"""A real server whose disk really hangs: a separate file system, frozen by the kernel."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.server.node.node_view import monotonic_ms
from support.server.server_process import ServerProcess
from support.services.waiting import wait_until

MEMORY = Path("/dev/shm")
TOOLS = ("mkfs.ext4", "mount", "umount", "fsfreeze")
SERVING = health_pb2.HealthCheckResponse.SERVING
THAWED_AFTER_S = 90
ANSWERED_WITHIN_S = 30


def run(*command: object) -> None:
    """Runs a command as root."""
    subprocess.run(list(map(str, command)), check=True, capture_output=True)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    """A file system that can be frozen."""
    if os.geteuid() or not MEMORY.is_dir() or not all(map(shutil.which, TOOLS)):
        pytest.skip("only root can freeze a file system")
    place = tmp_path / "mount"
    place.mkdir()
    with NamedTemporaryFile(dir=MEMORY) as image:
        os.truncate(image.name, 64 << 20)
        run("mkfs.ext4", "-q", "-F", image.name)
        try:
            run("mount", "-o", "loop", image.name, place)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no loop device: {error.stderr!r}")
        # Whatever becomes of this process: nothing stays frozen.
        thaw = f"sleep {THAWED_AFTER_S}; fsfreeze -u {place}"
        guard = subprocess.Popen(
            ["sh", "-c", thaw], stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            yield place
        finally:
            subprocess.run(["fsfreeze", "-u", str(place)], check=False, capture_output=True)
            os.killpg(guard.pid, signal.SIGKILL)
            guard.wait()
            run("umount", "-l", place)


@pytest.fixture
def server(mount: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    """Its fake cleaner lives in this process, which must not hang: its status is elsewhere."""
    data = mount / "n1"
    data.mkdir()
    (tmp_path / "cleaner.row").touch()
    (data / "cleaner.row").symlink_to(tmp_path / "cleaner.row")
    with ServerProcess(data) as found:
        yield found


class Caller:
    """Asks, and notes how long that took."""

    def __init__(self, server: ServerProcess) -> None:
        assert server.address is not None
        self._channel = grpc.insecure_channel(server.address)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._stub = server.stub
        self.waited_s = 0.0

    def is_serving(self) -> bool:
        """What health says."""
        asked = self._health.Check(health_pb2.HealthCheckRequest(), timeout=ANSWERED_WITHIN_S)
        return bool(asked.status == SERVING)

    def produce(self) -> str:
        """The handle of a message, or why it was refused."""
        began = time.monotonic()
        message = pb.DelayedMessage(topic="orders", value=b"x", delay_ms=3_600_000)
        try:
            asked = pb.DelayProduceRequest(messages=[message])
            return str(self._stub.DelayProduce(asked, timeout=ANSWERED_WITHIN_S).results[0].handle)
        except grpc.RpcError as error:
            return str(error.details())
        finally:
            self.waited_s = time.monotonic() - began


def is_refused_at_once(caller: Caller) -> bool:
    """Whether a message was refused without waiting for the disk."""
    assert "The node's disk does not respond" in caller.produce()
    return caller.waited_s < 1


def row_age_ms(server: ServerProcess) -> int:
    """How old the server's report to its cleaner is."""
    row = server.cleaner._server_row.read()
    assert row is not None
    return monotonic_ms() - row.monotonic_ms


def test_a_node_whose_disk_hangs_says_so_and_goes_on_when_it_does(
    server: ServerProcess, mount: Path
) -> None:
    caller = Caller(server)
    wait_until("a wheel is open", caller.is_serving)
    assert caller.produce().startswith("n1.1:")
    run("fsfreeze", "-f", mount)
    waited = caller.produce()
    assert "disk" in waited, waited
    assert caller.waited_s > 1
    wait_until("health says so", lambda: not caller.is_serving())
    wait_until("it is refused at once", lambda: is_refused_at_once(caller))
    wait_until("the row is written all the same", lambda: row_age_ms(server) < 500)
    run("fsfreeze", "-u", mount)
    wait_until("it goes on", lambda: caller.produce().startswith("n1."))
    wait_until("health says so", caller.is_serving)
