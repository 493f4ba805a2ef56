"""The stage of demo and chaos: a running cluster, traffic, and a careful reader.

The main thread runs the show (a restarted node lives as long as the thread that started it): it
disturbs, lets the cluster restart what died and draws the view. Threads make the messages when
they are to be sent; the SDK sends them in the background, and retries while a node is away. A
consumer in a process of its own reads what becomes visible.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from delaywheel import Client
from local.loopback.cluster import LocalCluster
from local.stage.mirrors import Mirrors, compare
from local.stage.observer import Observer, Record
from local.stage.tally import Tally, Verdict
from local.stage.traffic import CancelledTraffic, Planned, Sending, Traffic
from local.stage.view import Sample, View

TOPIC = "demo"
PARTITIONS = 3
TICK_S = 0.1
# A message that was taken is never given up earlier than this after the last arrival.
PATIENCE_S = 60.0
SEND_TIMEOUT_S = 60.0
MIRRORS_WITHIN_S = 60.0


class Ended(NamedTuple):
    """The result of a run."""

    verdict: Verdict
    mirrors: Mirrors

    @property
    def is_clean(self) -> bool:
        """Whether every promise was kept."""
        return self.verdict.is_clean and not self.mirrors.differing


class Stage:
    """One run on a running cluster; only within `staged`.

    Attributes:
        cluster: The nodes.
        view: Shows what happens.
        beside: Called with each tick: what else has to be looked after by the main thread.
    """

    def __init__(
        self, cluster: LocalCluster, client: Client, observer: Observer, view: View
    ) -> None:
        """Puts the parts together."""
        self.cluster = cluster
        self.view = view
        self.beside: list[Callable[[], None]] = []
        self._client = client
        self._observer = observer
        self._tally = Tally()
        self._sample = Sample(cluster.nodes, self._tally, observer.records)
        self._sendings: list[Traffic] = []
        self._began_at = self._quiet_since = time.monotonic()
        self._arrived = 0

    @property
    def records(self) -> list[Record]:
        """Returns the records that the consumer has seen, in order of arrival."""
        return self._observer.records

    def send(self, planned: Iterable[Planned]) -> Sending:
        """Starts to send messages."""
        sending = Sending(self._client, TOPIC, planned, self._tally)
        self._sendings.append(sending)
        sending.start()
        return sending

    def send_cancelled(self, rate_per_s: float) -> None:
        """Starts to send messages, at this rate, each of which is cancelled before its due."""
        addresses = [node.address for node in self.cluster.nodes]
        cancelled = CancelledTraffic(addresses, TOPIC, rate_per_s, self._tally)
        self._sendings.append(cancelled)
        cancelled.start()

    def stop_sending(self) -> None:
        """Stops making messages."""
        for sending in self._sendings:
            sending.stop()

    def tick(self) -> None:
        """Waits a moment, looks after the cluster, and shows the state."""
        time.sleep(TICK_S)
        self.cluster.watch()
        for look_after in self.beside:
            look_after()
        self._sample.take(time.monotonic() - self._began_at)
        self.view.show(self._sample)
        if len(self.records) != self._arrived or not self._is_settled():
            self._arrived = len(self.records)
            self._quiet_since = time.monotonic()

    def wait(self, seconds: float) -> None:
        """Waits for a time."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.tick()

    def is_over(self) -> bool:
        """Whether everything was sent and has arrived, or nothing more comes."""
        if not self._is_settled():
            return False
        everything = self._sample.delivered >= self._tally.accepted - self._tally.cancelled
        return everything or time.monotonic() - self._quiet_since > PATIENCE_S

    def _is_settled(self) -> bool:
        """Whether every message was accepted, refused or given up."""
        # In this order: what is made last must be counted.
        return all(sending.is_made for sending in self._sendings) and self._tally.is_settled

    def ended(self, *, killed_at_ms: float | None = None) -> Ended:
        """Compares everything; keeps data that shows an error."""
        ended = Ended(self._tally.verdict(self.records, killed_at_ms=killed_at_ms), self._mirrors())
        self.cluster.keep_folder = not ended.is_clean
        if self.cluster.keep_folder:
            self.view.note(f"logs and data are kept in {self.cluster.folder}")
        return ended

    def _mirrors(self) -> Mirrors:
        """Compares slot files until they agree or time is up."""
        deadline = time.monotonic() + MIRRORS_WITHIN_S
        while True:
            mirrors = compare([node.data for node in self.cluster.nodes])
            if not mirrors.differing or time.monotonic() > deadline:
                return mirrors
            self.cluster.watch()
            time.sleep(TICK_S)


@contextlib.contextmanager
def staged(
    view: View,
    *,
    nodes: int,
    brokers: int = 1,
    settings: Mapping[str, Any] | None = None,
    python: str = sys.executable,
) -> Iterator[Stage]:
    """Starts everything, and ends everything."""
    started = LocalCluster(
        nodes=nodes, brokers=brokers, settings=settings, python=python, say=view.note
    )
    with started as cluster:
        view.note("waiting until a node leads and every node accepts messages")
        cluster.wait_until_accepting()
        cluster.create_topic(TOPIC, PARTITIONS)
        client = Client(cluster.nodes[0].address, timeout=SEND_TIMEOUT_S)
        with Observer(cluster.kafka, {TOPIC: PARTITIONS}) as observer:
            stage = Stage(cluster, client, observer, view)
            try:
                yield stage
            finally:
                stage.stop_sending()
                client.close(timeout=1)  # after an interruption nothing is waited for
                view.note("stopping the nodes and Kafka")
