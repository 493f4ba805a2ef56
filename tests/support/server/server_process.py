"""A real server process under test, with a fake cleaner on a thread of the test."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import grpc

from delaywheel.storage.folder.status_file import in_memory
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_proto.v1 import delaywheel_pb2_grpc as rpc
from delaywheel_replica.config import Config
from delaywheel_replica.config_sources import load_config
from delaywheel_replica.process.inheritance import (
    ADDRESS_VARIABLE,
    ALLOCATOR,
    LIFE_FD_VARIABLE,
    LINK_FD_VARIABLE,
    READY_FD_VARIABLE,
    RESOLVED_VARIABLE,
    ROW_FD_VARIABLE,
)
from support.server.fake_cleaner import FakeCleaner
from support.server.forked import Forked, fork_server
from support.services.waiting import wait_until

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_reconnect_backoff_ms", 200),
)


def config_for(data: Path, **settings: Any) -> Config:
    """A node's configuration for tests."""
    flags = {
        "cluster_id": "test",
        "node_id": "n1",
        "data_dir": str(data),
        "listen": "127.0.0.1:0",
        "kafka.bootstrap.servers": "127.0.0.1:1",
        "ledger_seal_seconds": "1",
        "disk_reserve_bytes": "0",
        **settings,
    }
    return load_config(flags=flags)


class ServerProcess:
    """The server of node n1 on a data folder; started once, or again after its end."""

    def __init__(self, data: Path, **settings: Any) -> None:
        """Prepares; nothing runs before `start`."""
        self.data = data
        # What Python runs; None: the server, forked from a process that has loaded it.
        self.program: Sequence[str] | None = None
        self.config = config_for(data, **settings)
        self.address: str | None = None
        self.cleaner: FakeCleaner
        self.process: subprocess.Popen[bytes] | Forked
        self.life_write = -1
        self._row_fd = os.memfd_create("server.row")
        self._channel: grpc.Channel | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(
        self, *, prepare: Callable[[FakeCleaner], None] = lambda _: None, leads: bool = True
    ) -> None:
        """Starts the process and waits until it accepts calls.

        Args:
            prepare: Gets the fake cleaner before it starts.
            leads: False: the cleaner does not run at all (Kafka and all of it is away).
        """
        self.data.mkdir(parents=True, exist_ok=True)
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        life_read, self.life_write = os.pipe()
        ready_read, ready_write = os.pipe()
        inherited = {
            LINK_FD_VARIABLE: there.fileno(),
            LIFE_FD_VARIABLE: life_read,
            READY_FD_VARIABLE: ready_write,
            ROW_FD_VARIABLE: self._row_fd,
        }
        environment = {**ALLOCATOR, **os.environ, RESOLVED_VARIABLE: self.config.resolved()}
        if self.address is not None:
            environment[ADDRESS_VARIABLE] = self.address
        self.process = self._started(environment, inherited)
        there.close()
        os.close(life_read)
        os.close(ready_write)
        state = self.cleaner.state if hasattr(self, "cleaner") else None
        self.cleaner = FakeCleaner(
            self.data, here.detach(), self.config.node_id, row=in_memory(self._row_fd)
        )
        if state is not None:
            self.cleaner.state = state
        prepare(self.cleaner)
        if leads:
            self.cleaner.start()
        with os.fdopen(ready_read) as ready:
            self.address = ready.readline().strip() or None
        assert self.address is not None, f"the server ended: {self.process.wait(30)}"

    def _started(
        self, environment: Mapping[str, str], inherited: Mapping[str, int]
    ) -> subprocess.Popen[bytes] | Forked:
        if self.program is None:
            return fork_server(environment, inherited)
        numbers = {name: str(number) for name, number in inherited.items()}
        return subprocess.Popen(
            [sys.executable, "-P", *self.program],
            env={**environment, **numbers},
            pass_fds=tuple(inherited.values()),
            stdin=subprocess.DEVNULL,
        )

    def kill(self) -> None:
        """Ends the process at once, and the fake cleaner."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self._clean_up()

    def terminate(self) -> int:
        """Ends it as the supervisor does; returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        finally:
            self._clean_up()

    def _clean_up(self) -> None:
        self.process.wait(30)
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self.cleaner.stop()
        if self.life_write >= 0:
            os.close(self.life_write)
            self.life_write = -1

    @property
    def stub(self) -> rpc.DelayWheelStub:
        """The calls of its service."""
        return rpc.DelayWheelStub(self._connected())

    @property
    def admin(self) -> rpc.DelayWheelAdminStub:
        """The calls of its operators' service."""
        return rpc.DelayWheelAdminStub(self._connected())

    def _connected(self) -> grpc.Channel:
        if self._channel is None:
            assert self.address is not None
            self._channel = grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        return self._channel

    def wait_accepting(self) -> None:
        """Waits until a wheel is open."""
        wait_until("it accepts", lambda: self.describe().members[0].accepting)

    def wait_spare(self) -> None:
        """Waits until the spare is saved, and reported."""
        wait_until("a spare", lambda: (heartbeat := self.cleaner.heartbeat()) and heartbeat.spare)

    def describe(self) -> pb.DescribeClusterResponse:
        """DescribeCluster."""
        return self.stub.DescribeCluster(
            pb.DescribeClusterRequest(), timeout=30, wait_for_ready=True
        )

    def produce(self, *messages: pb.DelayedMessage, timeout: float = 30) -> list[pb.ProduceResult]:
        """DelayProduce of rows; the results."""
        request = pb.DelayProduceRequest(messages=messages)
        return list(self.stub.DelayProduce(request, timeout=timeout).results)
