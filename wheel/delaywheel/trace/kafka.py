"""The Kafka producer of events: nothing here decides what is sent, or waits for it.

Its errors are one text, the last one, and no lines of a log: a program whose trace fails must not
hear of it again and again.
"""

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

try:
    from confluent_kafka import KafkaError, KafkaException, Message, Producer
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "a trace needs confluent-kafka: install delaywheel[trace]"
    ) from missing

from delaywheel.ingress import trace_topic

_TOPIC: Final = re.compile(re.escape(trace_topic("<>")).replace("<>", "(.+)"))

_DEFAULTS: Final = {
    "acks": 1,
    "compression.type": "zstd",
    "linger.ms": 0,
    "partitioner": "murmur2_random",
    "retry.backoff.max.ms": 1_000,
}
_OURS: Final = {
    "log_level": 0,  # its own log would say the same every second
    # What is to be sent is bounded before it comes here.
    "queue.buffering.max.kbytes": 65_536,
    "queue.buffering.max.messages": 100_000,
}
_LOOK_S: Final = 2.0


class TraceProducer:
    """A producer of confluent-kafka."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Makes it, or raises ValueError for a setting; its own threads connect."""
        self._error = ""
        self._listed: Collection[str] = ()
        try:
            self._producer: Final = Producer(
                {**_DEFAULTS, **settings, **_OURS, "error_cb": self._note}
            )
        except (KafkaException, TypeError) as error:
            raise ValueError(f"kafka: {_said(error)}") from error

    def _note(self, error: KafkaError) -> None:
        self._error = error.str()

    def clusters(self) -> list[str]:
        """See `reporter.TracePort`. All are listed: to ask for one by name would create it."""
        try:
            topics = self._listed = self._producer.list_topics(timeout=_LOOK_S).topics
        except KafkaException as error:
            self._producer.poll(0)  # has the error noted that is the cause
            raise OSError(self._error or _said(error)) from error
        return [match[1] for match in map(_TOPIC.fullmatch, topics) if match]

    def has_topic(self, topic: str) -> bool:
        """See `reporter.TracePort`."""
        return topic in self._listed

    def send(self, topic: str, key: bytes, value: bytes, on_end: Callable[[str], object]) -> None:
        """See `reporter.TracePort`."""

        def ended(error: KafkaError | None, _record: Message) -> None:
            on_end("" if error is None else self._error or error.str())

        try:
            self._producer.produce(topic, value, key, on_delivery=ended)
        except (BufferError, KafkaException) as error:
            raise OSError(_said(error)) from error

    def poll(self, timeout_s: float) -> None:
        """See `reporter.TracePort`."""
        self._producer.poll(timeout_s)

    def close(self) -> None:
        """See `reporter.TracePort`."""
        self._producer.purge(blocking=False)


def _said(error: Exception) -> str:
    first = error.args[0] if error.args else error
    return first.str() if isinstance(first, KafkaError) else str(first)
