"""Dials a node's peer port, and sends byte by byte what a test wants."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Self

from delaywheel_proto.v1 import peer_pb2 as pb
from delaywheel_replica.peers.framing import PREFACE, IncomingStream, head_of
from delaywheel_replica.peers.handshake import Hello, PeerIdentity, encode_hello
from delaywheel_replica.peers.sockets import Channel
from delaywheel_replica.peers.states import Stream

PATIENCE_S = 60


class Raw:
    """One connection."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        until = Channel(self.socket, address).until(time.monotonic() + PATIENCE_S)
        self._incoming = IncomingStream(until, 1 << 20)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def say(self, *messages: bytes) -> None:
        """Sends messages, each after its length."""
        for message in messages:
            self.socket.sendall(head_of([message]) + message)

    def greet(self, me: PeerIdentity, to: str, stream: Stream | None = Stream.CONTROL) -> None:
        """Greets as a node does."""
        self.socket.sendall(PREFACE)
        self.say(encode_hello(Hello(me, to, stream)))

    def answer(self) -> pb.Answer:
        """What comes back."""
        assert self._incoming.take(len(PREFACE)) == PREFACE
        data = self._incoming.message()
        assert data is not None
        return pb.Answer.FromString(data)

    def wait_ended(self) -> None:
        """Waits until the other side has ended it; nothing more may come."""
        self.socket.settimeout(PATIENCE_S)
        # A reset, where it did not read all that was said.
        with contextlib.suppress(ConnectionResetError):
            assert self.socket.recv(1) == b""

    def has_ended(self) -> bool:
        """Whether the other side has ended it."""
        self.socket.settimeout(0)
        try:
            return self.socket.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True
