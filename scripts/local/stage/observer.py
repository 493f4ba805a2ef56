"""A careful consumer in its own process, so that its clock is not disturbed.

It reads committed records only, stamps each with the time at which it could be read, and sends
them in batches through a pipe. The demo checks what arrives; the benchmark reads lateness from
it, with the same process for delaywheel's topics and for Kafka's own.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

if TYPE_CHECKING:  # only the child pays for it
    from confluent_kafka import Message

POLL_S = 0.1
BATCH = 500
START_TIMEOUT_S = 60.0


class Record(NamedTuple):
    """One record, with the wall clock when the consumer saw it."""

    topic: str
    partition: int
    offset: int
    received_ms: float
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]

    def header(self, name: str) -> bytes | None:
        """Returns the last header of this name."""
        return next((value for key, value in reversed(self.headers) if key == name), None)


class ConsumerProcess:
    """A consumer process, which ends with its parent; a context manager."""

    def __init__(
        self,
        consume: Callable[..., None],
        *args: object,
        take: Callable[[Any], None],
        error: type[Exception] = RuntimeError,
    ) -> None:
        """Prepares; nothing runs before the `with` block.

        Args:
            consume: What the child runs: it sends batches, the first one as soon as it reads, and
                ends when the other end of its last argument is closed.
            args: Passed first; then the connection to send on, and the one that requests the stop.
            take: Is given each batch, on a thread.
            error: Raised if the child does not start.
        """
        context = multiprocessing.get_context("spawn")
        self._receive, send = context.Pipe(duplex=False)
        stop, self._stop = context.Pipe(duplex=False)
        self._theirs = (send, stop)
        self._process = context.Process(target=consume, args=(*args, send, stop), daemon=True)
        self._reader = threading.Thread(target=self._read, name="observer", daemon=True)
        self._ready = threading.Event()
        self._take = take
        self._error = error

    @property
    def pid(self) -> int:
        """The process's id."""
        assert self._process.pid is not None
        return self._process.pid

    def __enter__(self) -> Self:
        self._process.start()
        for end in self._theirs:
            end.close()
        self._reader.start()
        if not self._ready.wait(START_TIMEOUT_S) or not self._process.is_alive():
            self.close()
            raise self._error("the consumer did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the consumer."""
        self._stop.close()
        self._process.join(10)
        self._process.kill()
        self._process.join()
        self._reader.join()

    def _read(self) -> None:
        try:
            while True:
                self._take(self._receive.recv())
                self._ready.set()
        except EOFError:
            self._ready.set()


class Observer(ConsumerProcess):
    """Follows topics from their beginnings in a child process.

    Attributes:
        records: Everything seen so far, in the order of arrival; only ever appended to.
    """

    def __init__(self, bootstrap: str, partitions: Mapping[str, int]) -> None:
        """Prepares; nothing runs before the `with` block.

        Args:
            bootstrap: Kafka's address.
            partitions: Topics that exist already, with their numbers of partitions.
        """
        self.records: list[Record] = []
        super().__init__(_consume, bootstrap, dict(partitions), take=self.records.extend)


def followed(
    bootstrap: str,
    partitions: Mapping[str, int],
    send: Connection,
    stop: Connection,
    most: int = BATCH,
) -> Iterator[list[Message]]:
    """Yields records in a child, until the other end of `stop` is closed or its parent dies."""
    from confluent_kafka import Consumer, TopicPartition  # noqa: PLC0415 - the child alone needs it

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "observer",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "log_level": 2,  # a broker that is killed is no news
        }
    )
    wanted = [
        TopicPartition(name, n, 0) for name, count in partitions.items() for n in range(count)
    ]
    consumer.assign(wanted)
    consumer.poll(POLL_S)
    send.send([])  # ready
    while not stop.poll():
        first = consumer.poll(POLL_S)
        if first is not None:
            # `consume` would wait until its batch is full: only what is there already is taken.
            yield [first, *consumer.consume(most, 0)]
    consumer.close()


def _consume(
    bootstrap: str, partitions: Mapping[str, int], send: Connection, stop: Connection
) -> None:
    for messages in followed(bootstrap, partitions, send, stop):
        received_ms = time.time_ns() / 1e6
        send.send(
            [
                Record(
                    m.topic() or "",
                    m.partition() or 0,
                    m.offset() or 0,
                    received_ms,
                    _bytes(m.key()),
                    _bytes(m.value()),
                    _headers(m),
                )
                for m in messages
                if m.error() is None
            ]
        )


def _headers(message: Message) -> list[tuple[str, bytes | None]]:
    pairs = cast("list[tuple[str, str | bytes | None]] | None", message.headers())
    return [(name, _bytes(value)) for name, value in pairs or ()]


def _bytes(content: str | bytes | None) -> bytes | None:
    return content.encode() if isinstance(content, str) else content
