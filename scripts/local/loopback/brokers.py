"""The brokers of one Kafka on loopback, each a JVM of its own that can be stopped alone.

Each is broker and controller. A topic that is made without a replication factor has a copy on each,
on three at most, and takes what all copies but one have (`min.insync.replicas`): one broker at a
time may be away.
"""

from __future__ import annotations

import functools
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from local.loopback.kafka import HEAP, START_TIMEOUT_S, KafkaBroker, Quorum, free_ports, new_id
from local.loopback.kafka_jars import KAFKA_VERSION, KafkaError

HEAP_OF_MANY = "400m"
CALL_S = 10.0
ELECT_LEADERS, ALTER_REASSIGNMENTS = (43, 2), (45, 0)
"""Kafka's numbers and versions of requests. The Python client lacks the second, and fails over its
own arguments in the first."""

Reassignments = Mapping[tuple[str, int], Sequence[int]]
"""For topic and partition, the brokers that are to have copies: the preferred leader first."""


class Brokers:
    """All brokers of one Kafka; a context manager that ends them.

    Attributes:
        each: They, by their numbers from 1 on.
    """

    def __init__(
        self,
        count: int = 1,
        folder: Path | None = None,
        *,
        settings: Mapping[str, str] | None = None,
        version: str = KAFKA_VERSION,
    ) -> None:
        """Prepares; nothing runs before `start`.

        Args:
            count: How many.
            folder: Where data, configuration and logs go, a folder for each; a temporary one if
                absent. Brokers that were there before go on with their data.
            settings: Settings of every broker on top of the defaults.
            version: Of Kafka.
        """
        self._own_folder = folder is None
        folder = folder or Path(tempfile.mkdtemp(prefix="delaywheel-kafka-"))
        self._folder = folder
        quorum = Quorum(_cluster_id(folder) or new_id(), tuple(free_ports(count)))
        self.each = tuple(
            KafkaBroker(
                folder / str(number),
                number=number,
                quorum=quorum,
                settings=settings,
                version=version,
                heap=HEAP if count == 1 else HEAP_OF_MANY,
            )
            for number in range(1, count + 1)
        )

    @property
    def address(self) -> str:
        """Bootstrap addresses of all brokers."""
        return ",".join(broker.address for broker in self.each)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Starts all together, and returns when each serves clients."""
        for broker in self.each:
            broker.begin()
        for broker in self.each:
            broker.wait_until_ready()

    def close(self) -> None:
        """Ends all; removes their folder if it was made here.

        Several are killed: the last of them would wait minutes for a controller.
        """
        for broker in self.each:
            if len(self.each) > 1:
                broker.kill()
            else:
                broker.stop()
        vars(self).pop("_admin", None)
        if self._own_folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def wait_until_in_sync(self) -> None:
        """Waits until every partition has a leader, and all its copies are in sync.

        Raises:
            KafkaError: They are not within the time of a start.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while behind := self.behind():
            if time.monotonic() > deadline:
                raise KafkaError(f"not in sync: {behind[:5]}")
            time.sleep(0.2)

    def behind(self) -> list[tuple[str, int]]:
        """Returns the partitions without leader, or with copies that are not in sync."""
        return [at for at, found in self._partitions().items() if _is_behind(found)]

    def leaders(self) -> dict[tuple[str, int], int]:
        """Returns the leader of each partition of all topics, Kafka's own included; -1: none."""
        return {at: found.leader for at, found in self._partitions().items()}

    def copies(self, topic: str) -> dict[int, list[int]]:
        """Returns the brokers that have copies of each of a topic's partitions."""
        found = self._partitions()
        return {at[1]: list(one.replicas) for at, one in found.items() if at[0] == topic}

    def move_leaders(self) -> None:
        """Makes another broker the preferred leader of each partition, and has all elected."""
        turned = {
            at: [*found.replicas[1:], found.replicas[0]]
            for at, found in self._partitions().items()
            if len(found.replicas) > 1
        }
        self.reassign(turned)
        self.elect_preferred()

    def elect_preferred(self) -> None:
        """Has each partition led by its preferred leader, where that is in sync."""
        preferred, all_partitions = b"\0", b"\0"
        self._ask(ELECT_LEADERS, preferred + all_partitions + _timeout() + b"\0")

    def reassign(self, wanted: Reassignments) -> None:
        """Asks Kafka to move copies of partitions; returns before they have moved.

        Raises:
            KafkaError: It refuses.
        """
        topics: dict[str, list[tuple[int, Sequence[int]]]] = {}
        for (topic, partition), replicas in wanted.items():
            topics.setdefault(topic, []).append((partition, replicas))
        self._ask(ALTER_REASSIGNMENTS, _timeout() + _reassignments(topics) + b"\0")

    def _partitions(self) -> dict[tuple[str, int], Any]:
        topics = self._admin.list_topics(timeout=CALL_S).topics.values()
        return {
            (topic.topic, number): found
            for topic in topics
            for number, found in topic.partitions.items()
        }

    @functools.cached_property
    def _admin(self) -> Any:
        """One for all questions: who waits asks many times, and each begins with connections."""
        from confluent_kafka.admin import AdminClient  # noqa: PLC0415 - `--help` must not need it

        return AdminClient({"bootstrap.servers": self.address, "log_level": 0})

    def _ask(self, request: tuple[int, int], body: bytes) -> None:
        """Sends a running broker a request, and waits for its answer.

        Raises:
            KafkaError: It refuses all of it. What it says of single partitions is not read: that
                one has its leader already is no failure.
        """
        head = struct.pack(">hhih", *request, 1, -1) + b"\0"
        running = next(broker for broker in self.each if broker.running)
        host, port = running.address.split(":")
        with socket.create_connection((host, int(port)), CALL_S) as connection:
            connection.sendall(struct.pack(">i", len(head + body)) + head + body)
            (length,) = struct.unpack(">i", connection.recv(4, socket.MSG_WAITALL))
            answer = connection.recv(length, socket.MSG_WAITALL)
        # After the correlation, tags and throttle time.
        (code,) = struct.unpack_from(">h", answer, 9)
        if code:
            raise KafkaError(f"request {request[0]} is refused: error {code} of Kafka's protocol")


