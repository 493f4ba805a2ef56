"""The look in Kafka for what became of a message: the real search, on the simulated logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError

from delaywheel_replica.cleaner.kafka.places import _Search
from delaywheel_replica.link import AskPlace, PlaceFound
from sim.kafka.brokers import SimKafka
from sim.kafka.log import Entry, Partition
from sim.machine.scheduler import US_PER_MS

if TYPE_CHECKING:
    from sim.nodes.server import SimServer

_END = SimpleNamespace(code=lambda: KafkaError._PARTITION_EOF)
_UNAVAILABLE = SimpleNamespace(code=lambda: KafkaError.LEADER_NOT_AVAILABLE)


class Looks:
    """What the cleaner of a node finds, for its server."""

    def __init__(self, server: SimServer) -> None:
        self._server = server
        self._random = server.world.scheduler.stream(f"looks of {server.node.name}")

    def ask(self, asked: AskPlace, heard: Callable[[PlaceFound], None]) -> bool:
        """Looks some time later; False: there is no cleaner."""
        if self._server.node.cleaner is None:
            return False
        later_us = self._random.randrange(5, 400) * US_PER_MS
        self._server.process.call_later(later_us, self._server.run, self._look, asked, heard)
        return True

    def _look(self, asked: AskPlace, heard: Callable[[PlaceFound], None]) -> None:
        node, world = self._server.node, self._server.world
        if node.cleaner is None:
            return
        settings: Any = SimpleNamespace(names=world.names)
        search = _Search(settings, [asked])
        if world.kafka.is_reachable(node.name):
            reader: Any = _Reader(world.kafka)
            search.run(reader)
        heard(search.found.get(asked.question, PlaceFound(asked.question)))


class _Reader:
    """What a search asks of a consumer, which sees what is committed."""

    def __init__(self, kafka: SimKafka) -> None:
        self._kafka = kafka
        self._unread: list[_Read] = []

    def list_topics(self, topic: str, **_: object) -> Any:
        """All partitions of a topic."""
        numbers = {each.number: each for each in self._kafka.partitions(topic)}
        return SimpleNamespace(topics={topic: SimpleNamespace(error=None, partitions=numbers)})

    def offsets_for_times(self, since: Sequence[Any], **_: object) -> list[Any]:
        """The first record of each partition since a time."""
        return [self._first_since(each.topic, each.partition, each.offset) for each in since]

    def assign(self, begins: Sequence[Any]) -> None:
        """Begins to read."""
        self._unread = [read for begin in begins for read in self._from(begin)]

    def consume(self, *_: object) -> list[_Read]:
        """Returns all that there is."""
        found, self._unread = self._unread, []
        return found

    def _first_since(self, topic: str, number: int, from_ms: int) -> Any:
        if self._kafka.troubles.of(topic) is not None:
            return SimpleNamespace(topic=topic, partition=number, offset=-1, error=_UNAVAILABLE)
        readable = _readable(self._partition(topic, number))
        offsets = (entry.offset for entry in readable if _stamp_ms(entry) >= from_ms)
        return SimpleNamespace(topic=topic, partition=number, offset=next(offsets, -1), error=None)

    def _from(self, begin: Any) -> Iterator[_Read]:
        partition = self._partition(begin.topic, begin.partition)
        for entry in _readable(partition):
            if entry.offset >= begin.offset:
                yield _Read(partition, entry)
        yield _Read(partition, None)

    def _partition(self, topic: str, number: int) -> Partition:
        return next(each for each in self._kafka.partitions(topic) if each.number == number)


class _Read:
    """A record as a consumer returns it; without one: the end of its partition."""

    def __init__(self, partition: Partition, entry: Entry | None) -> None:
        self._partition = partition
        self._entry = entry

    def _record(self) -> Entry:
        assert self._entry is not None
        return self._entry

    def topic(self) -> str:
        """Where it lies."""
        return self._partition.topic

    def offset(self) -> int:
        """Its place there."""
        return self._record().offset

    def key(self) -> bytes | None:
        """Its key."""
        return self._record().key

    def value(self) -> bytes | None:
        """Its value."""
        return self._record().value

    def headers(self) -> list[tuple[str, bytes | None]]:
        """Its headers."""
        return self._record().headers

    def error(self) -> Any:
        """Whether it is the end."""
        return _END if self._entry is None else None

    def partition(self) -> int:
        """The number of its partition."""
        return self._partition.number


def _readable(partition: Partition) -> list[Entry]:
    end = partition.last_stable_offset
    return [entry for entry in partition.log[partition.first : end] if entry.visible_us >= 0]


def _stamp_ms(entry: Entry) -> int:
    return entry.timestamp_ms if entry.timestamp_ms >= 0 else entry.transaction.began_ms
