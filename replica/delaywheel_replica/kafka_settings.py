"""Settings of the Kafka clients: the operator's, passed on verbatim, and those that keep promises.

`PROMISES` are the settings that the protocol stands on. An operator's value for one of them is
refused by name (see `refused`), never overwritten silently.

The leader's producers send requests again within our calls, after a backoff that is theirs
(core/election/repeating.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from delaywheel.ingress import (
    IngressLimits,
    counts_topic,
    halves_topic,
    ingress_topic,
    trace_topic,
)
from delaywheel.transactional import TRANSACTION_TIMEOUT_MS, repeating
from delaywheel_replica.core.election.repeating import MOST_BACKOFF_MS
from delaywheel_replica.core.leader.pacing import MOST_PAUSE_MS

DEFAULT_BATCH_BYTES = 1_000_000
"""librdkafka's `batch.size`, unless the operator sets it."""

DEFAULT_TOPIC_BYTES = 1_048_588
"""Kafka's `max.message.bytes`, unless the topic has its own."""

DEFAULT_QUEUE_KBYTES = 1_048_576
"""librdkafka's `queue.buffering.max.kbytes`, unless the operator sets it."""

BATCH_HEADER_BYTES = 61
_VARINT_BYTES = 5
_WHEEL_BYTES = 82  # the longest names of a cluster and a wheel
_RECORD_FIXED_BYTES = 1 + 1 + 1 + 4 * _VARINT_BYTES  # attributes, two deltas, four lengths
_OWN_HEADERS_BYTES = sum(
    len(name) + value_bytes + 2
    for name, value_bytes in (
        ("dw-id", 32),
        ("dw-due", 19),
        ("dw-accepted", 19),
        ("dw-wheel", _WHEEL_BYTES),
        ("dw-forwarded", 19),
    )
)
FORWARD_ROOM_BYTES = BATCH_HEADER_BYTES + _RECORD_FIXED_BYTES + _OWN_HEADERS_BYTES
"""The most that a message takes in Kafka besides its key, value and encoded headers."""

DEAD_ROOM_BYTES = 2_048
"""How much larger than the greatest message a dead letter may be, with all our headers."""

MAX_REQUEST_BYTES = 90_000_000
"""What the client accepts: a message accepted under a larger limit than today's must still be
delivered, or become a dead letter. Topics and brokers (100 MiB a request by default) judge the
size."""

INGRESS_FETCHED_KBYTES = 16_384
"""How much of the ingress topics is fetched before it is taken in."""

PROMISES = frozenset(
    {
        "acks",
        "delivery.report.only.error",
        "enable.auto.commit",
        "enable.auto.offset.store",
        "enable.gapless.guarantee",
        "enable.idempotence",
        "enable.partition.eof",
        "group.id",
        "isolation.level",
        "max.in.flight",
        "max.in.flight.requests.per.connection",
        "message.max.bytes",
        "message.send.max.retries",
        "message.timeout.ms",
        "delivery.timeout.ms",
        "on_delivery",
        "dr_cb",
        "partitioner",
        "request.required.acks",
        "request.timeout.ms",
        "retries",
        "retry.backoff.max.ms",
        "retry.backoff.ms",
        "socket.timeout.ms",
        "topic.metadata.propagation.max.ms",
        "transaction.timeout.ms",
        "transactional.id",
    }
)


@dataclass(frozen=True, slots=True)
class KafkaNames:
    """The names of our topics and ids on the brokers; all contain the cluster id."""

    cluster_id: str

    @property
    def control(self) -> str:
        """The topic of progress, leaders, nodes and wheels: one partition, compacted."""
        return f"delaywheel-{self.cluster_id}-control"

    @property
    def outcomes(self) -> str:
        """The topic with the outcomes of messages that were not forwarded."""
        return f"delaywheel-{self.cluster_id}-outcomes"

    @property
    def dead(self) -> str:
        """The dead-letter topic."""
        return f"delaywheel-{self.cluster_id}-dead"

    @property
    def halves(self) -> str:
        """The topic in which groups are asked about half messages."""
        return halves_topic(self.cluster_id)

    @property
    def trace(self) -> str:
        """The topic to which clients and consumers tell what became of messages."""
        return trace_topic(self.cluster_id)

    @property
    def counts(self) -> str:
        """The topic in which they count messages."""
        return counts_topic(self.cluster_id)

    @property
    def ingress(self) -> str:
        """The topic from which records to be delayed are taken."""
        return ingress_topic(self.cluster_id)

    @property
    def ingress_group(self) -> str:
        """The consumer group that shows how far ingress topics are read."""
        return ingress_topic(self.cluster_id)

    def leader_id(self, number: int) -> str:
        """The transactional id of the leader's producer `number`."""
        return f"delaywheel-{self.cluster_id}-leader-{number}"

    def trial_id(self, number: int) -> str:
        """The transactional ids of transactions that are always aborted."""
        return f"delaywheel-{self.cluster_id}-trial-{number}"

    @property
    def check_id(self) -> str:
        """The transactional id with which a command sees whether ours may be used."""
        return f"delaywheel-{self.cluster_id}-check"


