"""A TCP proxy that speaks just enough of Kafka's protocol to lose the right message.

Clients come through it when they bootstrap at the broker's `proxy_address`: the broker's proxied
listener sends them back here. A request is its length, api key, version and correlation
id; a reply is its length and the correlation id. Nothing else is read.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Self

from local.loopback.kafka import KafkaBroker

ANSWER_S = 60
PRODUCE = 0
ADD_OFFSETS_TO_TXN = 25
END_TXN = 26
_FLEXIBLE_END_TXN = 3

Matches = Callable[[int, bytes], bool]
"""Whether a request, by api key and whole frame, is meant."""


@dataclass(slots=True)
class _Rule:
    """The fate of the next matching request."""

    matches: Matches
    act: Callable[[_Connection, int, bytes], None]
    once: bool = True


@dataclass(slots=True)
class _Connection:
    client: socket.socket
    broker: socket.socket
    # Correlation ids whose replies are lost, together with the connection.
    losing: set[int] = field(default_factory=set)
    # Correlation ids whose replies never come; the connection stays.
    silent: set[int] = field(default_factory=set)

    def close(self) -> None:
        for end in (self.client, self.broker):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@dataclass(slots=True)
class HeldCommits:
    """A leader's transactions that do not end.

    Attributes:
        begun: one with a record of the topic is open, until it is aborted.
        late: the EndTxn requests that did not arrive, for `end_txn_error`.
    """

    begun: threading.Event = field(default_factory=threading.Event)
    late: list[bytes] = field(default_factory=list)


class KafkaProxy:
    """Stands between clients and a broker's proxied listener.

    Attributes:
        held_requests: EndTxn requests that were held back so far.
        lost_replies: Replies that the broker gave and the client never saw.
    """

    def __init__(self, kafka: KafkaBroker) -> None:
        self.held_requests = 0
        self.lost_replies = 0
        self._target = ("127.0.0.1", kafka.proxied_port)
        self._server = socket.create_server(("127.0.0.1", kafka.proxy_port))
        self._connections: list[_Connection] = []
        self._rules: list[_Rule] = []
        self._held: list[bytes] = []
        self._lock = threading.Lock()
        self._closing = False
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        # A thread that is in accept() does not notice that the socket is closed.
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()
        for thread in self._threads:
            thread.join(5)

    def lose_next_end_txn_reply(self) -> None:
        """The broker ends the next transaction; instead of its reply the connection breaks."""
        self._add(_Rule(_is(END_TXN), _lose_reply))

    def hold_next_end_txn(self) -> None:
        """Loses the next EndTxn and breaks the connection; see `release_held`."""
        self._add(_Rule(_is(END_TXN), self._hold))

    def release_held(self) -> list[int]:
        """Lets the held requests arrive now; returns the error codes of the broker's answers."""
        held, self._held = self._held, []
        return [self.end_txn_error(frame) for frame in held]

    def break_at_next_produce(self, topic: str) -> None:
        """Lets the next produce to the topic arrive, and breaks the connection."""
        self._add(_Rule(_is(PRODUCE, topic), _lose_reply))

    def swallow_produces(self, topic: str) -> Callable[[], None]:
        """Loses everything that is produced to the topic, until the returned function is called."""
        rule = _Rule(_is(PRODUCE, topic), _swallow, once=False)
        self._add(rule)
        return lambda: self._drop(rule)

    def delay_produces(self, seconds: float) -> Callable[[], None]:
        """Lets each produce wait for this long, until the returned function is called."""
        return self._delay(PRODUCE, seconds)

    def delay_ends(self, seconds: float) -> Callable[[], None]:
        """The same for the end of each transaction."""
        return self._delay(END_TXN, seconds)

    def _delay(self, api_key: int, seconds: float) -> Callable[[], None]:

        def delay(connection: _Connection, correlation: int, frame: bytes) -> None:
            del correlation
            time.sleep(seconds)
            connection.broker.sendall(frame)

        rule = _Rule(_is(api_key), delay, once=False)
        self._add(rule)
        return lambda: self._drop(rule)

    @contextlib.contextmanager
    def open_transactions(self, topic: str) -> Iterator[HeldCommits]:
        """From the next record of the topic on no transaction ends that the leader has begun.

        A new leader's do: it connects again.
        """
        held = HeldCommits()
        leaders: set[int] = set()

        def keep(connection: _Connection, correlation: int, frame: bytes) -> None:
            del correlation
            if id(connection) in leaders:
                held.late.append(frame)
            else:
                connection.broker.sendall(frame)

        def pass_on(connection: _Connection, correlation: int, frame: bytes) -> None:
            del correlation
            with self._lock:
                leaders.update(map(id, self._connections))
                self._rules.append(no_end)
            connection.broker.sendall(frame)
            held.begun.set()

        no_end = _Rule(_is(END_TXN), keep, once=False)
        produced = _Rule(_is(PRODUCE, topic), pass_on)
        self._add(produced)
        try:
            yield held
        finally:
            with self._lock:
                self._rules = [rule for rule in self._rules if rule not in (produced, no_end)]

    def stall_next_offsets(self) -> tuple[threading.Event, threading.Event]:
        """The next transaction has its records, and waits with its offsets.

        Returns:
            Set when it waits; and to be set to let it continue.
        """
        came, goes_on = threading.Event(), threading.Event()

        def stall(connection: _Connection, correlation: int, frame: bytes) -> None:
            del correlation
            came.set()
            goes_on.wait(ANSWER_S)
            connection.broker.sendall(frame)

        self._add(_Rule(_is(ADD_OFFSETS_TO_TXN), stall))
        return came, goes_on

    def end_txn_error(self, frame: bytes) -> int:
        """Lets a kept EndTxn request arrive at last; returns the broker's error code."""
        (version,) = struct.unpack_from(">h", frame, 6)
        reply = self._ask_broker(frame)
        # Length, correlation id, from version 3 on an empty run of tags, throttle time, error.
        (code,) = struct.unpack_from(">h", reply, 12 + (version >= _FLEXIBLE_END_TXN))
        return int(code)

    def _ask_broker(self, frame: bytes) -> bytes:
        with socket.create_connection(self._target, timeout=ANSWER_S) as broker:
            broker.sendall(frame)
            return _read_frame(broker)

    def cut(self) -> None:
        """Breaks all connections."""
        with self._lock:
            connections, self._connections = self._connections, []
        for connection in connections:
            connection.close()

    def _add(self, rule: _Rule) -> None:
        with self._lock:
            self._rules.append(rule)

    def _drop(self, rule: _Rule) -> None:
        with self._lock:
            self._rules.remove(rule)

    def _start(self, run: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closing:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            try:
                broker = socket.create_connection(self._target, timeout=ANSWER_S)
            except OSError:
                client.close()
                continue
            for end in (client, broker):
                end.settimeout(None)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = _Connection(client, broker)
            with self._lock:
                self._connections.append(connection)
            self._start(self._pump, connection, self._requests)
            self._start(self._pump, connection, self._replies)

    def _pump(self, connection: _Connection, pump: Callable[[_Connection], None]) -> None:
        with contextlib.suppress(OSError):
            pump(connection)
        connection.close()

    def _requests(self, connection: _Connection) -> None:
        while frame := _read_frame(connection.client):
            api_key, _, correlation = struct.unpack_from(">hhi", frame, 4)
            rule = self._rule_for(api_key, frame)
            if rule is None:
                connection.broker.sendall(frame)
            else:
                rule.act(connection, correlation, frame)

    def _rule_for(self, api_key: int, frame: bytes) -> _Rule | None:
        """The fate of a request; each connection asks on its own thread."""
        with self._lock:
            rule = next((rule for rule in self._rules if rule.matches(api_key, frame)), None)
            if rule is not None and rule.once:
                self._rules.remove(rule)
        return rule

    def _replies(self, connection: _Connection) -> None:
        while frame := _read_frame(connection.broker):
            (correlation,) = struct.unpack_from(">i", frame, 4)
            if correlation in connection.losing:
                self.lost_replies += 1
                return
            if correlation not in connection.silent:
                connection.client.sendall(frame)

    def _hold(self, connection: _Connection, correlation: int, frame: bytes) -> None:
        del correlation
        self._held.append(frame)
        self.held_requests += 1
        connection.close()


def _is(api_key: int, topic: str = "") -> Matches:
    """Requests of this kind; if they name topics, only those naming this one."""
    # A name in the request has its length before it, plus 1 as compact strings have it. The same
    # name within a record, in a dead letter for instance, has not.
    name = bytes([len(topic) + 1]) + topic.encode() if topic else b""
    return lambda key, frame: key == api_key and name in frame


def _lose_reply(connection: _Connection, correlation: int, frame: bytes) -> None:
    connection.losing.add(correlation)
    connection.broker.sendall(frame)


def _swallow(connection: _Connection, correlation: int, frame: bytes) -> None:
    del connection, correlation, frame


def _read_frame(end: socket.socket) -> bytes:
    """One whole frame with its length; empty at the end of the stream."""
    head = _read(end, 4)
    if not head:
        return b""
    body = _read(end, struct.unpack(">i", head)[0])
    return head + body if body else b""


def _read(end: socket.socket, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        part = end.recv(length - len(parts))
        if not part:
            return b""
        parts += part
    return bytes(parts)
