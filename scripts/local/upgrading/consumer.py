"""A consumer beside the upgrade: each fifth record fails once, and comes again by the nodes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from delaywheel import Client
from delaywheel.consumer import RetryConsumer
from local.loopback.cluster import LocalCluster

TOPIC = "work"
_EVERY_S = 0.05
_RETRIED = 5
_WITHIN_S = 60.0
_END_S = 10.0


class Worker:
    """Sends records to itself, and handles each until it succeeds; see `working`."""

    def __init__(self, cluster: LocalCluster) -> None:
        """Starts."""
        # It would tell of each record that is to fail.
        logging.getLogger("delaywheel").setLevel(logging.ERROR)
        self.sent = 0
        self._is_over = threading.Event()
        self._client = Client(cluster.nodes[0].address, timeout=_WITHIN_S)
        self._consumer = RetryConsumer(
            TOPIC,
            group="worker",
            bootstrap=cluster.kafka,
            cluster="local",
            retry=("1s", "2s", "5s"),
        )
        self._failure: Exception | None = None
        self._threads = [
            threading.Thread(target=self._run, args=(part,), daemon=True)
            for part in (self._send, self._handle)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Sends no more, and ends once everything is handled, or nothing more comes.

        Raises:
            Exception: What went wrong in a thread.
        """
        sending, handling = self._threads
        self._is_over.set()
        sending.join()
        until_s = time.monotonic() + _WITHIN_S
        while (
            self._consumer.counts.done < self.sent
            and time.monotonic() < until_s
            and handling.is_alive()
        ):
            time.sleep(_EVERY_S)
        self.end()
        if self._failure is not None:
            raise self._failure

    def end(self) -> None:
        """Ends at once."""
        self._is_over.set()
        self._consumer.stop()
        for thread in self._threads:
            thread.join(_END_S)

    def faults(self) -> list[str]:
        """Returns what was not settled as it had to be: each record done, each fifth retried."""
        counts = self._consumer.counts
        wanted = {"done": self.sent, "retried": -(-self.sent // _RETRIED), "dead": 0}
        return [
            f"{name} is {getattr(counts, name)}, where {number} was to be"
            for name, number in wanted.items()
            if getattr(counts, name) != number
        ]

    def _run(self, part: Callable[[], None]) -> None:
        try:
            part()
        except Exception as error:  # noqa: BLE001 - raised again in the main thread
            self._failure = error

    def _send(self) -> None:
        with self._client as client:
            while not self._is_over.wait(_EVERY_S):
                client.produce(TOPIC, b"%d" % self.sent, delay="1s")
                self.sent += 1

    def _handle(self) -> None:
        with self._consumer as consumer:
            for message in consumer:
                with message:
                    if message.attempt == 1 and int(message.value or b"1") % _RETRIED == 0:
                        raise ConnectionError("this one fails at first")


@contextmanager
def working(cluster: LocalCluster) -> Iterator[Worker]:
    """Runs a consumer; ends it."""
    cluster.create_topic(TOPIC)
    worker = Worker(cluster)
    try:
        yield worker
    finally:
        worker.end()
