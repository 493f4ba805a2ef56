"""Demonstrates a record that a consumer cannot handle at first: retried with growing delays."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from typing import NamedTuple

from delaywheel import Client
from delaywheel.consumer import RetryConsumer
from delaywheel.trace import Trace
from local.loopback.cluster import ClusterError, LocalCluster

TOPIC = "demo-retried"
GROUP = "demo"
DELAYS_MS = (500, 1_000, 2_000)
WITHIN_S = 60.0


class Retried(NamedTuple):
    """The fate of one record that fails as often as it may be retried, less once.

    Attributes:
        id: Of the message that it came as.
        delays_ms: After which it was to come again.
        waited_ms: Between one attempt and the next.
        done: Records that ended as done, after that.
    """

    id: bytes
    delays_ms: tuple[int, ...]
    waited_ms: tuple[int, ...]
    done: int

    @property
    def is_clean(self) -> bool:
        """Whether each retry came when it was due, no earlier, and the record ended as done."""
        waited = zip(self.waited_ms, self.delays_ms, strict=True)
        return self.done == 1 and all(by_ms >= due_ms for by_ms, due_ms in waited)


def retry_one(cluster: LocalCluster, cluster_id: str, trace: Trace) -> Retried:
    """Sends a message to a consumer that fails until its last attempt, and knows Kafka alone."""
    cluster.create_topic(TOPIC, 1)
    with Client(cluster.nodes[0].address, timeout=WITHIN_S, trace=trace) as client:
        handle = client.produce(TOPIC, b"again", key=b"42", delay="500ms")
    attempts: list[float] = []
    with RetryConsumer(
        TOPIC,
        group=GROUP,
        bootstrap=cluster.kafka,
        cluster=cluster_id,
        retry=[f"{delay_ms}ms" for delay_ms in DELAYS_MS],
        trace=trace,
    ) as consumer:
        late = threading.Timer(WITHIN_S, consumer.stop)
        late.daemon = True  # an interrupt does not wait for it
        late.start()
        for message in consumer:
            attempts.append(time.monotonic())
            with message:
                if len(attempts) <= len(DELAYS_MS):
                    raise ConnectionError("the demo's handler fails")
                consumer.stop()
        late.cancel()
    done = consumer.counts.done
    if len(attempts) <= len(DELAYS_MS):
        raise ClusterError(
            f"{len(attempts)} attempts within {WITHIN_S:.0f} s; see {cluster.folder}/*.log"
        )
    waited_ms = tuple(round((after - before) * 1000) for before, after in pairwise(attempts))
    return Retried(handle.id, DELAYS_MS, waited_ms, done)
