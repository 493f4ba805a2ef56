"""Reading topics as a careful consumer does: committed records only, in order, to the end."""

from __future__ import annotations

import time
from typing import Self, cast

from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    OffsetSpec,
    ResourceType,
)
from confluent_kafka.cimpl import NewPartitions, NewTopic

from support.services.waiting import wait_until

PATIENCE_S = 60.0
"""A broker beside whole clusters on two cores may be slow; nothing here tests how fast it is."""


def create_topic(
    bootstrap: str, topic: str, *, partitions: int = 1, config: dict[str, str] | None = None
) -> None:
    """Creates a topic and waits until every partition of it takes requests.

    It keeps its records: a test may give them timestamps that Kafka would delete them for, at a
    moment of each five minutes.
    """
    client = AdminClient({"bootstrap.servers": bootstrap})
    kept = {"retention.ms": "-1"} | (config or {})
    wanted = NewTopic(topic, num_partitions=partitions, replication_factor=-1, config=kept)
    client.create_topics([wanted])[topic].result()
    _wait_taken(client, topic, partitions)


def add_partitions(bootstrap: str, topic: str, partitions: int) -> None:
    """Lets a topic have so many partitions, and waits until every one takes requests."""
    client = AdminClient({"bootstrap.servers": bootstrap})
    client.create_partitions([NewPartitions(topic, partitions)])[topic].result()
    _wait_taken(client, topic, partitions)


def _wait_taken(client: AdminClient, topic: str, partitions: int) -> None:
    """Waits for the broker: what its controller has answered it applies a little later."""
    latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    ends = {TopicPartition(topic, number): latest for number in range(partitions)}
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            for future in client.list_offsets(ends).values():
                future.result()
        except KafkaException:
            assert time.monotonic() < deadline, f"{topic} did not appear"
            time.sleep(0.02)
            client.list_topics(timeout=PATIENCE_S)  # else it asks by what it knew before
        else:
            return


def wait_decided(bootstrap: str, topic: str, *, partitions: int = 1) -> None:
    """Waits until no transaction is open in a topic: it is committed before readers see it."""
    client = AdminClient({"bootstrap.servers": bootstrap})
    latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    wanted = {TopicPartition(topic, number): latest for number in range(partitions)}

    def ends(isolation: IsolationLevel) -> list[int]:
        found = client.list_offsets(wanted, isolation_level=isolation)
        return [found[each].result().offset for each in wanted]

    wait_until(
        f"no transaction of {topic} is open",
        lambda: ends(IsolationLevel.READ_COMMITTED) == ends(IsolationLevel.READ_UNCOMMITTED),
    )


def set_topic(bootstrap: str, topic: str, name: str, value: str) -> None:
    """Changes one setting of a topic, and waits until the broker shows it."""
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    wanted = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    client = AdminClient({"bootstrap.servers": bootstrap})
    client.incremental_alter_configs([wanted])[wanted].result()
    asked = ConfigResource(ResourceType.TOPIC, topic)
    wait_until(
        f"{topic} has {name}={value}",
        lambda: client.describe_configs([asked])[asked].result()[name].value == value,
    )


def delete_topic(bootstrap: str, topic: str) -> None:
    """Deletes a topic and waits until the broker has forgotten it."""
    client = AdminClient({"bootstrap.servers": bootstrap})
    client.delete_topics([topic])[topic].result()
    wait_until(
        f"{topic} is gone", lambda: topic not in client.list_topics(timeout=PATIENCE_S).topics
    )


def topic_exists(bootstrap: str, topic: str) -> bool:
    """Whether the broker has the topic; asking does not create it."""
    client = AdminClient({"bootstrap.servers": bootstrap})
    return topic in client.list_topics(timeout=PATIENCE_S).topics


def headers_of(message: Message) -> list[tuple[str, bytes | None]]:
    """A record's headers in order; values are bytes, whatever the client's types allow."""
    return cast("list[tuple[str, bytes | None]]", message.headers() or [])


class CommittedReader:
    """Follows one topic from its beginning; what it has read stays in `messages`."""

    def __init__(self, bootstrap: str, topic: str, *, partitions: int = 1) -> None:
        self.messages: list[Message] = []
        self._topic = topic
        self._partitions = partitions
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "read-committed-test",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 100,
            }
        )
        self._consumer.assign([TopicPartition(topic, n, 0) for n in range(partitions)])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()

    def read_to_end(self, *, timeout_s: float = PATIENCE_S) -> list[Message]:
        """Reads until every partition has confirmed again that nothing committed follows.

        The client says of a position once that it is the end, perhaps while `wait_for` read: it is
        assigned again, and so says it again.
        """
        places = dict.fromkeys(range(self._partitions), 0)
        places |= {cast("int", m.partition()): cast("int", m.offset()) + 1 for m in self.messages}
        self._consumer.assign([TopicPartition(self._topic, n, at) for n, at in places.items()])
        ended: set[int] = set()
        deadline = time.monotonic() + timeout_s
        while len(ended) < self._partitions:
            message = self._consumer.poll(0.1)
            assert time.monotonic() < deadline, f"{self._topic} did not come to its end"
            if message is None:
                continue
            error = message.error()
            if error is None:
                self.messages.append(message)
            else:
                assert error.code() == KafkaError._PARTITION_EOF, error
                partition = message.partition()
                assert partition is not None
                ended.add(partition)
        return self.messages

    def wait_for(self, count: int, *, timeout_s: float = PATIENCE_S) -> list[Message]:
        """Reads until at least this many messages were seen."""
        deadline = time.monotonic() + timeout_s
        while len(self.messages) < count:
            seen = len(self.messages)
            assert time.monotonic() < deadline, f"{seen} of {count} messages in {self._topic}"
            message = self._consumer.poll(0.05)
            if message is not None and message.error() is None:
                self.messages.append(message)
        return self.messages


def read_all(
    bootstrap: str, topic: str, *, at_least: int = 0, partitions: int = 1
) -> list[Message]:
    """Everything committed in the topic, once there is this much.

    A commit is reported when it is certain; it shows a little later, when its markers are written.
    """
    with CommittedReader(bootstrap, topic, partitions=partitions) as reader:
        reader.wait_for(at_least)
        return reader.read_to_end()
