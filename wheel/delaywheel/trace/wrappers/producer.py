"""confluent-kafka's producer, which tells a trace what it has written to ingress topics.

docs/TRACE.md says with which status. A record goes to an ingress topic if it has the header
`dw-topic`; cancels, commits and answers are passed on untold. One without `dw-id` is given an id,
so that it can be asked for: else it has one by its place, which nobody knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any, Final, Self

import uuid_utils
from confluent_kafka import KafkaError, Message, Producer

from delaywheel import ingress
from delaywheel.trace.reports import EventReports
from delaywheel.trace.schema import UNKNOWN, WRITTEN
from delaywheel.trace.wrappers.held import Held
from delaywheel.ways.records import PairsOfHeaders, WrittenRecord, WrittenRun
from delaywheel.ways.values import number_in

DeliveryCall = Callable[[KafkaError | None, Message], object]
GivenHeaders = Mapping[str, str | bytes | None] | Sequence[tuple[str, str | bytes | None]]

_UNTOLD: Final = frozenset({ingress.CANCEL, ingress.COMMIT, ingress.ANSWER})
_PERHAPS: Final = frozenset({"_MSG_TIMED_OUT", "_PURGE_INFLIGHT"})
_ABORTED: Final = "ABORTED"
_MANY: Final = 500


class TracedProducer:
    """A producer; what is not here it does itself, `produce_batch` without being told."""

    def __init__(self, producer: Producer, trace: EventReports) -> None:
        self._producer: Final = producer
        self._trace: Final = trace
        self._ended: Final[Held[WrittenRecord]] = Held(trace)
        self._is_in_transaction = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def __len__(self) -> int:
        return len(self._producer)

    def __bool__(self) -> bool:
        return True

    def __enter__(self) -> Self:
        self._producer.__enter__()
        return self

    def __exit__(self, *raised: object) -> bool | None:
        try:
            return self._producer.__exit__(*raised)
        finally:
            self._end()

    def produce(
        self,
        topic: str,
        value: str | bytes | None = None,
        key: str | bytes | None = None,
        partition: int = -1,
        callback: DeliveryCall | None = None,
        on_delivery: DeliveryCall | None = None,
        timestamp: int = 0,
        headers: GivenHeaders | None = None,
    ) -> None:
        """See `confluent_kafka.Producer.produce`."""
        on_delivery = on_delivery or callback
        own = _own(headers)
        if own is not None:
            headers = own
            on_delivery = partial(self._delivered, own, monotonic(), on_delivery)
        given: dict[str, Any] = {} if on_delivery is None else {"on_delivery": on_delivery}
        if headers is not None:
            given["headers"] = headers
        self._producer.produce(topic, value, key, partition, timestamp=timestamp, **given)

    def poll(self, timeout: float = -1) -> int:
        """See `confluent_kafka.Producer.poll`."""
        served = self._producer.poll(timeout)
        self._tell()
        return served

    def flush(self, timeout: float = -1) -> int:
        """See `confluent_kafka.Producer.flush`."""
        left = self._producer.flush(timeout)
        self._tell()
        return left

    def begin_transaction(self) -> None:
        """See `confluent_kafka.Producer.begin_transaction`."""
        self._producer.begin_transaction()
        self._is_in_transaction = True

    def commit_transaction(self, timeout: float = -1) -> None:
        """See `confluent_kafka.Producer.commit_transaction`."""
        self._producer.commit_transaction(timeout)
        self._is_in_transaction = False
        self._tell()

    def abort_transaction(self, timeout: float = -1) -> None:
        """See `confluent_kafka.Producer.abort_transaction`."""
        self._producer.abort_transaction(timeout)
        self._is_in_transaction = False
        self._tell(_ABORTED)

    def close(self) -> bool:
        """See `confluent_kafka.Producer.close`."""
        try:
            return self._producer.close()
        finally:
            self._end()

    def _delivered(
        self,
        headers: PairsOfHeaders,
        began_s: float,
        on_delivery: DeliveryCall | None,
        error: KafkaError | None,
        message: Message,
    ) -> None:
        status = WRITTEN
        if error is not None:
            status = UNKNOWN if error.name() in _PERHAPS else error.name()
        cost_us = int((monotonic() - began_s) * 1e6)
        key = message.key()
        own_key = key.encode() if isinstance(key, str) else key
        due_ms = _due_ms(dict(headers), message)
        length_bytes = len(own_key or b"") + len(message.value() or b"")
        record = WrittenRecord(own_key, headers, due_ms, status, cost_us, length_bytes)
        self._ended.add(record, own_key, headers)
        if len(self._ended) >= _MANY:
            self._tell()
        if on_delivery is not None:
            on_delivery(error, message)

    def _tell(self, written: str = WRITTEN) -> None:
        """Tells what has ended; in a transaction nothing has."""
        if self._is_in_transaction or not len(self._ended):
            return
        ended = self._ended.take()
        if written != WRITTEN:
            ended = [
                one._replace(status=written) if one.status == WRITTEN else one for one in ended
            ]
        self._trace.written(WrittenRun(ended))

    def _end(self) -> None:
        was_open, self._is_in_transaction = self._is_in_transaction, False
        self._tell(UNKNOWN if was_open else WRITTEN)
        self._trace.flush()


def _own(headers: GivenHeaders | None) -> list[tuple[str, bytes | None]] | None:
    """Returns the headers of a message that is to be told, with an id; None: it is none."""
    if not headers:
        return None
    pairs = list(headers.items()) if isinstance(headers, Mapping) else list(headers)
    names = {name for name, _ in pairs}
    if ingress.TOPIC not in names or names & _UNTOLD:
        return None
    own = [(name, value.encode() if isinstance(value, str) else value) for name, value in pairs]
    if ingress.ID not in names:
        own.append((ingress.ID, uuid_utils.uuid7().bytes.hex().encode()))
    return own


def _due_ms(headers: Mapping[str, bytes | None], message: Message) -> int | None:
    """Returns the due; None: it follows from a level, which the cluster knows."""
    if ingress.DELIVER_AT in headers:
        return number_in(headers[ingress.DELIVER_AT])
    delay_ms = number_in(headers.get(ingress.DELAY_MS))
    _, written_ms = message.timestamp()
    return None if delay_ms is None or written_ms <= 0 else written_ms + delay_ms
