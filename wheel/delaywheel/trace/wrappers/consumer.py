"""confluent-kafka's consumer, which tells a trace what its program has committed.

What such a program did with a record, and how long it had it, nobody says: all that it has read and
commits is DONE, what it skipped or failed at, too. docs/TRACE.md says what of its commits is known.
What another consumer has got since is told by that one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Self

from confluent_kafka import Consumer, Message, TopicPartition

from delaywheel.record_headers import headers_of
from delaywheel.trace.reports import EventReports
from delaywheel.trace.wrappers.held import Held
from delaywheel.ways.records import ReadRecord, ReadRun

PartitionsCall = Callable[[Consumer, list[TopicPartition]], None]
_OffsetEnds = dict[tuple[str, int], int]


class TracedConsumer:
    """A consumer; what is not here it does itself."""

    def __init__(self, consumer: Consumer, group: str, trace: EventReports) -> None:
        self._consumer: Final = consumer
        self._group: Final = group
        self._trace: Final = trace
        self._read: Final[Held[ReadRecord]] = Held(trace)
        self._stored: _OffsetEnds = {}
        self._positions: _OffsetEnds = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def __enter__(self) -> Self:
        self._consumer.__enter__()
        return self

    def __exit__(self, *raised: object) -> bool | None:
        try:
            return self._consumer.__exit__(*raised)
        finally:
            self._trace.flush()

    def subscribe(
        self,
        topics: list[str],
        on_assign: PartitionsCall | None = None,
        on_revoke: PartitionsCall | None = None,
        on_lost: PartitionsCall | None = None,
    ) -> None:
        """See `confluent_kafka.Consumer.subscribe`."""
        ours = {
            "on_assign": on_assign,
            "on_revoke": self._forgetting(on_revoke),
            "on_lost": self._forgetting(on_lost or on_revoke),
        }
        self._consumer.subscribe(topics, **{name: one for name, one in ours.items() if one})

    def poll(self, timeout: float = -1) -> Message | None:
        """See `confluent_kafka.Consumer.poll`."""
        message = self._consumer.poll(timeout)
        if message is not None:
            self._note(message)
        return message

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[Message]:
        """See `confluent_kafka.Consumer.consume`."""
        messages = self._consumer.consume(num_messages, timeout)
        for message in messages:
            self._note(message)
        return messages

    def store_offsets(
        self, message: Message | None = None, offsets: list[TopicPartition] | None = None
    ) -> None:
        """See `confluent_kafka.Consumer.store_offsets`."""
        given: dict[str, Any] = {"offsets": offsets} if message is None else {"message": message}
        self._consumer.store_offsets(**given)
        self._stored.update(_ends(message, offsets))

    def commit(
        self,
        message: Message | None = None,
        offsets: list[TopicPartition] | None = None,
        asynchronous: bool = True,
    ) -> list[TopicPartition] | None:
        """See `confluent_kafka.Consumer.commit`."""
        given: dict[str, Any] = {"asynchronous": asynchronous}
        if message is not None:
            given["message"] = message
        elif offsets is not None:
            given["offsets"] = offsets
        committed: list[TopicPartition] | None = self._consumer.commit(**given)
        if committed is not None:
            offsets = [each for each in committed if each.error is None]
            self._tell(_ends(None, offsets))
        else:
            self._tell(_ends(message, offsets) or self._stored or self._positions)
        return committed

    def done(self, offsets: Iterable[TopicPartition]) -> None:
        """Tells what is before these offsets: they were committed by a producer's transaction."""
        self._tell(_ends(None, offsets))

    def close(self) -> None:
        """See `confluent_kafka.Consumer.close`."""
        self._consumer.close()
        self._trace.flush()

    def _note(self, message: Message) -> None:
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        if message.error() is not None or topic is None or partition is None or offset is None:
            return
        key, at = message.key(), (topic, partition)
        if offset < self._positions.get(at, 0):  # it goes back: these are read again
            self._read.take(lambda one: (one.topic, one.partition) == at and one.offset >= offset)
        self._positions[at] = offset + 1
        own_key = key.encode() if isinstance(key, str) else key
        headers = headers_of(message) or ()
        length_bytes = len(own_key or b"") + len(message.value() or b"")
        place = topic, partition, offset, message.timestamp()[1]
        record = ReadRecord(*place, own_key, headers, length_bytes)
        self._read.add(record, own_key, headers)

    def _tell(self, ends: Mapping[tuple[str, int], int]) -> None:
        done = self._read.take(lambda one: one.offset < ends.get((one.topic, one.partition), 0))
        if done:
            self._trace.processed(ReadRun(done, self._group))

    def _forgetting(self, then: PartitionsCall | None) -> PartitionsCall:
        def leave(consumer: Consumer, partitions: list[TopicPartition]) -> None:
            if then is not None:
                then(consumer, partitions)
            left = {(each.topic, each.partition) for each in partitions}
            self._read.take(lambda one: (one.topic, one.partition) in left)
            for at in left:
                self._positions.pop(at, None)
                self._stored.pop(at, None)

        return leave


def _ends(message: Message | None, offsets: Iterable[TopicPartition] | None) -> _OffsetEnds:
    """Returns up to where a program commits, by topic and partition."""
    if message is not None:
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        if topic is None or partition is None or offset is None:
            return {}
        return {(topic, partition): offset + 1}
    return {(each.topic, each.partition): each.offset for each in offsets or ()}
