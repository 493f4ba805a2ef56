"""A consumer process that notes when each record should have arrived, and did.

Each value begins with a stamp: the due, or the time of sending, in Unix microseconds. The same
process and the same settings serve delaywheel's topic and Kafka's own.
"""

from __future__ import annotations

import struct
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from typing import Final

import numpy as np

from local.bench.figures import Times
from local.loopback.cluster import ClusterError
from local.stage.observer import ConsumerProcess, followed

STAMP: Final = struct.Struct("<q")
BATCH: Final = 1_000
BETWEEN: Final = "-"
"""Comes between the name of a family of topics and a topic's number."""


def topic_names(family: str, count: int) -> list[str]:
    """Returns the topics of a family, which are measured together.

    Example:
        >>> topic_names("delayed", 1), topic_names("many", 2)
        (['delayed'], ['many-0', 'many-1'])
    """
    return [family] if count == 1 else [f"{family}{BETWEEN}{number}" for number in range(count)]


class Consumer(ConsumerProcess):
    """Follows topics from their beginning, and reports by family of topics."""

    def __init__(self, bootstrap: str, topics: Sequence[str], partitions: int) -> None:
        """Prepares; the topics exist."""
        # For each family alternately stamp and arrival, in microseconds.
        self._arrived: defaultdict[str, array[int]] = defaultdict(lambda: array("q"))
        super().__init__(
            _consume, bootstrap, list(topics), partitions, take=self._note, error=ClusterError
        )

    def take(
        self, family: str, count: int, timeout_s: float, watch: Callable[[], None]
    ) -> tuple[Times, Times]:
        """Returns a family's next records: stamps and arrivals, in Unix milliseconds.

        Args:
            family: The family of topics.
            count: How many records were sent.
            timeout_s: Gives up after this long without any record.
            watch: Called repeatedly.

        Raises:
            ClusterError: Records are missing, or more arrived.
        """
        arrived, before = self._arrived[family], 0
        deadline = time.monotonic() + timeout_s
        while len(arrived) < 2 * count:
            watch()
            if len(arrived) > before:
                before, deadline = len(arrived), time.monotonic() + timeout_s
            if time.monotonic() > deadline:
                missing = count - len(arrived) // 2
                raise ClusterError(f"{missing:,} of {count:,} messages of {family} did not arrive")
            time.sleep(0.05)
        if len(arrived) > 2 * count:
            raise ClusterError(f"{len(arrived) // 2:,} records of {family}, {count:,} were sent")
        pairs = np.array(self._arrived.pop(family), np.int64).reshape(-1, 2) / 1000
        return pairs[:, 0], pairs[:, 1]

    def _note(self, batch: Iterable[tuple[str, bytes]]) -> None:
        for family, times in batch:
            self._arrived[family].frombytes(times)


def _consume(
    bootstrap: str, topics: Sequence[str], partitions: int, send: Connection, stop: Connection
) -> None:
    for messages in followed(bootstrap, dict.fromkeys(topics, partitions), send, stop, BATCH):
        received_us = time.time_ns() // 1000
        times: defaultdict[str, array[int]] = defaultdict(lambda: array("q"))
        for message in messages:
            value = message.value()
            if message.error() is None and isinstance(value, bytes):
                family = (message.topic() or "").partition(BETWEEN)[0]
                times[family].extend((STAMP.unpack_from(value)[0], received_us))
        send.send([(family, pairs.tobytes()) for family, pairs in times.items()])
