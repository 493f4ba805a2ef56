"""Several fake services that describe each other, to be killed, drained, and brought back."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import grpc

from delaywheel.testing.rows import SentMessage
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from support.clients.fake_service import Behaviour, FakeService, accept
from support.services.waiting import wait_until


class FakeCluster:
    """Nodes n1, n2, …

    Attributes:
        nodes: The service of each, the latest where one was brought back.
        advertised: The address that is advertised for each.
        accepting: Each node's report about itself.
    """

    def __init__(self, count: int = 3, *, cluster_id: str = "c1") -> None:
        self._cluster_id = cluster_id
        self.nodes = [FakeService() for _ in range(count)]
        self.advertised: list[str] = []
        self.accepting = [True] * count
        # Of each dead one what keeps others from taking its port.
        self._dead: dict[int, socket.socket] = {}
        self._former: list[FakeService] = []

    def __enter__(self) -> Self:
        for number, node in enumerate(self.nodes):
            node.__enter__()
            node.describe = self._describe(number)
            self.advertised.append(node.address)
        return self

    def __exit__(self, *_: object) -> None:
        for number in range(len(self.nodes)):
            if number not in self._dead:
                self.kill(number)
        for held in self._dead.values():
            held.close()

    @property
    def addresses(self) -> list[str]:
        return [node.address for node in self.nodes]

    def kill(self, number: int) -> None:
        """Ends its connections and calls, and no longer listens."""
        node = self.nodes[number]
        node.__exit__(None, None, None)
        self._dead[number] = wait_until("its port is free", lambda: _held(node.address))

    def revive(self, number: int) -> None:
        """A new service at the old address; it remembers nothing."""
        held = self._dead.pop(number)
        node = FakeService(address=self.nodes[number].address)
        node.describe = self._describe(number)
        self._former.append(self.nodes[number])
        self.nodes[number] = node
        node.__enter__()
        held.close()

    def behave(self, number: int, behaviour: Behaviour) -> None:
        """Sets the answer to every DelayProduce, Cancel and GetMessage from now on."""
        self.nodes[number].otherwise = behaviour

    def sent(self, number: int) -> list[SentMessage]:
        """Every row of every attempt that arrived there."""
        return [row for rows in self.nodes[number].sent for row in rows]

    def accepted(self) -> set[tuple[bytes, int]]:
        """Id and due of all messages that any node has ever accepted."""
        services = (*self._former, *self.nodes)
        return {taken for service in services for taken in service.accepted}

    def describe(self, number: int) -> pb.DescribeClusterResponse:
        levels = [pb.Level(name="30s", delay_ms=30_000)]
        limits = pb.Limits(max_request_messages=10_000, max_request_bytes=16 << 20)
        return pb.DescribeClusterResponse(
            cluster_id=self._cluster_id,
            node=f"n{number + 1}",
            members=[
                pb.Member(
                    node=f"n{other + 1}",
                    address=address,
                    accepting=self.accepting[other] and other == number,
                )
                for other, address in enumerate(self.advertised)
            ],
            levels=levels,
            limits=limits,
        )

    def _describe(self, number: int) -> Behaviour:
        return lambda _service, _request, _context: self.describe(number)


def _held(address: str) -> socket.socket | None:
    """Refuses connections there while nothing listens; gRPC may do that all the same."""
    host, _, port = address.rpartition(":")
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((host, int(port)))
    except OSError:
        held.close()
        return None
    return held


@contextmanager
def black_hole() -> Iterator[str]:
    """An address that accepts connections and never sends anything."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@contextmanager
def dead() -> Iterator[str]:
    """An address that refuses connections for as long as it is held."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound but not listening
        yield f"127.0.0.1:{held.getsockname()[1]}"


def first(behaviours: Sequence[Behaviour]) -> Behaviour:
    """Answers with these in turn, then with acceptance; for several services together."""
    left = list(behaviours)

    def behave(service: FakeService, request: Any, context: grpc.ServicerContext) -> Any:
        return (left.pop(0) if left else accept)(service, request, context)

    return behave
