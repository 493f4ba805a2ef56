"""Demonstrates a message that expires, becomes a dead letter, and is replayed just once."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from delaywheel import Client
from delaywheel.deadletters import DeadLetterTopic, LetterState, Selection, dead_letter_topic
from delaywheel.deadletters.reading import TopicReader
from local.loopback.cluster import ClusterError, LocalCluster

TOPIC = "demo-late"
WITHIN_S = 60.0
PAUSE_S = 0.1
_AGE = timedelta(minutes=2)
_TTL_S = 60


class Replayed(NamedTuple):
    """The outcome of one message.

    Attributes:
        reason: Why it became a dead letter.
        first: Letters that the first replay sent.
        second: Letters that the same replay sent again.
        arrived: Messages that consumers of its topic see.
    """

    reason: str
    first: int
    second: int
    arrived: int

    @property
    def is_clean(self) -> bool:
        """Whether it expired, and was sent again once."""
        return self[1:] == (1, 0, 1) and self.reason == "EXPIRED"


def replay_one(cluster: LocalCluster, cluster_id: str) -> Replayed:
    """Sends a message whose time to live is over, and replays its letter twice."""
    cluster.create_topic(TOPIC, 1)
    with Client(cluster.nodes[0].address, timeout=WITHIN_S) as client:
        client.produce(
            TOPIC,
            b"too late",
            headers=[("ttl", b"%d" % _TTL_S)],
            timestamp=datetime.now(UTC) - _AGE,
            delay=timedelta(seconds=1),
        )
    kafka = {"bootstrap.servers": cluster.kafka}
    selection = Selection(topic=TOPIC)
    with DeadLetterTopic(dead_letter_topic(cluster_id), kafka) as letters:
        deadline = time.monotonic() + WITHIN_S
        while not letters.count(selection).of(LetterState.WAITING):
            _pause(cluster, deadline, "the expired message has not become a dead letter")
        [(letter, _)] = letters.letters(selection)
        first = letters.replay(selection, as_new=True).done
        second = letters.replay(selection, as_new=True).done
    reader = TopicReader(kafka, TOPIC, timeout_s=WITHIN_S)
    try:
        while not (arrived := sum(1 for _ in reader.read(reader.bounds(1)))):
            _pause(cluster, deadline, "the replayed message has not arrived")
    finally:
        reader.close()
    return Replayed(letter.reason, first, second, arrived)


def _pause(cluster: LocalCluster, deadline: float, why: str) -> None:
    if time.monotonic() > deadline:
        raise ClusterError(f"{why} within {WITHIN_S:.0f} s; see {cluster.folder}/*.log")
    cluster.watch()
    time.sleep(PAUSE_S)