_RECONNECTING = {"reconnect.backoff.ms": 50, "reconnect.backoff.max.ms": 1_000}
"""Not the default 100 ms to 10 s: a broker that comes back may lead at once."""


@dataclass(frozen=True, slots=True)
class KafkaSettings:
    """Client settings for one cluster."""

    names: KafkaNames
    client: Mapping[str, Any]
    """The operator's settings, with `bootstrap.servers` among them."""
    max_record_bytes: int = 1_100_000
    """The greatest record we write: a greatest message with all our headers."""
    halves: bool = False
    """Whether half messages are wanted: then their topic is one of ours."""
    trace: bool = False
    """Whether the topics of the trace are made."""
    ingress_limits: IngressLimits | None = None
    """What is taken from ingress topics: said beside the offsets of their group."""
    node: str = ""
    """The node whose clients these are; empty: they are a command's."""

    def named(self, purpose: str) -> dict[str, str]:
        """Returns the `client.id` that quotas, metrics and logs of brokers know a client by.

        Example:
            >>> KafkaSettings(KafkaNames("a"), {}, node="n1").named("leader")
            {'client.id': 'delaywheel-a-n1-leader'}
        """
        parts = ("delaywheel", self.names.cluster_id, self.node, purpose)
        return {"client.id": "-".join(part for part in parts if part)}

    @property
    def compresses(self) -> bool:
        """Whether records may be compressed."""
        kinds = (self.client.get("compression.type"), self.client.get("compression.codec"))
        return any(kind not in (None, "none") for kind in kinds)

    @property
    def own_batch_bytes(self) -> int:
        """How much is written to one of our own topics before the client is flushed.

        The client joins records up to its `batch.size`, whatever a topic accepts, and never splits
        a refused batch: every transaction with as many outcomes would fail. Each of our topics
        accepts this much (cleaner/kafka/brokers.py).
        """
        return min(self.max_record_bytes, DEFAULT_BATCH_BYTES)

    @property
    def ingress_topic_bytes(self) -> int:
        """The batch size for ingress topics: at least Kafka's default for topics."""
        return max(self.max_record_bytes, DEFAULT_TOPIC_BYTES)

    def unusable(self) -> str | None:
        """Returns a setting that the client library accepts but the service cannot work with."""
        name = "queue.buffering.max.kbytes"
        queue_bytes = int(self.client.get(name, DEFAULT_QUEUE_KBYTES)) * 1024
        if queue_bytes < self.max_record_bytes:
            return (
                f"{name}={self.client[name]}: a record of ours may have {self.max_record_bytes}"
                f" bytes (max_message_bytes and our headers); at least"
                f" {-(-self.max_record_bytes // 1024)}"
            )
        return None

    def producer(
        self,
        transactional_id: str,
        *,
        backoff_ms: int = MOST_BACKOFF_MS,
        timeout_ms: int = TRANSACTION_TIMEOUT_MS,
        purpose: str = "leader",
        log_level: int = 4,
    ) -> dict[str, Any]:
        """Returns the settings of a transactional producer; by default it sends nothing again."""
        return {
            **self.named(purpose),
            "log_level": log_level,
            "linger.ms": 5,  # a flush does not wait for it; without it, batches stay small
            # Messages without a key go to one partition of their topic for so long: for as long as
            # transactions are apart, since each partition that a transaction touches costs time.
            "sticky.partitioning.linger.ms": MOST_PAUSE_MS,
            "queue.buffering.max.messages": 1_000_000,
            **_RECONNECTING,
            # As Java's client: a request for another partition would wait until TCP has heard that
            # the one before has arrived, up to 40 ms late where brokers are far.
            "socket.nagle.disable": True,
            **self.client,
            **repeating(transactional_id, backoff_ms, timeout_ms),
            "message.max.bytes": max(self.max_record_bytes, MAX_REQUEST_BYTES),
        }

    def consumer(self, purpose: str = "control") -> dict[str, Any]:
        """Returns the settings of the control topic's reader, which is in no group."""
        return {
            **self.named(purpose),
            "log_level": 3,
            "fetch.wait.max.ms": 500,
            **_RECONNECTING,
            **self.client,
            "group.id": f"delaywheel-{self.names.cluster_id}-reader",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
        }

    def ingress_consumer(self) -> dict[str, Any]:
        """Returns the settings of the ingress topics' reader, which never joins its group."""
        return {
            **self.consumer("ingress"),
            "group.id": self.names.ingress_group,
            "fetch.wait.max.ms": 100,
            "queued.max.messages.kbytes": INGRESS_FETCHED_KBYTES,
            "enable.partition.eof": False,
        }

    def admin(self, purpose: str = "admin") -> dict[str, Any]:
        """Returns the settings of a client that asks about topics and creates ours.

        To ask about a topic never makes it: with the broker's settings it would not be ours.
        """
        own = {**self.named(purpose), "log_level": 3}
        return {**own, **self.client, "allow.auto.create.topics": False}


def refused(client: Iterable[str]) -> list[str]:
    """Returns the operator's settings that are reserved, since promises depend on them."""
    return sorted(PROMISES & set(client))