def _is_behind(found: Any) -> bool:
    return found.leader < 0 or len(found.isrs) < len(found.replicas)


def _cluster_id(folder: Path) -> str | None:
    """Returns the id of the Kafka whose brokers lie in this folder; None: there are none."""
    try:
        lines = (folder / "1" / "data" / "meta.properties").read_text().splitlines()
    except FileNotFoundError:
        return None
    return dict(line.split("=", 1) for line in lines if "=" in line)["cluster.id"]


def _reassignments(topics: Mapping[str, Iterable[tuple[int, Sequence[int]]]]) -> bytes:
    """Encodes topics with partitions with brokers."""
    return _array(
        _text(topic)
        + _array(
            struct.pack(">i", number)
            + _array(struct.pack(">i", replica) for replica in replicas)
            + b"\0"
            for number, replicas in partitions
        )
        + b"\0"
        for topic, partitions in topics.items()
    )


def _timeout() -> bytes:
    return struct.pack(">i", int(CALL_S * 1000))


def _array(elements: Iterable[bytes]) -> bytes:
    listed = list(elements)
    return _count(len(listed)) + b"".join(listed)


def _text(text: str) -> bytes:
    return _count(len(text.encode())) + text.encode()


def _count(length: int) -> bytes:
    """Encodes a length as Kafka's compact types have it: one more, in groups of seven bits."""
    left, written = length + 1, b""
    while left > 0x7F:
        written += bytes([left & 0x7F | 0x80])
        left >>= 7
    return written + bytes([left])
